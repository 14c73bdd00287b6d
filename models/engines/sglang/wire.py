"""Between the engine contract's words and SGLang's."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.engines.contract import Completion, NonFiniteLogits, Request, SamplingParams
from models.engines.sglang.backend import Answer, Asked

SEEDS = 2**31  # SGLang's sampling seeds are int32


def ask(request: Request, params: SamplingParams, context: int, name: str) -> Asked:
    """What SGLang is asked for one trajectory."""
    room = min(params.max_new_tokens, context - len(request.token_ids))
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "max_new_tokens": room,
        "sampling_seed": request.seed % SEEDS,
        **({"stop": list(params.stop)} if params.stop else {}),
        # Without any eos of ours the model's own must not end an answer either.
        **({"stop_token_ids": list(params.eos_ids)} if params.eos_ids else {"ignore_eos": True}),
    }
    if params.greedy:
        sampling |= {"top_p": 1.0, "top_k": -1}
    return Asked(name, request.token_ids.tolist(), sampling)


def probe(name: str, token_ids: Sequence[int], tokens: int) -> Asked:
    """Some tokens at temperature 1, whatever they are."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return Asked(name, list(token_ids), sampling)


def tokens_of(answer: Answer) -> tuple[np.ndarray, np.ndarray]:
    """ids [new] int32 and log-probs [new] float32."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    ids = np.fromiter((pair[1] for pair in pairs), np.int32, len(pairs))
    return ids, np.fromiter((pair[0] for pair in pairs), np.float32, len(pairs))


def completion(
    request: Request, answer: Answer, eos_ids: Sequence[int], tag: str, version: int, digest: str
) -> Completion:
    """Raises ValueError if the answer is not one of the policy asked for, or incomplete; NonFiniteLogits for NaN."""
    ids, logprobs = tokens_of(answer)
    meta = answer["meta_info"]
    name, served = f"trajectory {request.trajectory_id}", str(meta.get("weight_version"))
    if served != tag:
        raise ValueError(f"{name}: SGLang answered with weights {served!r}, asked for {tag!r}; a sync did not arrive")
    if list(answer["output_ids"]) != ids.tolist():
        raise ValueError(
            f"{name}: {len(answer['output_ids'])} tokens with log-probs of {len(ids)}; they must be the same"
        )
    if not np.isfinite(logprobs).all():
        raise NonFiniteLogits(
            f"{name}: logits of new token {int(np.flatnonzero(~np.isfinite(logprobs))[0])} are not finite under policy "
            f"version {version} (digest {digest}); its weights are broken: go back to an earlier version"
        )
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise ValueError(f"{name}: SGLang ended it with {meta['finish_reason']}; only stop and length are answers")
    if len(ids) and int(ids[-1]) in eos_ids:
        reason = "stop"  # also where it is the last that was allowed, which SGLang 0.5.17 calls a matter of length
    return Completion(request.trajectory_id, ids, np.minimum(logprobs, 0.0), reason, version, digest)
