"""The trainer's state: brought to where a step begins, from what is kept or by repeating recorded train steps."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from data.checkpoints import STEP as CHECKPOINT
from data.checkpoints import Checkpoints, way_to
from data.config import CheckpointConfig, CriticConfig, TrainConfig
from data.ledger import Ledger, Request, read_table
from data.manifest import Manifest, ManifestError
from infra.spool import Spool
from models.megatron.contract import Setup, TrainOptions
from tasks.step import Job, Run
from tasks.updates import ROLLOUT_COLUMNS, Lessons

if TYPE_CHECKING:
    from models.megatron.state import StateCopy
    from models.megatron.trainer import Trainer

# Of the gradient norm of each optimizer step that is repeated where its bits cannot be: on a GPU, another layout.
TOLERANCE = 0.02

spool = functools.cache(Spool)  # one a process


class NotTheState(RuntimeError):
    """A repeated train step came out otherwise than it is on record."""


def bring(trainer: "Trainer", job: Job, setup: Setup) -> None:
    """The trainer to the step's input `state`: a policy starts training afresh, a state goes on.

    Raises NotTheState, naming the iteration, if a state that is not kept cannot be made again.
    """
    state = job.input("state")
    job.how["device"] = trainer.device
    if trainer.resume(state.content_digest, setup):
        return
    if state.kind == "policy":
        trainer.bring_to_policy(job.folder_of(state), state.content_digest, setup)
        return
    start, steps = trainer.from_first(lambda: way_to(job.ledger, state))
    if steps and (was := _setup_of(steps[-1]).critic.kind) != setup.critic.kind:
        raise ValueError(
            f"state after iteration {state.iteration} of {state.run!r}: its critic is {was!r}, critic.kind is "
            f"{setup.critic.kind!r}; keep the kind within a run and its forks, or start from a policy"
        )
    first = _setup_of(steps[0]) if steps else setup
    to = trainer.bring_to_policy if start.kind == "policy" else trainer.bring_to_state
    to(job.folder_of(start), start.content_digest, first)
    for step in steps:
        _repeat(trainer, job, step)
    if steps:
        job.how["state_rebuilt"] = [step.iteration for step in steps]
        trainer.resume(state.content_digest, setup)


def _repeat(trainer: "Trainer", job: Job, step: Manifest) -> None:
    """The recorded train step once more; the trainer then holds what it made, to the bit or within TOLERANCE."""
    setup, options = _setup_of(step), _options_of(step)
    lessons = Lessons(*(_table(job, step, name) for name in ("rollouts", "replays", "advantages")))
    if not trainer.resume(step.inputs["state"], setup):
        raise NotTheState(f"{step.uri}: begins at a state that the step before it did not make; restore the manifests")
    updates = lessons.learn(trainer, options, setup, step.seed)
    if trainer.digest != step.content_digest:
        _require_near(trainer, job, step, updates)
        trainer.take_for(step.content_digest)


def _table(job: Job, step: Manifest, name: str) -> Any:
    manifest = job.ledger.open(step.input_uris[name])
    return read_table(job.ledger.store, manifest, ROLLOUT_COLUMNS if name == "rollouts" else None)


def _require_near(trainer: "Trainer", job: Job, step: Manifest, updates: list[dict[str, float]]) -> None:
    """Raises NotTheState unless every optimizer step was like the recorded one."""
    what = f"the train step of iteration {step.iteration} of {step.run!r}, repeated to make its state again"
    if same_bits(step.execution, {**job.request.execution, **job.how}):
        raise NotTheState(
            f"{what}, gave another state than the recorded {step.content_digest[:16]}: Rollbook's source or a package "
            "differs from what made it (see the manifest); use those versions, or fork from a state that is kept"
        )
    if (unlike := unlike_updates(updates_of(step), updates)) is not None:
        raise NotTheState(f"{what}, has {unlike}; run on the recorded layout and device")


def unlike_updates(recorded: list[dict[str, float]], again: list[dict[str, float]]) -> str | None:
    """The first optimizer step with gradient norms further apart than TOLERANCE, in words; None if all are near."""
    if len(recorded) != len(again):
        return f"{len(again)} optimizer steps, on record are {len(recorded)}"
    for number, (theirs, mine) in enumerate(zip(recorded, again, strict=True)):
        for name in ("grad_norm", "critic_grad_norm"):
            if name in theirs and not math.isclose(mine[name], theirs[name], rel_tol=TOLERANCE, abs_tol=1e-6):
                return (
                    f"{name} {mine[name]:.6g} at optimizer step {number}, on record {theirs[name]:.6g}: further apart "
                    f"than {TOLERANCE:.0%}"
                )
    return None


def same_bits(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether what two executions of a trainer's step give must be equal, not only near."""
    alike = all(recorded.get(name) == now.get(name) for name in ("device", "layout", "threads"))
    return alike and now.get("device") == "cpu"


