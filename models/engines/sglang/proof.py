"""Whether an SGLang serves just the weights of a folder: by checksum of each parameter, and by what it computes.

The checksums are exact, and catch what no log-prob shows: an update of 1e-6, a shard that was not read. The log-probs
come from `transformers`, another implementation, so they catch what no checksum shows: weights in the right place
that are used in the wrong way, prefixes computed under the old ones, a CUDA graph that reads elsewhere.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models.weights import (
    EMBEDDING,
    HEAD,
    WeightsMismatch,
    read_tensors,
    require_digest,
    tensors_digest,
    without_tied_head,
)

FUSED = {  # SGLang's parameter -> the parts it is made of, in order
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
EXPERTS = ".experts."  # their layout is SGLang's own: only what is computed with them is compared
VOCAB_MULTIPLE = 64  # SGLang pads embedding and head with zeros
PROBES, PROMPT, ANSWER = 4, 12, 8
# |SGLang's - transformers'| log-prob on the probes: mean and largest. In bf16, on an H200, .056 and .17 were measured
# (SmolLM2-135M) and .008 and .039 (Qwen3-0.6B's shape). Checksums find what is smaller.
TOLERANCES = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.2, 1.5), torch.float16: (0.05, 0.4)}


@dataclass(frozen=True)
class Weights:
    """A folder's tensors on the engine's device, proven to be those of the digest and to fit the model."""

    digest: str
    tensors: Mapping[str, torch.Tensor]
    model: PreTrainedModel

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @property
    def device(self) -> str:
        """cpu or cuda"""
        return next(iter(self.tensors.values())).device.type

    @cached_property
    def checksums(self) -> dict[str, str]:
        """Parameter, as SGLang fuses them -> checksum, as SGLang computes it on the same kind of device."""
        from sglang.srt.managers.mm_utils import tensor_hash  # ty: ignore[unresolved-import]

        return {name: f"{tensor_hash(tensor):016x}" for name, tensor in fuse(self.tensors).items()}

    @torch.inference_mode()
    def logprobs(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Of each answer's tokens, [tokens] float32, at temperature 1."""
        streams = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
        # Padding at the right: no token sees what comes after it.
        padded = torch.nn.utils.rnn.pad_sequence(streams, batch_first=True).to(self.model.device)
        logp = self.model(padded, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        chosen = logp.gather(2, padded[:, 1:, None])[..., 0].cpu().numpy()
        spans = [slice(len(p) - 1, len(p) + len(a) - 1) for p, a in zip(prompts, answers, strict=True)]
        return [row[span] for row, span in zip(chosen, spans, strict=True)]


def read_weights(folder: Path, digest: str, device: str, dtype: str | None, hashed: bool = False) -> Weights:
    """dtype: that SGLang serves them in; None: their own. hashed: the files are known to have the digest.

    Raises WeightsMismatch for weights of another digest, that do not fit the model, or that are not finite.
    """
    try:
        with ThreadPoolExecutor(1, "read") as beside:
            reading = beside.submit(read_tensors, folder, device)
            model = _empty(folder, device)
        tensors = reading.result()
    except (OSError, ValueError) as error:
        raise WeightsMismatch(f"{folder}: cannot be loaded ({error}); publish that policy again") from error
    if not hashed:
        require_digest(f"engine, loaded from {folder}", tensors_digest(tensors), digest)
    if dtype is not None:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    _fill(model, folder, tensors)
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()  # waits for the GPU once
    if not all(finite):
        name = list(tensors)[finite.index(False)]
        raise WeightsMismatch(f"{folder}: {name} is not finite; go back to an earlier version")
    return Weights(digest, tensors, model)


def _empty(folder: Path, device: str) -> PreTrainedModel:
    """`transformers`' model, without weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # it has no place in files
    return model.eval()


def _fill(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put these tensors into the model, without a copy."""
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    if model.config.tie_word_embeddings:
        wanted.pop(HEAD, None)
        given = {name: given[name] for name in without_tied_head(tensors)}
    if wrong := sorted(wanted.items() ^ given.items()):
        name = wrong[0][0]
        raise WeightsMismatch(
            f"{folder}: {name} has shape {given.get(name, 'none')} where the model's is {wanted.get(name, 'none')}; "
            "the weights must be those of config.json, no more and no fewer: publish that policy again"
        )
    model.load_state_dict({name: tensors[name] for name in given}, strict=False, assign=True)
    model.tie_weights()


def can_hash(theirs: str, ours: str) -> bool:
    """Whether checksums can be compared: SGLang's own function makes them, and makes others on another device."""
    return theirs == ours and importlib.util.find_spec("sglang") is not None


def fuse(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as SGLang holds them, less those of experts."""
    parts = {part: (whole, order) for whole, order in FUSED.items() for part in order}
    plain, joined = {}, {}
    for name, tensor in without_tied_head(tensors).items():
        if EXPERTS in name:
            continue
        layer, _, rest = name.rpartition(".")
        found = next(((layer.removesuffix(part), part) for part in parts if layer.endswith(part)), None)
        if found is None:
            plain[name] = _padded(tensor) if name in (EMBEDDING, HEAD) else tensor
        else:
            whole, order = parts[found[1]]
            joined[f"{found[0]}{whole}.{rest}"] = [tensors[f"{found[0]}{part}.{rest}"] for part in order]
    return plain | {name: torch.cat(pieces) for name, pieces in joined.items()}


def _padded(table: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(table, (0, 0, 0, -len(table) % VOCAB_MULTIPLE))


def require_same_parameters(holder: str, theirs: Mapping[str, str], weights: Weights) -> None:
    """Raises WeightsMismatch, naming the first parameters that differ. Experts' are left out (see EXPERTS)."""
    ours = weights.checksums
    tied = HEAD not in ours and theirs.get(HEAD) == theirs.get(EMBEDDING)
    told = {name: value for name, value in theirs.items() if EXPERTS not in name and not (tied and name == HEAD)}
    if names := sorted({name for name, _ in ours.items() ^ told.items()}):
        raise WeightsMismatch(
            f"{holder}: {len(names)} parameters are not those of digest {weights.digest}, first "
            f"{', '.join(names[:3])}; the update did not arrive as a whole"
        )


def probes(vocab: int) -> list[list[int]]:
    """Prompts of random ids, always the same for a vocabulary."""
    rng = np.random.default_rng(vocab)
    return rng.integers(0, vocab, (PROBES, PROMPT)).tolist()


def require_same_logprobs(
    holder: str, theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], dtype: torch.dtype
) -> None:
    """Raises WeightsMismatch if the engine's log-probs are further from `transformers`' than TOLERANCES."""
    gap = np.abs(np.concatenate(theirs) - np.concatenate(ours))
    mean, largest = TOLERANCES[dtype]
    if not (gap.mean() <= mean and gap.max() <= largest):  # NaN is no match
        raise WeightsMismatch(
            f"{holder}: its log-probs are {gap.mean():.2g} (mean) and {gap.max():.2g} (largest) away from those of the "
            f"same weights in transformers; {mean:g} and {largest:g} may be rounding: it computes with others"
        )
