"""The arguments SGLang is started with. Where its versions differ in names, they differ here."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from data.config import EngineConfig
from models.folder import read_config
from models.weights import stored_dtype

HEADROOM = 16  # positions SGLang wants for itself; answers are limited by us, to the model's own context

OURS = {"model_path", "weight_version", "tp_size", "pp_size", "dp_size", "skip_tokenizer_init"}


class EngineMissing(ImportError):
    """SGLang is not installed, or cannot run on this machine."""


def prepare_environment(device: str) -> None:
    """What has to be in the environment before `sglang` is imported. Raises EngineMissing, with what to install."""
    if importlib.util.find_spec("sglang") is None:
        raise EngineMissing(
            "engine.kind = 'sglang': the package sglang is not installed; `uv sync --extra sglang` installs it "
            "(pip: 'rollbook[sglang]'), or set engine.kind = 'transformers'"
        )
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")  # by HEADROOM, no more
    if device == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        try:
            import sgl_kernel  # noqa: F401  # ty: ignore[unresolved-import]
        except (ImportError, OSError) as error:
            raise EngineMissing(
                f"engine.kind = 'sglang' on a machine without a GPU: sgl_kernel, which the package sglang brings, "
                f"cannot be loaded ({type(error).__name__}); set engine.kind = 'transformers'"
            ) from error


def _dtype(config: EngineConfig, folder: Path, device: str) -> str:
    """Raises ValueError for one that SGLang's kernels do not have."""
    dtype = config.dtype or stored_dtype(folder)
    if device == "cuda" and dtype == "float32":
        raise ValueError(
            f"{folder}: float32 weights, which SGLang's kernels for GPUs do not take; set engine.dtype = 'bfloat16' "
            "(the trainer keeps float32, and every iteration's record says how far apart the two are)"
        )
    return dtype


def server_arguments(
    config: EngineConfig, folder: Path, device: str, tag: str, threads: int, text: bool
) -> dict[str, Any]:
    """text: whether it is to watch for stop strings, for which it needs the tokenizer.

    Of `sglang.Engine`, or as flags of its server. `engine.arguments` has the last word.
    """
    chosen: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": not text,  # token ids only
        "dtype": _dtype(config, folder, device),
        "context_length": read_config(folder).context + HEADROOM,
        "weight_version": tag,
        "max_running_requests": config.batch,
        "mem_fraction_static": config.memory,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "log_level": "warning",
        "random_seed": 0,
        **(_on_cpu(config, threads) if device == "cpu" else _on_gpu(config)),
    }
    if taken := sorted(OURS & set(config.arguments)):
        raise ValueError(
            f"engine.arguments.{taken[0]}: it is set by Rollbook, which serves a policy on one GPU; remove it"
        )
    if config.cache_tokens is not None:
        chosen["max_total_tokens"] = config.cache_tokens
    if config.deterministic:
        chosen["enable_deterministic_inference"] = True
    return chosen | config.arguments


def _on_gpu(config: EngineConfig) -> dict[str, Any]:
    # Above the largest captured graph throughput halves: no more requests run than that.
    return {"attention_backend": "triton", "cuda_graph_max_bs_decode": config.batch}


def _on_cpu(config: EngineConfig, threads: int) -> dict[str, Any]:
    if config.deterministic:
        raise ValueError("engine.deterministic on a CPU: SGLang has it on GPUs only; set it to false")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": 65536,
    }
