"""C7, C8: over templates of five kinds and a tokenizer that folds capitals, what is trained on is what was sampled."""

import json
import random
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from data.columns import ROLLOUTS
from data.config import SamplingConfig
from data.schema import validate
from models.agents.loop import Play, Rules, Trajectory
from models.engines.contract import SAMPLED, Completion, Request, SamplingParams
from models.environments.contract import Environment, Episode, Message, Reply
from models.environments.spec import EnvironmentSpec
from models.environments.worlds import Environments
from models.tokenizer import Tokenizer
from models.toy import CONTROL
from tasks.rollout_rows import Producer, row
from tests.models.agents.templates import KINDS, Kind, write_kind

HOSTILE = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|endoftext|>",
    "<|eot|>",
    "</tool_response>",
    "<think>",
    "Ünï",
    "46",
]
LIMIT = 12


class Chatter:
    """An engine that says random tokens, and keeps what it was given and what it said."""

    name, version, policy_digest = "chatter", "1", "p"

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random, self._tokenizer = random.Random(seed), tokenizer
        self.log: dict[str, list[tuple[list[int], Completion]]] = defaultdict(list)

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        return [self._say(request) for request in requests]

    def _say(self, request: Request) -> Completion:
        count, how = self._random.randint(1, LIMIT), self._random.random()
        ids = [self._random.randrange(3, len(self._tokenizer)) for _ in range(LIMIT if how < 0.1 else count)]
        ids = [3 if token in self._tokenizer.eos_ids else token for token in ids]
        if how > 0.2:  # else it runs out of room, or comes to a stop string
            ids[-1] = self._random.choice(self._tokenizer.eos_ids)
        logprobs = -np.array([self._random.random() + 0.01 for _ in ids], np.float32)
        said = Completion(
            request.trajectory_id, np.array(ids, np.int32), logprobs, "length" if how < 0.1 else "stop", 3, "p"
        )
        self.log[request.trajectory_id].append((request.token_ids.tolist(), said))
        return said


class Weather(Environment):
    """Answers at random, from the episode's own seed; now and then it ends, or falls over."""

    def reset(self, episode: Episode) -> list[Message]:
        self._random = random.Random(episode.seed)
        return [*episode.messages[:-1], {"role": "user", "content": self._text()}]

    def step(self, said: str) -> Reply:
        chance = self._random.random()
        if chance < 0.02:
            raise RuntimeError("fell over")
        if chance < 0.25:
            return Reply(done=True, reward=chance)
        role, count = self._random.choice(["user", "tool"]), self._random.choice([1, 1, 2])
        if role == "user":
            count = 1
        return Reply(tuple({"role": role, "content": self._text()} for _ in range(count)), reward=chance)

    def _text(self) -> str:
        return " ".join(self._random.choices(HOSTILE, k=self._random.randint(1, 4)))


class Here(EnvironmentSpec):
    """The environment above, which lies in no file of its own."""

    isolate = False
    make = Weather


def played(tokenizer: Tokenizer, seed: int, count: int) -> tuple[list[Trajectory], Chatter]:
    engine = Chatter(tokenizer, seed)
    prompt = ({"role": "user", "content": "?"},)
    trajectories = [
        Trajectory(Episode(f"q@{seed}/{i}", prompt, {"prompt_id": "q"}, 1000 * seed + i)) for i in range(count)
    ]
    params = SamplingParams(1.0, 1.0, 0, LIMIT, tokenizer.eos_ids)
    Play(engine, tokenizer, params, Environments(Here("tools"), 10.0), Rules(max_turns=6, in_flight=50)).run(
        trajectories
    )
    return trajectories, engine


def table(trajectories: list[Trajectory], tokenizer: Tokenizer) -> pa.Table:
    """Its invariants checked as on every write."""
    producer = Producer("chatter", "1", SAMPLED, tokenizer, SamplingConfig(max_new_tokens=LIMIT))
    rows = [row(trajectory, "train", producer, datetime.now(UTC)) for trajectory in trajectories]
    made = pa.Table.from_pylist(rows, schema=ROLLOUTS)
    validate("rollouts", made, policy_version=3)
    return made


def require_exact(rows: list[dict], engine: Chatter) -> None:
    """Of every turn: the stream before it is what the engine consumed, its tokens and log-probs what it emitted."""
    assert [r["trajectory_id"] for r in rows if any(r["action_mask"])] == [
        name for name in (r["trajectory_id"] for r in rows) if name in engine.log
    ]
    for r in rows:
        said = np.zeros(len(r["token_ids"]), bool)
        for consumed, answer in engine.log[r["trajectory_id"]]:
            start, end = len(consumed), len(consumed) + len(answer.token_ids)
            assert r["token_ids"][:start] == consumed
            assert r["token_ids"][start:end] == answer.token_ids.tolist()
            assert np.array_equal(np.float32(r["rollout_logprobs"][start:end]), answer.logprobs)
            said[start:end] = True
        assert r["action_mask"] == said.tolist()
        assert sum(r["action_mask"]) == sum(len(answer.token_ids) for _, answer in engine.log[r["trajectory_id"]])


