"""The residents of a run and how each is made. Heavy libraries load in the resident, never in the driver."""

from typing import TYPE_CHECKING

from data.config import LayoutConfig
from infra.ray_session import Role
from infra.timed_pool import TimedPool

if TYPE_CHECKING:
    from models.engines.contract import RolloutEngine
    from models.megatron.trainer import Trainer


def engine_role(kind: str, batch: int, threads: int) -> Role:
    return Role("engine", make_engine, (kind, batch, threads))


def trainer_role(threads: int, layout: LayoutConfig) -> Role:
    return Role("trainer", make_trainer, (threads, layout), ranks=layout.ranks)


def worker_role(scorer_processes: int) -> Role:
    return Role("worker", make_worker, (scorer_processes,))


def make_engine(kind: str, batch: int, threads: int) -> "RolloutEngine":
    from models.engines.transformers import TransformersEngine

    engines = {"transformers": TransformersEngine}
    return engines[kind](batch, threads)


def make_trainer(rank: int, world: int, rendezvous: str, threads: int, layout: LayoutConfig) -> "Trainer":
    from models.megatron.trainer import Trainer

    return Trainer(rank, world, rendezvous, threads, layout)


def make_worker(scorer_processes: int) -> TimedPool:
    return TimedPool(scorer_processes)
