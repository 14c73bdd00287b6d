"""The agent loop against the same engine in one turn: as many prompts, as many sampled tokens.

    python tests/benchmarks/agents.py

Two turns of 12 tokens with a tool's answer in between, in threads, against one turn of 24. The second turn reads the
whole stream again, which is the engine's part of what two turns cost; the rest is the loop's own.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from models.agents.loop import Play, Rules, Trajectory
from models.engines.contract import Completion, Request, SamplingParams
from models.engines.transformers import TransformersEngine
from models.environments.contract import Environment, Episode, Reply
from models.environments.spec import EnvironmentSpec
from models.environments.worlds import Environments, Unanswered, Worlds
from models.tokenizer import Tokenizer
from models.toy import write_toy
from models.weights import read_tensors, tensors_digest

TRAJECTORIES, TOKENS, REPEATS, THREADS = 256, 24, 5, 2
PROMPT = ({"role": "user", "content": "What is 12+34?"},)


class Timed:
    """The engine, its answers taken as finished turns; how long it took."""

    def __init__(self, folder: Path) -> None:
        self._engine, self.seconds = TransformersEngine(128, THREADS), 0.0
        self._engine.update_weights(folder, 0, tensors_digest(read_tensors(folder)))

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        started = time.perf_counter()
        said = self._engine.generate(requests, params)
        self.seconds += time.perf_counter() - started
        return [replace(completion, finish_reason="stop") for completion in said]


class Answers(Environment):
    """A tool's answer, and the end."""

    def __init__(self) -> None:
        self._turns = 0

    def step(self, said: str) -> Reply:
        self._turns += 1
        return Reply(done=True) if self._turns == 2 else Reply(({"role": "tool", "content": "46"},))


class Spec(EnvironmentSpec):
    """Names the class above, which lies in no file of a user's."""

    isolate = False
    make = Answers


def measure(engine: Timed, tokenizer: Tokenizer, worlds: Worlds, turns: int) -> tuple[float, float]:
    """Seconds of all, and of them the engine's."""
    params = SamplingParams(1.0, 1.0, 0, TOKENS // turns, eos_ids=())
    trajectories = [Trajectory(Episode(f"q@{i}/0", PROMPT, {}, i)) for i in range(TRAJECTORIES)]
    engine.seconds, started = 0.0, time.perf_counter()
    sampled = Play(engine, tokenizer, params, worlds, Rules(max_turns=2)).run(trajectories)  # ty: ignore
    seconds = time.perf_counter() - started
    assert sampled == TRAJECTORIES * TOKENS and {t.status for t in trajectories} == {"ok"}
    return seconds, engine.seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_toy(Path(folder))
        engine, tokenizer = Timed(Path(folder)), Tokenizer(Path(folder))
        rows = []
        for _ in range(REPEATS + 1):
            one = measure(engine, tokenizer, Unanswered(), 1)
            two = measure(engine, tokenizer, Environments(Spec("tools"), 30.0), 2)
            rows.append((*one, *two))
    one, one_engine, two, two_engine = map(statistics.median, zip(*rows[1:], strict=True))
    tokens = TRAJECTORIES * TOKENS
    print(f"one turn   {tokens / one:8.0f} tokens/s, {100 * (1 - one_engine / one):4.1f} % beside the engine")
    print(f"two turns  {tokens / two:8.0f} tokens/s, {100 * (1 - two_engine / two):4.1f} % beside the engine")
    print(f"the loop: {one / two:.2f} of one turn's tokens/s; the engine alone would give {one / two_engine:.2f}")


if __name__ == "__main__":
    main()
