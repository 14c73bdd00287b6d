"""SGLang over HTTP: no trajectory lost or answered twice under faults of a fake server."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from data.config import EngineConfig
from models.engines.contract import Request, SamplingParams
from models.engines.sglang import engine as engine_module
from models.engines.sglang import proof, servers, wire
from models.engines.sglang.backend import Answer, Asked, BackendLost, BackendRefused
from models.engines.sglang.http import Served
from models.engines.sglang.replica import Wanted
from models.engines.sglang.replicas import ATTEMPTS, Replicas, balance
from models.toy import write_toy
from models.weights import WeightsMismatch, read_tensors, tensors_digest
from tests.models.sglang_fake import Fake, Fault

TAG, FOLDER = "policy-1", Path("/policies/1")
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9, eos_ids=())


@pytest.fixture
def fakes() -> Iterator[Callable[..., Fake]]:
    made: list[Fake] = []

    def make(fault: Callable[[int], Fault] = lambda n: None, key: str | None = None) -> Fake:
        made.append(Fake(fault, key))
        return made[-1]

    yield make
    for fake in made:
        if not fake._loop.is_closed() and fake._loop.is_running():
            fake.stop()


@pytest.fixture
def replicas_of() -> Iterator[Callable[..., Replicas]]:
    """Of fakes, with weights; `prove` may refuse them."""
    made: list[Replicas] = []

    def start(*fakes: Fake, prove: Callable = lambda backend: None, timeout_s: float = 5.0, batch: int = 4) -> Replicas:
        config = EngineConfig(kind="sglang", urls=[f.url for f in fakes], timeout_s=timeout_s, batch=batch)
        made.append(Replicas(config, "cpu", 1, text=False))
        made[-1].load(Wanted(FOLDER, TAG, prove), in_place=False)
        return made[-1]

    yield start
    for each in made:
        each.close()


def questions(count: int) -> list[Asked]:
    """Prompts of one token, all different, so that an answer tells whose it is."""
    return [Asked(f"p@{i}/0", [i + 1], {"max_new_tokens": 8}) for i in range(count)]


def require_each_its_own(answers: list[Answer], count: int) -> None:
    assert [answer["output_ids"] for answer in answers] == [[7 * (i + 1)] for i in range(count)]


def asked_for(*fakes: Fake) -> Counter[str]:
    """Trajectory -> how often a server was asked for it, whatever the attempt."""
    return Counter(name.rpartition(".")[0] for fake in fakes for name in fake.asked)


def test_balance_is_by_tokens_longest_first() -> None:
    """7 | -, 7 | 5, 7 | 9 (4), 10 (3) | 9, 10 | 10 (1). By number it would be 3 and 2 with 12 and 8 tokens."""
    assert balance([7, 5, 4, 3, 1], 2) == [[0, 3], [1, 2, 4]]
    assert balance([1, 3, 4, 5, 7], 2) == [[4, 1], [3, 2, 0]]


def test_balance_of_one_long_and_many_short() -> None:
    """The long one alone outweighs four of 20, so those go to the other; without work a share stays empty."""
    assert balance([20, 100, 20, 20, 20], 2) == [[1], [0, 2, 3, 4]]
    assert balance([5], 3) == [[0], [], []]


def test_tokens_are_prompt_and_answer(fakes, replicas_of) -> None:
    """3 + 1 = 4 and 1 + 2 = 3 tokens, then 1 + 1 = 2 to the second: 4 | 5."""
    first, second = fakes(), fakes()
    asked = [
        Asked("a", [1], {"max_new_tokens": 1}),
        Asked("b", [1, 1, 1], {"max_new_tokens": 1}),
        Asked("c", [1], {"max_new_tokens": 2}),
    ]
    replicas_of(first, second).generate(asked)
    assert (first.asked, sorted(second.asked)) == (["b.0"], ["a.0", "c.0"])


@pytest.mark.parametrize("fault", ["reset", "500", "text", "other", "abort"])
def test_what_a_fault_left_is_asked_of_the_others(fakes, replicas_of, fault) -> None:
    """The first server answers 3 of its 6, then fails 3: those are asked for once more, no other is."""
    bad = fakes(lambda n: None if n < 3 or n >= 6 else fault)
    good = fakes()
    require_each_its_own(replicas_of(bad, good).generate(questions(12)), 12)
    times = asked_for(bad, good)
    failed = {name.rpartition(".")[0] for name in bad.asked[3:6]}
    assert {name for name, count in times.items() if count == 2} == failed
    assert set(times.values()) == {1, 2} and len(times) == 12


def test_a_lost_server_is_given_the_present_weights_before_it_serves_again(fakes, replicas_of) -> None:
    """It forgot them. The second call finds it proven."""
    proven = []
    bad, good = fakes(lambda n: "reset" if n == 0 else None), fakes()
    replicas = replicas_of(bad, good, prove=lambda backend: proven.append((backend.url, backend.serving())))
    bad.version = "of its start"
    require_each_its_own(replicas.generate(questions(4)), 4)
    replicas._replicas[0].revive().result()
    assert proven[2:] == [(bad.url, TAG)]
    before = len(bad.asked)
    require_each_its_own(replicas.generate(questions(4)), 4)
    assert len(bad.asked) == before + 2


def test_a_server_that_fails_the_proof_is_never_used(fakes, replicas_of) -> None:
    bad, good = fakes(lambda n: "reset"), fakes()
    refused = []

    def prove(backend: Served) -> None:
        if backend.url == bad.url and bad.asked:
            refused.append(backend.url)
            raise WeightsMismatch("not these weights")

    replicas = replicas_of(bad, good, prove=prove)
    require_each_its_own(replicas.generate(questions(4)), 4)
    with pytest.raises(WeightsMismatch, match="not these weights"):  # it is being brought back, behind
        replicas._replicas[0].revive().result()
    asked = len(bad.asked)
    require_each_its_own(replicas.generate(questions(4)), 4)
    assert refused and len(bad.asked) == asked
    with pytest.raises(WeightsMismatch, match="not these weights"):
        replicas.load(Wanted(FOLDER, "policy-2", prove), in_place=True)


def test_hanging_requests_are_aborted_and_asked_for_again(fakes, replicas_of) -> None:
    """What the slow server answers after the limit (the fake does, when aborted) is no answer."""
    slow = fakes(lambda n: "hang" if n < 2 else None)
    answers = replicas_of(slow, timeout_s=0.5).generate(questions(3))
    require_each_its_own(answers, 3)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["length"] * 3
    assert sorted(slow.aborted) == sorted(slow.asked[:2])
    assert sorted(asked_for(slow).values()) == [1, 2, 2]


def test_a_server_that_is_gone_leaves_its_share_to_the_others(fakes, replicas_of) -> None:
    gone, good = fakes(), fakes()
    replicas = replicas_of(gone, good, timeout_s=0.5)
    gone.stop()
    require_each_its_own(replicas.generate(questions(6)), 6)
    assert not gone.asked and len(good.asked) == 6
    with pytest.raises(BackendLost, match=rf"{gone.url}.*tried for engine.timeout_s = 0.5 s.*out of engine.urls"):
        replicas.load(Wanted(FOLDER, "policy-2", lambda backend: None), in_place=True)


def test_replicas_that_die_again_and_again_end_the_call(fakes, replicas_of) -> None:
    """Each of two requests is asked for ATTEMPTS = 3 times, no more."""
    bad, worse = fakes(lambda n: "reset"), fakes(lambda n: "500")
    with pytest.raises(BackendLost, match="does not answer /generate"):
        replicas_of(bad, worse).generate(questions(2))
    assert ATTEMPTS == 3 and sorted(asked_for(bad, worse).values()) == [3, 3]


def test_an_address_without_a_server_is_named(fakes) -> None:
    gone = fakes()
    gone.stop()
    replicas = Replicas(EngineConfig(kind="sglang", urls=[gone.url], timeout_s=0.3), "cpu", 1, text=False)
    with pytest.raises(BackendLost, match=rf"SGLang at {gone.url} does not answer /pause_generation.*tried for"):
        replicas.load(Wanted(FOLDER, TAG, lambda backend: None), in_place=False)
    replicas.close()


def test_a_refused_request_ends_the_call_with_the_reason(fakes, replicas_of) -> None:
    """Asking again would change nothing; what else is under way is aborted."""
    fake = fakes(lambda n: "400" if n == 1 else "hang")
    with pytest.raises(BackendRefused, match=r"refuses /generate: status 400, the input is too long"):
        replicas_of(fake).generate(questions(3))
    assert sorted(asked_for(fake).values()) == [1, 1, 1] and len(fake.aborted) == 2


def test_weights_a_server_cannot_read_are_refused_and_it_goes_on(fakes, replicas_of) -> None:
    fake = fakes()
    replicas = replicas_of(fake)
    fake.refuses_weights = True
    with pytest.raises(BackendRefused, match=r"no such folder here; .* must see /policies/2 .*share the file system"):
        replicas.load(Wanted(Path("/policies/2"), "policy-2", lambda backend: None), in_place=True)
    assert not fake.paused


def test_an_answer_of_older_weights_is_no_completion(fakes, replicas_of) -> None:
    request = Request("p@0/0", np.array([3], np.int32), seed=0)
    asked = [wire.ask(request, PARAMS, 64, "p@0/0#call")]
    (answer,) = replicas_of(fakes(lambda n: "stale")).generate(asked)
    with pytest.raises(ValueError, match="with weights 'older', asked for 'policy-1'"):
        wire.completion(request, answer, (), TAG, 1, "digest")


def test_a_server_without_checksums_is_refused(fakes) -> None:
    served = Served(fakes().url, batch=4, timeout_s=5.0)
    with pytest.raises(BackendRefused, match="cannot hash its weights: no weights here"):
        served.checksums()
    assert served.device == "cuda"


def test_the_key_comes_from_the_environment_and_stays_there(fakes, replicas_of, monkeypatch) -> None:
    fake = fakes(key="s3cret")
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    with pytest.raises(BackendRefused, match="status 401, Unauthorized; set SGLANG_API_KEY"):
        replicas_of(fake)
    monkeypatch.setenv("SGLANG_API_KEY", "wrong-s3cret")
    with pytest.raises(BackendRefused) as refused:
        replicas_of(fake)
    assert "s3cret" not in str(refused.value)
    monkeypatch.setenv("SGLANG_API_KEY", "s3cret")
    require_each_its_own(replicas_of(fake).generate(questions(2)), 2)


def test_abort_ends_what_is_asked_and_what_waits(fakes) -> None:
    """Two connections of four questions: two are under way, two were never sent. Somebody else's goes on."""
    fake = fakes(lambda n: "hang")
    served = Served(fake.url, batch=1, timeout_s=5.0)
    answers: dict[int, Answer] = {}
    asking = threading.Thread(target=served.generate, args=(questions(4), answers.__setitem__, 30.0))
    asking.start()
    until(lambda: len(fake.asked) == 2)
    served.abort()
    asking.join()
    assert [answers[i]["meta_info"]["finish_reason"]["type"] for i in range(4)] == ["abort"] * 4
    assert set(fake.aborted) == set(fake.asked) and len(fake.asked) == 2


