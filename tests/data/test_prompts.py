"""Prompt files and the cursor: each row once an epoch, nothing skipped by a resume, a broken row named by its line."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.config import PromptsConfig
from data.prompt_files import read_prompts
from data.prompts import FileSource, ProceduralSource, Prompt, PromptError, PromptSource, load_source

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a prompt file: text as it is, other rows one JSON a line."""

    def build(name: str, *rows: Any) -> Path:
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return build


def numbered(count: int) -> FileSource:
    prompts = [Prompt(str(i), [{"role": "user", "content": f"q{i}"}], {}) for i in range(count)]
    return FileSource("numbered.jsonl", prompts, None, 0)


def names(source: PromptSource, cursor: int, count: int, seed: int = 0) -> list[str]:
    return [prompt.prompt_id for prompt in source.take(cursor, count, seed)]


# Files


def test_a_row_becomes_a_prompt(write: Write):
    row = {"prompt": "2+2?", "prompt_id": "sum", "metadata": {"answer": "4", "level": 1}}
    (prompt,) = read_prompts(write("p.jsonl", row)).prompts
    expected = {"data_set": "p.jsonl", "item": "sum", "answer": "4", "level": 1}
    assert prompt == Prompt("sum", [{"role": "user", "content": "2+2?"}], expected)


def test_unknown_keys_become_metadata_and_answers_text(write: Write):
    rows = [{"caption": "a cat", "style": "oil", "answer": 7}, {"prompt": "b", "answer": 0.5, "metadata": {"level": 2}}]
    first, second = read_prompts(write("p.jsonl", *rows)).prompts
    assert first.messages == [{"role": "user", "content": "a cat"}]
    assert first.metadata == {"data_set": "p.jsonl", "item": "0", "style": "oil", "answer": "7"}
    assert second.metadata == {"data_set": "p.jsonl", "item": "1", "answer": "0.5", "level": 2}


def test_conversations_keep_their_turns(write: Write):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [{"messages": messages}, {"prompt": [*messages, call, {"role": "tool", "content": "1"}]}]
    first, second = read_prompts(write("p.jsonl", *rows)).prompts
    assert first.messages == messages
    assert second.messages == [*messages, call, {"role": "tool", "content": "1"}]


def test_the_system_text_applies_where_the_data_has_none(write: Write):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]
    first, second = read_prompts(write("p.jsonl", {"messages": own}, {"prompt": "b"}), "given").prompts
    assert first.messages == own
    assert second.messages == [{"role": "system", "content": "given"}, {"role": "user", "content": "b"}]


def test_media_are_kept_with_absolute_addresses(write: Write, tmp_path: Path):
    media = [{"modality": "image", "role": "user", "uri": "img/a.png"}, {"uri": "s3://bucket/b.png"}]
    (prompt,) = read_prompts(write("p.jsonl", {"prompt": "see", "media": media})).prompts
    assert prompt.metadata["media"] == [
        {"modality": "image", "role": "user", "uri": str(tmp_path / "img" / "a.png")},
        {"uri": "s3://bucket/b.png"},
    ]


