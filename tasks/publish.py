"""publish: state -> policy. A Hugging Face folder: weights without value head, and the base model's tokenizer."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from data.config import CriticConfig, TrainConfig
from data.manifest import Manifest
from infra import handover
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


def _publish(trainer: "Trainer", job: Job, setup: Setup, hand_over: bool) -> Manifest | None:
    bring(trainer, job, setup)
    return commit_policy(trainer, job, job.input("state").policy_version, {}, hand_over)


def commit_policy(
    trainer: "Trainer", job: Job, version: int, metrics: dict[str, float], hand_over: bool
) -> Manifest | None:
    """Export what the trainer holds, as a folder that stands alone: tokenizer and template are the base policy's.

    Every rank takes part; the first one commits, the others return None. hand_over: keep the folder in memory, for an
    engine on this machine.
    """
    base = job.input("base")
    with _place(hand_over and trainer.is_first) as folder:
        digest = trainer.export_policy(folder)
        if not trainer.is_first:
            return None
        for file in job.folder("base").iterdir():
            if (
                file.suffix != ".safetensors"
                and not (folder / file.name).exists()
                and not file.name.endswith(".index.json")
            ):
                shutil.copyfile(file, folder / file.name)
        attempt = job.attempt()
        attempt.add_folder(folder)
        made = attempt.commit(content_digest=digest, metrics=metrics, facts={**base.facts, "policy_version": version})
        if hand_over and folder.parent == handover.root():
            handover.offer(folder, digest)
        return made


@contextlib.contextmanager
def _place(in_memory: bool) -> Iterator[Path]:
    """A folder to write into: one in memory, which stays, or one that goes."""
    if in_memory and (folder := handover.place()) is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="rollbook-policy-") as name:
        yield Path(name)
