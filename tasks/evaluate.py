"""evaluate: policy -> held-out accuracy, sampled as in training and greedy; stored like any rollouts."""

from dataclasses import dataclass

from data.config import EngineConfig, EvaluateConfig, PromptsConfig, RewardConfig, SamplingConfig
from data.manifest import Manifest
from data.summary import DECODINGS
from tasks.generate import Draw, roll_out
from tasks.score import judge
from tasks.step import Pending, Run, Step

EVALUATIONS = tuple(f"{what}_{decoding}" for decoding in DECODINGS for what in ("evaluate", "score"))


@dataclass(frozen=True)
class Evaluation:
    """Rewards manifests of the held-out problems, by decoding."""

    rewards: dict[str, Manifest]

    def accuracy(self) -> dict[str, float]:
        return {name: manifest.metrics["reward/mean"] for name, manifest in self.rewards.items()}


def evaluate(
    run: Run,
    iteration: int,
    policy: Manifest | Pending,
    config: EvaluateConfig,
    prompts: PromptsConfig,
    sampling: SamplingConfig,
    reward: RewardConfig,
    engine: EngineConfig,
) -> Evaluation | Pending | None:
    """Mean reward on the first `config.problems` held-out problems; None if the config asks for none."""
    if config.problems == 0:
        return None
    found: dict[str, Manifest | Pending] = {}
    for decoding in DECODINGS:
        own = sampling if decoding == "sampled" else sampling.model_copy(update={"temperature": 0.0})
        draw = Draw("eval", 0, config.problems)
        step = Step(f"evaluate_{decoding}", version=1, kind="rollouts")
        rollouts = roll_out(run, step, iteration, policy, draw, prompts, own, engine)
        found[decoding] = judge(run, Step(f"score_{decoding}", 1, "rewards"), iteration, rollouts, reward, own)
    recorded = {name: manifest for name, manifest in found.items() if isinstance(manifest, Manifest)}
    return Evaluation(recorded) if len(recorded) == len(found) else Pending("evaluate", iteration)