def test_all_four_formats_give_the_same_prompts(write: Write, tmp_path: Path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b"}]
    files = [write("p.jsonl", rows[0], "", rows[1], ""), write("p.json", json.dumps(rows, indent=2))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=1)  # b's answer is null there
    texts = []
    for file in [*files, tmp_path / "p.parquet"]:
        texts.append([(p.prompt_id, p.messages, p.metadata.get("answer")) for p in read_prompts(file).prompts])
        assert "answer" not in read_prompts(file).prompts[1].metadata
    assert texts[0] == texts[1] == texts[2]
    plain = read_prompts(write("p.txt", "a", "", "  b  ")).prompts
    assert [p.messages[0]["content"] for p in plain] == ["a", "b"]


def test_repeated_rows_weigh_once_and_are_counted(write: Write):
    """C37"""
    a, b = {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "1"}
    same_with_other_answer = {"prompt": "a", "answer": "2"}
    renamed = a | {"prompt_id": "again"}
    path = write("p.jsonl", a, b, a, same_with_other_answer, renamed, a)
    source = load_source(PromptsConfig(source=str(path)))
    assert source.duplicates == 3
    drawn = Counter(names(source, 0, 300))
    assert drawn == {"0": 100, "1": 100, "3": 100}  # ids are row numbers of the file


BROKEN = {
    "not JSON": ('{"prompt": "b"', r"p.jsonl:3: not JSON: .* column \d+; mend the line"),
    "a number": ("7", "p.jsonl:3: a row is int; it must be an object or a string"),
    "nothing": ("{}", "p.jsonl:3: neither prompt nor messages; a row needs one; it has nothing"),
    "no prompt": ('{"text": "b"}', "p.jsonl:3: neither prompt nor messages; a row needs one; it has text"),
    "null prompt": ('{"prompt": null}', "p.jsonl:3: neither prompt nor messages"),
    "empty prompt": ('{"prompt": " "}', "p.jsonl:3: prompt is ' '; it must be a non-empty string"),
    "number prompt": ('{"prompt": 7}', "p.jsonl:3: prompt is 7; it must be a non-empty string"),
    "both": ('{"prompt": "b", "messages": []}', "p.jsonl:3: prompt and messages; a row has one of them"),
    "no messages": ('{"messages": []}', "p.jsonl:3: messages is empty"),
    "role": (
        '{"messages": [{"role": "bot", "content": "x"}]}',
        r"p.jsonl:3: messages\[0\] is .*a message has a role of",
    ),
    "content": ('{"messages": [{"role": "user", "content": ""}]}', r"p.jsonl:3: messages\[0\] has content ''"),
    "calls": (
        '{"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}',
        r"p.jsonl:3: messages\[0\] has tool_calls; only an assistant may",
    ),
    "metadata": ('{"prompt": "b", "metadata": [1]}', "p.jsonl:3: metadata is list; it must be an object"),
    "NaN": ('{"prompt": "b", "level": NaN}', "p.jsonl:3: metadata that JSON cannot hold"),
    "media": ('{"prompt": "b", "media": [{"modality": "image"}]}', "p.jsonl:3: media entry .* with a uri"),
    "id": ('{"prompt": "b", "prompt_id": ""}', "p.jsonl:3: prompt_id is ''; it must be a non-empty string"),
    "id taken": ('{"prompt": "b", "prompt_id": "0"}', "p.jsonl:3: prompt_id '0' is also that of .*p.jsonl:1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_row_is_named_by_its_line(case: str, write: Write):
    line, message = BROKEN[case]
    path = write("p.jsonl", {"prompt": "a"}, "", line, {"prompt": "c"})
    with pytest.raises(PromptError, match=message):
        load_source(PromptsConfig(source=str(path)))


def test_broken_files_of_the_other_formats(write: Write, tmp_path: Path):
    with pytest.raises(PromptError, match=r"p.json:2: not JSON"):
        read_prompts(write("p.json", "[", "oops", "]"))
    with pytest.raises(PromptError, match=r"p.json: a JSON dict; it must be a list of rows"):
        read_prompts(write("p.json", "{}"))
    with pytest.raises(PromptError, match=r"p.json row 2: neither prompt nor messages"):
        read_prompts(write("p.json", '["a", {}]'))
    pq.write_table(pa.table({"prompt": ["a", None]}), tmp_path / "p.parquet")
    with pytest.raises(PromptError, match=r"p.parquet row 2: neither prompt nor messages"):
        read_prompts(tmp_path / "p.parquet")
    with pytest.raises(PromptError, match=r"q.parquet: not a Parquet file"):
        read_prompts(write("q.parquet", "x" * 20))
    (tmp_path / "p.txt").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(PromptError, match=r"p.txt:2: not UTF-8"):
        read_prompts(tmp_path / "p.txt")


@pytest.mark.parametrize(("name", "text"), [("p.jsonl", "\n\n"), ("p.json", "[]"), ("p.txt", "  \n")])
def test_an_empty_data_set_is_refused(name: str, text: str, write: Write):
    with pytest.raises(PromptError, match=rf"{name}: no prompts in it"):
        read_prompts(write(name, text))


def test_a_source_that_is_none_is_named(tmp_path: Path):
    with pytest.raises(
        PromptError, match=r"sorted: not a prompt source; use sort, addition, addmix or a file ending in \.jsonl"
    ):
        load_source(PromptsConfig(source="sorted"))
    with pytest.raises(PromptError, match=r"p.jsonl: no such file"):
        load_source(PromptsConfig(source=str(tmp_path / "p.jsonl")))


def test_settings_that_do_not_fit_are_refused(write: Write):
    path = str(write("p.jsonl", {"prompt": "a"}))
    with pytest.raises(PromptError, match=r"prompts.digits = 6 with source .*p.jsonl"):
        load_source(PromptsConfig(source=path, digits=6))
    with pytest.raises(PromptError, match=r"prompts.held_out = .* it holds out one problem in five by itself"):
        load_source(PromptsConfig(source="sort", held_out=path))
    with pytest.raises(PromptError, match=r"prompts.digits = 10: addition has at most 9"):
        load_source(PromptsConfig(source="addition", digits=10))


def test_held_out_prompts_come_from_their_own_file(write: Write):
    train, held = write("p.jsonl", {"prompt": "a"}), write("h.jsonl", *({"prompt": f"h{i}"} for i in range(7)))
    source = load_source(PromptsConfig(source=str(train), held_out=str(held)))
    assert [p.messages[0]["content"] for p in source.held_out(3)] == ["h0", "h1", "h2"]
    assert len(source.held_out(384)) == 7  # what there is, neither padded nor refused
    with pytest.raises(PromptError, match=r"has no held-out prompts; set prompts.held_out"):
        load_source(PromptsConfig(source=str(train))).held_out(1)


def test_a_file_shows_what_its_rows_demonstrate(write: Write):
    """Only rows that show something are drawn, each once in an epoch."""
    rows = [{"prompt": "a"}, {"prompt": "b", "demonstration": "B"}, {"prompt": "c", "demonstration": ["look", "take"]}]
    shown = load_source(PromptsConfig(source=str(write("p.jsonl", *rows)))).demonstrations(0, 4, 0)
    assert sorted((str(p.messages[0]["content"]), turns) for p, turns in shown[:2]) == [
        ("b", ("B",)),
        ("c", ("look", "take")),
    ]
    assert {p.prompt_id for p, _ in shown[2:]} == {p.prompt_id for p, _ in shown[:2]}
    with pytest.raises(PromptError, match=r"numbered.jsonl has no demonstrations: no row has metadata.demonstration"):
        numbered(3).demonstrations(0, 1, 0)
    broken = load_source(PromptsConfig(source=str(write("q.jsonl", {"prompt": "a", "demonstration": [1]}))))
    with pytest.raises(PromptError, match=r"metadata.demonstration is \[1\]; it must be a text or a list of texts"):
        broken.demonstrations(0, 1, 0)


def test_the_digest_is_of_the_content(write: Write, tmp_path: Path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]

    def digest(*given: Any, system: str | None = None) -> str:
        return load_source(PromptsConfig(source=str(write("p.jsonl", *given)), system=system)).digest

    assert digest(*rows) == digest(rows[0], "", rows[1], rows[1])
    others = [
        digest(*rows[::-1]),
        digest(rows[0]),
        digest(rows[0], rows[1] | {"answer": "3"}),
        digest(*rows, system="s"),
    ]
    assert len({digest(*rows), *others}) == 5


# The cursor


@given(st.integers(1, 9), st.integers(0, 3), st.lists(st.integers(0, 7), min_size=1, max_size=8))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_split_of_takes_gives_the_same_sequence(size: int, seed: int, counts: list[int]):
    source, total = numbered(size), sum(counts)
    cursors = [sum(counts[:i]) for i in range(len(counts) + 1)]
    split = [name for a, b in pairwise(cursors) for name in names(source, a, b - a, seed)]
    assert split == names(source, 0, total, seed)
    # Each epoch has every row once.
    for start in range(0, total - size + 1, size):
        assert sorted(split[start : start + size]) == sorted(str(i) for i in range(size))


def test_each_epoch_and_seed_has_its_own_order():
    source = numbered(50)
    orders = [names(source, 0, 50, 0), names(source, 50, 50, 0), names(source, 0, 50, 1), names(source, 50, 50, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] != [str(i) for i in range(50)]


def test_the_order_is_that_of_the_raw_generator():
    # PCG64's raw stream is fixed for good; numpy's permutation methods are not.
    raw = [int(x) for x in np.random.PCG64([3, 1]).random_raw(5)]
    assert names(numbered(5), 5, 5, 3) == [str(i) for i in sorted(range(5), key=lambda i: raw[i])]


@pytest.mark.parametrize("name", ["sort", "addition"])
def test_a_procedural_draw_depends_on_seed_and_cursor_alone(name: str):
    source = load_source(PromptsConfig(source=name))
    assert isinstance(source, ProceduralSource)
    whole = names(source, 0, 60, 5)
    assert names(source, 20, 40, 5) == whole[20:]
    assert [names(source, at, 1, 5)[0] for at in (59, 3)] == [whole[59], whole[3]]
    assert names(source, 0, 60, 6) != whole
