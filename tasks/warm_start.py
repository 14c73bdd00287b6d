"""warm_start: policy -> policy. Supervised steps on the task's own demonstrations, recorded and shared by runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from data.config import CriticConfig, Generation, PromptsConfig, TrainConfig, WarmStartConfig
from data.manifest import Manifest
from data.prompts import Prompt
from data.seeds import derive
from models.agents.loop import Trajectory
from models.agents.script import Script
from models.engines.contract import SamplingParams
from models.environments.apart import end_kept
from models.megatron.contract import Setup
from ops.packing import pack
from ops.ragged import Ragged, from_rows
from tasks.episodes import Played, episode_of, play, played_in, source_of
from tasks.publish import commit_policy
from tasks.state import bring
from tasks.step import Job, Pending, Run, Step, perform

if TYPE_CHECKING:
    from models.megatron.trainer import Trainer
    from models.tokenizer import Tokenizer

STEP = Step("warm_start", version=1, kind="policy")
GREEDILY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=1, eos_ids=())  # a script reads none


def warm_start(
    run: Run, policy: Manifest | Pending, generation: Generation, config: WarmStartConfig, train: TrainConfig
) -> Manifest | Pending:
    """The policy after `config.steps` supervised steps; the policy itself if there are none. train: how they run."""
    if config.steps == 0:
        return policy
    prompts, played = generation.prompts, played_in(generation.environment)
    source_of(prompts).demonstrations(0, 1, 0)  # a source that has none says so before anything is started
    setup = Setup(CriticConfig(kind="none"), config.optimizer, train.recompute)
    read = {"warm_start": config.semantic(), "system": prompts.system}
    read |= {"environment": played.keyed()} if played else {}
    return perform(
        run,
        STEP,
        None,
        {"state": policy, "base": policy, "prompts": source_of(prompts).digest},
        read,
        config.seed,
        run.trainer,
        _warm_start,
        (prompts, played, config, setup, train.micro_tokens),
        played.spec.code if played else {},
    )


def _warm_start(
    trainer: "Trainer",
    job: Job,
    prompts: PromptsConfig,
    played: Played | None,
    config: WarmStartConfig,
    setup: Setup,
    micro_tokens: int,
) -> Manifest | None:
    from models.tokenizer import tokenizer_of

    bring(trainer, job, setup)
    shown = source_of(prompts).demonstrations(0, config.steps * config.batch, derive(job.seed, STEP.name))
    folder = job.folder("state")
    streams, loss_mask = trainer.from_first(lambda: demonstrated(tokenizer_of(folder), shown, played))
    rows = np.arange(len(streams)).reshape(config.steps, config.batch)
    plan = [pack(streams.lengths, members, micro_tokens) for members in rows]
    updates = trainer.supervise(streams, loss_mask, plan)
    metrics = {"loss_first": updates[0]["loss"], "loss_last": updates[-1]["loss"]}
    return commit_policy(trainer, job, job.input("state").policy_version, metrics, hands_over=False)


def demonstrated(
    tokenizer: "Tokenizer", shown: Sequence[tuple[Prompt, tuple[str, ...]]], played: Played | None
) -> tuple[Ragged, Ragged]:
    """(token ids, mask of what is said, with its end-of-turn tokens) of each, the environment's answers in between.

    Raises ValueError for a demonstration that does not come to its end in the environment.
    """
    names = [f"demonstration/{i}" for i in range(len(shown))]
    trajectories = [
        Trajectory(episode_of(name, prompt, seed))
        for seed, (name, (prompt, _)) in enumerate(zip(names, shown, strict=True))
    ]
    script = Script(dict(zip(names, (turns for _, turns in shown), strict=True)), tokenizer)
    try:
        play(script, tokenizer, GREEDILY, played, trajectories)
    finally:
        end_kept()  # the trainer needs no environments again
    for trajectory, (prompt, _) in zip(trajectories, shown, strict=True):
        if trajectory.status != "ok":
            reason = trajectory.error or trajectory.truncation
            raise ValueError(
                f"the demonstration of prompt {prompt.prompt_id} is {trajectory.status} ({reason}); mend it"
            )
    streams = [trajectory.stream for trajectory in trajectories]
    masks = from_rows([stream.action_mask for stream in streams], np.bool_)
    return from_rows([stream.token_ids for stream in streams], np.int32), masks
