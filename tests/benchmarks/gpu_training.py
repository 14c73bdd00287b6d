"""Training and replay of a Qwen3-0.6B shape on one GPU, each fast path against what it replaces.

    python tests/benchmarks/gpu_training.py           # one H200, 2 minutes; tables also into $OUT if that is set
    python tests/benchmarks/gpu_training.py --tiny    # a toy shape, to see on any machine that it works

Random bfloat16 weights, float32 masters. FLOPs of a train step: 6 · parameters · tokens for the matrix products (the
tied embedding counts once), 12 · layers · heads · head_dim · Σ length² / 2 for causal attention; replay takes a third.
MFU is their rate over 989 TFLOP/s, an H200's dense bfloat16. Recomputed work does not count. The learning rate is too
small to move a weight: gradient norms of all variants must agree, and show it if one computes something else.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from qwen_shape import FULL, TINY, write_model
from said import say
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.config import CriticConfig, LayoutConfig, OptimizerConfig, TrainConfig
from models.megatron import attention, head, norm, rotary
from models.megatron.contract import Setup, TrainBatch, TrainOptions
from models.megatron.shape import ModelShape
from models.megatron.trainer import Trainer
from ops.packing import pack
from ops.ragged import Ragged, from_rows

PEAK_FLOPS = 989e12
LAST_S = {"ragged": 65.0, "8k": 115.0}  # no variant begins later, counted from the start
REPEATS, MICRO_TOKENS, PROMPT = 2, 16384, 64
HOW = TrainOptions(TrainConfig(max_kl=None), 1.0)
SETUP = Setup(CriticConfig(kind="none"), OptimizerConfig(lr=1e-12))


@dataclass(frozen=True)
class Variant:
    name: str
    micro_tokens: int = MICRO_TOKENS
    recompute: bool = False
    change: Callable[[Trainer], Iterator[None]] | None = None  # a context in which a fast path is off
    only_ragged: bool = False


@dataclass(frozen=True)
class Bench:
    trainer: Trainer
    shape: ModelShape
    parameters: int
    scale: int  # all lengths and budgets are divided by it
    started: float

    def flops(self, lengths: np.ndarray) -> float:
        """Of one train step."""
        square = float((lengths.astype(np.float64) ** 2).sum()) / 2
        heads = self.shape.layers * self.shape.heads * self.shape.head_dim
        return 6 * self.parameters * float(lengths.sum()) + 12 * heads * square


def sdpa(trainer: Trainer) -> Iterator[None]:
    with mock.patch.object(attention, "has_kernel", lambda query: False):
        yield


def cudnn(trainer: Trainer) -> Iterator[None]:
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with mock.patch.object(attention, "has_kernel", lambda query: False), sdpa_kernel(order, set_priority=True):
        yield


def whole_logits(trainer: Trainer) -> Iterator[None]:
    with mock.patch.object(head, "in_chunks", lambda hidden: False):
        yield


def plain_pointwise(trainer: Trainer) -> Iterator[None]:
    """torch's RMSNorm, the rotation in six passes, SwiGLU in two."""

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    config = trainer._held().parts["policy"].module.config
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(norm.RMSNorm, "forward", torch.nn.RMSNorm.forward))
        stack.enter_context(mock.patch.object(rotary, "turn", turn))
        stack.enter_context(mock.patch.object(config, "bias_activation_fusion", False))
        yield


VARIANTS = [
    Variant("as it runs"),
    Variant("SDPA in buckets", change=sdpa),
    Variant("SDPA in buckets, cuDNN first", change=cudnn),
    Variant("logits held whole", change=whole_logits),
    Variant("plain norm, rotation, SwiGLU", change=plain_pointwise),
    Variant("recompute", recompute=True),
    Variant("micro_tokens 4,096", micro_tokens=4096, only_ragged=True),
    Variant("micro_tokens 32,768", micro_tokens=32768),
]


