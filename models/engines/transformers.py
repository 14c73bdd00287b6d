"""The `transformers` rollout engine: batched sampling with a key-value cache, on the CPU or one GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.engines.contract import (
    GREEDY,
    SAMPLED,
    Completion,
    EngineHealth,
    NonFiniteLogits,
    NotReady,
    Request,
    SamplingParams,
    require_sane,
)
from models.engines.decoding import Decoded, decode
from models.engines.sampling import uniforms
from models.folder import FolderConfig, read_config
from models.tokenizer import Tokenizer, tokenizer_of
from models.weights import WeightsMismatch, read_tensors, require_digest, stored_dtype, stored_shapes, tensors_digest


@dataclass(frozen=True)
class _Serving:
    folder: Path
    model: PreTrainedModel
    shape: bytes  # what another policy must share for its weights to fit into the model: config.json and dtype
    config: FolderConfig
    version: int
    digest: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Only stop strings need it."""
        return tokenizer_of(self.folder)


class TransformersEngine:
    """A RolloutEngine (contract.py). Weights keep the files' dtype; a GPU is used where there is one.

    The batch plan is a function of the requests' lengths and `batch`: the same call gives the same bytes on the CPU.
    Another `batch` changes the last bits of the logits, and so, once in a while, a token whose draw was a close call.
    """

    name = "transformers"
    version: str = transformers.__version__

    def __init__(self, batch: int, threads: int) -> None:
        """batch: trajectories decoded together; threads: CPU threads, of the whole process."""
        if batch < 1:
            raise ValueError(f"engine.batch is {batch}; it must be at least 1")
        torch.set_num_threads(threads)
        self._batch = batch
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._serving: _Serving | None = None
        self._spare: _Serving | None = None  # that served before: the next weights go into its model

    @property
    def policy_digest(self) -> str | None:
        return self._serving.digest if self._serving else None

    def logprob_semantics(self, params: SamplingParams) -> str:
        return GREEDY if params.greedy else SAMPLED

    def health(self) -> EngineHealth:
        serving = self._serving
        return EngineHealth(
            ready=serving is not None,
            engine=f"{self.name} {self.version}",
            device=str(self._device),
            policy_version=serving.version if serving else None,
            policy_digest=serving.digest if serving else None,
            context=serving.config.context if serving else None,
        )

    def update_weights(self, folder: Path, version: int, digest: str, in_memory: bool = False) -> None:
        """See the contract. Weights that are served already are not loaded again; all others are hashed here."""
        del in_memory
        if self._serving and self._serving.digest == digest:
            self._serving = replace(self._serving, version=version)
            return
        config, shape, spare = read_config(folder), _shape(folder), self._spare
        self._spare = None  # half filled, if this fails
        if spare is None or spare.shape != shape or stored_shapes(folder).keys() - spare.model.state_dict().keys():
            model = _load(folder, self._device)
        else:
            model = _refill(spare.model, folder)
        # What the model holds now, not what the file says: a tensor that never arrived shows here.
        require_digest(f"engine, loaded from {folder}", tensors_digest(model.state_dict()), digest)
        self._spare = self._serving
        self._serving = _Serving(folder, model, shape, config, version, digest)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """See the contract. Batches are cut from the requests in order of prompt length, to spare padding."""
        if self._serving is None:
            raise NotReady("the engine has no weights yet; call update_weights first")
        for request in requests:
            require_sane(request, self._serving.config.vocab, self._serving.config.context)
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].token_ids))
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), self._batch):
            chosen = order[start : start + self._batch]
            completions |= zip(chosen, _complete(self._serving, [requests[i] for i in chosen], params), strict=True)
        return [completions[index] for index in range(len(requests))]


def _complete(serving: _Serving, requests: list[Request], params: SamplingParams) -> list[Completion]:
    room = [min(params.max_new_tokens, serving.config.context - len(r.token_ids)) for r in requests]
    streams = [uniforms(request.seed, count) for request, count in zip(requests, room, strict=True)]
    text = serving.tokenizer.decode if params.stop else None
    decoded = decode(serving.model, [r.token_ids for r in requests], streams, params, text)
    return [_completion(serving, request, row) for request, row in zip(requests, decoded, strict=True)]


def _completion(serving: _Serving, request: Request, row: Decoded) -> Completion:
    if not np.isfinite(row.logprobs).all():
        step = int(np.flatnonzero(~np.isfinite(row.logprobs))[0])
        raise NonFiniteLogits(
            f"{request.trajectory_id}: logits of new token {step} are not finite under policy version "
            f"{serving.version} (digest {serving.digest}); its weights are broken: go back to an earlier version"
        )
    reason = "stop" if row.stopped else "length"
    return Completion(request.trajectory_id, row.token_ids, row.logprobs, reason, serving.version, serving.digest)


def _shape(folder: Path) -> bytes:
    try:
        return (folder / "config.json").read_bytes() + stored_dtype(folder).encode()
    except (OSError, ValueError) as error:
        raise _unloadable(folder, error) from error


def _load(folder: Path, device: torch.device) -> PreTrainedModel:
    """The folder's model, in the dtype of its files. Raises WeightsMismatch for files that cannot be its weights."""
    transformers.utils.logging.disable_progress_bar()
    try:
        dtype = getattr(torch, stored_dtype(folder))
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _unloadable(folder, error) from error
    for parameter in model.parameters():  # still the mapped file: whoever wrote to it would change the policy
        parameter.data = parameter.data.clone()
    return model.to(device).eval()


def _refill(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Sooner than to build a model again. A weight that is not there the digest shows."""
    try:
        model.load_state_dict(read_tensors(folder), strict=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unloadable(folder, error) from error
    return model


def _unloadable(folder: Path, error: Exception) -> WeightsMismatch:
    return WeightsMismatch(f"{folder}: cannot be loaded ({error}); publish that policy again")
