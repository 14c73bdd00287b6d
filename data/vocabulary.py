"""Token ids as text, for people: by the tokenizer.json that a policy carries."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from tokenizers import Tokenizer

from data.digest import sha256
from data.files import check_sha256
from data.ledger import Ledger
from data.manifest import FileEntry, Manifest
from data.store import Store

FILE = "tokenizer.json"
PART = "\ufffd"  # what a decoder makes of a part of a character


@dataclass(frozen=True)
class Vocabulary:
    """Of one policy; without a tokenizer a token's text is unknown."""

    tokenizer: Tokenizer | None

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each token by itself, spaces kept; a part of a character is U+FFFD."""
        if self.tokenizer is None:
            return {}
        known = sorted(set(ids))
        # A decoder may drop the space that a text begins with: what the token adds to itself has it.
        once, twice = ([[i] * n for i in known] for n in (1, 2))
        pairs = zip(known, self._decode(once), self._decode(twice), strict=True)
        return {i: double[len(single) :] for i, single, double in pairs}

    def spelled(self, ids: Sequence[int]) -> list[str | None]:
        """The text of each token of a stream: the first of those that share a character has it, the others nothing."""
        words = self.texts(ids)
        texts = [words.get(i) for i in ids]
        for broken, run in groupby(range(len(ids)), key=lambda at: PART in (texts[at] or "")):
            if broken:
                places = list(run)
                (whole,) = self._decode([[ids[at] for at in places]])
                texts[places[0] : places[-1] + 1] = [whole, *[""] * (len(places) - 1)]
        return texts

    def _decode(self, rows: list[list[int]]) -> list[str]:
        assert self.tokenizer is not None
        return self.tokenizer.decode_batch(rows, skip_special_tokens=False)


@dataclass(frozen=True)
class _Source:
    """Where to read a tokenizer; the same bytes are the same, wherever they lie."""

    sha256: str
    store: Store = field(compare=False)
    entry: FileEntry = field(compare=False)


def vocabulary(ledger: Ledger, rollouts: Manifest) -> Vocabulary:
    """Of the policy that sampled. Raises ManifestError if its manifest or its tokenizer is missing or altered."""
    policy = ledger.open(rollouts.input_uris["policy"])
    entry = next((entry for entry in policy.files if entry.name == FILE), None)
    return Vocabulary(None if entry is None else _load(_Source(entry.sha256, ledger.store, entry)))


@lru_cache(maxsize=4)
def _load(source: _Source) -> Tokenizer:
    entry = source.entry
    data = source.store.open_buffer(source.store.path_of(entry.uri), entry.version_id)
    check_sha256(sha256(data), entry)
    return Tokenizer.from_str(data.to_pybytes().decode())
