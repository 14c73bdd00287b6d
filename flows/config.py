"""The config of a run: a TOML file plus `--set a.b=c`, checked once, here."""

import contextlib
import difflib
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from data.addresses import StoreError, require_no_secret
from data.config import (
    AdvantageConfig,
    CheckpointConfig,
    CriticConfig,
    EngineConfig,
    EvaluateConfig,
    Generation,
    LayoutConfig,
    ModelConfig,
    PromptsConfig,
    ReplayConfig,
    ResourcesConfig,
    RewardConfig,
    SamplingConfig,
    TrackingConfig,
    TrainConfig,
    WarmStartConfig,
)
from data.environment_config import EnvironmentConfig, PartialConfig
from data.problems import PROBLEMS
from data.sections import Section, execution, later


class ConfigError(ValueError):
    """A config that cannot be run; the message has one line for each fault, with the value, the rule and the fix."""


class RunConfig(Section):
    """Everything a run is made from. Sections live in `data.config` and `data.environment_config`."""

    run: str = Field(description="name of the run, its folder in the store")
    seed: int = Field(0, ge=0)
    iterations: int = Field(1, ge=0)
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    environment: EnvironmentConfig = later(EnvironmentConfig())
    partial: PartialConfig = later(PartialConfig())
    pipelined: bool = later(
        False,
        description="generate each iteration's rollouts while the one before trains, under the policy it began with",
    )
    reward: RewardConfig = RewardConfig()
    replay: ReplayConfig = ReplayConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    train: TrainConfig = TrainConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = execution(CheckpointConfig())
    layout: LayoutConfig = execution(LayoutConfig())
    resources: ResourcesConfig = ResourcesConfig()
    tracking: TrackingConfig = execution(TrackingConfig())

    @property
    def generation(self) -> Generation:
        return Generation(self.prompts, self.sampling, self.engine, self.environment, self.partial)

    @property
    def replay_temperature(self) -> float:
        own = self.replay.temperature
        return self.sampling.temperature if own is None else own

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "RunConfig":
        faults = [
            *_sampling_faults(self),
            *_reward_faults(self),
            *_partial_faults(self),
            *_advantage_faults(self),
            *_evaluation_faults(self),
            *_resource_faults(self),
        ]
        if faults:
            raise ValueError("\n".join(faults))
        return self


def _sampling_faults(config: RunConfig) -> list[str]:
    faults = []
    sampling = config.sampling
    if sampling.temperature == 0.0:
        faults.append(
            "sampling.temperature = 0.0: greedy rollouts have no log-probs to learn from; set it above 0 "
            "(evaluation reports greedy accuracy besides)"
        )
    if config.replay_temperature != sampling.temperature:
        faults.append(
            f"replay.temperature = {config.replay_temperature}: it must equal sampling.temperature "
            f"({sampling.temperature}), or every ratio is wrong; remove replay.temperature"
        )
    cut = config.engine.kind == "transformers" and (sampling.top_p < 1.0 or sampling.top_k > 0)
    if cut and (reader := config.train.reads_rollout_logprobs):
        faults.append(
            f"{reader} with top_p {sampling.top_p}, top_k {sampling.top_k}: this engine's log-probs are of the "
            "truncated distribution, the trainer's of the full one; set train.old_logp_source = 'replay' and "
            "train.correction.kind = 'none', or top_p = 1 and top_k = 0"
        )
    return faults


def _reward_faults(config: RunConfig) -> list[str]:
    faults = []
    reward, world, longest = config.reward, config.environment.kind, config.sampling.max_new_tokens
    if reward.truncated == "soft" and reward.overlong_buffer > longest:
        faults.append(
            f"reward.overlong_buffer = {reward.overlong_buffer} with sampling.max_new_tokens = {longest}: the soft "
            "penalty would meet every answer; set it to at most max_new_tokens"
        )
    if reward.truncated == "soft" and world is not None:
        faults.append(
            f"reward.truncated = 'soft' with environment.kind = {world!r}: it compares all that a trajectory says with "
            "sampling.max_new_tokens, which is of one turn; set it to 'keep' or 'zero'"
        )
    if reward.scorer == "environment" and world is None:
        faults.append(
            "reward.scorer = 'environment' without an environment.kind: nobody rewards; set environment.kind, or "
            "another scorer"
        )
    if reward.scorer == "environment" and world == "tools":
        faults.append(
            "reward.scorer = 'environment' with environment.kind = 'tools': tools give no reward; set a scorer that "
            "grades the answer, or an environment of your own"
        )
    if reward.per_turn and config.advantage.estimator != "gae":
        faults.append(
            f"reward.per_turn = true with advantage.estimator = {config.advantage.estimator!r}: it reads a "
            "trajectory's total only, not where it was earned; set reward.per_turn = false, or the estimator 'gae'"
        )
    return faults


