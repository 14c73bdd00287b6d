"""evaluate: policy -> held-out accuracy, k sampled answers a problem and a greedy one; stored like any rollouts."""

from dataclasses import replace

from data.config import EvaluateConfig, Generation, RewardConfig, SamplingConfig
from data.manifest import Manifest
from data.summary import DECODINGS, Evaluation
from tasks.episodes import source_of
from tasks.generate import Draw, roll_out
from tasks.score import Attempts, judge
from tasks.step import Pending, Run, Step

EVALUATIONS = tuple(f"{what}_{decoding}" for decoding in DECODINGS for what in ("evaluate", "score"))


def evaluate(
    run: Run,
    iteration: int,
    policy: Manifest | Pending,
    config: EvaluateConfig,
    generation: Generation,
    reward: RewardConfig,
) -> Evaluation | Pending | None:
    """Rewards on the held-out problems that `config` names; None if it names none."""
    if config.problems == 0:
        return None
    count = config.problems if config.problems > 0 else len(source_of(generation.prompts).held_out(None))
    found: dict[str, Manifest | Pending] = {}
    for decoding in DECODINGS if config.greedy else DECODINGS[:1]:
        sampled = decoding == "sampled"
        temperature = _temperature(config, generation.sampling) if sampled else 0.0
        own = replace(generation, sampling=generation.sampling.model_copy(update={"temperature": temperature}))
        samples = config.samples if sampled else 1
        step = Step(f"evaluate_{decoding}", version=1, kind="rollouts", several=True)
        rollouts = roll_out(run, step, iteration, policy, Draw("eval", 0, count, samples), own)
        step = Step(f"score_{decoding}", version=1, kind="rewards", several=True)
        found[decoding] = judge(
            run, step, iteration, rollouts, reward, own.sampling, Attempts(samples, config.pass_reward)
        )
    recorded = {name: manifest for name, manifest in found.items() if isinstance(manifest, Manifest)}
    return Evaluation(recorded) if len(recorded) == len(found) else Pending("evaluate", iteration)


def _temperature(config: EvaluateConfig, sampling: SamplingConfig) -> float:
    return sampling.temperature if config.temperature is None else config.temperature
