"""Replay and training of packed rows against a plain Hugging Face loop over padded rows, in one process.

    python tests/benchmarks/training.py

Same model, threads, rows, micro-batches and loss (PPO's clip, mean over tokens, AdamW). The plain loop is what a short
script does: rows padded at the right to their micro-batch's longest, logits of every position, log-softmax, gather.
Both must agree in the gradient norm before anything is timed.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from data.config import CriticConfig, LayoutConfig, OptimizerConfig, TrainConfig
from models.megatron.contract import Setup, TrainBatch, TrainOptions
from models.megatron.trainer import Trainer
from models.weights import read_tensors, tensors_digest
from ops.packing import pack
from ops.ragged import Ragged, from_rows
from tests.seaweed import free_ports

THREADS, ROWS, MICRO_TOKENS, REPEATS = 2, 32, 4096, 3
SIZES = {
    "small": {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    "large vocabulary": {"vocab_size": 16384, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2},
}
HOW = TrainOptions(TrainConfig(max_kl=None), 1.0)
SETUP = Setup(CriticConfig(kind="none"), OptimizerConfig(lr=1e-5, max_grad_norm=1e9))


class Plain:
    """The script."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        options = SETUP.optimizer
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=tuple(options.betas))

    def logprobs(self, batch: TrainBatch, rows: np.ndarray) -> torch.Tensor:
        """[rows, longest - 1] of the tokens that follow, whatever they are."""
        longest = int(batch.streams.lengths[rows].max())
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            stream = torch.from_numpy(batch.streams.row(row).astype(np.int64))
            ids[i, : len(stream)], mask[i, : len(stream)] = stream, 1
        logits = self.model(ids, attention_mask=mask).logits[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]

    def replay(self, batch: TrainBatch, micros: list[np.ndarray]) -> None:
        with torch.no_grad():
            for rows in micros:
                self.logprobs(batch, rows)

    def step(self, batch: TrainBatch, micros: list[np.ndarray]) -> float:
        """The gradient norm."""
        tokens = float(batch.loss_mask.values.sum())
        for rows in micros:
            logprobs = self.logprobs(batch, rows)
            old, advantages, mask = (
                self._padded(column, rows, logprobs)
                for column in (batch.old_logprobs, batch.advantages, batch.loss_mask)
            )
            ratio = torch.exp(logprobs - old)
            losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
            ((losses * mask).sum() / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), SETUP.optimizer.max_grad_norm)
        self.adam.step()
        self.adam.zero_grad()
        return float(norm)

    @staticmethod
    def _padded(column: Ragged, rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros_like(like)
        for i, row in enumerate(rows):
            values = torch.from_numpy(column.row(row)[1:].astype(np.float32))
            padded[i, : len(values)] = values
        return padded


def batch_of(vocab: int, old: float) -> TrainBatch:
    """Prompts of 64 tokens, answers of 32 to 512; old log-probs at `old`."""
    rng = np.random.default_rng(0)
    answers = rng.integers(32, 513, ROWS)

    def column(make: Callable[[int], np.ndarray], dtype: Any) -> Ragged:
        return from_rows([make(64 + int(n)) for n in answers], dtype)

    mask = from_rows([np.arange(64 + n) >= 64 for n in answers], np.bool_)
    return TrainBatch(
        streams=column(lambda n: rng.integers(0, vocab, n), np.int32),
        action_mask=mask,
        loss_mask=mask,
        old_logprobs=column(lambda n: np.full(n, old), np.float32),
        advantages=column(lambda n: rng.normal(size=n), np.float32),
    )


def model(folder: Path, sizes: dict[str, int]) -> str:
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return tensors_digest(read_tensors(folder))


def median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def compare(name: str, trainer: Trainer, folder: Path, sizes: dict[str, int]) -> None:
    digest = model(folder, sizes)
    batch = batch_of(sizes["vocab_size"], -float(np.log(sizes["vocab_size"])))
    micros = pack(batch.streams.lengths, np.arange(ROWS), MICRO_TOKENS)
    trainer.bring_to_policy(folder, digest, SETUP)
    plain = Plain(folder)
    ours, theirs = trainer.train(batch, [micros], HOW)[0]["grad_norm"], plain.step(batch, micros)
    assert abs(ours / theirs - 1.0) < 1e-3, (ours, theirs)
    tokens = float(batch.streams.lengths.sum())
    times = {
        "replay": (
            median(lambda: trainer.replay(batch.streams, batch.action_mask, micros, 1.0, False)),
            median(lambda: plain.replay(batch, micros)),
        ),
        "train": (median(lambda: trainer.train(batch, [micros], HOW)), median(lambda: plain.step(batch, micros))),
    }
    print(f"{name}: {tokens:,.0f} tokens in {len(micros)} micro-batches; gradient norms {ours:.5f} and {theirs:.5f}")
    for what, (mine, other) in times.items():
        print(f"  {what:8}{tokens / mine:10,.0f} tokens/s   plain {tokens / other:10,.0f}   {other / mine:.2f} x")


def main() -> None:
    trainer = Trainer(0, 1, f"tcp://127.0.0.1:{free_ports(1)[0]}", THREADS, LayoutConfig())
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in SIZES.items():
            compare(name, trainer, Path(folder) / name.replace(" ", "-"), copy.copy(sizes))


if __name__ == "__main__":
    main()
