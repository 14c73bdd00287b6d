"""What people call things by: every form of a reference, and what is said of one that is not on record."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.index import Index
from data.ledger import Fork, Ledger, Request
from data.references import resolve
from data.store import Store

Build = Callable[..., Any]


@pytest.fixture
def index(chain: Build, store: Store, tmp_path: Path) -> Index:
    """Two iterations of `sort`, and a fork that trains the second one otherwise."""
    chain(2)
    fork = Ledger(store, "branch")
    chain(0, fork, fork=Fork(run="sort", iteration=1, step="train"))
    request = Request("publish", 1, "policy", {}, {})
    made = fork.writer(fork.at(1, "publish"), request)
    made.commit(content_digest="b" * 64, facts={"policy_version": 8})
    return Index(store, tmp_path / "cache")


@pytest.mark.parametrize(
    "ref, meant",
    [
        ("sort/1/score", "sort/1/score"),
        ("sort/000001/score", "sort/1/score"),
        ("sort/0", "sort/0/publish"),
        ("sort", "sort/1/publish"),
        ("sort@4", "sort/0/publish"),
        ("sort@8", "sort/1/publish"),
        ("branch@4", "sort/0/publish"),  # before the fork
        ("branch@8", "branch/1/publish"),
        ("branch/1/generate", "sort/1/generate"),
        ("sort:P3@3/0", "sort/1/generate"),
        ("branch:P0@0/0", "sort/0/generate"),
        ("bbbbbb", "branch/1/publish"),
    ],
)
def test_every_form(ref: str, meant: str, index: Index) -> None:
    assert resolve(index, ref).name == meant


def test_policy_0_digests_uris_and_folders(index: Index) -> None:
    assert resolve(index, "sort@0").step == "warm_start"
    node = resolve(index, "sort/0/score")
    assert resolve(index, node.content_digest[:12]) == resolve(index, node.key) == node
    assert resolve(index, index.store.url_of(node.path)) == node
    assert resolve(index, index.store.url_of("sort/000000/score")) == node
    base = resolve(index, "sort@0")
    assert resolve(index, base.path.removesuffix("/manifest.json")) == base
    assert resolve(index, "P3@3/0", run="sort").name == "sort/1/generate"


@pytest.mark.parametrize(
    "ref, message",
    [
        ("sort/7", "it has no iteration 7"),
        ("sort/1/train/x", "sort/1/train/x: not on record in run 'sort'; its iteration 1 has generate"),
        ("sort/1/scare", "its iteration 1 has generate, score, replay"),
        ("sort@5", "has published no such version; it has 0, 4, 8"),
        ("sport", "run 'sport': not on record .* did you mean 'sort'?"),
        ("sort:P3@9/0", "trajectory 'P3@9/0': not in run 'sort'"),
        ("sort:Q3@3/0", "trajectory 'Q3@3/0': not in run 'sort'"),  # the position is there, with another prompt
        ("sort:P3", "trajectory 'P3': not in run 'sort'"),
        ("shared/policy/abc", "shared/policy/abc: no manifest on record"),
    ],
)
def test_what_is_not_on_record(ref: str, message: str, index: Index) -> None:
    with pytest.raises(LookupError, match=message):
        resolve(index, ref)


def test_a_beginning_of_several_digests_names_them(index: Index, ledger: Ledger) -> None:
    for k, digest in enumerate(("cccccc01", "cccccc02")):
        ledger.writer(ledger.at(k, "extra"), Request("extra", 1, "extra", seed=k)).commit(content_digest=digest)
    again = Index(index.store, index.file.parent)
    with pytest.raises(LookupError, match=r"cccccc01 \(sort/0/extra\), cccccc02 \(sort/1/extra\); give more"):
        resolve(again, "cccccc")
    assert resolve(again, "cccccc02").name == "sort/1/extra"
