"""Partial rollout over several iterations: where every trajectory went, and that those which went on are themselves."""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.ids import root_of
from data.manifest import Manifest
from data.seeds import derive
from data.tables import read_table
from flows.config import RunConfig, load
from flows.session import make_run, open_ledger
from flows.training import begin
from infra.home import Home
from models.agents.stream import Stream
from models.engines.contract import SAMPLED, Completion, EngineHealth, Request, SamplingParams
from tasks.episodes import source_of
from tasks.evaluate import evaluate
from tasks.generate import generate
from tasks.partial import require_resumable
from tasks.rollout_rows import Producer, row
from tasks.step import Run
from tests.models.environments.test_worlds import HOSTILE
from tests.recorder import SORT

Row = dict[str, Any]
# By prompt: one turn, three, a failure in the second turn, before the first one, and again one.
ACTS = [{"step 1": "done"}, {}, {"step 2": "raise"}, {}, {"reset": "raise"}, {"step 1": "done"}, {}]
WANTED, GROUPS, SAMPLES, ITERATIONS = 3, 5, 2, 6


class Serves:
    """An engine that says what a trajectory's seed and the policy's version make of it, and keeps a log."""

    name, version, policy_digest = "serves", "1", "p"

    def __init__(self) -> None:
        self.serving = -1
        self.temperatures: set[float] = set()
        self.log: dict[str, list[tuple[list[int], Completion]]] = defaultdict(list)

    def logprob_semantics(self, params: SamplingParams) -> str:
        return SAMPLED

    def update_weights(
        self, folder: Path, version: int, digest: str, in_memory: bool = False, verified: bool = False
    ) -> None:
        self.serving = version

    def health(self) -> EngineHealth:
        return EngineHealth(True, self.name, "cpu", self.serving, "p", None)

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        self.temperatures.add(params.temperature)
        return [self._say(request, params) for request in requests]

    def _say(self, request: Request, params: SamplingParams) -> Completion:
        rng = random.Random(request.seed + self.serving)
        ids = [rng.randrange(3, 500) for _ in range(rng.randint(0, 3))] + [params.eos_ids[0]]
        logprobs = -np.array([0.01 + rng.random() for _ in ids], np.float32)
        said = Completion(request.trajectory_id, np.array(ids, np.int32), logprobs, "stop", self.serving, "p")
        self.log[request.trajectory_id].append((request.token_ids.tolist(), said))
        return said


class Inline:
    """In the place of infra.ray_session.Fleet: bodies run here, on one engine."""

    def __init__(self, engine: Serves) -> None:
        self._engine = engine

    def warm(self, role: Any) -> None: ...

    def run(self, role: Any, wrapper: Callable[..., Any], *args: Any) -> Any:
        return wrapper(self._engine, *args)


@dataclass
class Drive:
    """A run of which only rollouts are made, one policy an iteration."""

    folder: Path
    config: RunConfig
    engine: Serves = field(default_factory=Serves)
    made: list[Manifest] = field(default_factory=list)

    def __post_init__(self) -> None:
        home = Home(self.folder)
        ledger = open_ledger(self.config, home)
        ledger.open_or_create(self.config)
        self.run: Run = make_run(self.config, ledger, home)
        self.run.fleet, self.run.watchers = Inline(self.engine), ()  # ty: ignore[invalid-assignment]

    def policy(self, version: int) -> Manifest:
        from data.request import Request as StepRequest
        from models.toy import write_toy

        if not (self.folder / "toy").exists():
            write_toy(self.folder / "toy")
        request = StepRequest(step="publish", step_version=1, kind="policy", inputs={}, seed=version)
        attempt = self.run.ledger.writer(self.run.ledger.at(version, "publish"), request)
        attempt.add_folder(self.folder / "toy")
        return attempt.commit(content_digest=f"{version:064x}", facts={"policy_version": version})

    def go_on(self, iterations: int = 1) -> None:
        for _ in range(iterations):
            k = len(self.made)
            before = self.made[-1] if self.made else None
            made = generate(self.run, k, self.policy(k), self.config.generation, before)
            assert isinstance(made, Manifest)
            self.made.append(made)

    def rows(self, k: int, name: str = "rollouts") -> list[Row]:
        return read_table(self.run.ledger.store, self.made[k], name=name).to_pylist()

    def ids(self, k: int, name: str = "rollouts") -> list[str]:
        return [found["trajectory_id"] for found in self.rows(k, name)]

    def count(self, k: int, name: str) -> int:
        return int(self.made[k].metrics[f"partial/{name}"])


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., Drive]:
    def make(name: str = "partial", acts: list[Any] = ACTS, **overrides: Any) -> Drive:
        folder = tmp_path / name
        folder.mkdir()
        prompts = [{"prompt": f"say {i}", "metadata": {"acts": told}} for i, told in enumerate(acts)]
        for part in ("train", "held_out"):
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        settings = {
            "run": name,
            "iterations": ITERATIONS,
            "prompts.source": folder / "train.jsonl",
            "prompts.held_out": folder / "held_out.jsonl",
            "prompts.per_iteration": WANTED,
            "prompts.samples_per_prompt": SAMPLES,
            "environment.kind": f"{HOSTILE}:Hostile",
            "environment.options.log": folder / "log",
            "environment.in_flight": 3,  # of 10 in play: siblings are not always at the same turn
            "partial.groups": GROUPS,
            "warm_start.steps": 0,
            "evaluate.problems": 7,
        } | {key.replace("__", "."): value for key, value in overrides.items()}
        raw = SORT.read_text().replace("digits = 6\n", "")
        (folder / "config.toml").write_text(raw)
        return Drive(folder, load(folder / "config.toml", [f"{key}={value}" for key, value in settings.items()]))

    return make


