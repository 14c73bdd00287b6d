"""Draws tokens from logits: one uniform number per trajectory and step, inverted through the distribution.

The draw of a trajectory depends on its own seed, step and logits alone, never on its neighbours in the batch.
"""

import numpy as np
import torch

from models.engines.contract import SamplingParams


def uniforms(seed: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1): the trajectory's random stream, one number per step, the same on every machine.

    Raw Philox-4x64 bits, keyed by the seed; a longer stream starts with the shorter one.
    """
    raw = np.random.Philox(key=seed).random_raw(count)
    return (raw >> np.uint64(11)) * 2.0**-53


def draw(logits: torch.Tensor, uniform: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, and its log-prob.

    logits [rows, vocab] any float; uniform [rows] float64 in [0, 1). Returns ids [rows] int64 and logprobs [rows]
    float32: under the distribution sampled from, or, greedy, under softmax(logits). NaN logits give NaN logprobs.
    """
    logits = logits.double()
    if params.greedy:
        ids = logits.argmax(-1)
        return ids, _pick(logits.log_softmax(-1), ids)
    logprobs = filtered_logprobs(logits / params.temperature, params.top_k, params.top_p)
    ids = invert(logprobs.exp(), uniform)
    return ids, _pick(logprobs, ids)


def filtered_logprobs(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """log-softmax [rows, vocab] over the tokens that top_k and then top_p keep; -inf for the others.

    top_k keeps exactly k tokens (0: all), top_p the fewest of the likeliest whose share of those k reaches p. Among
    equal tokens the lower id comes first.
    """
    vocab = logits.shape[-1]
    if 0 < top_k < vocab or top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        if 0 < top_k < vocab:
            ordered[:, top_k:] = -torch.inf
        if top_p < 1.0:
            ordered = ordered.masked_fill(_before(ordered.softmax(-1)) >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits.log_softmax(-1)


def _before(shares: torch.Tensor) -> torch.Tensor:
    """[rows, vocab]: the sum of the shares ahead of each one; exactly 0 for the first."""
    return torch.nn.functional.pad(shares.cumsum(-1)[:, :-1], (1, 0))


def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[rows] int64: the first token, in the order of ids, whose cumulative probability exceeds uniform x the total.

    A token of probability 0 is never drawn. float64.
    """
    cumulative = probs.cumsum(-1)
    # Below the total, also after rounding: the largest uniform is 1 - 2^-53, half a unit in the last place or more.
    target = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return ids.clamp(max=probs.shape[-1] - 1)  # only NaN rows reach beyond


def _pick(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logprobs.gather(-1, ids[:, None])[:, 0].float()
