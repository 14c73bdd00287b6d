"""Two manifests field by field and row by row, and where two runs part; worked by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data.compare import ColumnDifference
from data.diff import Parting, compare_manifests, compare_runs
from data.index import Index
from data.ledger import Ledger, Request
from data.manifest import Manifest
from data.request import Difference
from data.store import Store

Build = Callable[..., Any]


def rewards(ledger: Ledger, values: list[float], **parts: Any) -> Manifest:
    request = Request(**({"step": "score", "step_version": 1, "kind": "rewards"} | parts))
    attempt = ledger.writer(ledger.shared(request), request)
    count = len(values)
    status = ["failed" if value != value else "ok" for value in values]
    scored = {"scorer": ["s"] * count, "scorer_digest": ["d"] * count, "status": status}
    scored["error"] = ["no" if value != value else None for value in values]
    ids = [f"P{i}@{i}/0" for i in range(count)]
    attempt.add_table("rewards", pa.table({"trajectory_id": ids, "reward": pa.array(values, pa.float32()), **scored}))
    return attempt.commit()


def test_fields_of_the_key_beside_it_and_rows(ledger: Ledger) -> None:
    """Rewards .5 and NaN against .75 and NaN: one row differs, by .25."""
    one = rewards(ledger, [0.5, float("nan")], inputs={"rollouts": "r0"}, config={"reward": {"scale": 1}}, seed=1)
    two = rewards(
        ledger,
        [0.75, float("nan")],
        inputs={"rollouts": "r0"},
        config={"reward": {"scale": 2}},
        seed=1,
        user_code={"scorer": "c"},
        execution={"threads": 4},
    )
    found = compare_manifests(ledger.store, one, two)
    assert found.keyed == (
        Difference("config.reward.scale", "1", "2"),
        Difference("user_code.scorer", "not set", '"c"'),
    )
    assert found.beside == (Difference("execution.threads", "not set", "4"),)
    assert not found.same_content and found.files == ()
    assert found.tables["rewards"].columns == (ColumnDifference("reward", 1, "P0@0/0", 0.25),)
    assert found.as_json()["tables"]["rewards"]["columns"][0]["largest"] == 0.25
    assert found.as_json()["keyed"][0] == {"name": "config.reward.scale", "first": "1", "second": "2"}


def test_equal_content_is_said_and_no_table_is_read(ledger: Ledger) -> None:
    one, two = (rewards(ledger, [0.5], seed=seed) for seed in (1, 2))
    without_files = two.model_copy(update={"files": two.files[:0]})
    found = compare_manifests(ledger.store, one, without_files)
    assert found.same_content and not found.tables
    assert found.keyed == (Difference("seed", "1", "2"),)


def test_other_files_are_named(chain: Build, ledger: Ledger) -> None:
    made = chain(2).made
    assert compare_manifests(ledger.store, made[0, "publish"], made[1, "publish"]).files == ("weights",)


def test_two_kinds_are_refused(chain: Build, ledger: Ledger) -> None:
    made = chain(1).made
    with pytest.raises(ValueError, match=r"generate/manifest.json has rollouts, .* rewards: compare two of one kind"):
        compare_manifests(ledger.store, made[0, "generate"], made[0, "score"])


@pytest.fixture
def runs(chain: Build, store: Store) -> tuple[Ledger, Ledger, Ledger]:
    """`twin` has other weights from the first training on and another lr; `longer` has one iteration more."""
    chain(2)
    twin, longer = Ledger(store, "twin"), Ledger(store, "longer")
    chain(2, twin, mark="'", lr=0.25)
    chain(3, longer)
    return Ledger(store, "sort"), twin, longer


def test_where_runs_part(runs: tuple[Ledger, Ledger, Ledger], store: Store, tmp_path: Path) -> None:
    """The chain names what has no table after its run's mark: replay is the first such step, train the first whose
    key says so."""
    sort, twin, longer = runs
    index = Index(store, tmp_path / "cache")
    found = compare_runs(index, sort, twin)
    assert found.config == (Difference("lr", "0.5", "0.25"),)
    assert found.by_content == Parting(0, "replay", "sort/0/replay", "twin/0/replay")
    assert found.by_key == Parting(0, "advantages", "sort/0/advantages", "twin/0/advantages")
    assert found.shared == 2  # generate and score
    found = compare_runs(index, sort, longer)
    assert found.config == () and found.shared == 12
    assert found.by_key == found.by_content == Parting(2, "generate", None, "longer/2/generate")
    same = compare_runs(index, sort, sort)
    assert (same.by_key, same.by_content, same.shared) == (None, None, 12)
    with pytest.raises(LookupError, match="run 'sport': not on record"):
        compare_runs(index, sort, Ledger(store, "sport"))
