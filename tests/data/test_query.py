"""SQL over a run's iterations; figures are those of Chain, worked by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from data import query
from data.ledger import Fork, Ledger, Request
from data.query import connect
from data.store import Store
from tests.data.places import locally_and_on_s3

Build = Callable[..., Any]


def ask(ledger: Ledger, sql: str) -> list[tuple[Any, ...]]:
    with connect(ledger) as database:
        return query.ask(database, sql).fetchall()


@locally_and_on_s3
def test_views_over_all_iterations(chain: Build, ledger: Ledger) -> None:
    """Rewards k and 1 in iteration k; two rows with six tokens an iteration."""
    chain(3)
    means = ask(ledger, "SELECT iteration, avg(reward) FROM rewards GROUP BY ALL ORDER BY ALL")
    assert means == [(0, 0.5), (1, 1.0), (2, 1.5)]
    joined = "SELECT sum(len(token_ids)), sum(reward) FROM rollouts JOIN rewards USING (iteration, trajectory_id)"
    assert ask(ledger, joined) == [(36, 6.0)]
    spoken = "SELECT DISTINCT turns[2].text FROM rollouts"
    assert ask(ledger, spoken) == [("...",)]
    steps = "SELECT iteration, metrics['reward/mean'], seconds FROM steps WHERE step = 'score' ORDER BY 1"
    assert ask(ledger, steps) == [(0, 0.5, 0.25), (1, 1.0, 0.25), (2, 1.5, 0.25)]
    policies = "SELECT policy_version FROM steps WHERE kind = 'policy' ORDER BY 1"
    assert ask(ledger, policies) == [(4,), (8,), (12,)]


def test_a_condition_on_the_iteration_spares_other_files(chain: Build, ledger: Ledger) -> None:
    chain(3)
    with connect(ledger) as database:
        explained = database.sql("EXPLAIN ANALYZE SELECT sum(reward) FROM rewards WHERE iteration = 1")
        ((_, plan),) = explained.fetchall()
    assert "Scanning Files: 1/3" in plan


def test_a_kind_without_tables_is_an_empty_view(chain: Build, ledger: Ledger) -> None:
    chain(1)
    assert ask(ledger, "SELECT iteration, old_logprobs FROM replays") == []


def test_evaluations_are_no_training_rows(chain: Build, ledger: Ledger) -> None:
    chain(1)
    request = Request("score_greedy", 1, "rewards")
    attempt = ledger.writer(ledger.at(1, "score_greedy"), request)
    row = {"trajectory_id": ["P0@0/0"], "reward": [9.0], "scorer": ["s"], "scorer_digest": ["d"], "status": ["ok"]}
    attempt.add_table("rewards", pa.table(row))
    attempt.commit()
    assert ask(ledger, "SELECT max(reward) FROM rewards") == [(1.0,)]
    assert ask(ledger, "SELECT iteration, rows FROM steps WHERE step = 'score_greedy'") == [(1, 1)]


def test_a_fork_has_its_parents_rows_before_it(chain: Build, store: Store) -> None:
    chain(3)
    fork = chain(0, Ledger(store, "branch"), fork=Fork(run="sort", iteration=1, step="train")).ledger
    assert ask(fork, "SELECT DISTINCT iteration FROM rewards ORDER BY 1") == [(0,), (1,)]


def test_a_store_with_a_quote_in_its_path(chain: Build, tmp_path: Any) -> None:
    ledger = Ledger(Store(str(tmp_path / "it's")), "sort")
    chain(1, ledger)
    assert ask(ledger, "SELECT count(*) FROM rewards") == [(2,)]


@pytest.mark.parametrize("sql", ["SELECT nope FROM rewards", "SELEKT 1"])
def test_wrong_sql_is_refused_in_words(sql: str, chain: Build, ledger: Ledger) -> None:
    chain(1)
    with pytest.raises(Exception, match=r"nope|syntax error"):
        ask(ledger, sql)


@pytest.mark.parametrize(
    "sql",
    ["copy (select 1) to '{}/x.csv'", "select 1; select 2", "", "attach '{}/x.db' as x", "drop view rewards"],
)
def test_only_one_question_is_taken(ledger: Ledger, tmp_path: Path, sql: str) -> None:
    with connect(ledger) as database, pytest.raises(ValueError, match="give a single SELECT"):
        query.ask(database, sql.format(tmp_path))
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("sql", ["select * from read_text('/etc/hostname')", "select * from glob('/etc/*')"])
def test_nothing_beyond_the_store_is_read(ledger: Ledger, sql: str) -> None:
    with connect(ledger) as database, pytest.raises(duckdb.PermissionException):
        query.ask(database, sql).fetchall()
