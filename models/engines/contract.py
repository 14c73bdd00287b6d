"""What a rollout engine takes and gives. Stream ids and sampling in; ids, log-probs, reason and policy digest out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

# Values of `logprob_semantics`: of which distribution the returned log-probs are.
SAMPLED = "sampled"  # the one sampled from: temperature, then top_k, then top_p, renormalised
SCALED = "scaled: softmax at the sampling temperature, before top_k and top_p"  # SGLang's top_p is of all tokens
GREEDY = "greedy: softmax at temperature 1, before top_p and top_k"  # argmax is no draw; of the untouched softmax


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer."""


class NotReady(RuntimeError):
    """An engine that was asked to generate before it got weights."""


class NonFiniteLogits(RuntimeError):
    """Weights that give NaN or infinite logits."""


@dataclass(frozen=True)
class SamplingParams:
    """Raises ValueError for a value outside its range."""

    temperature: float  # 0: greedy
    top_p: float  # (0, 1]; 1: off
    top_k: int  # 0: off
    max_new_tokens: int
    eos_ids: tuple[int, ...]  # any of them ends an answer, and is part of it; none: only the limit does
    stop: tuple[str, ...] = ()  # so does the token with which any of these is in the answer's text

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "finite, 0 (greedy) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]; 1 switches it off")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(all(self.stop), "stop", list(self.stop), "strings of at least one character")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _require(fine: bool, name: str, value: object, rule: str) -> None:
    if not fine:
        raise ValueError(f"sampling.{name} is {value}; it must be {rule}")


@dataclass(frozen=True)
class Request:
    trajectory_id: str
    token_ids: np.ndarray  # [prompt] int32: the stream so far
    seed: int  # in [0, 2^64): the trajectory's own random stream


@dataclass(frozen=True)
class Completion:
    trajectory_id: str
    token_ids: np.ndarray  # [new] int32, the sampled eos included
    logprobs: np.ndarray  # [new] float32, see logprob_semantics
    finish_reason: Literal["stop", "length"]  # stop: an eos was sampled, or the text came to a stop string
    policy_version: int
    policy_digest: str


@dataclass(frozen=True)
class EngineHealth:
    ready: bool  # has weights
    engine: str  # name and version
    device: str
    policy_version: int | None
    policy_digest: str | None
    context: int | None  # tokens of prompt and answer together


class RolloutEngine(Protocol):
    """An engine serves exactly one policy at a time and says which with every completion."""

    name: str
    version: str

    @property
    def policy_digest(self) -> str | None:
        """Digest of the weights it serves (models.weights.tensors_digest); None before the first."""
        ...

    def logprob_semantics(self, params: SamplingParams) -> str:
        """SAMPLED, SCALED or GREEDY: of which distribution the log-probs are, to be stored beside them."""
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion per request, in the same order.

        Raises, before anything is generated, PromptTooLong, NotReady, or ValueError for an impossible request.
        """
        ...

    def update_weights(
        self, folder: Path, version: int, digest: str, in_memory: bool = False, verified: bool = False
    ) -> None:
        """Serves the folder's weights from now on. in_memory: it lies in memory, and whoever wrote it hashed it.

        verified: its files were just found to be those that the record has for this digest.
        Raises WeightsMismatch if what was loaded has another digest; the old weights then stay and serve on.
        """
        ...

    def health(self) -> EngineHealth: ...


def require_sane(request: Request, vocab: int, context: int) -> None:
    """Raises PromptTooLong or ValueError, naming the trajectory, for a request that no engine can serve."""
    ids, name = request.token_ids, f"trajectory {request.trajectory_id}"
    if len(ids) == 0:
        raise ValueError(f"{name}: an empty prompt; it needs at least one token")
    require_room(name, len(ids), context)
    if (outside := ids[(ids < 0) | (ids >= vocab)]).size:
        raise ValueError(f"{name}: token id {outside[0]}; ids must be in [0, {vocab}): use the policy's own tokenizer")
    if not 0 <= request.seed < 2**64:
        raise ValueError(f"{name}: seed {request.seed}; it must be in [0, 2^64)")


def require_room(name: str, length: int, context: int) -> None:
    """Raises PromptTooLong, naming the prompt or trajectory, unless a prompt of `length` tokens leaves room for one."""
    if length >= context:
        raise PromptTooLong(
            f"{name}: the prompt has {length} tokens, the model's context {context}; the prompt must leave room for an "
            f"answer: shorten it to at most {context - 1} tokens, drop it, or take a model with a longer context"
        )