def names(roots: set[str]) -> set[str]:
    return {f"{root}/{branch}" for root in roots for branch in range(SAMPLES)}


@pytest.mark.parametrize("tail", ["carry", "drop"])
def test_c33_every_trajectory_is_somewhere_with_its_siblings(drive: Callable[..., Drive], tail: str) -> None:
    """completed + failed + carried + dropped = submitted = 5 groups of 2, in each iteration, by counts and by name."""
    mine = drive(partial__tail=tail)
    mine.go_on(ITERATIONS)
    carried: set[str] = set()
    committed: list[str] = []
    for k in range(ITERATIONS):
        start, end = (mine.made[k].facts["cursor"][name] for name in ("start", "end"))
        taken = source_of(mine.config.prompts).take(start, end - start, mine.config.seed)
        fresh = names({f"{prompt.prompt_id}@{start + i}" for i, prompt in enumerate(taken)})
        rollouts, going_on = mine.ids(k), mine.ids(k, "carry")
        assert not fresh & carried and len(fresh | carried) == GROUPS * SAMPLES == mine.count(k, "submitted")
        dropped = (fresh | carried) - set(rollouts) - set(going_on)
        for part in (rollouts, going_on, dropped):
            assert names({root_of(name) for name in part}) == set(part) and len(set(part)) == len(part)
        assert len(rollouts) == WANTED * SAMPLES and not set(rollouts) & set(going_on)
        statuses = [found["status"] for found in mine.rows(k)]
        counted = [mine.count(k, name) for name in ("completed", "failed", "carried", "dropped", "stale")]
        failed = statuses.count("failed")
        assert counted == [len(rollouts) - failed, failed, len(going_on), len(dropped), 0]
        assert (tail == "drop") or not dropped
        assert (tail == "carry") or {found["status"] for found in mine.rows(k, "carry")} <= {"ok", "failed"}
        committed += rollouts
        carried = set(going_on)
    assert len(set(committed)) == len(committed)  # C32: however often a prompt comes round
    assert len({root_of(name).partition("@")[0] for name in committed}) < len({root_of(name) for name in committed})
    assert sum(mine.count(k, "failed") for k in range(ITERATIONS)) > 0
    assert sum(mine.count(k, "dropped") > 0 for k in range(ITERATIONS)) == (ITERATIONS if tail == "drop" else 0)


