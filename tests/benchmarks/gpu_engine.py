"""Rollbook's SGLang engine on one GPU: against bare SGLang in the same process, and how long new weights take.

    python tests/benchmarks/gpu_engine.py           # one H200, 150 s after SGLang's start; also into $OUT if set
    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/sglang_cpu:. python tests/benchmarks/gpu_engine.py --tiny

Random bfloat16 weights of Qwen3-0.6B's shape. Prompts of 32 to 128 random ids, 256 or 16 new tokens, log-probs on.
Ours is `SGLangEngine.generate`; bare is `sglang.Engine.generate` with the whole batch, on the very engine that ours
holds. They take turns, each call with prompts of its own, so that none finds a prefix of another in the cache.

A sync is `SGLangEngine.update_weights` to other weights, proof included. Its parts overlap: they do not add up. The
files were written just before, as in a run, so that "disk" is the page cache.
"""

import argparse
import faulthandler
import functools
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from qwen_shape import FULL, TINY, write_model
from safetensors.torch import load_file
from said import say

from data.config import EngineConfig
from data.digest import file_digest
from models.engines.contract import Request, SamplingParams
from models.engines.sglang import proof
from models.engines.sglang.embedded import Embedded
from models.engines.sglang.engine import SGLangEngine
from models.weights import WEIGHTS_FILE, read_tensors, write_tensors

LIMIT_S = 480  # then the process ends, wherever it hangs
LAST_S = 150.0  # nothing is measured later, counted from the engine's start
TINY_PATIENCE = 4  # both times that, for a busy machine without a GPU
MEMORY = Path("/dev/shm")
BATCH, NEW = 256, 256


@dataclass(frozen=True)
class Folder:
    path: Path
    digest: str


@dataclass
class Bench:
    engine: SGLangEngine
    vocabulary: int
    scale: int  # numbers of requests and tokens are divided by it
    last_s: float
    started: float = 0.0
    version: int = 0
    served: str = ""
    drawn: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def backend(self) -> Embedded:
        found = self.engine._replicas._replicas[0]._backend
        assert isinstance(found, Embedded)
        return found

    @property
    def late(self) -> bool:
        return time.perf_counter() - self.started > self.last_s

    def update(self, folder: Folder, how: dict[str, bool]) -> float:
        self.version += 1
        clock = time.perf_counter()
        self.engine.update_weights(folder.path, self.version, folder.digest, **how)
        taken = time.perf_counter() - clock
        self.served = folder.digest
        return taken


def ours(bench: Bench, prompts: list[np.ndarray], new: int) -> None:
    requests = [Request(f"p{i}", ids, seed=i) for i, ids in enumerate(prompts)]
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=new, eos_ids=())
    said = bench.engine.generate(requests, params)
    assert all(len(completion.token_ids) == len(completion.logprobs) == new for completion in said)


