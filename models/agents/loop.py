"""The agent loop: the policy speaks, its environment answers, turn by turn, for many trajectories at once.

All that are in flight speak in one call of the engine, then all environments answer: what a trajectory becomes does not
depend on which of the others was faster.
"""

import functools
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from data.ids import root_of
from data.seeds import derive
from models.agents.stream import Stream
from models.engines.contract import Completion, Request, RolloutEngine, SamplingParams, require_room
from models.environments.contract import Episode, Opening, Reply
from models.environments.worlds import Fault, Worlds

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer


@dataclass
class Trajectory:
    """One episode and what came of it so far. `status` None: it goes on."""

    episode: Episode
    stream: Stream = field(default_factory=Stream)
    status: str | None = None  # ok, truncated, failed, carried
    truncation: str | None = None  # length, max_turns, context
    error: str | None = None
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    round: int = 0  # of the engine, in which it ended; 0: before the first

    @property
    def name(self) -> str:
        return self.episode.trajectory_id

    def end(self, status: str, truncation: str | None = None, error: str | None = None) -> None:
        self.status, self.truncation, self.error = status, truncation, error
        self.seconds = time.monotonic() - self.started


@dataclass(frozen=True)
class Rules:
    max_turns: int = 1  # of the policy in one trajectory
    in_flight: int | None = None  # trajectories at a time; None: all
    enough: int | None = None  # whole groups; then what is unfinished is left at its turn


class Play:
    """Trajectories played with one engine and the one policy that it serves."""

    def __init__(
        self, engine: RolloutEngine, tokenizer: "Tokenizer", params: SamplingParams, worlds: Worlds, rules: Rules
    ) -> None:
        self._engine, self._tokenizer, self._params = engine, tokenizer, params
        self._worlds, self._rules = worlds, rules
        self._encoded = functools.cache(self._encode)
        self._rounds = self._sampled = 0

    def run(self, trajectories: Sequence[Trajectory]) -> int:
        """Each to its end, or with `enough` until so many groups are at theirs; the others are then `carried`.

        Returns how many tokens were sampled.

        One that has a stream already goes on from there. Raises what the engine raises, and PromptTooLong or ValueError
        for a prompt that cannot be asked; if that is its environment's doing, only its trajectory has failed.
        """
        waiting, active = deque(t for t in trajectories if t.status is None), []
        with self._worlds:
            while (waiting or active) and not self._enough(trajectories):
                room = len(waiting) if self._rules.in_flight is None else self._rules.in_flight - len(active)
                fresh = [waiting.popleft() for _ in range(min(room, len(waiting)))]
                active = self._round(active + self._opened(fresh))
        for trajectory in trajectories:
            if trajectory.status is None:
                trajectory.end("carried")
        return self._sampled

    def _enough(self, trajectories: Sequence[Trajectory]) -> bool:
        if self._rules.enough is None:
            return False
        unfinished = {root_of(t.name) for t in trajectories if t.status is None}
        return len({root_of(t.name) for t in trajectories} - unfinished) >= self._rules.enough

    def _opened(self, fresh: list[Trajectory]) -> list[Trajectory]:
        """Those that can be asked; the others have failed before their first turn."""
        openings = self._worlds.reset([trajectory.episode for trajectory in fresh])
        for trajectory, opening in zip(fresh, openings, strict=True):
            trajectory.started = time.monotonic()
            if isinstance(opening, Fault):
                self._fail_at_once(trajectory, opening.error)
            elif trajectory.stream:
                trajectory.stream.tools = opening.tools
            else:
                self._begin(trajectory, opening)
        return self._unfinished(fresh)

    def _begin(self, trajectory: Trajectory, opening: Opening) -> None:
        try:
            self._show_prompt(trajectory, opening)
        except ValueError as error:
            if opening.messages == trajectory.episode.messages:
                raise
            self._fail_at_once(trajectory, f"what its environment opens with cannot be asked: {error}")

    def _fail_at_once(self, trajectory: Trajectory, error: str) -> None:
        """Before its next turn. One that has not begun has its prompt on record."""
        if not trajectory.stream:
            self._show_prompt(trajectory, Opening(trajectory.episode.messages, ()))
        trajectory.end("failed", error=error)

    def _show_prompt(self, trajectory: Trajectory, opening: Opening) -> None:
        trajectory.stream.tools = opening.tools
        ids = self._encoded(json.dumps([opening.messages, opening.tools]))
        require_room(f"prompt of {trajectory.name}", len(ids), self._tokenizer.context)
        trajectory.stream.show(ids, opening.messages, "user")

    def _encode(self, opening: str) -> np.ndarray:
        """[tokens] int32 of an opening as JSON; siblings have it in common."""
        messages, tools = json.loads(opening)
        return np.array(self._tokenizer.encode_prompt(messages, tools), np.int32)

    def _round(self, active: list[Trajectory]) -> list[Trajectory]:
        """One turn of each; those that go on."""
        self._rounds += 1
        asked = [self._request(trajectory) for trajectory in active]
        answers = self._engine.generate(asked, self._params) if asked else []
        heard = []
        for trajectory, answer in zip(active, answers, strict=True):
            self._sampled += len(answer.token_ids)
            trajectory.stream.say(answer, said := self._text(answer))
            if answer.finish_reason == "length":
                cut = len(answer.token_ids) == self._params.max_new_tokens
                trajectory.end("truncated", "length" if cut else "context")
            else:
                heard.append((trajectory, said))
        replies = self._worlds.step([(trajectory.name, said) for trajectory, said in heard])
        for (trajectory, _), reply in zip(heard, replies, strict=True):
            self._take(trajectory, reply)
        return self._unfinished(active)

    def _request(self, trajectory: Trajectory) -> Request:
        seed, turns = trajectory.episode.seed, trajectory.stream.turns
        return Request(trajectory.name, trajectory.stream.token_ids, derive(seed, turns) if turns else seed)

    def _text(self, answer: Completion) -> str:
        ids = answer.token_ids.tolist()
        return self._tokenizer.decode(ids[:-1] if ids[-1] in self._tokenizer.eos_ids else ids)

    def _take(self, trajectory: Trajectory, reply: Reply | Fault) -> None:
        """What the environment says becomes the end of the trajectory, or tokens that the policy reads next."""
        stream = trajectory.stream
        if isinstance(reply, Fault):
            return trajectory.end("failed", error=reply.error)
        stream.note(reply.reward, reply.tool_calls)
        if reply.done:
            return trajectory.end("ok")
        if stream.turns >= self._rules.max_turns:
            return trajectory.end("truncated", "max_turns")
        try:
            ids = self._tokenizer.encode_replies(stream.messages[:-1], reply.messages, stream.last, stream.tools)
        except ValueError as error:
            return trajectory.end("failed", error=str(error))
        if len(stream) + len(ids) >= self._tokenizer.context:
            return trajectory.end("truncated", "context")
        return stream.show(ids, reply.messages, str(reply.messages[0]["role"]))

    def _unfinished(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        ended = [trajectory for trajectory in trajectories if trajectory.status is not None]
        for trajectory in ended:
            trajectory.round = self._rounds
        self._worlds.close([trajectory.name for trajectory in ended])
        return [trajectory for trajectory in trajectories if trajectory.status is None]
