"""A fleet that enters each step without running its body: the ledger and all keys are real, tables there are none."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.ledger import Address, Ledger, Request
from data.manifest import Manifest
from flows.config import RunConfig, load
from flows.session import make_run, open_ledger
from flows.training import Head, begin, one_iteration
from infra.home import Home
from tasks.step import Run
from tests.seaweed import seaweed

SORT = Path(__file__).parents[1] / "flows/configs/sort.toml"
METRICS = {f"metric/{i}": float(i) for i in range(25)}  # as many as a step of the quickstart has


class Recorder:
    """In the place of infra.ray_session.Fleet."""

    def warm(self, role: Any) -> None: ...

    def run(
        self, role: Any, wrapper: Any, body: Any, ledger: Ledger, address: Address, request: Request, *rest: Any
    ) -> Manifest:
        facts = {"policy_version": address.iteration or 0, "cursor": {"start": 0, "end": 1}}
        metrics = METRICS | {"reward/mean": 0.5}
        return ledger.writer(address, request).commit(metrics=metrics, facts=facts, content_digest=request.key)


def record_run(config: RunConfig, home: Home, iterations: int) -> tuple[Run, Head]:
    """Enter so many iterations. The run, and where it then stands."""
    ledger = open_ledger(config, home)
    ledger.open_or_create(config)
    run = make_run(config, ledger, home)
    run.fleet, run.watchers = Recorder(), ()  # ty: ignore[invalid-assignment]
    head = begin(config, run)
    for k in range(iterations):
        head = one_iteration(config, run, k, head)
    return run, head


def in_both_places(iterations: int) -> Iterator[tuple[str, RunConfig, Run]]:
    """A recorded run of so many iterations in a folder, then on SeaweedFS: the place's name, its config, the run."""
    with tempfile.TemporaryDirectory() as folder:
        yield _recorded("folder", f"file://{folder}/store", iterations)
        (Path(folder) / "weed").mkdir()
        with seaweed(Path(folder) / "weed") as server:
            os.environ.update(server.environment)
            yield _recorded("SeaweedFS", server.place(), iterations)


def _recorded(place: str, store: str, iterations: int) -> tuple[str, RunConfig, Run]:
    config = load(SORT, [f"resources.store={store}", f"iterations={iterations}"])
    home = Home.find()
    home.prepare()
    return place, config, record_run(config, home, iterations)[0]
