"""warm_start: policy -> policy. Supervised steps on the task's own demonstrations, recorded and shared by runs."""

from typing import TYPE_CHECKING

import numpy as np

from data.config import CriticConfig, PromptsConfig, TrainConfig, WarmStartConfig
from data.manifest import Manifest
from data.seeds import derive
from models.megatron.contract import Setup
from ops.packing import pack
from ops.ragged import Ragged, from_rows
from tasks.generate import source_of
from tasks.publish import commit_policy
from tasks.state import bring
from tasks.step import Job, Pending, Run, Step, perform

if TYPE_CHECKING:
    from models.megatron.trainer import Trainer
    from models.tokenizer import Tokenizer

STEP = Step("warm_start", version=1, kind="policy")


def warm_start(
    run: Run, policy: Manifest | Pending, prompts: PromptsConfig, config: WarmStartConfig, train: TrainConfig
) -> Manifest | Pending:
    """The policy after `config.steps` supervised steps; the policy itself if there are none. train: how they run."""
    if config.steps == 0:
        return policy
    source_of(prompts).demonstrations(0, 1, 0)  # a source that has none says so before anything is started
    setup = Setup(CriticConfig(kind="none"), config.optimizer, train.recompute)
    read = {"warm_start": config.semantic(), "system": prompts.system}
    return perform(
        run,
        STEP,
        None,
        {"state": policy, "base": policy, "prompts": source_of(prompts).digest},
        read,
        config.seed,
        run.trainer,
        _warm_start,
        (prompts, config, setup, train.micro_tokens),
    )


def _warm_start(
    trainer: "Trainer", job: Job, prompts: PromptsConfig, config: WarmStartConfig, setup: Setup, micro_tokens: int
) -> Manifest | None:
    from models.tokenizer import Tokenizer

    bring(trainer, job, setup)
    streams, loss_mask = _demonstrations(Tokenizer(job.folder("state")), prompts, config, job.seed)
    rows = np.arange(len(streams)).reshape(config.steps, config.batch)
    plan = [pack(streams.lengths, members, micro_tokens) for members in rows]
    updates = trainer.supervise(streams, loss_mask, plan)
    metrics = {"loss_first": updates[0]["loss"], "loss_last": updates[-1]["loss"]}
    return commit_policy(trainer, job, job.input("state").policy_version, metrics, hand_over=False)


def _demonstrations(
    tokenizer: "Tokenizer", prompts: PromptsConfig, config: WarmStartConfig, seed: int
) -> tuple[Ragged, Ragged]:
    """(token ids, mask of the answer with its end-of-turn token) of every demonstration, `batch` a step."""
    shown = source_of(prompts).demonstrations(0, config.steps * config.batch, derive(seed, STEP.name))
    ids, masks = [], []
    for prompt, answer in shown:
        asked = tokenizer.encode_prompt(prompt.messages)
        said = [*tokenizer.encode(answer), tokenizer.eos_ids[0]]
        ids.append(asked + said)
        masks.append([False] * len(asked) + [True] * len(said))
    return from_rows(ids, np.int32), from_rows(masks, np.bool_)
