"""The residents of a run and how each is made. Heavy libraries load in the resident, never in the driver."""

import importlib
from typing import TYPE_CHECKING

from data.config import EngineConfig, LayoutConfig, ResourcesConfig
from infra.ray_session import Role
from infra.timed_pool import TimedPool

if TYPE_CHECKING:
    from models.engines.contract import RolloutEngine
    from models.megatron.trainer import Trainer


def engine_role(config: EngineConfig, resources: ResourcesConfig, text: bool) -> Role:
    """text: whether stop strings will be asked for."""
    return Role("engine", make_engine, (config, resources.threads, text), gpus=resources.engine_gpus)


def trainer_role(resources: ResourcesConfig, layout: LayoutConfig) -> Role:
    args = (resources.threads, layout)
    return Role("trainer", make_trainer, args, ranks=layout.ranks, gpus=resources.trainer_gpus)


def worker_role(scorer_processes: int) -> Role:
    return Role("worker", make_worker, (scorer_processes,))


def make_engine(config: EngineConfig, threads: int, text: bool) -> "RolloutEngine":
    if config.kind == "sglang":
        from models.engines.sglang.engine import SGLangEngine

        return SGLangEngine(config, threads, text)
    from models.engines.transformers import TransformersEngine

    return TransformersEngine(config.batch, threads)


def make_trainer(rank: int, world: int, rendezvous: str, threads: int, layout: LayoutConfig) -> "Trainer":
    from models.megatron.trainer import Trainer

    return Trainer(rank, world, rendezvous, threads, layout)


def make_worker(scorer_processes: int) -> TimedPool:
    importlib.import_module("ops.advantages")  # which compiles GAE
    return TimedPool(scorer_processes)
