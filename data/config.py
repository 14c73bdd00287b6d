"""The sections of a run's config: plain, frozen pydantic models that import no torch.

`flows.config.RunConfig` is made of these. A field is *semantic* (it changes the result and enters the keys of the steps
that read its section) unless it is declared with `execution(...)` (batch shapes, threads, addresses: never in a key).
One that came when runs were already on record is declared with `later(...)`: it enters once it is not the default.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from data.addresses import require_plain
from data.environment_config import EnvironmentConfig, PartialConfig
from data.patience import PATIENCE_S
from data.sections import Fraction, Positive, Rate, Section, execution, later

EVERY_ENGINE = ("kind", "batch", "sync")  # settings of engine
SCORER_NAMES = ("exact", "number", "integer", "math", "environment", "judge")  # of ops.scorers, but for the last two


class ModelConfig(Section):
    path: str = Field(
        "xs",
        description="'xs' (the toy Qwen3 model shipped here), a local Hugging Face folder, a .gguf file, or the name "
        "of an installed package that carries one",
    )


class PromptsConfig(Section):
    source: str = Field(
        "sort", description="'sort', 'addition', 'addmix', 'calc', or a .jsonl, .json, .txt or .parquet file"
    )
    digits: Positive | None = Field(None, description="size of the procedural problems (sort: 6, the others: 2)")
    system: str | None = Field(None, description="system turn for prompts that bring none")
    per_iteration: Positive = 128
    samples_per_prompt: Positive = 1
    held_out: str | None = Field(None, description="file of held-out prompts; procedural sources split by hash")


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, description="0: off")
    max_new_tokens: Positive = 512
    stop: list[str] = later([], description="strings that end an answer, and are part of it")


class EngineConfig(Section):
    """What generates. What is not in EVERY_ENGINE is for SGLang."""

    kind: Literal["transformers", "sglang"] = "transformers"
    batch: Positive = execution(128, description="trajectories decoded together (SGLang: also its largest CUDA graph)")
    urls: list[str] = execution(
        [], description="addresses of SGLang servers that run already (key: SGLANG_API_KEY); none: start our own"
    )
    sync: Literal["disk", "tensor"] = execution(
        "disk",
        description="how weights come to the engine: from the store, or in memory from a trainer on its machine",
    )
    replicas: Positive = execution(1, description="own servers on this machine, each on a GPU of its own")
    dtype: Literal["float32", "bfloat16", "float16"] | None = later(
        None, description="of the weights it generates with; unset: the policy's own. On a GPU it must be a 16-bit one"
    )
    memory: float = execution(0.4, gt=0.0, lt=1.0, description="share of the GPU's memory for weights and cache")
    cache_tokens: Positive | None = execution(None, description="most tokens in the key-value cache; unset: by memory")
    timeout_s: float = execution(1800.0, gt=0.0, description="seconds a call may take; then the unfinished is redone")
    deterministic: bool = execution(False, description="honour sampling seeds, whatever the batch; slower")
    arguments: dict[str, str | int | float | bool | None] = execution({}, description="further arguments of SGLang")

    @field_validator("urls")
    @classmethod
    def _addresses_without_secrets(cls, urls: list[str]) -> list[str]:
        for url in urls:
            require_plain(url, "SGLANG_API_KEY")
        if len(set(urls)) < len(urls):
            raise ValueError(f"{urls}: each server must be named once")
        return urls

    @model_validator(mode="after")
    def _has_what_is_set(self) -> "EngineConfig":
        fields = type(self).model_fields.items()
        unheard = [name for name, f in fields if name not in EVERY_ENGINE and getattr(self, name) != f.default]
        if self.kind != "sglang" and unheard:
            raise ValueError(
                f"engine.{unheard[0]} = {getattr(self, unheard[0])!r} with engine.kind = {self.kind!r}, which has no "
                "such setting; set engine.kind = 'sglang', or remove it"
            )
        return self

    @model_validator(mode="after")
    def _given_or_own(self) -> "EngineConfig":
        if self.urls and self.replicas > 1:
            raise ValueError(
                f"engine.replicas = {self.replicas} with engine.urls: servers that run already are as many as their "
                "addresses; remove one of the two"
            )
        return self


@dataclass(frozen=True)
class Generation:
    """What rollouts are made from."""

    prompts: PromptsConfig
    sampling: SamplingConfig
    engine: EngineConfig
    environment: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    partial: PartialConfig = dataclasses.field(default_factory=PartialConfig)


class JudgeConfig(Section):
    """A model that says whether answers are right. Wherever it is served, it is the same one."""

    url: str | None = execution(None, description="OpenAI-compatible, as http://host:8000/v1; key: JUDGE_API_KEY")
    model: str | None = Field(None, description="its name at that address")
    attempts: Positive = Field(3, description="to get an answer of it; then the sample is marked failed")
    timeout_s: float = Field(60.0, gt=0.0, description="seconds an attempt may take")

    @field_validator("url")
    @classmethod
    def _address_without_secrets(cls, url: str | None) -> str | None:
        if url is not None:
            require_plain(url, "JUDGE_API_KEY")
        return url


class RewardConfig(Section):
    scorer: str = Field("exact", description=f"{', '.join(SCORER_NAMES)}, or path/to/file.py:function")
    timeout_s: float = Field(10.0, gt=0.0, description="seconds a sample may take before it is marked failed")
    attempts: Positive = 1
    truncated: Literal["keep", "zero", "soft"] = "keep"
    overlong_buffer: Positive = 4096
    overlong_factor: float = Field(1.0, ge=0.0)
    workers: Positive = execution(1, description="scorer processes")
    per_turn: bool = later(False, description="of environment: at each turn's last token what that turn was given")
    judge: JudgeConfig = later(JudgeConfig(), description="of judge, instead of timeout_s and attempts")

    @field_validator("scorer")
    @classmethod
    def _known_or_own(cls, scorer: str) -> str:
        if ":" not in scorer and scorer not in SCORER_NAMES:
            raise ValueError(
                f"{scorer!r} is no scorer; use one of {', '.join(SCORER_NAMES)}, or path/to/file.py:function"
            )
        return scorer

    @model_validator(mode="after")
    def _has_what_it_reads(self) -> "RewardConfig":
        if self.per_turn and self.scorer != "environment":
            raise ValueError(
                f"per_turn = true with scorer = {self.scorer!r}: only the environment rewards turns; set scorer = "
                "'environment', or per_turn = false"
            )
        if self.scorer == "judge" and (lacking := [n for n in ("url", "model") if not getattr(self.judge, n)]):
            raise ValueError(f"scorer = 'judge' without judge.{lacking[0]}; set reward.judge.{lacking[0]}")
        return self


class ReplayConfig(Section):
    temperature: float | None = Field(None, description="must equal sampling.temperature, its default")


class AdvantageConfig(Section):
    estimator: Literal["gae", "group", "group_center", "global"] = Field("gae", description="ops.advantages.ESTIMATORS")
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    lam_critic: Fraction | None = Field(None, description="lambda of the returns; lam if unset (VC-PPO)")
    length_alpha: float | None = Field(None, gt=0.0, description="lam = max(0, 1 - 1/(alpha * actions)) (VAPO)")
    bootstrap_truncated: bool = False
    whiten: bool = False
    std: Literal["population", "unbiased"] = "population"
    mask_truncated: bool = Field(False, description="leave truncated trajectories out of the loss")
    eps: float = Field(1e-6, ge=0.0)
    step_unit: Literal["token", "turn"] = later("token", description="of GAE: ops.turns.STEP_UNITS")

    @model_validator(mode="after")
    def _turns_need_steps(self) -> "AdvantageConfig":
        if self.step_unit == "turn" and self.estimator != "gae":
            raise ValueError(
                f"step_unit = 'turn' with estimator = {self.estimator!r}: it has one advantage a trajectory and no "
                "steps; set estimator = 'gae', or step_unit = 'token'"
            )
        return self


class OptimizerConfig(Section):
    lr: Rate = 1e-6
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    max_grad_norm: float = Field(1.0, gt=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    decay_steps: int = Field(0, ge=0, description="optimizer steps until lr reaches 0 (linear, cosine)")

    @model_validator(mode="after")
    def _decay_needs_its_length(self) -> "OptimizerConfig":
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} with schedule {self.schedule!r}: it must exceed warmup_steps "
                f"({self.warmup_steps}); set the total number of optimizer steps"
            )
        return self


class CriticConfig(Section):
    kind: Literal["none", "shared", "separate"] = Field("shared", description="shared: a head on the policy's trunk")
    lr: Rate = Field(1e-5, description="the separate critic's trunk")
    head_lr: Rate = Field(1e-4, description="the value head")
    loss_weight: float = Field(0.5, ge=0.0)
    clip: float | None = Field(0.2, gt=0.0, description="value clip range; unset: no clipping")
    warmup_iterations: int = Field(0, ge=0, description="first iterations that train the critic only")


class CorrectionConfig(Section):
    """Importance weights w = pi_train / pi_engine on the policy loss; by sequence the product over its tokens."""

    kind: Literal["none", "truncate", "mask"] = Field("none", description="ops.importance.CORRECTIONS")
    level: Literal["token", "sequence"] = "token"
    cap: float = Field(2.0, gt=0.0, description="truncate: w is at most this")
    low: float = Field(0.5, ge=0.0, description="mask: a smaller w counts as 0")
    high: float = Field(2.0, gt=0.0, description="mask: a larger w counts as 0")

    @model_validator(mode="after")
    def _bounds_hold_something(self) -> "CorrectionConfig":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} with high {self.high}: nothing lies between; set low below high")
        return self


class TrainConfig(Section):
    loss: Literal["ppo_clip", "reinforce"] = Field("ppo_clip", description="ops.losses.POLICY_LOSSES")
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(0.2, gt=0.0)
    dual_clip: float | None = Field(None, gt=1.0)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    horizon: Positive = Field(8192, description="divisor of seq_mean_token_sum")
    entropy_bonus: float = Field(0.0, ge=0.0)
    epochs: Positive = 1
    mini_batch: Positive = Field(64, description="trajectories in one optimizer step")
    old_logp_source: Literal["replay", "rollout"] = "replay"
    correction: CorrectionConfig = later(CorrectionConfig())
    optimizer: OptimizerConfig = OptimizerConfig()
    max_kl: float | None = execution(
        1.0, gt=0.0, description="stop if an optimizer step starts further than this from the old policy, nats a token"
    )
    max_ratio: float | None = execution(
        None,
        gt=1.0,
        description="stop if a token is this many times likelier, or less likely, than when sampled",
    )
    micro_tokens: Positive = execution(4096, description="most tokens in one micro-batch, over all data-parallel ranks")
    recompute: bool = execution(False, description="keep no activations inside layers: less memory, a third more work")

    @property
    def reads_rollout_logprobs(self) -> str:
        """The setting that trains on the engine's log-probs; empty if they are only measured."""
        if self.correction.kind != "none":
            return f"train.correction.kind = {self.correction.kind!r}"
        return "train.old_logp_source = 'rollout'" if self.old_logp_source == "rollout" else ""

    @model_validator(mode="after")
    def _correction_needs_both_sides(self) -> "TrainConfig":
        if self.correction.kind != "none" and self.old_logp_source == "rollout":
            raise ValueError(
                f"correction.kind = {self.correction.kind!r} with old_logp_source = 'rollout': the engine's log-probs "
                "are then on both sides and every weight is 1; set old_logp_source = 'replay'"
            )
        return self


