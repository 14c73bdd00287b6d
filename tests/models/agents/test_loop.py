"""The agent loop at its edges: what ends a trajectory, and that nothing which ends one ends the others."""

import logging
import os
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.columns import ROLLOUTS
from data.config import SamplingConfig
from data.environment_config import EnvironmentConfig
from data.schema import validate
from models.agents.loop import Play, Rules, Trajectory
from models.engines.contract import SAMPLED, Completion, PromptTooLong, Request, SamplingParams
from models.environments.apart import end_kept
from models.environments.contract import Environment, Episode, Message, Reply
from models.environments.spec import EnvironmentSpec
from models.environments.worlds import Environments
from models.tokenizer import Tokenizer
from models.toy import write_toy
from tasks.episodes import EnvironmentsFailed, Played, play
from tasks.rollout_rows import Producer, row
from tests.models.environments.test_worlds import Log, gone, spec_of, until

CONTEXT = 128  # of the toy below
LIMIT = 12


class Says:
    """An engine whose every turn is "ok"; of some trajectories so many tokens that it runs out of room."""

    name, version, policy_digest = "says", "1", "p"

    def __init__(self, tokenizer: Tokenizer, endless: Sequence[tuple[str, int]] = (), fails_in: int = 0) -> None:
        """endless: (trajectory, turn) that goes on for as long as it may. fails_in: the call that raises; 0: none."""
        self._tokenizer, self._endless, self._fails_in = tokenizer, endless, fails_in
        self.calls = 0
        self._turns: dict[str, int] = {}

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        self.calls += 1
        if self.calls == self._fails_in:
            raise RuntimeError("the engine is on fire")
        return [self._say(request, params) for request in requests]

    def _say(self, request: Request, params: SamplingParams) -> Completion:
        name = request.trajectory_id
        self._turns[name] = self._turns.get(name, 0) + 1
        room = min(params.max_new_tokens, self._tokenizer.context - len(request.token_ids))
        endless = (name, self._turns[name]) in self._endless
        ids = [5] * room if endless else [*self._tokenizer.encode("ok"), self._tokenizer.eos_ids[0]][:room]
        reason = "length" if endless or ids[-1] not in self._tokenizer.eos_ids else "stop"
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Completion(name, np.array(ids, np.int32), logprobs, reason, 3, "p")


class Talks(Environment):
    """Opens and answers with texts of the lengths that the prompt's metadata names."""

    def reset(self, episode: Episode) -> list[Message]:
        self._told: Any = episode.metadata
        return [{"role": "user", "content": "a" * length} for length in self._told.get("opening", [1])]

    def step(self, said: str) -> Reply:
        assert said == "ok"
        return Reply(({"role": "user", "content": "b" * self._told.get("answer", 1)},), reward=0.5)


class Here(EnvironmentSpec):
    isolate = False
    make = Talks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    write_toy(folder := tmp_path_factory.mktemp("toy"))
    found = Tokenizer(folder)
    found.context = CONTEXT
    return found


def trajectory(name: str, **metadata: Any) -> Trajectory:
    return Trajectory(Episode(name, ({"role": "user", "content": "?"},), {"prompt_id": "q"} | metadata, 7))


def run(
    engine: Says, tokenizer: Tokenizer, trajectories: list[Trajectory], max_turns: int = 3, spec: Any = None
) -> list[tuple[str | None, str | None]]:
    """How each ended; their rows are checked as on every write."""
    params = SamplingParams(1.0, 1.0, 0, LIMIT, tokenizer.eos_ids)
    worlds = Environments(spec or Here("tools"), 20.0)
    sampled = Play(engine, tokenizer, params, worlds, Rules(max_turns, 250)).run(trajectories)
    require_rows(trajectories, tokenizer)
    assert sampled == sum(int(t.stream.action_mask.sum()) for t in trajectories)
    return [(t.status, t.truncation) for t in trajectories]