@pytest.mark.timeout(60)
def test_close_ends_a_call_under_way(fakes, replicas_of) -> None:
    fake = fakes(lambda n: "hang")
    replicas = replicas_of(fake, timeout_s=10_000.0)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            replicas.generate(questions(2))
        except BackendLost as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: len(fake.asked) == 2)
    replicas.close()
    asking.join()
    assert raised and sorted(fake.aborted) == sorted(fake.asked)


def until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"urls": ["http://me:pw@host:1"]}, r"http://\*\*\*: holds credentials.*SGLANG_API_KEY"),
        ({"urls": ["http://host:1/?key=pw"]}, r"http://\*\*\*: holds credentials or a query"),
        ({"urls": ["host:30000"]}, "must begin with http:// or https://"),
        ({"urls": ["http://a:1", "http://a:1"]}, "each server must be named once"),
        ({"urls": ["http://a:1"], "replicas": 2}, "engine.replicas = 2 with engine.urls"),
    ],
)
def test_addresses_that_cannot_be_meant(settings, said) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        EngineConfig(kind="sglang", **settings)
    assert "pw" not in str(refused.value)


def test_arguments_as_flags() -> None:
    """Zero is a value; False and None are none."""
    given = {"random_seed": 0, "disable_cuda_graph": True, "enable_x": False, "cache": None, "dtype": "float32"}
    assert servers.flags(given) == ["--random-seed=0", "--disable-cuda-graph", "--dtype=float32"]


