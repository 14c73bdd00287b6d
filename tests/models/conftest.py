"""Shared by the Megatron tests: one training world per session, tiny Hugging Face models, random trajectories."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.config import CriticConfig, EngineConfig, LayoutConfig, OptimizerConfig
from models.megatron.contract import Setup, TrainBatch
from ops.ragged import Ragged, from_rows

MakeModel = Callable[..., Path]
VOCAB = 64
STAND_IN = Path(__file__).parents[1] / "sglang_cpu"


@pytest.fixture(scope="session")
def sharp_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with matrices six times as large: next-token distributions far from uniform."""
    from models.toy import write_toy
    from models.weights import read_tensors, write_tensors

    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder)
    write_tensors(folder, {name: t * 6 if t.ndim == 2 else t for name, t in read_tensors(folder).items()})
    return folder


@pytest.fixture(scope="session")
def sglang_on_cpu() -> None:
    """SGLang's processes, and this one, take the stand-in for its compiled kernels."""
    sys.path.insert(0, str(STAND_IN))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", os.getcwd())])


@pytest.fixture(scope="session")
def engine_of(request: pytest.FixtureRequest, sharp_toy: Path, digest_of) -> Iterator[Callable[[str], Any]]:
    """engine_of(kind): the session's engine of that kind, which serves the sharp toy as version 3."""
    from tasks.roles import make_engine

    engines: dict[str, Any] = {}

    def engine(kind: str) -> Any:
        if kind == "sglang":
            request.getfixturevalue("sglang_on_cpu")
        if kind not in engines:
            engines[kind] = make_engine(EngineConfig(kind=kind, batch=32), 2, text=True)
            engines[kind].update_weights(sharp_toy, 3, digest_of(sharp_toy))
        return engines[kind]

    yield engine
    if "sglang" in engines:
        engines["sglang"].close()


@pytest.fixture(scope="session")
def rendezvous() -> Callable[[], str]:
    def address() -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    return address


@pytest.fixture(scope="session")
def world(rendezvous: Callable[[], str]) -> tuple[int, int, str, int, LayoutConfig]:
    """The arguments of the session's one training world; its shim is installed before any model is loaded."""
    return 0, 1, rendezvous(), 1, LayoutConfig()


@pytest.fixture(scope="session")
def device(world: tuple[int, int, str, int, LayoutConfig]) -> torch.device:
    from models.megatron import ranks

    return ranks.join(*world)


@pytest.fixture
def trainer(world: tuple[int, int, str, int, LayoutConfig]):
    """A trainer that holds nothing yet."""
    from models.megatron.trainer import Trainer

    return Trainer(*world)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """make_model(family, tied=…, seed=…, dtype=…, **config) -> a tiny model's folder, written by transformers."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    kinds = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    }

    def make(family: str = "qwen3", *, tied: bool = True, seed: int = 0, dtype=torch.float32, **more: object) -> Path:
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
        }
        if family == "qwen3_moe":
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
        if family.startswith("qwen3"):
            sizes["head_dim"] = 16  # not hidden / heads
        config_class, model_class = kinds[family]
        torch.manual_seed(seed)
        model = model_class(config_class(**(sizes | more)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms and biases away from 1 and 0, weights large enough for logits that differ.
                parameter.copy_(
                    torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.15)
                    + (1.0 if "norm" in name else 0)
                )
        folder = tmp_path_factory.mktemp(family)
        model.to(dtype).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def small_model(make_model: MakeModel) -> Path:
    return make_model("qwen3")


@pytest.fixture(scope="session")
def digest_of() -> Callable[[Path], str]:
    from models.weights import read_tensors, tensors_digest

    return lambda folder: tensors_digest(read_tensors(folder))


@pytest.fixture(scope="session")
def reference_logprobs() -> Callable[[Path, Ragged, float], tuple[Ragged, Ragged]]:
    """(log-probs, entropies) of every token but each row's first, by transformers, one row at a time, in float32."""
    from transformers import AutoModelForCausalLM

    def logprobs(folder: Path, streams: Ragged, temperature: float = 1.0) -> tuple[Ragged, Ragged]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        chosen, entropy = [], []
        for row in range(len(streams)):
            ids = torch.from_numpy(streams.row(row).astype(np.int64))
            with torch.no_grad():
                logp = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, -1)
            zero = torch.zeros(1)
            chosen.append(torch.cat([zero, logp[:-1].gather(1, ids[1:, None])[:, 0]]).numpy())
            entropy.append(torch.cat([zero, -(logp.exp() * logp).sum(-1)[:-1]]).numpy())
        return from_rows(chosen, np.float32), from_rows(entropy, np.float32)

    return logprobs


def _trajectories(seed: int, lengths: list[tuple[int, int]]) -> TrainBatch:
    """One row per (prompt, response) length, with random columns; every action token is a loss token."""
    rng = np.random.default_rng(seed)
    totals = [prompt + response for prompt, response in lengths]

    def column(scale: float, shift: float = 0.0) -> Ragged:
        return from_rows([rng.normal(size=n) * scale + shift for n in totals], np.float32)

    mask = from_rows([np.arange(p + r) >= p for p, r in lengths], bool)
    return TrainBatch(
        streams=from_rows([rng.integers(0, VOCAB, n) for n in totals], np.int32),
        action_mask=mask,
        loss_mask=mask,
        old_logprobs=column(0.3, -4.0),
        advantages=column(1.0),
        returns=column(1.0),
        old_values=column(0.5),
    )


@pytest.fixture(scope="session")
def trajectories() -> Callable[[int, list[tuple[int, int]]], TrainBatch]:
    return _trajectories


@pytest.fixture(scope="session")
def eight() -> TrainBatch:
    """Eight trajectories of different lengths; row 3 has no loss token, row 5 a masked-out one in its middle."""
    batch = _trajectories(1, [(3, 5), (6, 2), (2, 9), (4, 4), (30, 20), (5, 7), (1, 1), (3, 12)])
    keep = batch.loss_mask.values.copy()
    keep[batch.loss_mask.offsets[3] : batch.loss_mask.offsets[4]] = False
    keep[batch.loss_mask.offsets[5] + 8] = False
    return replace(batch, loss_mask=batch.loss_mask.like(keep))


@pytest.fixture(scope="session")
def make_setup() -> Callable[..., Setup]:
    """make_setup(critic kind, **optimizer) with rates at which a few steps show."""

    def make(kind: str = "none", critic: dict | None = None, **optimizer: object) -> Setup:
        rates = {"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1} | optimizer
        return Setup(CriticConfig(kind=kind, lr=3e-3, head_lr=2e-2, **(critic or {})), OptimizerConfig(**rates))

    return make
