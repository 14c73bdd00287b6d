"""A folder's tokenizer: prompts to token ids through the chat template, and ids back to text."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from models.folder import FolderError, read_config, read_json

FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
]
READ = [*FILES, "config.json", "generation_config.json"]  # all that decides what a Tokenizer is
PRIVATE_USE = range(0xF0000, 0xFFFFE)  # code points without a meaning

Message = Mapping[str, object]  # role, content, and what else the template reads


class Tokenizer:
    """Text ⇄ token ids. The same folder contents give the same `digest`.

    The text of a message can never open or close a turn: what looks like a control token in it (`<|im_end|>`) is
    encoded as plain characters. Tags that are ordinary vocabulary (`<tool_call>`, `<think>`) keep their own tokens.
    """

    context: int  # tokens of prompt and answer together
    eos_ids: tuple[int, ...]  # the tokenizer's own first, then generation_config.json's others
    digest: str  # sha256 (hex) of the tokenizer's files and eos_ids
    template_digest: str  # sha256 (hex) of the chat template

    def __init__(self, folder: Path) -> None:
        """Raises FolderError for a folder without a usable tokenizer, end-of-sequence token or chat template."""
        folder = Path(folder)
        self.context = read_config(folder).context
        self._tokenizer = _load(folder)
        self.eos_ids = _eos_ids(folder, self._tokenizer.eos_token_id)
        self.digest = _digest(folder, self.eos_ids)
        self.template_digest = hashlib.sha256(_template(folder, self._tokenizer).encode()).hexdigest()
        self._shown: dict[str, bool] = {}  # by role: whether the template has its messages after an answer
        control = [t.content for t in self._tokenizer.added_tokens_decoder.values() if t.special]
        alternatives = "|".join(re.escape(token) for token in control)
        # The first character of a control token's text; the look-ahead also finds overlapping ones.
        self._control = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL) if control else None

    def __len__(self) -> int:
        """Ids that the tokenizer knows, added tokens included."""
        return len(self._tokenizer)

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """The conversation through the chat template, with the header of the assistant's turn at its end.

        tools: JSON schemas for the template. Raises ValueError for messages that the template refuses.
        """
        mark, _ = _unused(messages, tools)
        return self._encode(self._render(messages, tools, mark), mark)

    def encode_replies(
        self, messages: Sequence[Message], replies: Sequence[Message], last: int, tools: Sequence[Message] = ()
    ) -> list[int]:
        """What lies between the last token that was sampled and the next one: nothing before it is encoded again.

        The end of the assistant's turn, unless `last`, the last sampled id, is that; the replies; the next header.
        messages: the conversation that the assistant answered, without its answer. Raises ValueError for replies that
        the template refuses.
        """
        for role in {str(reply.get("role")) for reply in replies}:
            self._require_shown(role)
        mark, answer = _unused(messages, replies, tools)
        text = self._render([*messages, {"role": "assistant", "content": answer}, *replies], tools, mark)
        _, found, rest = text.rpartition(answer)
        if not found:
            raise ValueError("the chat template leaves out what the assistant said before the replies; use another one")
        ids = self._encode(rest, mark)
        return ids[1:] if last in self.eos_ids and ids[:1] == [last] else ids

    def _require_shown(self, role: str) -> None:
        if role not in self._shown:
            probe, _ = _unused()
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            self._shown[role] = probe in self._render([*turns, {"role": role, "content": probe}], (), "")
        if not self._shown[role]:
            raise ValueError(
                f"the chat template shows nothing of messages of the role {role!r}; let it answer as 'user'"
            )

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the template shows an earlier turn otherwise once there are later ones, as without its thoughts.

        Streams only grow: they keep what was sampled, and the policy goes on seeing it.
        """
        asked: list[Message] = [{"role": "user", "content": "a"}]
        said: Message = {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
        once = self._render([*asked, said], (), "", header=False)
        for role in ("user", "tool"):
            with suppress(ValueError):
                if not self._render([*asked, said, {"role": role, "content": "d"}], (), "").startswith(once):
                    return True
        return not once.startswith(self._render(asked, (), ""))

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], mark: str, header: bool = True) -> str:
        """Through the template; control tokens' texts in it are cut by `mark`."""
        guarded, schemas = (
            [_map_text(item, lambda text: self._guard(text, mark)) for item in items] for items in (messages, tools)
        )
        try:
            return self._tokenizer.apply_chat_template(
                guarded, tools=schemas or None, tokenize=False, add_generation_prompt=header
            )
        except (TemplateError, TypeError) as error:  # the latter from what a template does with keys of another type
            raise ValueError(f"messages {messages!r}: the chat template refuses them: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Plain text, without any template or control token: `decode` gives it back."""
        mark, _ = _unused(text)
        return self._encode(self._guard(text, mark), mark)

    def decode(self, ids: Sequence[int]) -> str:
        """Every id's text, control tokens included; invalid UTF-8 becomes U+FFFD, an unknown id nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _guard(self, text: str, mark: str) -> str:
        """Cuts every control token's text after its first character, so that its parts are encoded apart."""
        return self._control.sub(rf"\1{mark}", text) if self._control else text

    def _encode(self, text: str, mark: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text {text!r} is no valid Unicode ({error.reason}); correct the prompt") from error
        pieces = self._tokenizer(text.split(mark), add_special_tokens=False)["input_ids"]
        return [token for piece in pieces for token in piece]


def tokenizer_of(folder: Path) -> Tokenizer:
    """Tokenizer(folder), or the one at hand that was made from the same contents, as every policy of a run has them."""
    return _made(_Contents(json.dumps(_hashes(Path(folder), READ)), Path(folder)))


@dataclass(frozen=True)
class _Contents:
    hashes: str
    folder: Path = field(compare=False)


@lru_cache(maxsize=2)
def _made(contents: _Contents) -> Tokenizer:
    return Tokenizer(contents.folder)


def _load(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise FolderError(f"{folder}: no tokenizer.json; copy the model's tokenizer files into the folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise FolderError(f"{folder}: transformers cannot load the tokenizer ({error}); copy it again") from error


def _eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    if own is None:
        raise FolderError(f"{folder}: the tokenizer has no eos_token; name one in tokenizer_config.json")
    path = folder / "generation_config.json"
    listed = read_json(path).get("eos_token_id") if path.is_file() else None
    more = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if wrong := [value for value in more if not isinstance(value, int)]:
        raise FolderError(f"{path}: eos_token_id {wrong[0]!r}; it must be a token id or a list of them")
    return tuple(dict.fromkeys([own, *more]))


def _template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise FolderError(f"{folder}: the tokenizer has no chat template; add chat_template.jinja (ChatML, say)")
    return tokenizer.get_chat_template()


def _digest(folder: Path, eos_ids: tuple[int, ...]) -> str:
    return hashlib.sha256(json.dumps([_hashes(folder, FILES), eos_ids], sort_keys=True).encode()).hexdigest()


def _hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """sha256 (hex) of those that are there."""
    present = [name for name in names if (folder / name).is_file()]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in present}


def _unused(*values: object) -> tuple[str, str]:
    """Two characters that no text in the JSON values holds."""
    text = json.dumps(values, ensure_ascii=False)
    first, second = islice((chr(point) for point in PRIVATE_USE if chr(point) not in text), 2)
    return first, second


def _map_text(value: object, change: Callable[[str], str]) -> object:
    """The same JSON value with every string in it changed, keys left alone."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(item, change) for item in value]
    return value