def test_visible_gpus(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert servers.visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert servers.visible_gpus() == []


def test_a_child_on_the_leash_ends_with_a_killed_parent() -> None:
    parent = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-c', sys.argv[1], str(os.getpid()), '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(command).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, servers.LEASH], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(process.stdout.readline()))
    until(lambda: "-c" in child.cmdline() and "import time; time.sleep(600)" in child.cmdline()[2])
    process.kill()
    process.wait()
    gone, left = psutil.wait_procs([child], timeout=30)
    for orphan in left:
        orphan.kill()
    assert gone and not left


class Elsewhere:
    """A backend on a GPU that computes with the right weights; its checksums are of another kind."""

    device = "cuda"

    def __init__(self, weights: proof.Weights, off: float) -> None:
        self._weights, self._off = weights, off

    def serving(self) -> str:
        return "tag"

    def checksums(self) -> list[dict[str, str]]:
        raise AssertionError("they differ between kinds of device")

    def generate(self, asked: list[Asked], arrived: Callable[[int, Answer], None], timeout_s: float) -> None:
        for place, each in enumerate(asked):
            (logprobs,) = self._weights.logprobs([each.token_ids], [[5, 6]])
            pairs = [[float(logp) + self._off, token, None] for logp, token in zip(logprobs, [5, 6], strict=True)]
            arrived(place, {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": pairs}})


def test_a_server_on_another_kind_of_device_is_proven_by_logprobs(tmp_path, caplog) -> None:
    write_toy(tmp_path)
    digest = tensors_digest(read_tensors(tmp_path))
    weights = proof.read_weights(tmp_path, digest, "cpu", None)
    config = engine_module.read_config(tmp_path)
    serving = engine_module._Serving(tmp_path, config, b"", 1, "tag")
    prove = engine_module._Proof(serving, lambda: pytest.fail("it holds them"), weights)
    engine_module._say_unhashed.cache_clear()
    prove(Elsewhere(weights, 0.0))
    prove(Elsewhere(weights, 0.0))
    assert [record.message for record in caplog.records if "checksums cannot be compared" in record.message] == [
        "SGLang computes on cuda, this process on cpu: checksums cannot be compared, so weights are proven by their "
        "version and by log-probs only"
    ]
    with pytest.raises(WeightsMismatch, match="it computes with others"):
        prove(Elsewhere(weights, -0.01))