def test_what_is_carried_goes_on_token_for_token(drive: Callable[..., Drive]) -> None:
    """Of each carried trajectory, the next table that has it begins with what was stored, turn for turn."""
    mine = drive()
    mine.go_on(ITERATIONS)
    resumed = afresh = 0
    for k in range(ITERATIONS - 1):
        later = {found["trajectory_id"]: found for found in [*mine.rows(k + 1), *mine.rows(k + 1, "carry")]}
        for before in mine.rows(k, "carry"):
            after, turns = later[before["trajectory_id"]], len(before["turns"])
            assert after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
            assert after["rollout_logprobs"][: len(before["token_ids"])] == before["rollout_logprobs"]
            assert after["turns"][:turns] == before["turns"]
            assert after["sampling"]["seed"] == before["sampling"]["seed"]
            assert before["resume_turn"] == sum(turn["is_generated"] for turn in before["turns"])
            assert before["origin_iteration"] <= k
            assert after.get("origin_iteration", before["origin_iteration"]) == before["origin_iteration"]
            resumed += before["status"] == "carried" and before["resume_turn"] > 0
            afresh += before["status"] == "carried" and before["resume_turn"] == 0
    assert resumed >= 2 and afresh >= 2
    versions = [[t["policy_version"] for t in f["turns"] if t["is_generated"]] for k in range(6) for f in mine.rows(k)]
    assert any(len(set(found)) == 2 for found in versions)
    for k in range(ITERATIONS):
        sampled = [t["policy_version"] for f in mine.rows(k) for t in f["turns"] if t["is_generated"]]
        assert mine.count(k, "staleness_max") == k - min(sampled)
    assert all(found == sorted(found) for found in versions)


def test_what_is_trained_on_is_what_the_engine_said(drive: Callable[..., Drive]) -> None:
    """C8 for trajectories that went on: each turn's tokens before it were consumed, its own and no others emitted."""
    mine = drive()
    mine.go_on(ITERATIONS)
    asked = 0
    for found in (found for k in range(ITERATIONS) for found in mine.rows(k)):
        log, said = mine.engine.log[found["trajectory_id"]], np.zeros(len(found["token_ids"]), bool)
        for consumed, answer in log:
            start, end = len(consumed), len(consumed) + len(answer.token_ids)
            assert found["token_ids"][:start] == consumed
            assert found["token_ids"][start:end] == answer.token_ids.tolist()
            assert np.array_equal(np.float32(found["rollout_logprobs"][start:end]), answer.logprobs)
            said[start:end] = True
        assert found["action_mask"] == said.tolist()
        spoken = [turn for turn in found["turns"] if turn["is_generated"]]
        assert [turn["policy_version"] for turn in spoken] == [answer.policy_version for _, answer in log]
        asked += len(log)
    assert asked > WANTED * SAMPLES * ITERATIONS / 2


def test_a_stream_comes_back_from_its_row(drive: Callable[..., Drive]) -> None:
    from models.agents.loop import Trajectory
    from models.environments.contract import Episode
    from models.tokenizer import Tokenizer

    mine = drive()
    mine.go_on(1)
    tokenizer = Tokenizer(mine.folder / "toy")
    producer = Producer("serves", "1", SAMPLED, tokenizer, mine.config.sampling)
    several = 0
    for found in mine.rows(0):
        stream = Stream.of_row(found)
        episode = Episode(found["trajectory_id"], (), json.loads(found["metadata"]), found["sampling"]["seed"])
        again = row(
            Trajectory(episode, stream, found["status"], found["truncation"], found["error"]), "train", producer,
            found["started_at"],
        )  # fmt: skip
        for name in ("token_ids", "action_mask", "rollout_logprobs"):
            assert np.array_equal(again[name], found[name]), name
        for name in ("turns", "messages", "status", "truncation", "error", "metadata"):
            assert again[name] == found[name], name
        several += stream.turns > 1
    assert several


def test_groups_that_are_too_old_are_given_up_whole(drive: Callable[..., Drive]) -> None:
    """Every policy is one update later: with 0, what has a turn by the one before cannot go on, what has none can."""
    mine = drive(partial__max_staleness=0)
    mine.go_on(ITERATIONS)
    stale = 0
    for k in range(ITERATIONS - 1):
        begun = {root_of(r["trajectory_id"]) for r in mine.rows(k, "carry") if r["resume_turn"]}
        old = names(begun)
        assert old <= set(mine.ids(k, "carry"))  # siblings too, though some of them may have had no turn
        assert mine.count(k + 1, "stale") == mine.count(k + 1, "dropped") == len(old)
        assert not old & {*mine.ids(k + 1), *mine.ids(k + 1, "carry")}
        total = sum(mine.count(k + 1, name) for name in ("completed", "failed", "carried", "dropped"))
        assert total == mine.count(k + 1, "submitted") == GROUPS * SAMPLES
        stale += len(old)
    assert stale > 0


def test_the_same_drive_twice_is_equal(drive: Callable[..., Drive]) -> None:
    first, second = drive("first"), drive("second")
    for made in (first, second):
        made.go_on(3)
    for k in range(3):
        for name in ("rollouts", "carry"):
            mine, theirs = first.rows(k, name), second.rows(k, name)
            for a, b in zip(mine, theirs, strict=True):
                assert {n: v for n, v in a.items() if n not in ("started_at", "latency_ms")} == {
                    n: v for n, v in b.items() if n not in ("started_at", "latency_ms")
                }