def updates_of(step: Manifest) -> list[dict[str, float]]:
    updates: Any = step.facts["updates"]
    return updates


def _setup_of(step: Manifest) -> Setup:
    critic: Any = step.config["critic"]
    train = _train_config_of(step)
    return Setup(CriticConfig(**critic), train.optimizer, train.recompute)


def _options_of(step: Manifest) -> TrainOptions:
    recorded = step.config
    temperature, frozen, unit = recorded["temperature"], recorded["policy_frozen"], recorded.get("step_unit", "token")
    if not isinstance(temperature, float) or not isinstance(frozen, bool) or not isinstance(unit, str):
        raise ManifestError(f"{step.uri}: temperature {temperature!r}, policy_frozen {frozen!r}; restore the file")
    return TrainOptions(_train_config_of(step), temperature, frozen, unit)


def _train_config_of(step: Manifest) -> TrainConfig:
    """As recorded, with its micro-batches, and no limits: it was within those that it had."""
    train: Any = step.config["train"]
    recompute: Any = step.execution.get("recompute", False)  # records from before the setting lack it
    micro: Any = step.execution["micro_tokens"]
    return TrainConfig(**train, micro_tokens=micro, recompute=recompute, max_kl=None, max_ratio=None)


def copy(trainer: "Trainer", job: Job) -> "StateCopy | None":
    """The present state on the first rank's host, once the one copied before is in the store: one at a time is held."""
    if trainer.is_first:
        spool(job.cache / "spool").drain()
    return trainer.copy_state()


def keep_behind(job: Job, made: Manifest, copied: "StateCopy", config: CheckpointConfig) -> None:
    """Write the copy into the store while work goes on; there `config` then decides what stays."""
    checkpoints, execution = Checkpoints(job.ledger), job.request.execution

    def keep(folder: Path) -> None:
        copied.write(folder)
        checkpoints.keep(made, folder, execution)
        checkpoints.retain(config)

    spool(job.cache / "spool").send(keep)


def keep_for_later(run: Run, state: Manifest) -> None:
    """See to it that a state is kept now, so that several steps can start from it without repeating any."""
    if state.kind == "state" and way_to(run.ledger, state)[1]:
        request = Request(CHECKPOINT, 1, CHECKPOINT, {"state": state}, execution=run.execution)
        setup = _setup_of(state)
        run.fleet.run(run.trainer, _keep_input, run.ledger, request, run.cache, setup)


def _keep_input(trainer: "Trainer", ledger: Ledger, request: Request, cache: Path, setup: Setup) -> None:
    state = request.inputs["state"]
    assert isinstance(state, Manifest) and state.run is not None
    job = Job(ledger, ledger.shared(request), request, cache)
    bring(trainer, job, setup)
    copied = copy(trainer, job)
    if copied is not None:
        with TemporaryDirectory(prefix="rollbook-state-") as folder:
            copied.write(Path(folder))
            Checkpoints(Ledger(ledger.store, state.run)).keep(state, Path(folder), {**request.execution, **job.how})


def finish_copies(run: Run) -> None:
    """Wait until the states that are to be kept are in the store."""
    if run.fleet.has(run.trainer):
        run.fleet.run(run.trainer, _drain, run.cache)


def _drain(trainer: "Trainer", cache: Path) -> None:
    spool(cache / "spool").drain()