def ragged_lengths(scale: int) -> np.ndarray:
    """Log-normal, median 700, at most 2,048; about 64k tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(700), 0.8, 1000).clip(2 * PROMPT, 2048).astype(np.int64)
    return drawn[: int(np.searchsorted(drawn.cumsum(), 65536)) + 1] // scale


def batch_of(lengths: np.ndarray, vocabulary: int, prompt: int) -> TrainBatch:
    rng = np.random.default_rng(1)

    def column(values: np.ndarray, dtype: type) -> Ragged:
        return from_rows(np.split(values, lengths.cumsum()[:-1]), dtype)

    total = int(lengths.sum())
    mask = from_rows([np.arange(n) >= prompt for n in lengths], np.bool_)
    return TrainBatch(
        streams=column(rng.integers(0, vocabulary, total), np.int32),
        action_mask=mask,
        loss_mask=mask,
        old_logprobs=column(np.full(total, -np.log(vocabulary)), np.float32),
        advantages=column(rng.normal(size=total), np.float32),
    )


def seconds(call: Callable[[], object]) -> float:
    """The best of REPEATS, after one to warm up."""
    call()
    best = float("inf")
    for _ in range(REPEATS):
        _wait()
        started = time.perf_counter()
        call()
        _wait()
        best = min(best, time.perf_counter() - started)
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(bench: Bench, batch: TrainBatch, variant: Variant) -> str:
    """One line of the table."""
    trainer, lengths = bench.trainer, batch.streams.lengths
    micros = pack(lengths, np.arange(len(lengths)), variant.micro_tokens // bench.scale)
    norms: list[float] = []
    trainer._setup = replace(SETUP, recompute=variant.recompute)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        if variant.change is not None:
            stack.enter_context(contextmanager(variant.change)(trainer))
        train = seconds(lambda: norms.append(trainer.train(batch, [micros], HOW)[0]["grad_norm"]))
        replay = seconds(lambda: trainer.replay(batch.streams, batch.action_mask, micros, 1.0, False))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    tokens, mfu = int(lengths.sum()), bench.flops(lengths) / PEAK_FLOPS
    return (
        f"  {variant.name:30}{tokens / train:10,.0f}{mfu / train:8.1%}{tokens / replay:11,.0f}{mfu / 3 / replay:8.1%}"
        f"{train / replay:8.2f}{peak:8.1f}   {norms[-1]:.5f}"
    )


def table(bench: Bench, name: str, batch: TrainBatch) -> Iterator[str]:
    lengths = batch.streams.lengths
    yield f"{name}: {len(lengths)} rows, {lengths.sum():,} tokens, longest {lengths.max():,}"
    yield f"  {'':30}{'train/s':>10}{'MFU':>8}{'replay/s':>11}{'MFU':>8}{'ratio':>8}{'GiB':>8}   gradient norm"
    for variant in VARIANTS:
        if variant.only_ragged and name != "ragged":
            continue
        if time.perf_counter() - bench.started > LAST_S[name]:
            yield f"  {variant.name:30}  no time left"
            continue
        try:
            yield measure(bench, batch, variant)
        except torch.OutOfMemoryError:
            yield f"  {variant.name:30}  out of memory"


def profile(bench: Bench, batch: TrainBatch) -> str:
    """The 25 operations that take longest in a train step of one micro-batch, as it runs."""
    micros = pack(batch.streams.lengths, np.arange(len(batch.streams)), MICRO_TOKENS // bench.scale)[:1]
    bench.trainer._setup = SETUP
    cuda = torch.cuda.is_available()
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=kinds) as seen:
        bench.trainer.train(batch, [micros], HOW)
        _wait()
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    return seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a toy shape and short rows")
    tiny, started = parser.parse_args().tiny, time.perf_counter()
    sizes, scale = (TINY, 16) if tiny else (FULL, 1)
    out = os.environ.get("OUT")

    def clock() -> float:
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        trainer = Trainer(0, 1, f"file://{name}/store", 2, LayoutConfig())
        trainer.bring_to_policy(folder, write_model(folder, sizes, trainer._device), SETUP)
        parameters = sum(p.numel() for p in trainer._held().parts["policy"].bare.parameters())
        bench = Bench(trainer, ModelShape.from_hf(folder), parameters, scale, started)
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        say(f"{where}, torch {torch.__version__}, {parameters:,} parameters; {clock():.0f} s so far")
        for kind, lengths in {"ragged": ragged_lengths(scale), "8k": np.full(8, 8192 // scale)}.items():
            batch = batch_of(lengths, sizes["vocab_size"], PROMPT // scale)
            for line in table(bench, kind, batch):
                say(line)
            if out:
                (Path(out) / f"profile_{kind}.txt").write_text(profile(bench, batch))
        say(f"{clock():.0f} s in all")


if __name__ == "__main__":
    main()
