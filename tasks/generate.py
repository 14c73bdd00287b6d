"""generate: policy -> rollouts. One row per trajectory, token for token what the engine consumed and emitted."""

import functools
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from data.columns import ROLLOUTS
from data.config import EngineConfig, PromptsConfig, SamplingConfig
from data.ids import child, root_id
from data.manifest import Manifest
from data.prompts import Prompt, PromptSource, load_source
from data.seeds import derive
from infra import handover
from models.engines.contract import Completion, Request, RolloutEngine, SamplingParams, require_room
from ops.metrics import rollout_metrics
from tasks.step import Job, Pending, Run, Step, perform, unless_given

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

STEP = Step("generate", version=1, kind="rollouts")
source_of = functools.lru_cache(maxsize=8)(load_source)


@dataclass(frozen=True)
class Draw:
    """Which prompts a generate step takes."""

    purpose: Literal["train", "eval"]
    cursor: int  # position in the endless seeded order of training prompts; of eval sets 0
    count: int
    samples: int = 1  # answers a prompt

    def keyed(self) -> dict[str, JsonValue]:
        """What of it enters the key. Training has its samples among the prompts' settings, one is what was always."""
        found: dict[str, JsonValue] = {"purpose": self.purpose, "cursor": self.cursor, "count": self.count}
        return found | ({"samples": self.samples} if self.purpose == "eval" and self.samples != 1 else {})


@unless_given(STEP)
def generate(
    run: Run,
    iteration: int,
    policy: Manifest | Pending,
    prompts: PromptsConfig,
    sampling: SamplingConfig,
    engine: EngineConfig,
) -> Manifest | Pending:
    """Rollouts of the next `prompts.per_iteration` prompts under `policy`, `samples_per_prompt` siblings each."""
    draw = Draw("train", iteration * prompts.per_iteration, prompts.per_iteration, prompts.samples_per_prompt)
    return roll_out(run, STEP, iteration, policy, draw, prompts, sampling, engine)


def roll_out(
    run: Run,
    step: Step,
    iteration: int,
    policy: Manifest | Pending,
    draw: Draw,
    prompts: PromptsConfig,
    sampling: SamplingConfig,
    engine: EngineConfig,
) -> Manifest | Pending:
    """Rollouts of the prompts that `draw` names; also how evaluation generates."""
    source = source_of(prompts)
    config = {
        "prompts": {"system": prompts.system, "samples_per_prompt": prompts.samples_per_prompt},
        "draw": draw.keyed(),
        "sampling": sampling.semantic(),
        "engine": engine.semantic(),
    }
    seed = derive(run.seed, step.name, iteration) if draw.purpose == "train" else derive(run.seed, step.name)
    return perform(
        run,
        step,
        iteration,
        {"policy": policy, "prompts": source.digest if draw.purpose == "train" else source.held_out_digest},
        config,
        seed,
        run.engine,
        _generate,
        (draw, prompts, sampling, run.seed, run.hands_over),
    )