def _partial_faults(config: RunConfig) -> list[str]:
    partial, wanted = config.partial, config.prompts.per_iteration
    if partial.groups is None:
        if partial == PartialConfig():
            return []
        return [
            f"partial.tail = {partial.tail!r}, max_staleness = {partial.max_staleness} without partial.groups: nothing "
            "is cut off; set it, or remove them"
        ]
    faults = []
    if partial.groups <= wanted:
        faults.append(
            f"partial.groups = {partial.groups} with prompts.per_iteration = {wanted}: it must be more, or every group "
            "is waited for; raise it, or remove it"
        )
    if config.environment.kind is None:
        faults.append(
            f"partial.groups = {partial.groups} without an environment: trajectories are cut off between turns, and "
            "have but one; set environment.kind, or remove it"
        )
    return faults


def _advantage_faults(config: RunConfig) -> list[str]:
    faults = []
    estimator, critic = config.advantage.estimator, config.critic.kind
    if estimator == "gae" and critic == "none":
        faults.append(
            "advantage.estimator = 'gae' with critic.kind = 'none': GAE needs values; choose shared or separate"
        )
    if estimator != "gae" and critic != "none":
        faults.append(
            f"critic.kind = {critic!r} with advantage.estimator = {estimator!r}: no one reads the values; "
            "set critic.kind = 'none'"
        )
    if estimator in ("group", "group_center") and config.prompts.samples_per_prompt == 1:
        faults.append(
            f"prompts.samples_per_prompt = 1 with advantage.estimator = {estimator!r}: a group of one has advantage 0; "
            "set it to 2 or more"
        )
    return faults


def _evaluation_faults(config: RunConfig) -> list[str]:
    if config.evaluate.problems < 0 and config.prompts.source in PROBLEMS:
        return [
            f"evaluate.problems = -1 with prompts.source = {config.prompts.source!r}: its problems are made on demand, "
            "up to millions of them; set a number"
        ]
    return []


def _resource_faults(config: RunConfig) -> list[str]:
    store, endpoint, ray = config.resources.store, config.resources.store_endpoint, config.resources.ray_address
    local = store is None or store.startswith("file://") or "://" not in store
    faults = [*_secrets("store", store), *_secrets("store_endpoint", endpoint)]
    if not faults and ray != "local" and local:
        faults.append(
            f"resources.ray_address = {ray!r} with the local store {store or '<home>/store'}: workers elsewhere cannot "
            "read it; set resources.store to an s3:// URL"
        )
    if not faults and endpoint is not None and local:
        faults.append(
            f"resources.store_endpoint = {endpoint!r} with the local store {store or '<home>/store'}: only S3 has an "
            "endpoint; leave it out, or set resources.store to an s3:// URL"
        )
    return faults


def _secrets(name: str, url: str | None) -> list[str]:
    try:
        require_no_secret(url or "", f"resources.{name} =")
    except StoreError as error:
        return [str(error)]
    return []


def load(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML file, apply `a.b=c` overrides (values in TOML syntax, bare words are strings), check.

    Raises ConfigError, one line a fault.
    """
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; shipped ones are in flows/configs/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides or []:
        _apply(raw, override)
    return parse(raw)


def changed(config: RunConfig, overrides: list[str]) -> RunConfig:
    """The config with `a.b=c` applied. Raises ConfigError."""
    raw = config.model_dump(mode="json")
    for override in overrides:
        _apply(raw, override)
    return parse(raw)


def parse(raw: dict[str, Any]) -> RunConfig:
    """A nested dict -> RunConfig. Raises ConfigError."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault) for fault in error.errors())) from None


def _apply(raw: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"--set {override!r}: it must look like a.b=value")
    *sections, name = dotted.strip().split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a section")
    raw[name] = _value(text)


def _value(text: str) -> Any:
    """TOML where it parses, else a number such as .5 that TOML wants a digit before, else the bare words."""
    with contextlib.suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = {text}")["value"]
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _explain(fault: Any) -> str:
    """One pydantic error -> one line with the value, the rule and the fix."""
    path = [str(part) for part in fault["loc"]]
    dotted = ".".join(path)
    if fault["type"] == "extra_forbidden":
        names = sorted(_section_at(path[:-1]).model_fields)
        near = difflib.get_close_matches(path[-1], names, 1, 0.5)
        fix = f"did you mean {'.'.join([*path[:-1], near[0]])!r}?" if near else f"valid names: {', '.join(names)}"
        return f"{dotted}: unknown key; {fix}"
    message = fault["msg"].removeprefix("Value error, ")
    if not path:
        return message
    if fault["type"] == "missing":
        return f"{dotted}: required, but not set"
    if fault["type"] == "value_error":
        return f"{dotted}: {message}"
    return f"{dotted} = {fault['input']!r}: {message[:1].lower() + message[1:]}"


def _section_at(path: list[str]) -> type[BaseModel]:
    """The model class at a dotted path of section names."""
    section: type[BaseModel] = RunConfig
    for name in path:
        annotation = section.model_fields[name].annotation
        options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return section