def require_rows(trajectories: list[Trajectory], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    producer = Producer("says", "1", SAMPLED, tokenizer, SamplingConfig(max_new_tokens=LIMIT))
    rows = [row(trajectory, "train", producer, datetime.now(UTC)) for trajectory in trajectories]
    validate("rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS), policy_version=3)
    assert all(len(r["token_ids"]) <= tokenizer.context for r in rows)
    return rows


def test_one_turn_is_one_turn(tokenizer: Tokenizer) -> None:
    """The environment still hears it, and its reward is on record."""
    [only] = [trajectory("q@0/0")]
    assert run(Says(tokenizer), tokenizer, [only], max_turns=1) == [("truncated", "max_turns")]
    assert [span.env_reward for span in only.stream.spans] == [None, 0.5]
    assert [message["role"] for message in only.stream.messages] == ["user", "assistant"]


def test_an_answer_beyond_the_context_ends_one_trajectory(tokenizer: Tokenizer) -> None:
    """It is cut off where it was: neither the answer's tokens nor its message are in the stream."""
    both = [trajectory("q@0/0", answer=CONTEXT), trajectory("q@0/1")]
    assert run(Says(tokenizer), tokenizer, both) == [("truncated", "context"), ("truncated", "max_turns")]
    assert [t.stream.turns for t in both] == [1, 3]
    assert len(both[0].stream.messages) == 2


def test_room_for_one_token_is_room(tokenizer: Tokenizer) -> None:
    """Answers grow by a token until they do not fit: of those that fit, the next turn ends at the context's end."""
    ended = {}
    for length in range(60, 128):
        [only] = [trajectory("q@0/0", answer=length)]
        run(Says(tokenizer), tokenizer, [only], max_turns=9)
        ended[len(only.stream)] = (only.status, only.truncation)
    assert set(ended.values()) == {("truncated", "context")}
    assert CONTEXT in ended  # the last turn was cut by it


def test_a_turn_in_the_middle_that_is_cut_is_the_last(tokenizer: Tokenizer) -> None:
    cut = trajectory("q@0/0")
    assert run(Says(tokenizer, [("q@0/0", 2)]), tokenizer, [cut]) == [("truncated", "length")]
    assert [(s.finish_reason, s.env_reward) for s in cut.stream.spans if s.is_generated] == [
        ("stop", 0.5),
        ("length", None),  # its environment never heard it
    ]


def test_an_opening_that_cannot_be_asked_fails_one_trajectory(tokenizer: Tokenizer) -> None:
    four = [
        trajectory("q@0/0", opening=[CONTEXT]),
        trajectory("q@0/1"),
        trajectory("q@0/2", opening=[]),
        trajectory("q@0/3"),
    ]
    assert [status for status, _ in run(Says(tokenizer), tokenizer, four)] == [
        "failed",
        "truncated",
        "failed",
        "truncated",
    ]
    assert four[0].error is not None and four[0].error.startswith(
        "what its environment opens with cannot be asked: prompt of q@0/0: the prompt has 1"
    )
    assert four[2].error == "TypeError: Talks.reset gave no message; the policy needs something to answer"
    assert [len(t.stream.spans) for t in four] == [1, 6, 1, 6]  # the prompt is on record


def test_a_prompt_that_cannot_be_asked_ends_the_call(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """No environment has made it so. Nothing is left open."""
    log = Log(tmp_path)
    prompt = ({"role": "user", "content": "x" * CONTEXT},)
    with pytest.raises(PromptTooLong, match="prompt of q@0/0: the prompt has 1"):
        run(Says(tokenizer), tokenizer, [Trajectory(Episode("q@0/0", prompt, {}, 7))], spec=spec_of("Hostile", log))
    assert log.sessions == (1, 1)


def test_c34_an_engine_that_fails_in_the_middle_leaves_no_environment(tokenizer: Tokenizer, tmp_path: Path) -> None:
    log = Log(tmp_path)
    engine, four = Says(tokenizer, fails_in=2), [trajectory(f"q@0/{i}") for i in range(4)]
    with pytest.raises(RuntimeError, match="on fire"):
        run(engine, tokenizer, four, spec=spec_of("Hostile", log))
    assert log.sessions == (4, 4)


def test_all_failed_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Also where others are carried: what would be committed counts."""
    spec = spec_of("Hostile", Log(tmp_path))
    config = EnvironmentConfig(kind="gym", in_flight=4)
    params = SamplingParams(1.0, 1.0, 0, LIMIT, tokenizer.eos_ids)
    fails = [trajectory(f"q@{i}/{j}", acts={"step 1": "raise"}) for i in range(2) for j in range(2)]
    message = "all 4 trajectories failed, the first one by: ValueError: fell over; nothing can be learned"
    with pytest.raises(EnvironmentsFailed, match=message):
        play(Says(tokenizer), tokenizer, params, Played(spec, config), fails)
    fails = [trajectory(f"q@{i}/{j}", acts={"step 1": "raise"}) for i in range(2) for j in range(2)]
    going_on = [trajectory("q@2/0"), trajectory("q@2/1")]
    with pytest.raises(EnvironmentsFailed, match=message):
        play(Says(tokenizer), tokenizer, params, Played(spec, config), [*fails, *going_on], enough=2)
    assert {t.status for t in going_on} == {"carried"}


HARM = {"Hostile": ("raise", "hang", "SystemExit", "nan"), "Isolated": ("raise", "hang", "exit", "kill")}


@pytest.mark.parametrize("kind", HARM)
@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_c34_nothing_leaks_where_one_in_ten_comes_to_harm(
    tokenizer: Tokenizer, tmp_path: Path, kind: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Harm in the second turn. No environment, thread or process is left; no group is torn."""
    log, before = Log(tmp_path), threading.active_count()
    harmed = {i: HARM[kind][i // 10 % 4] for i in range(0, count, 10)}
    asked = [trajectory(f"q@{i // 4}/{i % 4}", acts={"step 2": harmed[i]} if i in harmed else {}) for i in range(count)]
    params = SamplingParams(1.0, 1.0, 0, LIMIT, tokenizer.eos_ids)
    worlds = Environments(spec_of(kind, log), 3.0)
    with caplog.at_level(logging.WARNING, "rollbook"):
        Play(Says(tokenizer), tokenizer, params, worlds, Rules(5, 250)).run(asked)
    assert [t.status for t in asked] == ["failed" if i in harmed else "ok" for i in range(count)]
    assert [t.stream.turns for t in asked] == [2 if i in harmed else 3 for i in range(count)]
    rows = require_rows(asked, tokenizer)
    assert [r["trajectory_id"] for r in rows] == [f"q@{i // 4}/{i % 4}" for i in range(count)]
    for i, r in enumerate(rows):
        last = [turn["env_reward"] for turn in r["turns"] if turn["is_generated"]][-1]
        assert last == (None if i in harmed else 1.0)  # what failed has no reward of the turn in which it did
        assert bool(r["error"]) == (i in harmed)
    end_kept()
    log.path.with_name("let go").touch()
    lost = {"Hostile": 0, "Isolated": sum(act != "raise" for act in harmed.values())}[kind]
    until(lambda: log.sessions == (count, count - lost))
    until(lambda: threading.active_count() <= before)
    assert all(gone(pid) for pid in log.pids() if pid != os.getpid())
    assert len(log.pids()) == 2 * count - lost and not caplog.messages
