"""What an engine ought to say, token by token: one unpadded pass without a cache, filters in plain numpy."""

import numpy as np
import torch

from models.engines.contract import Completion, Request, SamplingParams

PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9, eos_ids=(2,))
MANY_EOS = tuple(range(0, 512, 9))  # one token in nine ends an answer: rows leave the batch at every step


def requests(count: int = 40, vocab: int = 512, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 24 tokens in no order of length."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab, rng.integers(1, 25)).astype(np.int32) for _ in range(count)]
    return [Request(f"p@{i}/0", prompt, seed=100 + i) for i, prompt in enumerate(prompts)]


def plain_logits(model, request: Request, completion: Completion) -> torch.Tensor:
    """[new, vocab] float64 of the answer's tokens."""
    stream = np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64)
    with torch.no_grad():
        logits = model(torch.from_numpy(stream)[None], use_cache=False).logits[0].double()
    return logits[len(request.token_ids) - 1 : -1]


def scaled_probs(model, request: Request, completion: Completion, params: SamplingParams) -> np.ndarray:
    """[new, vocab] float64 at the sampling temperature (greedy: 1), before top_k and top_p."""
    return (plain_logits(model, request, completion) / (params.temperature or 1.0)).softmax(-1).numpy()


def kept(probs: np.ndarray, params: SamplingParams, joint: bool = False) -> np.ndarray:
    """Of one token's probs [vocab] the ids that top_k, and of those top_p, leave: the fewest whose share reaches p.

    joint: p is of the whole distribution, not of what top_k leaves.
    """
    if params.greedy:
        return np.arange(len(probs))
    likeliest = np.argsort(-probs, kind="stable")[: params.top_k or None]
    shares = probs[likeliest] / (1.0 if joint else probs[likeliest].sum())
    while params.top_p < 1.0 and len(shares) > 1 and shares[:-1].sum() >= params.top_p:
        likeliest, shares = likeliest[:-1], shares[:-1]
    return likeliest
