"""publish: state -> policy. A Hugging Face folder: weights without value head, and the base model's tokenizer."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from data.config import CriticConfig, TrainConfig
from data.manifest import Manifest
from data.request import Request
from infra import handover
from infra.ray_session import WorkerLost
from models.megatron.contract import Setup
from tasks.state import bring
from tasks.step import Job, Pending, Run, Step, perform, unless_given

if TYPE_CHECKING:
    from models.megatron.trainer import Trainer

STEP = Step("publish", version=1, kind="policy")


@unless_given(STEP)
def publish(
    run: Run,
    iteration: int,
    state: Manifest | Pending,
    base: Manifest | Pending,
    train: TrainConfig,
    critic: CriticConfig,
) -> Manifest | Pending:
    """The policy of a training state, for engines and for people."""
    return perform(
        run,
        STEP,
        iteration,
        {"state": state, "base": base},
        {},
        0,
        run.trainer,
        _publish,
        (Setup(critic, train.optimizer), run.hands_over),
    )


def hand_over(
    run: Run,
    iteration: int,
    state: Manifest | Pending,
    base: Manifest | Pending,
    train: TrainConfig,
    critic: CriticConfig,
) -> Manifest | None:
    """What `publish` is about to record, promised: without files, its weights in memory for an engine on that machine.

    None if policies are not handed over, or nothing needs to be done.
    """
    if not run.hands_over or isinstance(state, Pending) or isinstance(base, Pending):
        return None
    address = run.ledger.at(iteration, STEP.name)
    if run.ledger.find(address) is not None:
        return None
    request = Request(STEP.name, STEP.version, STEP.kind, {"state": state, "base": base}, execution=run.execution)
    job = Job(run.ledger, address, request, run.cache)
    try:
        digest = run.fleet.run(run.trainer, _hand_over, job, Setup(critic, train.optimizer))
    except WorkerLost:
        return None  # `publish` finds it again
    promised = {
        "uri": run.ledger.store.url_of(address.manifest),
        "kind": STEP.kind,
        "step": STEP.name,
        "key": request.key,
        "content_digest": digest,
        "files": (),
    }
    return state.model_copy(update=promised) if digest is not None else None


def _hand_over(trainer: "Trainer", job: Job, setup: Setup) -> str | None:
    """The digest, on every rank; None if this machine has no place for it."""
    bring(trainer, job, setup)
    folder = trainer.from_first(lambda: handover.place(_room(job)))
    if folder is None:
        return None
    digest = _export(trainer, job, folder)
    if trainer.is_first:
        handover.offer(folder, digest)
    return digest


def _publish(trainer: "Trainer", job: Job, setup: Setup, hands_over: bool) -> Manifest | None:
    bring(trainer, job, setup)
    version, digest = job.input("state").policy_version, trainer.exported
    if hands_over and digest is not None:
        folder = trainer.from_first(lambda: handover.offered(digest))
        if folder is not None:
            return _commit(job, folder, digest, version, {}) if trainer.is_first else None
    return commit_policy(trainer, job, version, {}, hands_over)


def commit_policy(
    trainer: "Trainer", job: Job, version: int, metrics: dict[str, float], hands_over: bool
) -> Manifest | None:
    """Export what the trainer holds, as a folder that stands alone: tokenizer and template are the base policy's.

    Every rank takes part; the first one commits, the others return None. hands_over: keep the folder in memory, for an
    engine on this machine.
    """
    with _place(_room(job) if hands_over and trainer.is_first else None) as folder:
        digest = _export(trainer, job, folder)
        if not trainer.is_first:
            return None
        made = _commit(job, folder, digest, version, metrics)
        if hands_over and folder.parent == handover.root():
            handover.offer(folder, digest)
        return made


def _export(trainer: "Trainer", job: Job, folder: Path) -> str:
    digest = trainer.export_policy(folder)
    if trainer.is_first:
        others = [
            e for e in job.input("base").files if not e.name.endswith((".safetensors", ".safetensors.index.json"))
        ]
        beside = job.ledger.store.local_copy(others, job.cache)
        for name in (entry.name for entry in others if not (folder / entry.name).exists()):
            shutil.copyfile(beside / name, folder / name)
    return digest


def _commit(job: Job, folder: Path, digest: str, version: int, metrics: dict[str, float]) -> Manifest:
    facts = {**job.input("base").facts, "policy_version": version}
    attempt = job.attempt()
    attempt.add_folder(folder)
    return attempt.commit(content_digest=digest, metrics=metrics, facts=facts)


def _room(job: Job) -> int:
    """Bytes of a policy: those of the one it began from."""
    return sum(entry.bytes for entry in job.input("base").files)


@contextlib.contextmanager
def _place(room: int | None) -> Iterator[Path]:
    """A folder to write into: with `room` one in memory for so many bytes, which stays, or else one that goes."""
    if room is not None and (folder := handover.place(room)) is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="rollbook-policy-") as name:
        yield Path(name)
