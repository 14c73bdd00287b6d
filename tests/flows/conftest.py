"""Real runs, made once a session by the command a user types: real Prefect, Ray, MLflow, Megatron, Parquet."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from data.ledger import Ledger
from data.manifest import Manifest
from data.store import Store
from infra.home import Home
from infra.orphans import attend
from infra.prefect_tasks import prefect_at_hand
from infra.ray_session import Fleet

ROOT = Path(__file__).parents[2]
SORT = ROOT / "flows" / "configs" / "sort.toml"
# Small, but with everything: warm start, evaluation before and after, several optimizer steps, a separate RNG per step.
SMALL = (
    "run=small",
    "iterations=3",
    "prompts.per_iteration=32",
    "train.mini_batch=16",
    "train.optimizer.warmup_steps=20",
    "warm_start.steps=60",
    "evaluate.problems=24",
)


@dataclass(frozen=True)
class Desk:
    """A user's working folder, what is set in the environment, and the command line there."""

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def away(self, tracking_uri: str) -> "Desk":
        """The same folder, with MLflow elsewhere."""
        return replace(self, variables={**self.variables, "MLFLOW_TRACKING_URI": tracking_uri})

    def command(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).parent / "rollbook"), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"ROLLBOOK_HOME": str(self.folder / ".rollbook"), "COLUMNS": "200", "PYTHONPATH": path}
        return kept | own | self.variables

    def rollbook(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end; its output. Fails unless it ends with `code`."""
        done = subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=500
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{said[-4000:]}"
        return said if code else done.stdout

    def small(self, *overrides: str) -> list[str]:
        """The arguments of the small run."""
        return ["run", str(SORT), *(word for o in (*SMALL, *overrides) for word in ("--set", o))]

    def run(self, *overrides: str, code: int = 0) -> str:
        return self.rollbook(*self.small(*overrides), code=code)

    @property
    def ledger(self) -> Ledger:
        return Ledger(Store(f"file://{self.folder}/.rollbook/store"), "small")

    def manifest(self, iteration: int, step: str) -> Manifest:
        """What the small run has on record of a step. Fails if that is nothing."""
        found = self.ledger.find(self.ledger.at(iteration, step))
        assert found is not None, (iteration, step)
        return found

    def json(self, *arguments: str) -> Any:
        return json.loads(self.rollbook(*arguments, "--json"))


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home that was never used, but for its databases: to lay them out takes Prefect and MLflow 10 s and more.

    For as long as it is there, flows that run in this process have one Prefect server: each would start its own.
    """
    root, home = tmp_path_factory.mktemp("databases"), Home.find()
    (root / "prefect").mkdir()
    home.prepare()
    attend()
    with prefect_at_hand(home, MlflowClient(f"sqlite:///{root}/mlflow.db").search_experiments):
        used, copied = home.prefect / "prefect.db", root / "prefect/prefect.db"
        with closing(sqlite3.connect(used)) as mine, closing(sqlite3.connect(copied)) as copy:
            mine.backup(copy)
        yield root


@pytest.fixture(scope="session")
def desk(databases: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Desk]:
    def make(name: str, **variables: str) -> Desk:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(databases, folder / ".rollbook")
        return Desk(folder, variables)

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Desk, str]:
    """An undisturbed small run in a folder where nothing is, not even databases; and what it printed."""
    made = Desk(tmp_path_factory.mktemp("finished"))
    return made, made.run()


class SharedFleet(Fleet):
    """Residents outlive the run that asked for them."""

    shared: Fleet

    def __init__(self, address: str) -> None:
        self.__dict__ = self.shared.__dict__

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def home(
    finished: tuple[Any, str], fleet: Fleet, databases: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A copy of the finished small run, as the home of this process, with residents that its tests share."""
    root = tmp_path_factory.mktemp("replaying") / ".rollbook"
    shutil.copytree(finished[0].folder / ".rollbook/store", root / "store")
    shutil.copy(finished[0].folder / ".rollbook/mlflow.db", root)
    SharedFleet.shared = fleet
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLBOOK_HOME", str(root))
        patch.setattr("flows.session.Fleet", SharedFleet)
        yield root


@pytest.fixture
def rollbook(home: Path) -> Callable[..., Any]:
    def call(*arguments: str, code: int = 0) -> str:
        from flows import cli

        done = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
        assert done.exit_code == code, done.output
        return done.output

    return call
