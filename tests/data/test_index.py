"""The index of a store: what it says of a chain made by hand, and that it is nothing but the manifests."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.checkpoints import Checkpoints
from data.index import Index, Node
from data.ledger import Fork, Ledger, Request
from data.lineage import trace
from data.manifest import ManifestError
from data.store import Store
from tests.data.places import locally_and_on_s3, vandalise

Build = Callable[..., Any]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(nodes: list[Node]) -> list[str]:
    """As people write them; shared things by their step."""
    return [node.name if node.run else node.step for node in nodes]


def everything(index: Index) -> list[Node]:
    return sorted(index.with_digest(""), key=lambda node: node.path)


def at(index: Index, k: int, step: str) -> Node:
    found = index.find(f"sort/{k:06d}/{step}/manifest.json")
    assert found is not None
    return found


@locally_and_on_s3
def test_up_and_down_of_a_policy_in_the_middle(chain: Build, store: Store, cache: Path) -> None:
    """The first policy was made of the base and its own iteration; all of the second but its score came after."""
    chain(2)
    index = Index(store, cache)
    first = at(index, 0, "publish")
    own = [f"sort/0/{step}" for step in ("generate", "score", "replay", "advantages", "train")]
    assert names(index.ancestors(first)) == ["import_model", "warm_start", *own]
    steps = ("generate", "score", "replay", "advantages", "train", "publish")
    assert names(index.descendants(first)) == [f"sort/1/{step}" for step in steps]
    assert names(index.descendants(at(index, 1, "score"))) == ["sort/1/advantages", "sort/1/train", "sort/1/publish"]
    assert index.ancestors(index.ancestors(first)[0]) == []


def test_lineage_ends_at_model_prompts_settings_and_seed(chain: Build, store: Store, cache: Path) -> None:
    chain(1)
    index = Index(store, cache)
    found = trace(index, at(index, 0, "score"))
    assert names(found.models) == ["import_model"]
    assert (found.outside, found.code, found.runs) == ({"prompts": "prompts"}, {}, {"sort": 5})
    assert found.configs[found.node.config_digest] == {"scorer": "exact"}
    assert found.configs[found.models[0].config_digest] == {"toy": "xs"}
    node = found.as_json()["node"]
    assert (node["name"], node["seed"], node["files"], node["policy_version"]) == ("sort/0/score", 0, 1, 0)
    assert found.as_json()["up"][2]["cursor"] == (0, 2)


@locally_and_on_s3
def test_it_grows_with_the_record_and_is_the_same_when_made_again(
    chain: Build, store: Store, cache: Path, tmp_path: Path
) -> None:
    made = chain(1)
    Index(store, cache).close()
    made.extend(1)
    made.extend(2)
    grown = everything(Index(store, cache))
    assert len(grown) == 2 + 3 * 6
    assert grown == everything(Index(store, tmp_path / "other"))
    shutil.rmtree(cache)
    assert everything(Index(store, cache)) == grown


@locally_and_on_s3
def test_what_was_removed_leaves(chain: Build, store: Store, cache: Path, tmp_path: Path) -> None:
    made = chain(2)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "weights").write_bytes(b"w")
    checkpoints = Checkpoints(made.ledger)
    checkpoints.keep(made.made[0, "train"], tmp_path / "state", {})
    index = Index(store, cache)
    assert index.find("sort/checkpoints/000000/manifest.json") is not None
    index.close()
    checkpoints.remove(0)
    index = Index(store, cache)
    assert index.find("sort/checkpoints/000000/manifest.json") is None
    assert "sort/checkpoints/000000" not in names(index.descendants(at(index, 0, "train")))


def test_a_run_begun_again_under_its_name_is_read_again(chain: Build, store: Store, cache: Path) -> None:
    chain(2)
    Index(store, cache).close()
    shutil.rmtree(Path(store.url.removeprefix("file://")) / "sort")
    chain(1, Ledger(store, "sort"), mark=" again")
    index = Index(store, cache)
    assert at(index, 0, "train").content_digest == "train 0 again"
    assert index.find("sort/000001/train/manifest.json") is None
    assert len(everything(index)) == 2 + 6


@pytest.mark.parametrize("damage", [b"no database", b""])
def test_a_damaged_file_is_made_again(damage: bytes, chain: Build, store: Store, cache: Path) -> None:
    chain(1)
    index = Index(store, cache)
    before = everything(index)
    index.close()
    index.file.write_bytes(damage)
    assert everything(Index(store, cache)) == before


def test_a_manifest_that_is_another_one_now_is_told(chain: Build, store: Store, cache: Path) -> None:
    made = chain(1)
    index = Index(store, cache)
    vandalise(store, made.made[0, "train"].uri, None)
    with pytest.raises(ManifestError, match=r"train/manifest.json: missing, since it was indexed.*delete .*sqlite"):
        index.manifest(at(index, 0, "train"))


def test_a_fork_has_its_parents_entries_before_it(chain: Build, store: Store, cache: Path) -> None:
    chain(2)
    fork = Ledger(store, "branch")
    made = chain(0, fork, fork=Fork(run="sort", iteration=1, step="replay"))
    request = Request("replay", 1, "replays", {}, {})
    fork.writer(fork.at(1, "replay"), request).commit(content_digest="other")
    found = Index(store, cache).of_run(made.ledger)
    where = {place: node.run for place, node in found.items()}
    steps = ("generate", "score", "replay", "advantages", "train", "publish")
    assert where == {
        **{(0, step): "sort" for step in steps},
        (1, "generate"): "sort",
        (1, "score"): "sort",
        (1, "replay"): "branch",
    }


def test_what_others_made_of_a_run(chain: Build, store: Store, cache: Path) -> None:
    made = chain(1)
    request = Request("score", 2, "rewards", {"rollouts": made.made[0, "generate"]})
    made.ledger.writer(made.ledger.shared(request), request).commit(content_digest="aside")
    (found,) = Index(store, cache).made_elsewhere("sort")
    assert (found.content_digest, found.run) == ("aside", None)