class WarmStartConfig(Section):
    steps: int = Field(0, ge=0, description="supervised steps on the task's demonstrations; 0: none")
    batch: Positive = 64
    seed: int = Field(0, ge=0, description="its own seed: runs with different seeds share one warm start")
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3, betas=[0.9, 0.98], weight_decay=0.01, warmup_steps=30)


class EvaluateConfig(Section):
    """Held-out problems under the policies of a run. All of it may be changed within a run."""

    problems: int = Field(384, ge=-1, description="the first so many held-out ones; 0: no evaluation; -1: a whole file")
    every: Positive | None = execution(None, description="iterations between two; unset: only before and after")
    samples: Positive = later(1, description="sampled answers a problem, the k of avg@k and pass@k")
    temperature: float | None = later(None, gt=0.0, description="of the sampled answers; sampling.temperature if unset")
    greedy: bool = later(True, description="one greedy answer a problem besides")
    pass_reward: float = later(1.0, description="an answer with at least this reward passes")


class CheckpointConfig(Section):
    """Which full training states are kept. One that is not is made again from the recorded train steps."""

    every: Positive = execution(1, description="iterations between two that are written; a run's last is always")
    keep_last: int = execution(2, ge=2, description="how many of the newest stay")
    keep_every: Positive | None = execution(None, description="and every so many iterations one")
    keep_best: bool = execution(False, description="and the one whose policy got the highest mean reward")


