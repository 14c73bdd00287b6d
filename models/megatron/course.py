"""One optimizer step: which objective each trunk follows, which parts move, and the step itself."""

import functools
import math
from dataclasses import dataclass

from data.config import CriticConfig
from models.megatron.contract import NonFiniteLoss, Setup, TrainOptions
from models.megatron.guards import NO_LIMITS, Limits, require_within
from models.megatron.micro import Lesson
from models.megatron.networks import Networks, Outputs, run_schedule
from models.megatron.objective import Measured, Objective, grade, step_metrics
from models.megatron.optimizer import clip
from ops.losses import POLICY_LOSSES, LossOptions

Metrics = dict[str, float]


@dataclass(frozen=True)
class Course:
    """What a sequence of optimizer steps learns."""

    policy: Objective  # of the policy's trunk; with the value loss if the head is on it
    critic: Objective | None  # of the separate critic
    moving: dict[str, tuple[str, ...]]  # metric of a joint gradient norm -> the parts that are clipped by it and step
    temperature: float = 1.0
    limits: Limits = NO_LIMITS

    @property
    def moves_policy_trunk(self) -> bool:
        return any("policy" in names for names in self.moving.values())


def ppo(options: TrainOptions, setup: Setup) -> Course:
    """Policy loss, entropy bonus and value loss as configured; a frozen policy is measured and does not move.

    Raises ValueError for a frozen policy without a critic.
    """
    train, critic = options.train, setup.critic
    clips = LossOptions(train.clip_low, train.clip_high, train.dual_clip)
    policy = Objective(
        token_loss=functools.partial(POLICY_LOSSES[train.loss], options=clips),
        mode=train.aggregation,
        horizon=train.horizon,
        entropy_bonus=train.entropy_bonus,
        value_weight=critic.loss_weight if critic.kind == "shared" else None,
        value_clip=critic.clip,
        clip_low=train.clip_low,
        clip_high=train.clip_high,
    )
    alone = Objective(None, train.aggregation, train.horizon, value_weight=1.0, value_clip=critic.clip)
    separate = alone if critic.kind == "separate" else None
    limits = Limits(train.max_kl, train.max_ratio)
    return Course(policy, separate, _moving(critic, options.policy_frozen), options.temperature, limits)


def supervised() -> Course:
    """Cross entropy of the loss tokens, mean per token; no critic moves."""
    objective = Objective(lambda logprobs, old, advantages: -logprobs, mode="token_mean", horizon=1)
    return Course(objective, None, {"grad_norm": ("policy",)})


def _moving(critic: CriticConfig, frozen: bool) -> dict[str, tuple[str, ...]]:
    critic_parts = {"none": (), "shared": ("value_head",), "separate": ("critic", "value_head")}[critic.kind]
    if frozen and not critic_parts:
        raise ValueError("policy_frozen with critic.kind 'none': nothing could learn; set critic.kind")
    if frozen:
        return {"critic_grad_norm": critic_parts}
    if critic.kind == "separate":
        return {"grad_norm": ("policy",), "critic_grad_norm": critic_parts}
    return {"grad_norm": ("policy", *critic_parts)}


def optimizer_step(
    networks: Networks, setup: Setup, course: Course, lessons: list[Lesson], number: int, rows: list[int]
) -> Metrics:
    """Forward, backward and update over the micro-batches `lessons`; returns the step's metrics.

    lessons: this rank's; rows: those of all ranks. Raises NonFiniteLoss or BeyondLimit on every rank before any part
    has moved.
    """
    for part in networks.parts.values():
        part.zero_gradients()
    measured = _teach_policy(networks, course, lessons)
    metrics = step_metrics(measured, number)
    require_within(measured, metrics, number, course.limits)
    if course.critic is not None:
        metrics |= step_metrics(_teach_critic(networks, course.critic, lessons), number)
    for name, members in course.moving.items():
        metrics[name] = clip([networks.parts[member] for member in members], setup.optimizer.max_grad_norm)
        if not math.isfinite(metrics[name]):
            raise NonFiniteLoss(number, rows, "the gradient is not finite")
    return metrics | _move(networks, setup, course)


def _teach_policy(networks: Networks, course: Course, lessons: list[Lesson]) -> list[Measured]:
    frozen = not course.moves_policy_trunk
    judge = functools.partial(grade, objective=course.policy)

    def forward(lesson: Lesson) -> tuple[Outputs, functools.partial]:
        micro = lesson.micro
        outputs = networks.policy_pass(micro.packed, micro.reads, course.temperature, frozen=frozen)
        return outputs, functools.partial(judge, lesson=lesson)

    nothing_learns = frozen and course.policy.value_weight is None
    return run_schedule(networks.parts["policy"], lessons, forward, forward_only=nothing_learns)


def _teach_critic(networks: Networks, objective: Objective, lessons: list[Lesson]) -> list[Measured]:
    def forward(lesson: Lesson) -> tuple[Outputs, functools.partial]:
        return networks.critic_pass(lesson.micro.packed), functools.partial(grade, lesson=lesson, objective=objective)

    return run_schedule(networks.parts["critic"], lessons, forward, forward_only=False)


def _move(networks: Networks, setup: Setup, course: Course) -> Metrics:
    """Steps the moving parts; the rates they took (0 for a policy that stood still)."""
    rates = {"policy": setup.optimizer.lr, "critic": setup.critic.lr, "value_head": setup.critic.head_lr}
    names = [name for members in course.moving.values() for name in members]
    took = {name: networks.parts[name].step(rates[name], setup.optimizer) for name in names}
    metrics = {"lr": took.get("policy", 0.0)}
    if critic := [took[name] for name in ("critic", "value_head") if name in took]:
        metrics["critic_lr"] = critic[0]
    return metrics
