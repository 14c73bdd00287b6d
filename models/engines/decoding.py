"""The batched decoding loop: left-padded prompts, a key-value cache, rows that leave when they are done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from models.engines.contract import SamplingParams
from models.engines.sampling import draw


@dataclass(frozen=True)
class Decoded:
    token_ids: np.ndarray  # [new] int32
    logprobs: np.ndarray  # [new] float32
    stopped: bool  # by an eos or a stop string


class _Rows:
    """The rows still in the batch, the first dimension of every tensor; `number` is a row's place in the call."""

    def __init__(self, model: PreTrainedModel, prompts: list[np.ndarray], streams: list[np.ndarray]) -> None:
        width, steps = max(len(p) for p in prompts), max(len(s) for s in streams)
        ids = np.zeros((len(prompts), width), np.int64)
        mask = np.ones((len(prompts), width + steps), np.int64)  # 0: padding, left of the prompt
        uniform = np.zeros((len(prompts), steps))
        for row, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            ids[row, width - len(prompt) :] = prompt
            mask[row, : width - len(prompt)] = 0
            uniform[row, : len(stream)] = stream
        self.model, self.width, self.steps = model, width, steps
        self.cache = DynamicCache(config=model.config)
        self.number = torch.arange(len(prompts), device=model.device)
        self.ids = torch.from_numpy(ids).to(model.device)  # the next input, [rows, 1] after the first step
        self.mask = torch.from_numpy(mask).to(model.device)
        self.uniform = torch.from_numpy(uniform).to(model.device)
        self.budget = torch.tensor([len(s) for s in streams], device=model.device)  # tokens it may still become
        self.alive = torch.ones(len(prompts), dtype=torch.bool, device=model.device)

    def logits(self, step: int) -> torch.Tensor:
        """[rows, vocab] of the next token; step counts from 0, the prompt's own forward pass."""
        mask = self.mask[:, : self.width + step]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -self.ids.shape[1] :]
        output = self.model(
            self.ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def compact(self) -> None:
        """Drops the rows that are done."""
        kept = self.alive.nonzero()[:, 0]
        self.cache.batch_select_indices(kept)
        for name in ("number", "ids", "mask", "uniform", "budget", "alive"):
            setattr(self, name, getattr(self, name)[kept])


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: list[np.ndarray],
    streams: list[np.ndarray],
    params: SamplingParams,
    text: Callable[[Sequence[int]], str] | None = None,
) -> list[Decoded]:
    """Samples one continuation per prompt, all in one batch.

    prompts: [length] integers each, not empty; streams: the row's uniform numbers, [most tokens it may get] float64;
    text: of token ids, needed with stop strings.
    Finished rows stay as ballast until half of the batch is done, then leave it.
    """
    rows = _Rows(model, prompts, streams)
    eos = torch.tensor(params.eos_ids, dtype=torch.int64, device=model.device)
    tokens = torch.zeros(len(prompts), rows.steps, dtype=torch.int64, device=model.device)
    logprobs = torch.zeros(len(prompts), rows.steps, dtype=torch.float32, device=model.device)
    lengths = rows.budget.clone()
    stopped = torch.zeros_like(rows.alive)
    for step in range(rows.steps):
        drawn, logprob = draw(rows.logits(step), rows.uniform[:, step], params)
        tokens[rows.number, step], logprobs[rows.number, step] = drawn, logprob
        ended = torch.isin(drawn, eos)
        if params.stop and text is not None:
            ended |= _at_stop(tokens[rows.number, : step + 1], params.stop, text)
        ended &= rows.alive
        stopped[rows.number[ended]] = True
        lengths[rows.number[ended]] = step + 1
        rows.alive &= ~ended & (rows.budget > step + 1)
        rows.ids = drawn[:, None]
        living = int(rows.alive.sum())
        if living == 0:
            break
        if 2 * living <= len(rows.alive):
            rows.compact()
    return _collect(tokens, logprobs, lengths, stopped)


def _at_stop(tokens: torch.Tensor, stop: Sequence[str], text: Callable[[Sequence[int]], str]) -> torch.Tensor:
    """[rows]: whether the text of the last tokens, [rows, tokens], has a stop string. A token is a byte or more."""
    longest = max(len(string.encode()) for string in stop)
    tails = tokens[:, -longest:].tolist()
    found = [any(string in said for string in stop) for said in map(text, tails)]
    return torch.tensor(found, dtype=torch.bool, device=tokens.device)


def _collect(
    tokens: torch.Tensor, logprobs: torch.Tensor, lengths: torch.Tensor, stopped: torch.Tensor
) -> list[Decoded]:
    ids, logps = tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy()
    ends = zip(lengths.tolist(), stopped.tolist(), strict=True)
    return [Decoded(ids[row, :n].copy(), logps[row, :n].copy(), stop) for row, (n, stop) in enumerate(ends)]
