"""Runs on record whose steps never ran: ledger and keys are real, manifests list no files. A thousand in seconds."""

from typing import Any

from data.ledger import Address, Ledger, Request
from data.manifest import Manifest
from flows.config import RunConfig
from flows.session import make_run, open_ledger
from flows.training import begin, evaluate_policy, one_iteration
from infra.home import Home

METRICS = {f"metric/{i}": float(i) for i in range(25)}  # as many as a step of the quickstart has


class Recorder:
    """In the place of a fleet: enters each step without running its body. Its content is named after its key."""

    def warm(self, role: Any) -> None: ...

    def run(
        self, role: Any, wrapper: Any, body: Any, ledger: Ledger, address: Address, request: Request, *rest: Any
    ) -> Manifest:
        draw: Any = request.config.get("draw", {"cursor": 0, "count": 0})
        cursor = {"start": draw["cursor"], "end": draw["cursor"] + draw["count"]}
        facts = {"policy_version": address.iteration or 0, "cursor": cursor}
        metrics = METRICS | {"reward/mean": 0.5}
        return ledger.writer(address, request).commit(metrics=metrics, facts=facts, content_digest=request.key)


def record(config: RunConfig, evaluated: bool = False) -> Ledger:
    """A whole run; `evaluated` also enters the evaluations before and after it."""
    home = Home.find()
    home.prepare()
    ledger = open_ledger(config, home)
    ledger.open_or_create(config)
    run = make_run(config, ledger, home)
    run.fleet, run.watchers = Recorder(), ()  # ty: ignore[invalid-assignment]
    head = begin(config, run)
    for k in range(config.iterations):
        if evaluated and k == 0:
            evaluate_policy(config, run, k, head)
        head = one_iteration(config, run, k, head)
    if evaluated:
        evaluate_policy(config, run, config.iterations, head)
    return ledger