class LayoutConfig(Section):
    """How the trainer's ranks share the work. Results agree to rounding on every layout, so a run may change it."""

    tensor: Positive = execution(1, description="ranks that share each layer; must divide heads and key-value groups")
    pipeline: Positive = execution(1, description="stages of consecutive layers; must divide the number of layers")
    context: Positive = execution(1, description="ranks that share each sequence")
    data: Positive = execution(1, description="copies of the model that share the rows, and one optimizer")
    sequence_parallel: bool = execution(False, description="tensor ranks share the activations between layers too")

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @model_validator(mode="after")
    def _sequence_parallel_needs_ranks(self) -> "LayoutConfig":
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "sequence_parallel = true with tensor = 1: it shares activations among the tensor ranks; "
                "set tensor to 2 or more, or sequence_parallel to false"
            )
        return self


class ResourcesConfig(Section):
    store: str | None = execution(
        None, description="fsspec URL of the artifact store, as s3://bucket/prefix; unset: <home>/store"
    )
    store_endpoint: str | None = execution(
        None, description="http(s):// address of an S3 service; unset: AWS_ENDPOINT_URL, or AWS"
    )
    store_patience_s: float = execution(
        PATIENCE_S, ge=0.0, description="seconds to wait for an S3 service that does not answer; then the run stops"
    )
    ray_address: str = execution("local", description="'local' or the address of a Ray cluster")
    engine_gpus: float = execution(0.0, ge=0.0, description="of Ray's GPUs for the engine; 0: it sees all of them")
    trainer_gpus: float = execution(0.0, ge=0.0, description="for each trainer rank, likewise; .5 and .5 share one GPU")
    threads: Positive = execution(2, description="CPU threads of the engine and of each trainer rank")


class TrackingConfig(Section):
    """What MLflow is told beyond figures and tables."""

    traces: Fraction = execution(0.05, description="share of the trajectories, in whole groups, that become traces")