def test_prompts_that_were_changed_within_a_run_are_refused(drive: Callable[..., Drive]) -> None:
    mine = drive()
    mine.go_on(1)
    file = mine.folder / "train.jsonl"
    file.write_text(file.read_text().replace("say", "sing"))
    source_of.cache_clear()
    with pytest.raises(ValueError, match=r"prompts: iteration 1 has others .* put them back, or start another run"):
        mine.go_on(1)


def test_c31_what_the_machinery_did_wrong_is_failed_on_every_path(drive: Callable[..., Drive]) -> None:
    """Barrier, partial, and a trajectory that fails once it goes on: status, error and no reward of that turn."""
    barrier = drive("barrier")
    barrier.config = barrier.config.model_copy(update={"partial": type(barrier.config.partial)()})
    barrier.go_on(3)
    partial = drive()
    partial.go_on(ITERATIONS)
    for made in (barrier, partial):
        found = [found for k in range(len(made.made)) for found in made.rows(k)]
        for one in found:
            acts = json.loads(one["metadata"])["acts"]
            harmed = "raise" in acts.values()
            assert (one["status"] == "failed") == harmed == bool(one["error"])
            if harmed:
                assert one["error"] == "ValueError: fell over"
                assert one["turns"][-1]["env_reward"] is None
        assert {one["status"] for one in found} == {"ok", "failed"}
        assert {len(one["turns"]) for one in found if one["status"] == "failed"} >= {1}  # before the first turn


def test_evaluation_is_never_partial(drive: Callable[..., Drive]) -> None:
    """Each held-out problem is played to its end, sampled and greedily, though the run carries."""
    mine = drive(evaluate__samples=2)
    keys = []
    for partial in (mine.config.partial, mine.config.partial.model_copy(update={"groups": 6})):
        generation = replace(mine.config.generation, partial=partial)
        run = replace(mine.run, planning=False)
        with pytest.raises((AttributeError, TypeError, ValueError)):  # the scorer's resident is not an engine
            evaluate(run, 0, mine.policy(0), mine.config.evaluate, generation, mine.config.reward)
        [made] = [m for m in mine.run.ledger.steps(0) if m.step == "evaluate_sampled"]
        keys.append(made.key)
    rows = read_table(mine.run.ledger.store, made).to_pylist()
    assert len(rows) == 7 * 2 and {found["purpose"] for found in rows} == {"eval"}
    assert {found["status"] for found in rows} == {"ok", "failed"}
    assert keys[0] == keys[1]  # what partial says is nothing to it


@pytest.mark.parametrize(("tail", "kind", "refused"), [
    ("carry", "Hostile", False), ("carry", "Begun", True), ("drop", "Begun", False),
])  # fmt: skip
def test_what_cannot_go_on_is_refused_at_the_start(
    drive: Callable[..., Drive], tail: str, kind: str, refused: bool
) -> None:
    mine = drive(partial__tail=tail, environment__kind=f"{HOSTILE}:{kind}")
    mine.run.planning = True
    if not refused:
        begin(mine.config, mine.run)
        return
    with pytest.raises(ValueError, match=r"partial.tail = 'carry' with .*:Begun': its class does not say .* 'drop'"):
        begin(mine.config, mine.run)
    assert not mine.run.notes and not mine.engine.log


def test_seeds_of_turns_differ() -> None:
    """A turn's stream of random numbers is its own: were they the same, each turn would begin with the same token."""
    seeds = [derive(7, turn) for turn in range(1, 100)]
    assert len({7, *seeds}) == 100


@pytest.mark.parametrize(("tools", "refused"), [(["calculator"], False), (["calculator", "python"], True)])
def test_tools_that_keep_state_cannot_go_on(drive: Callable[..., Drive], tools: list[str], refused: bool) -> None:
    """The sandbox has the variables of its own trajectory."""
    config = drive().config
    environment = config.environment.model_copy(update={"kind": "tools", "tools": tools, "options": {}})
    generation = replace(config.generation, environment=environment)
    if not refused:
        require_resumable(generation)
        return
    with pytest.raises(ValueError, match=r"one of the tools keeps state .* set partial.tail = 'drop', or leave"):
        require_resumable(generation)
