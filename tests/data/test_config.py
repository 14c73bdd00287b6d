"""Which fields of a section enter keys: a recorded run must find its keys again after the config has grown."""

import pytest
from pydantic import ValidationError

from data.config import AdvantageConfig, CorrectionConfig, EngineConfig, JudgeConfig, RewardConfig, TrainConfig
from data.sections import Section, later


class Grown(Section):
    old: int = 1
    new: int = later(5)


def test_a_later_field_enters_once_it_is_not_its_default() -> None:
    assert Grown().semantic() == Grown(new=5).semantic() == {"old": 1}
    assert Grown(new=6).semantic() == {"old": 1, "new": 6}


def test_the_keys_of_train_steps_recorded_before_corrections_stay() -> None:
    """As a train step's manifest had it then, field by field."""
    optimizer = {
        "lr": 1e-6,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "schedule": "constant",
        "warmup_steps": 0,
        "decay_steps": 0,
    }
    recorded = {
        "loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "token_mean",
        "horizon": 8192,
        "entropy_bonus": 0.0,
        "epochs": 1,
        "mini_batch": 64,
        "old_logp_source": "replay",
        "optimizer": optimizer,
    }
    assert TrainConfig().semantic() == recorded
    assert TrainConfig(**recorded) == TrainConfig()  # as a state is made again from it

    asked = TrainConfig(correction=CorrectionConfig(kind="truncate", cap=3.0))
    correction = {"kind": "truncate", "level": "token", "cap": 3.0, "low": 0.5, "high": 2.0}
    assert asked.semantic() == {**recorded, "correction": correction}
    assert TrainConfig(**asked.semantic()) == asked


def test_the_keys_of_score_and_advantages_steps_recorded_before_turns_stay() -> None:
    """As their manifests had it then, field by field. Where a judge is served is in no key."""
    recorded = {
        "scorer": "exact",
        "timeout_s": 10.0,
        "attempts": 1,
        "truncated": "keep",
        "overlong_buffer": 4096,
        "overlong_factor": 1.0,
    }
    assert RewardConfig().semantic() == recorded
    judge = JudgeConfig(url="http://h:1/v1", model="m")
    asked = RewardConfig(scorer="judge", judge=judge).semantic()
    assert asked == recorded | {"scorer": "judge", "judge": {"model": "m", "attempts": 3, "timeout_s": 60.0}}
    moved = judge.model_copy(update={"url": "http://elsewhere/v1"})
    assert RewardConfig(scorer="judge", judge=moved).semantic() == asked
    assert RewardConfig(scorer="environment", per_turn=True).semantic()["per_turn"] is True
    assert "step_unit" not in AdvantageConfig().semantic()
    assert AdvantageConfig(step_unit="turn").semantic()["step_unit"] == "turn"


def test_a_correction_of_nothing_is_refused() -> None:
    """With the engine's log-probs as old ones every weight is 1; and no weight lies in an empty range."""
    with pytest.raises(ValidationError, match=r"correction\.kind = 'mask' with old_logp_source = 'rollout': .* is 1"):
        TrainConfig(correction=CorrectionConfig(kind="mask"), old_logp_source="rollout")
    with pytest.raises(ValidationError, match=r"low 2\.0 with high 2\.0: .* set low below high"):
        CorrectionConfig(kind="mask", low=2.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"dtype": "bfloat16"}, "engine.dtype = 'bfloat16'"), ({"replicas": 2}, "engine.replicas = 2")],
)
def test_a_setting_that_the_engine_does_not_have_is_refused(settings: dict[str, object], named: str) -> None:
    """It would enter keys, or be believed, and change nothing."""
    with pytest.raises(ValidationError, match=f"{named} with engine.kind = 'transformers', which has no such setting"):
        EngineConfig(**settings)
    assert EngineConfig(kind="sglang", **settings).kind == "sglang"


def test_what_every_engine_has_may_be_set_for_each() -> None:
    for kind in ("transformers", "sglang"):
        assert EngineConfig(kind=kind, batch=4, sync="tensor").batch == 4
