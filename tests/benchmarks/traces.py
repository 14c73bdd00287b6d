"""Seconds for 1,000 trajectories as traces, into a database of MLflow's and through its server.

    python tests/benchmarks/traces.py

One turn each, a reward with two parts. Bare spans, in bulk and without feedback, are timed besides.
"""

import os
import tempfile
import time
from pathlib import Path
from threading import Event

HOME = tempfile.mkdtemp(prefix="rollbook-benchmark-")
os.environ["ROLLBOOK_HOME"] = HOME

from infra.home import Home

Home.find().set_environment()
Home.find().prepare()  # before MLflow is imported

from itertools import batched

from mlflow.tracing.client import TracingClient
from mlflow.tracking import MlflowClient

from data.conversations import Scored
from data.ledger import Ledger
from data.store import Store
from infra.servers import serving
from infra.traces import AT_ONCE, Place, TraceSender, trace_spans
from tests.conversations import record, short
from tests.seaweed import free_ports

COUNT = 1_000
PARTS = (("right", 1.0), ("brevity", -0.25))


def measure(name: str, tracking_uri: str, tables: Scored) -> None:
    client = MlflowClient(tracking_uri)
    experiment = client.create_experiment(name)
    for again in ("first", "again"):
        place = Place(experiment, client.create_run(experiment).info.run_id, name, 0, tables.rollouts)
        wall, cpu = time.perf_counter(), time.process_time()
        TraceSender(client).send(place, tables, 1.0, Event())
        print(f"{name:8s} {again}: {time.perf_counter() - wall:6.1f} s, {time.process_time() - cpu:5.1f} s of CPU here")
    bare = Place(experiment, "", f"{name}-bare", 0, tables.rollouts)
    trajectories, wall = tables.choose(1.0).trajectories, time.perf_counter()
    for batch in batched(trajectories, AT_ONCE):
        TracingClient(tracking_uri).log_spans(experiment, [span for t in batch for span in trace_spans(bare, t)])
    print(f"{name:8s} spans only: {time.perf_counter() - wall:.1f} s")


def main() -> None:
    told = tuple(short(f"R{i // 8}/{i % 8}", "4", float(i % 2), components=PARTS) for i in range(COUNT))
    tables = record(Ledger(Store(str(Path(HOME) / "store")), "hand"), told)
    home = Home.find()
    measure("database", home.tracking_uri, tables)
    with serving(home, *free_ports(2)) as (servers, _):
        measure("server", servers.mlflow_url, tables)


if __name__ == "__main__":
    main()
