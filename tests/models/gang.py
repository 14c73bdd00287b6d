"""Several training ranks for a test: libraries are imported once, in a server that forks each rank."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from data.config import LayoutConfig

TIMEOUT_S = 150.0


def run(layout: LayoutConfig, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(trainer, *args)` on each rank of a fresh training world; the results by rank.

    body: a function of a test module. Raises AssertionError, with the rank's traceback, for the first that fails.
    """
    with _ranks(layout, body, args) as ends:
        results: dict[int, Any] = {}
        while len(results) < len(ends):
            ready = wait([end for rank, end in enumerate(ends) if rank not in results], TIMEOUT_S)
            assert ready, f"{layout}: nothing from ranks {sorted(set(range(len(ends))) - set(results))}"
            for end in ready:
                rank = ends.index(end)
                failure, results[rank] = end.recv()
                assert failure is None, f"{layout}, rank {rank}:\n{failure}"
        return [results[rank] for rank in range(len(ends))]


def save_state(trainer: Any, folder: Path) -> str:
    """The present state into a folder; its digest. On every rank, as in a train step."""
    from models.megatron import ranks

    copied = trainer.copy_state()
    if copied is not None:
        copied.write(folder)
    return ranks.told_by_first(copied.digest if copied is not None else "")


@contextmanager
def _ranks(layout: LayoutConfig, body: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[list[Connection]]:
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # for the server, which inherits no sys.path
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["models.megatron.trainer", "models.megatron.state"])
    meeting = tempfile.TemporaryDirectory(prefix="gang-")
    rendezvous = f"file://{meeting.name}/store"  # unlike a port, nobody else takes it meanwhile
    pipes = [context.Pipe(duplex=False) for _ in range(layout.ranks)]
    processes = [
        context.Process(target=_rank, args=(rank, layout, rendezvous, pipe[1], body, args), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        yield [pipe[0] for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        meeting.cleanup()


def _rank(
    rank: int, layout: LayoutConfig, rendezvous: str, end: Connection, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    from models.megatron.trainer import Trainer

    try:
        end.send((None, body(Trainer(rank, layout.ranks, rendezvous, 1, layout), *args)))
    except BaseException:
        end.send((traceback.format_exc(), None))
