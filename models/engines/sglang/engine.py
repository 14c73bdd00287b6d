"""The SGLang rollout engine: replicas that serve one policy, weights that are proven after each sync."""

import functools
import importlib.metadata
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
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
from models.engines.sglang.backend import Answer, Backend, BackendRefused
from models.engines.sglang.replicas import Replicas
from models.folder import FolderConfig, read_config
from models.weights import WeightsMismatch, stored_dtype

log = logging.getLogger("rollbook")


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

    def __init__(self, config: EngineConfig, threads: int) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if not config.urls:
            prepare_environment(self._device)
        self.version = importlib.metadata.version("sglang")
        self._config = config
        self._replicas = Replicas(config, self._device, threads)
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

    def update_weights(self, folder: Path, version: int, digest: str) -> None:
        """See the contract. Weights that are served already are not loaded again; new ones are proven on each replica.

        Raises WeightsMismatch also if a replica does not compute with them; it then gets the old ones back.
        """
        before = self._serving
        if before is not None and before.digest == digest:
            self._serving = _Serving(before.folder, before.config, before.shape, version, digest)
            return
        weights = proof.read_weights(folder, digest, self._device)
        shape = (folder / "config.json").read_bytes() + stored_dtype(folder).encode()
        new = _Serving(folder, read_config(folder), shape, version, digest)
        try:
            self._bring(new, weights)
        except (BackendRefused, WeightsMismatch) as refused:
            self._restore(before)
            raise WeightsMismatch(str(refused)) from refused

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """See the contract. What a replica that died had not finished is asked of another, or of its successor."""
        serving = self._serving
        if serving is None:
            raise NotReady("the engine has no weights yet; call update_weights first")
        for request in requests:
            require_sane(request, serving.config.vocab, serving.config.context)
        call = uuid.uuid4().hex[:8]  # SGLang wants names that it never heard before
        asked = [wire.ask(r, params, serving.config.context, f"{r.trajectory_id}#{call}") for r in requests]
        answers = self._replicas.generate(asked)
        return [
            wire.completion(request, answer, serving.tag, serving.version, serving.digest)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def close(self) -> None:
        self._serving = None
        self._replicas.close()

    def _bring(self, new: _Serving, weights: proof.Weights) -> None:
        alike = self._serving is not None and self._serving.shape == new.shape
        self._serving = None  # until it is proven
        self._replicas.load(new.folder, new.tag, in_place=alike, prove=lambda b: _prove(b, new, weights))
        self._serving = new

    def _restore(self, before: _Serving | None) -> None:
        """After a sync that failed: the old weights, proven, or none at all."""
        if before is None:
            return self._replicas.close()
        try:
            self._serving = before
            self._bring(before, proof.read_weights(before.folder, before.digest, self._device))
        except (BackendRefused, WeightsMismatch, OSError) as lost:
            log.warning("the engine's earlier weights cannot be had back (%s); it is started afresh", lost)
            self._serving = None
            self._replicas.close()


def _prove(backend: Backend, new: _Serving, weights: proof.Weights) -> None:
    """Raises WeightsMismatch unless it serves these weights under the tag, and computes with them."""
    holder = f"SGLang, loaded from {new.folder}"
    if (served := backend.serving()) != new.tag:
        raise WeightsMismatch(f"{holder}: it says that it serves {served!r}, not {new.tag!r}; the sync did not arrive")
    if backend.device == weights.device:
        for rank in backend.checksums():
            proof.require_same_parameters(holder, rank, weights)
    else:
        _say_unhashed(backend.device, weights.device)
    prompts = proof.probes(new.config.vocab)
    answers: dict[int, Answer] = {}
    call = uuid.uuid4().hex[:8]
    asked = [wire.probe(f"probe {i} #{call}", prompt, proof.ANSWER) for i, prompt in enumerate(prompts)]
    backend.generate(asked, answers.__setitem__, timeout_s=600.0)
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