def _generate(
    engine: RolloutEngine,
    job: Job,
    draw: Draw,
    prompts: PromptsConfig,
    sampling: SamplingConfig,
    order_seed: int,
    handed_over: bool,
) -> Manifest:
    """handed_over: the trainer may have left the policy in memory."""
    from models.tokenizer import Tokenizer

    policy = job.input("policy")
    in_memory = handover.offered(policy.content_digest) if handed_over else None
    folder = in_memory or job.folder("policy")
    tokenizer = Tokenizer(folder)
    clock = time.perf_counter()
    engine.update_weights(folder, policy.policy_version, policy.content_digest, in_memory is not None)
    sync_s = time.perf_counter() - clock
    source = source_of(prompts)
    roots = _roots(source, draw, order_seed)
    requests = _requests(roots, draw.samples, tokenizer, job.seed)
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
        stop=tuple(sampling.stop),
    )
    started, clock = datetime.now(UTC), time.perf_counter()
    completions = engine.generate([request for _, request in requests], params)
    latency_ms = 1000.0 * (time.perf_counter() - clock)
    common = _common(engine, params, tokenizer, draw.purpose, started, latency_ms)
    rows = [
        _row(prompt, request, completion, tokenizer, sampling, common)
        for (prompt, request), completion in zip(requests, completions, strict=True)
    ]
    attempt = job.attempt()
    version = policy.policy_version
    attempt.add_table("rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS), policy_version=version)
    return attempt.commit(
        metrics=_metrics(completions, 1000.0 / latency_ms) | {"generate/sync_s": sync_s},
        facts={
            "cursor": {"start": draw.cursor, "end": draw.cursor + draw.count},
            "duplicates": source.duplicates,
            "policy_version": version,
            "device": engine.health().device,
        },
    )


def _metrics(completions: list[Completion], per_second: float) -> dict[str, float]:
    lengths = np.array([len(c.token_ids) for c in completions])
    truncated = np.array([c.finish_reason == "length" for c in completions])
    metrics = rollout_metrics(lengths, truncated, np.ones(len(lengths), np.int64))
    tokens = float(lengths.sum())
    return metrics | {"generate/tokens": tokens, "generate/tokens_per_s": tokens * per_second}


def _roots(source: PromptSource, draw: Draw, seed: int) -> list[tuple[str, Prompt]]:
    """(root id, prompt); a root id is unique in its run, however often its prompt comes round."""
    if draw.purpose == "eval":
        return [(root_id(prompt.prompt_id, i), prompt) for i, prompt in enumerate(source.held_out(draw.count))]
    taken = source.take(draw.cursor, draw.count, seed)
    return [(root_id(prompt.prompt_id, draw.cursor + i), prompt) for i, prompt in enumerate(taken)]


def _requests(
    roots: list[tuple[str, Prompt]], samples: int, tokenizer: "Tokenizer", seed: int
) -> list[tuple[Prompt, Request]]:
    requests = []
    for root, prompt in roots:
        ids = np.array(tokenizer.encode_prompt(prompt.messages), np.int32)
        require_room(f"prompt {prompt.prompt_id}", len(ids), tokenizer.context)
        for branch in range(samples):
            trajectory = child(root, branch)
            requests.append((prompt, Request(trajectory, ids, derive(seed, trajectory))))
    return requests


def _common(
    engine: RolloutEngine,
    params: SamplingParams,
    tokenizer: "Tokenizer",
    purpose: str,
    started: datetime,
    latency_ms: float,
) -> dict[str, Any]:
    """The columns that all rows of one call share."""
    return {
        "depth": 1,
        "stage": "policy",
        "purpose": purpose,
        "media": [],
        "logprob_semantics": engine.logprob_semantics(params),
        "engine": engine.name,
        "engine_version": engine.version,
        "tokenizer_digest": tokenizer.digest,
        "template_digest": tokenizer.template_digest,
        "started_at": started,
        "latency_ms": latency_ms,
    }


def _row(
    prompt: Prompt,
    request: Request,
    completion: Completion,
    tokenizer: "Tokenizer",
    sampling: SamplingConfig,
    common: dict[str, Any],
) -> dict[str, Any]:
    asked, said = len(request.token_ids), len(completion.token_ids)
    root = request.trajectory_id.rsplit("/", 1)[0]
    answer_ids = [int(t) for t in completion.token_ids]
    spoken = answer_ids[:-1] if answer_ids[-1] in tokenizer.eos_ids else answer_ids
    answer = tokenizer.decode(spoken)
    shared = dict(common)
    semantics = shared.pop("logprob_semantics")
    return shared | {
        "trajectory_id": request.trajectory_id,
        "root_id": root,
        "parent_id": root,
        "token_ids": np.concatenate([request.token_ids, completion.token_ids]).astype(np.int32),
        "action_mask": np.repeat([False, True], [asked, said]),
        "rollout_logprobs": np.concatenate([np.zeros(asked, np.float32), completion.logprobs]),
        "turns": [
            _turn("user", False, 0, asked, tokenizer.decode(request.token_ids), None, None),
            _turn("assistant", True, asked, said, tokenizer.decode(answer_ids), completion.finish_reason, completion),
        ],
        "messages": json.dumps([*prompt.messages, {"role": "assistant", "content": answer}], ensure_ascii=False),
        "status": "truncated" if completion.finish_reason == "length" else "ok",
        "truncation": _truncation(completion, sampling),
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": request.seed,
            "stop": sampling.stop,
            "logprob_semantics": semantics,
        },
        "metadata": json.dumps({**prompt.metadata, "prompt_id": prompt.prompt_id}, ensure_ascii=False),
    }


def _truncation(completion: Completion, sampling: SamplingConfig) -> str | None:
    if completion.finish_reason != "length":
        return None
    return "length" if len(completion.token_ids) == sampling.max_new_tokens else "context"


def _turn(
    role: str,
    generated: bool,
    start: int,
    length: int,
    text: str,
    finish_reason: str | None,
    completion: Completion | None,
) -> dict[str, Any]:
    return {
        "role": role,
        "is_generated": generated,
        "start": start,
        "length": length,
        "text": text,
        "finish_reason": finish_reason,
        "policy_version": completion.policy_version if completion else None,
        "policy_digest": completion.policy_digest if completion else None,
        "env_reward": None,
        "tool_calls": None,
    }
