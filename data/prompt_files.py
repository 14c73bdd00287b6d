"""Prompt files: JSONL, JSON, TXT and Parquet. A row is a prompt, its answer and whatever else goes with it.

Keys of a row: `prompt` (or `caption`), a non-empty string or a list of chat messages, or `messages`, such a list;
optional `prompt_id`, `metadata` (an object) and `media` (a list of {modality, role, uri}). Every other key becomes
metadata. In a TXT file each line that is not blank is a prompt.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from data.digest import json_digest

ROLES = ("system", "user", "assistant", "tool")
OWN_KEYS = frozenset({"prompt", "caption", "messages", "prompt_id", "metadata", "media"})

Message = dict[str, JsonValue]


class PromptError(ValueError):
    """Prompts that cannot be used; the message names the file and row, the rule and the fix."""


@dataclass(frozen=True)
class Prompt:
    """What a trajectory starts from. `metadata["answer"]`, where there is one, is the reference answer, a string."""

    prompt_id: str
    messages: list[Message]
    metadata: dict[str, JsonValue]


@dataclass(frozen=True)
class PromptFile:
    prompts: tuple[Prompt, ...]
    duplicates: int  # rows left out: same messages and metadata as an earlier row


def read_prompts(path: Path, system: str | None = None) -> PromptFile:
    """All prompts of a file in its order, repeated rows once.

    `system` is put before conversations that bring no system turn. Raises PromptError with file and line (row, for JSON
    and Parquet) for a row that is broken, a prompt_id that two different rows share, or a file without prompts.
    """
    kept: dict[str, Prompt] = {}
    place_of: dict[str, str] = {}
    rows = 0
    for index, (place, row) in enumerate(_rows(path)):
        rows += 1
        prompt = _prompt(place, row, index, path, system)
        if kept.setdefault(json_digest([prompt.messages, prompt.metadata]), prompt) is not prompt:
            continue
        if (other := place_of.setdefault(prompt.prompt_id, place)) != place:
            raise PromptError(
                f"{place}: prompt_id {prompt.prompt_id!r} is also that of {other}, another prompt; ids are unique: "
                "rename one, or leave prompt_id out"
            )
    if not kept:
        raise PromptError(f"{path}: no prompts in it; a data set needs at least one row")
    return PromptFile(tuple(_with_item(prompt, path) for prompt in kept.values()), rows - len(kept))


def _rows(path: Path) -> Iterator[tuple[str, JsonValue]]:
    """(where, row) for each row."""
    readers = {".jsonl": _jsonl, ".json": _json, ".txt": _txt, ".parquet": _parquet}
    if path.suffix not in readers:
        endings = ", ".join(readers)
        raise PromptError(f"{path}: not a prompt source; use sort, addition, addmix or a file ending in {endings}")
    if not path.is_file():
        raise PromptError(f"{path}: no such file; set prompts.source to a file that is there")
    return readers[path.suffix](path)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise PromptError(f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
        if text:
            yield f"{path}:{number}", text


def _jsonl(path: Path) -> Iterator[tuple[str, JsonValue]]:
    for place, text in _lines(path):
        try:
            yield place, json.loads(text)
        except json.JSONDecodeError as error:
            raise PromptError(f"{place}: not JSON: {error.msg} at column {error.colno}; mend the line") from None


def _json(path: Path) -> Iterator[tuple[str, JsonValue]]:
    try:
        rows = json.loads(path.read_bytes())
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise PromptError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}; mend it") from None
    if not isinstance(rows, list):
        raise PromptError(f"{path}: a JSON {type(rows).__name__}; it must be a list of rows")
    for number, row in enumerate(rows, 1):
        yield f"{path} row {number}", row


def _txt(path: Path) -> Iterator[tuple[str, JsonValue]]:
    yield from _lines(path)


def _parquet(path: Path) -> Iterator[tuple[str, JsonValue]]:
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise PromptError(f"{path}: not a Parquet file ({error}); write it again") from None
    number = 0
    for batch in table.to_batches():
        for row in batch.to_pylist():
            number += 1
            # A row has every column in Parquet: null means that the key is not there.
            yield f"{path} row {number}", {key: value for key, value in row.items() if value is not None}


def _prompt(place: str, row: JsonValue, index: int, path: Path, system: str | None) -> Prompt:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise PromptError(f"{place}: a row is {type(row).__name__}; it must be an object or a string")
    messages = _messages(place, row)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    prompt_id = row.get("prompt_id", str(index))
    if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool) or prompt_id == "":
        raise PromptError(f"{place}: prompt_id is {prompt_id!r}; it must be a non-empty string, or left out")
    return Prompt(str(prompt_id), messages, _metadata(place, row, path))


def _messages(place: str, row: Mapping[str, JsonValue]) -> list[Message]:
    given = [key for key in ("prompt", "caption", "messages") if row.get(key) is not None]
    if not given:
        raise PromptError(
            f"{place}: neither prompt nor messages; a row needs one; it has {', '.join(row) or 'nothing'}"
        )
    if len(given) > 1:
        raise PromptError(f"{place}: {' and '.join(given)}; a row has one of them: remove the others")
    value = row[given[0]]
    if isinstance(value, list):
        return _conversation(place, given[0], value)
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f"{place}: {given[0]} is {value!r}; it must be a non-empty string")
    return [{"role": "user", "content": value}]


def _conversation(place: str, key: str, turns: list[JsonValue]) -> list[Message]:
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or turn.get("role") not in ROLES:
            raise PromptError(f"{place}: {key}[{number}] is {turn!r}; a message has a role of {', '.join(ROLES)}")
        if turn["role"] != "assistant" and turn.get("tool_calls"):
            raise PromptError(f"{place}: {key}[{number}] has tool_calls; only an assistant may: remove them")
        content = turn.get("content")
        if not isinstance(content, str | list | None) or not (content or turn.get("tool_calls")):
            raise PromptError(f"{place}: {key}[{number}] has content {content!r}; a message needs some text")
        messages.append({name: value for name, value in turn.items() if value is not None})
    if not messages:
        raise PromptError(f"{place}: {key} is empty; a conversation needs a message")
    return messages


def _metadata(place: str, row: Mapping[str, JsonValue], path: Path) -> dict[str, JsonValue]:
    given = row.get("metadata") or {}
    if not isinstance(given, dict):
        raise PromptError(f"{place}: metadata is {type(given).__name__}; it must be an object")
    metadata = {key: value for key, value in row.items() if key not in OWN_KEYS} | given
    if row.get("media"):
        metadata["media"] = _media(place, row["media"], path)
    answer = metadata.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        metadata["answer"] = str(answer)
    try:
        json_digest(metadata)
    except (TypeError, ValueError) as error:
        raise PromptError(f"{place}: metadata that JSON cannot hold ({error}); use text and finite numbers") from None
    return metadata


def _media(place: str, media: JsonValue, path: Path) -> list[JsonValue]:
    """The entries with each address made absolute: a relative one is relative to the file."""
    entries: list[JsonValue] = []
    for entry in media if isinstance(media, list) else [media]:
        uri = entry.get("uri") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(uri, str) or not uri:
            raise PromptError(f"{place}: media entry {entry!r}; it must be an object with a uri")
        entries.append(entry | {"uri": uri if "://" in uri else str((path.parent / uri).resolve())})
    return entries


def _with_item(prompt: Prompt, path: Path) -> Prompt:
    """With the names of the data set and item, which are no part of what makes two rows the same."""
    names: dict[str, JsonValue] = {"data_set": path.name, "item": prompt.prompt_id}
    return Prompt(prompt.prompt_id, prompt.messages, names | prompt.metadata)
