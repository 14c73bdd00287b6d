"""The tables that travel between steps, column by column: types, and which columns stay out of the content digest.

Token columns (`list<...>`) have the full stream's length. A column marked nullable is optional.
"""

import pyarrow as pa

SCHEMA_VERSION = 1

_TOKENS_I32 = pa.list_(pa.int32())
_TOKENS_F32 = pa.list_(pa.float32())
_TOKENS_BOOL = pa.list_(pa.bool_())
_CATEGORY = pa.dictionary(pa.int32(), pa.string())


def _must(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


TURN = pa.struct(
    [
        ("role", pa.string()),
        ("is_generated", pa.bool_()),  # the only sign that the policy wrote the span
        ("start", pa.int32()),  # index into the stream
        ("length", pa.int32()),  # tokens
        ("text", pa.string()),  # for people; token_ids is the truth
        ("finish_reason", pa.string()),  # null unless generated, as the next three
        ("policy_version", pa.int64()),  # optimizer updates
        ("policy_digest", pa.string()),
        ("env_reward", pa.float32()),
        ("tool_calls", pa.string()),  # JSON
    ]
)
MEDIA = pa.struct([("kind", pa.string()), ("uri", pa.string()), ("sha256", pa.string())])
SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("max_new_tokens", pa.int32()),
        ("seed", pa.uint64()),
        ("stop", pa.list_(pa.string())),
        ("logprob_semantics", pa.string()),
    ]
)

ROLLOUTS = pa.schema(
    [
        _must("trajectory_id", pa.string()),
        _must("root_id", pa.string()),
        pa.field("parent_id", pa.string()),
        _must("depth", pa.int16()),
        _must("stage", _CATEGORY),
        _must("purpose", _CATEGORY),  # PURPOSES
        _must("token_ids", _TOKENS_I32),
        _must("action_mask", _TOKENS_BOOL),
        _must("rollout_logprobs", _TOKENS_F32),  # nats, 0 where not sampled
        _must("turns", pa.list_(TURN)),
        _must("messages", pa.large_string()),  # JSON
        pa.field("media", pa.list_(MEDIA)),
        _must("status", _CATEGORY),  # ROLLOUT_STATUS
        pa.field("truncation", _CATEGORY),  # TRUNCATIONS, null unless truncated
        pa.field("error", pa.string()),
        _must("sampling", SAMPLING),
        _must("engine", pa.string()),
        _must("engine_version", pa.string()),
        _must("tokenizer_digest", pa.string()),
        _must("template_digest", pa.string()),
        _must("metadata", pa.string()),  # JSON
        pa.field("started_at", pa.timestamp("us", "UTC")),
        pa.field("latency_ms", pa.float32()),
    ]
)

CARRY = pa.schema(
    [
        *ROLLOUTS,
        _must("resume_turn", pa.int32()),  # turns of the policy so far; 0: to be begun afresh
        _must("origin_iteration", pa.int32()),  # that began it
    ]
)

REWARDS = pa.schema(
    [
        _must("trajectory_id", pa.string()),
        pa.field("reward", pa.float32()),  # null: not scored, NaN: the scorer failed, 0: a miss
        pa.field("raw_reward", pa.float32()),
        pa.field("length_penalty", pa.float32()),
        pa.field("components", pa.map_(pa.string(), pa.float32())),
        pa.field("token_rewards", _TOKENS_F32),
        _must("scorer", pa.string()),
        _must("scorer_digest", pa.string()),
        _must("status", _CATEGORY),  # REWARD_STATUS
        pa.field("error", pa.string()),
        pa.field("extracted_answer", pa.string()),
        pa.field("attempts", pa.int16()),
        pa.field("latency_ms", pa.float32()),
    ]
)

REPLAYS = pa.schema(
    [
        _must("trajectory_id", pa.string()),
        pa.field("old_logprobs", _TOKENS_F32),  # nats, 0 where not an action, as the next three
        pa.field("values", _TOKENS_F32),
        pa.field("ref_logprobs", _TOKENS_F32),
        pa.field("entropy", _TOKENS_F32),  # nats
        pa.field("bootstrap_value", pa.float32()),
        pa.field("value_digest", pa.string()),
        _must("policy_digest", pa.string()),
        _must("mini_batch", pa.int32()),
        _must("micro_batch", pa.int32()),
    ]
)

ADVANTAGES = pa.schema(
    [
        _must("trajectory_id", pa.string()),
        _must("token_rewards", _TOKENS_F32),
        _must("token_advantages", _TOKENS_F32),
        pa.field("returns", _TOKENS_F32),
        _must("loss_mask", _TOKENS_BOOL),
        _must("advantage", pa.float32()),
        _must("group_id", pa.string()),
        pa.field("group_mean", pa.float32()),
        pa.field("group_std", pa.float32()),
        _must("group_finite", pa.int32()),
        _must("excluded", pa.bool_()),
        pa.field("reason", pa.string()),
    ]
)

SCHEMAS: dict[str, pa.Schema] = {
    "rollouts": ROLLOUTS,
    "carry": CARRY,
    "rewards": REWARDS,
    "replays": REPLAYS,
    "advantages": ADVANTAGES,
}
# How long something took is no content: two honest computations differ in it.
VOLATILE: dict[str, frozenset[str]] = {
    "rollouts": frozenset({"started_at", "latency_ms"}),
    "carry": frozenset({"started_at", "latency_ms"}),
    "rewards": frozenset({"attempts", "latency_ms"}),
    "replays": frozenset(),
    "advantages": frozenset(),
}

PURPOSES = ("train", "baseline", "eval")
ROLLOUT_STATUS = ("ok", "truncated", "failed", "carried")
TRUNCATIONS = ("length", "max_turns", "context")
REWARD_STATUS = ("ok", "failed", "unscored")
