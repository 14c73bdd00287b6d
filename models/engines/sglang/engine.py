"""The SGLang rollout engine: replicas that serve one policy, weights that are proven after each sync."""

import functools
import importlib.metadata
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data.config import EngineConfig
from models.engines.contract import (
    GREEDY,
    SCALED,
    Completion,
    EngineHealth,
    NotReady,
    Request,
    SamplingParams,
    require_sane,
)
from models.engines.sglang import proof, wire
from models.engines.sglang.arguments import prepare_environment
from models.engines.sglang.backend import Answer, Backend, BackendLost, BackendRefused
from models.engines.sglang.replica import Wanted
from models.engines.sglang.replicas import Replicas
from models.folder import FolderConfig, read_config
from models.weights import WeightsMismatch, stored_dtype

log = logging.getLogger("rollbook")
PROBE_S = 600.0  # the first tokens after a start may wait for kernels that are compiled


@dataclass(frozen=True)
class _Serving:
    folder: Path
    config: FolderConfig
    shape: bytes  # what another policy must share to be loaded in place: config.json and dtype
    version: int
    digest: str

    @property
    def tag(self) -> str:
        """What SGLang calls these weights; the version is ours to keep, since equal weights may get another one."""
        return self.digest[:32]


class SGLangEngine:
    """A RolloutEngine (contract.py). Weights keep the files' dtype.

    Sampling seeds are honoured only with `engine.deterministic`; else SGLang draws from its own stream, and a repeated
    call gives other tokens of the same distribution.
    """

    name = "sglang"

    def __init__(self, config: EngineConfig, threads: int, text: bool = False) -> None:
        """text: whether stop strings will be asked for."""
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if not config.urls:
            prepare_environment(self._device)
        self.version = _version()
        self._config, self._text = config, text
        self._replicas = Replicas(config, self._device, threads, text)
        self._serving: _Serving | None = None

    @property
    def policy_digest(self) -> str | None:
        return self._serving.digest if self._serving else None

    def logprob_semantics(self, params: SamplingParams) -> str:
        return GREEDY if params.greedy else SCALED

    def health(self) -> EngineHealth:
        serving = self._serving
        return EngineHealth(
            ready=serving is not None,
            engine=f"{self.name} {self.version}",
            device=self._device,
            policy_version=serving.version if serving else None,
            policy_digest=serving.digest if serving else None,
            context=serving.config.context if serving else None,
        )

    def update_weights(self, folder: Path, version: int, digest: str, in_memory: bool = False) -> None:
        """See the contract. Weights that are served already are not loaded again; new ones are proven on each replica.

        Raises WeightsMismatch also if a replica does not compute with them; it then gets the old ones back.
        """
        before = self._serving
        if before is not None and before.digest == digest:
            self._serving = replace(before, version=version)
            return
        weights = self._read(folder, digest, hashed=in_memory)
        shape = (folder / "config.json").read_bytes() + stored_dtype(folder).encode()
        new = _Serving(folder, read_config(folder), shape, version, digest)
        try:
            self._bring(new, weights, in_memory)
        except (BackendRefused, WeightsMismatch) as refused:
            self._restore(before)
            raise WeightsMismatch(str(refused)) from refused

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """See the contract. What a replica that died had not finished is asked of another, or of its successor."""
        serving = self._serving
        if serving is None:
            raise NotReady("the engine has no weights yet; call update_weights first")
        if params.stop and not self._text:
            raise ValueError("sampling.stop: this engine was started without a tokenizer; start it with text=True")
        for request in requests:
            require_sane(request, serving.config.vocab, serving.config.context)
        call = uuid.uuid4().hex[:8]  # SGLang wants names that it never heard before
        asked = [wire.ask(r, params, serving.config.context, f"{r.trajectory_id}#{call}") for r in requests]
        answers = self._replicas.generate(asked)
        return [
            wire.completion(request, answer, params.eos_ids, serving.tag, serving.version, serving.digest)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def close(self) -> None:
        self._serving = None
        self._replicas.close()

    def _bring(self, new: _Serving, weights: proof.Weights, in_memory: bool = False) -> None:
        alike = self._serving is not None and self._serving.shape == new.shape
        self._serving = None  # until it is proven
        prove = _Proof(new, lambda: self._read(new.folder, new.digest), weights)
        with ThreadPoolExecutor(1, "checksums") as beside:
            if alike and proof.can_hash(self._device, weights.device):
                beside.submit(lambda: weights.checksums)  # they are there when SGLang has loaded
            self._replicas.load(Wanted(new.folder, new.tag, prove, prove.tensors if in_memory else lambda: None), alike)
        prove.held = None  # a replica brought back later is proven by the files
        self._serving = new

    def _read(self, folder: Path, digest: str, hashed: bool = False) -> proof.Weights:
        return proof.read_weights(folder, digest, self._device, self._config.dtype, hashed)

    def _restore(self, before: _Serving | None) -> None:
        """After a sync that failed: the old weights, proven, or none at all."""
        if before is None:
            return self._replicas.close()
        try:
            self._serving = before
            self._bring(before, self._read(before.folder, before.digest))
        except (BackendLost, BackendRefused, WeightsMismatch, OSError) as lost:
            log.warning("the engine's earlier weights cannot be had back (%s); it is started afresh", lost)
            self._serving = None
            self._replicas.close()


@dataclass
class _Proof:
    """Raises WeightsMismatch unless a backend serves the weights under their tag, and computes with them."""

    new: _Serving
    read: Callable[[], proof.Weights]
    held: proof.Weights | None

    def tensors(self) -> Mapping[str, torch.Tensor] | None:
        return self.held.tensors if self.held else None

    def __call__(self, backend: Backend) -> None:
        holder, tag = f"SGLang, loaded from {self.new.folder}", self.new.tag
        if (served := backend.serving()) != tag:
            raise WeightsMismatch(f"{holder}: it says that it serves {served!r}, not {tag!r}; the sync did not arrive")
        weights = self.held or self.read()
        if proof.can_hash(backend.device, weights.device):
            for rank in backend.checksums():
                proof.require_same_parameters(holder, rank, weights)
        else:
            _say_unhashed(backend.device, weights.device)
        self._compare_logprobs(holder, backend, weights)

    def _compare_logprobs(self, holder: str, backend: Backend, weights: proof.Weights) -> None:
        prompts = proof.probes(self.new.config.vocab)
        answers: dict[int, Answer] = {}
        call = uuid.uuid4().hex[:8]
        asked = [wire.probe(f"probe {i} #{call}", prompt, proof.ANSWER) for i, prompt in enumerate(prompts)]
        backend.generate(asked, answers.__setitem__, timeout_s=PROBE_S)
        said = [wire.tokens_of(answers[place]) for place in range(len(prompts))]
        ours = weights.logprobs(prompts, [ids.tolist() for ids, _ in said])
        proof.require_same_logprobs(holder, [logprobs for _, logprobs in said], ours, weights.dtype)


@functools.cache
def _say_unhashed(theirs: str, ours: str) -> None:
    """Once. SGLang's checksums of the same bytes differ between kinds of device."""
    log.warning(
        "SGLang computes on %s, this process on %s: checksums cannot be compared, so weights are proven by their "
        "version and by log-probs only",
        theirs,
        ours,
    )


def _version() -> str:
    """Of the package here; servers elsewhere have one of their own."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "remote"