def bare(bench: Bench, prompts: list[np.ndarray], new: int) -> None:
    """In the thread in which SGLang's loop lives."""
    call = functools.partial(
        bench.backend._engine.generate,
        input_ids=[ids.tolist() for ids in prompts],
        sampling_params={"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True},
        return_logprob=True,
    )
    said = bench.backend._thread.submit(call).result(timeout=bench.last_s)
    assert all(len(answer["meta_info"]["output_token_logprobs"]) == new for answer in said)


def generate(bench: Bench, requests: int, rounds: int, warm: bool, tokens: int = NEW) -> Iterator[str]:
    new, count = max(1, tokens // bench.scale), requests // bench.scale
    taken: dict[str, list[float]] = defaultdict(list)
    with timed({"in SGLang": (Embedded, "generate")}) as parts:
        for number in range(-1 if warm else 0, rounds):
            for call in (ours, bare) if number % 2 else (bare, ours):
                if bench.late:
                    break
                lengths = bench.drawn.integers(32, 129, count)
                prompts = [bench.drawn.integers(0, bench.vocabulary, n).astype(np.int32) for n in lengths]
                clock = time.perf_counter()
                call(bench, prompts, new)
                if number >= 0:
                    taken[call.__name__].append(time.perf_counter() - clock)
    if set(taken) != {"ours", "bare"}:
        yield f"{count} requests: no time left"
        return
    inside = parts["in SGLang"][-len(taken["ours"]) :]
    yield f"{count} requests, {new} new tokens each: {len(taken['ours'])} times ours, {len(taken['bare'])} bare"
    for name, each in taken.items():
        rates = [count * new / s for s in each]
        yield f"  {name:6}{statistics.median(rates):10,.0f} tok/s   {min(rates):,.0f} to {max(rates):,.0f}"
    outside = statistics.median(taken["ours"]) - statistics.median(inside)
    ratio = statistics.median(taken["bare"]) / statistics.median(taken["ours"])
    yield f"  ours has {ratio:.1%} of bare's; {outside * 1e3:.0f} ms of its calls are outside SGLang"


PARTS = {
    "read to the device": (proof, "read_tensors"),
    "sha256": (proof, "tensors_digest"),
    "empty model": (proof, "_empty"),
    "load, disk": (Embedded, "load_folder"),
    "load, tensor": (Embedded, "load_tensors"),
    "our checksums": (proof.Weights.__dict__["checksums"], "func"),
    "SGLang's checksums": (Embedded, "checksums"),
    "probes": (Embedded, "generate"),
    "transformers on the probes": (proof.Weights, "logprobs"),
}


@contextmanager
def timed(places: dict[str, tuple[Any, str]]) -> Iterator[dict[str, list[float]]]:
    """Name -> seconds of each call of that function while the context lasts."""
    taken: dict[str, list[float]] = defaultdict(list)

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            clock = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken[name].append(time.perf_counter() - clock)

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in places.items():
            function = clocked(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, function))
        yield taken


def sync(bench: Bench, name: str, folders: list[Folder], how: dict[str, bool], times: int) -> Iterator[str]:
    """Through the folders in turn; the first update warms up."""
    found: list[float] = []
    with timed(PARTS) as parts:
        for number in range(-1, times):
            if bench.late:
                break
            following = next(folder for folder in folders if folder.digest != bench.served)
            folders = [folder for folder in folders if folder is not following] + [following]
            if number == 0:
                parts.clear()
            taken = bench.update(following, how)
            if number >= 0:
                found.append(taken)
    if not found:
        yield f"  {name}: no time left"
        return
    span = f"{min(found):.3f} to {max(found):.3f}, {len(found)} times"
    yield f"  {name}: {statistics.median(found):.3f} s ({span})"
    for part, each in parts.items():
        yield f"    {part:28}{statistics.median(each):8.3f}"


def syncs(bench: Bench, disk: list[Folder]) -> Iterator[str]:
    size = (disk[0].path / WEIGHTS_FILE).stat().st_size
    yield f"sync, {size / 1e9:.2f} GB, {len(disk)} policies in turn, medians in seconds"
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="rollbook-bench-") as name:
        room = min(len(disk), int(shutil.disk_usage(MEMORY).free / size * 0.9))
        copies = [Folder(Path(name) / str(i), folder.digest) for i, folder in enumerate(disk[:room])]
        for folder, copy in zip(disk, copies, strict=False):
            shutil.copytree(folder.path, copy.path)
        if len(copies) > 1:
            yield from sync(bench, "tensor", copies, {"in_memory": True}, 7)
        else:
            yield f"  tensor: {MEMORY} has no room for two policies"
    yield from sync(bench, "disk", disk, {}, 7)
    yield from sync(bench, "disk, given to SGLang as tensors, not hashed", disk, {"in_memory": True}, 5)
    device, file = bench.backend.device, disk[0].path / WEIGHTS_FILE
    for name, work in {
        "the store's check of a policy's file": lambda: file_digest(file),
        "read to the device by safetensors": lambda: load_file(file, device=device),
        "read to the device by read_tensors": lambda: read_tensors(file.parent, device),
    }.items():
        yield f"  {name:40}{min(seconds(work) for _ in range(3)):8.3f}"


def seconds(work: Callable[[], object]) -> float:
    clock = time.perf_counter()
    work()
    return time.perf_counter() - clock


def write_policies(folder: Path, sizes: dict[str, int]) -> list[Folder]:
    """Three, which differ in nearly every weight."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = [Folder(folder / "0", write_model(folder / "0", sizes, device))]
    tensors = read_tensors(made[0].path)
    for number, factor in ((1, 1.01), (2, 0.99)):
        shutil.copytree(made[0].path, folder / str(number), ignore=shutil.ignore_patterns("*.safetensors"))
        changed = {name: tensor * factor for name, tensor in tensors.items()}
        made.append(Folder(folder / str(number), write_tensors(folder / str(number), changed)))
    torch.cuda.empty_cache()
    return made


def measure(bench: Bench, disk: list[Folder]) -> None:
    """Says each figure when it is there. What fails is told, and the rest is measured."""
    for section in (
        lambda: generate(bench, BATCH, 5, warm=True),
        lambda: syncs(bench, disk),
        lambda: generate(bench, 4 * BATCH, 5, warm=True, tokens=16),
        lambda: generate(bench, 64, 5, warm=True),
        lambda: generate(bench, 4 * BATCH, 2, warm=False),
    ):
        try:
            for line in section():
                say(line)
        except (RuntimeError, ValueError, OSError):
            say(traceback.format_exc())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a toy shape and few requests")
    tiny, began = parser.parse_args().tiny, time.perf_counter()
    sizes, scale = (TINY, 32) if tiny else (FULL, 1)
    patience = TINY_PATIENCE if tiny else 1
    faulthandler.dump_traceback_later(LIMIT_S * patience, exit=True)

    with tempfile.TemporaryDirectory() as name:
        disk = write_policies(Path(name), sizes)
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        say(f"{where}, torch {torch.__version__}; policies written in {time.perf_counter() - began:.0f} s")
        config = EngineConfig(kind="sglang", batch=BATCH, memory=0.4, timeout_s=240.0)
        engine = SGLangEngine(config, threads=os.cpu_count() or 1)
        bench = Bench(engine, sizes["vocab_size"], scale, LAST_S * patience)
        try:
            say(f"SGLang {engine.version}: started and proven in {bench.update(disk[0], {}):.0f} s")
            bench.started = time.perf_counter()
            measure(bench, disk)
        finally:
            engine.close()
        say(
            f"{time.perf_counter() - began:.0f} s in all, {time.perf_counter() - bench.started:.0f} s of them measuring"
        )


if __name__ == "__main__":
    main()