class Plain:
    """The folder's tokenizer as it is, to which a control token's text is the token."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        self._chat = AutoTokenizer.from_pretrained(folder)
        known = {*CONTROL, *kind.control}
        self.control = {self._backend.token_to_id(token) for token in known}

    def shown(self, roles: list[str], last: int) -> list[int]:
        """The control tokens of messages of these roles that say nothing, after a turn that ended with `last`."""
        silent = [{"role": role, "content": "x"} for role in roles]
        asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "SAID"}]
        text = self._chat.apply_chat_template([*asked, *silent], tokenize=False, add_generation_prompt=True)
        ids = self._backend.encode(text.rpartition("SAID")[2], add_special_tokens=False).ids
        found = [token for token in ids if token in self.control]
        return found[1:] if ids[:1] == [last] else found


def require_text_stays_text(rows: list[dict], plain: Plain) -> None:
    """What was shown between two turns has the template's own control tokens, whatever its text looks like."""
    for r in rows:
        replies: list[list[str]] = []  # roles of the messages after each turn
        for message in json.loads(r["messages"]):
            if message["role"] == "assistant":
                replies.append([])
            elif replies:
                replies[-1].append(message["role"])
        shown = [turn for turn in r["turns"][1:] if not turn["is_generated"]]
        assert len(shown) == sum(map(bool, replies))
        for turn, roles in zip(shown, replies, strict=False):
            span = r["token_ids"][turn["start"] : turn["start"] + turn["length"]]
            last = r["token_ids"][turn["start"] - 1]
            assert [token for token in span if token in plain.control] == plain.shown(roles, last)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("episodes", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_what_is_trained_on_is_what_was_sampled(folders: Path, kind: Kind, episodes: int) -> None:
    tokenizer = Tokenizer(folder := write_kind(folders / f"{kind.name} {episodes}", kind))
    drifted, statuses = 0, defaultdict(int)
    plain = Plain(folder, kind)
    for seed in range(episodes // 100):
        trajectories, engine = played(tokenizer, seed, 100)
        rows = table(trajectories, tokenizer).to_pylist()
        require_exact(rows, engine)
        require_text_stays_text(rows, plain)
        for r in rows:
            statuses[r["status"], r["truncation"]] += 1
            texts = [tokenizer.decode(r["token_ids"][t["start"] : t["start"] + t["length"]]) for t in r["turns"]]
            drifted += tokenizer.encode("".join(texts)) != r["token_ids"]
    assert drifted > 0.9 * episodes  # had they been tokenised again
    assert set(statuses) >= {("ok", None), ("truncated", "length"), ("truncated", "max_turns"), ("failed", None)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_template_that_rewrites_history_is_seen(tmp_path: Path, kind: Kind) -> None:
    assert Tokenizer(write_kind(tmp_path / "m", kind)).rewrites_history == kind.rewrites


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.rewrites and not kind.lower], ids=lambda k: k.name)
def test_a_stream_reads_as_the_template_would_have_it(tmp_path: Path, kind: Kind) -> None:
    """A conversation that the policy speaks as the template has it, token by token: one text, and one tokenisation."""
    folder = write_kind(tmp_path / "m", kind)
    tokenizer = Tokenizer(folder)
    chat = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 12+34?"}]
    replies = [{"role": "tool", "content": "46"}]
    end = tokenizer.eos_ids[-1]
    said = [*tokenizer.encode("let me see"), *([end] if kind.control or kind.template is None else [])]
    ids = tokenizer.encode_prompt(messages) + said
    ids += tokenizer.encode_replies(messages, replies, said[-1])
    whole = [*messages, {"role": "assistant", "content": "let me see"}, *replies]
    assert tokenizer.decode(ids) == chat.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)


def test_a_template_that_shows_nothing_of_a_reply_is_refused(tmp_path: Path) -> None:
    deaf = "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = Tokenizer(write_kind(tmp_path / "m", Kind("deaf", deaf)))
    asked = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match=r"shows nothing of messages of the role 'tool'; let it answer as"):
        tokenizer.encode_replies(asked, [{"role": "tool", "content": "46"}], 5)
    shown = tokenizer.encode_replies(asked, [{"role": "user", "content": "46"}], 5)
    assert tokenizer.decode(shown) == "\nuser: 46\n"
