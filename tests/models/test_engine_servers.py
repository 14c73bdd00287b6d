"""Real SGLang servers, `-m sglang`: two of our own, one of them killed; one at an address; one that cannot start."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from data.config import EngineConfig
from models.engines.contract import Completion, Request, SamplingParams
from models.engines.sglang.arguments import prepare_environment, server_arguments
from models.engines.sglang.backend import Answer, Asked, BackendLost, BackendRefused
from models.engines.sglang.engine import SGLangEngine
from models.engines.sglang.http import Served
from models.engines.sglang.replica import Wanted
from models.engines.sglang.replicas import Replicas
from models.engines.sglang.servers import Own
from models.toy import write_toy
from models.weights import read_tensors, tensors_digest, write_tensors

pytestmark = pytest.mark.sglang
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9, eos_ids=())


@pytest.fixture(scope="module")
def policies(tmp_path_factory, sglang_on_cpu) -> list[tuple[Path, str]]:
    """Two toys that differ, with distributions far from uniform, and their digests."""
    prepare_environment("cpu")
    found = []
    for scale in (6, 5):
        folder = tmp_path_factory.mktemp(f"toy-{scale}")
        write_toy(folder)
        write_tensors(folder, {name: t * scale if t.ndim == 2 else t for name, t in read_tensors(folder).items()})
        found.append((folder, tensors_digest(read_tensors(folder))))
    return found


def prompts(count: int) -> list[Request]:
    rng = np.random.default_rng(count)
    return [
        Request(f"p@{i}/0", rng.integers(0, 512, rng.integers(1, 25)).astype(np.int32), seed=i) for i in range(count)
    ]


def require_logprobs_of(folder: Path, requests: list[Request], completions: list[Completion]) -> None:
    """One completion each, in order, with the log-probs that one pass of transformers gives the same stream."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert [c.trajectory_id for c in completions] == [r.trajectory_id for r in requests]
    for request, completion in zip(requests, completions, strict=True):
        stream = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            logp = model(stream[None]).logits[0].log_softmax(-1)
        first = len(request.token_ids)
        expected = logp[first - 1 : -1].gather(1, stream[first:, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.timeout(1200)
def test_own_servers_one_killed_while_it_generates(policies) -> None:
    """Under the second policy: complete, each once, by its weights; the killed one comes back with them."""
    (first, first_digest), (second, second_digest) = policies
    long = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=200, eos_ids=())
    engine = SGLangEngine(EngineConfig(kind="sglang", replicas=2, batch=8, memory=0.3), 1)
    requests, earlier = prompts(40), set(psutil.Process().children(recursive=True))
    try:
        engine.update_weights(first, 1, first_digest)
        require_logprobs_of(first, requests, engine.generate(requests, PARAMS))
        engine.update_weights(second, 2, second_digest)
        replicas = engine._replicas._replicas
        os_ids = [replica._backend.pid for replica in replicas]
        threading.Timer(1.5, os.kill, (os_ids[0], signal.SIGKILL)).start()
        completions = engine.generate(requests, long)
        assert not psutil.pid_exists(os_ids[0]) and not replicas[0].ready, "it was killed in the middle"
        require_logprobs_of(second, requests, completions)
        assert {c.policy_version for c in completions} == {2}
        replicas[0].revive().result()
        assert replicas[0]._backend.serving() == second_digest[:32]
        require_logprobs_of(second, requests, engine.generate(requests, PARAMS))
    finally:
        started = [child for child in psutil.Process().children(recursive=True) if child not in earlier]
        engine.close()
    assert len(started) >= 6 and not psutil.wait_procs(started, timeout=10)[1]


@pytest.mark.timeout(1200)
def test_a_server_at_an_address(policies) -> None:
    """With a tokenizer, as somebody would start it: weights from disk, abort, refusals, and its end."""
    (first, first_digest), (second, second_digest) = policies
    theirs = EngineConfig(kind="sglang", batch=8, memory=0.3)
    server = Own(server_arguments(theirs, first, "cpu", "theirs", 2, True), theirs, None, threading.Event())
    engine = SGLangEngine(EngineConfig(kind="sglang", urls=[server.url], batch=8, timeout_s=20.0), 2)
    requests = prompts(20)
    try:
        engine.update_weights(first, 1, first_digest)
        require_logprobs_of(first, requests, engine.generate(requests, PARAMS))
        engine.update_weights(second, 2, second_digest)
        stopped = engine.generate(requests, replace(PARAMS, eos_ids=tuple(range(0, 512, 9))))
        require_logprobs_of(second, requests, stopped)
        assert {c.finish_reason for c in stopped} == {"stop", "length"}
        mine = engine._replicas._replicas[0]._backend
        with pytest.raises(BackendRefused, match=r"SGLang at .* must see /nowhere under the same path"):
            mine.load_folder(Path("/nowhere"), "nowhere")
        with pytest.raises(BackendRefused, match="refuses /generate: status 400"):
            mine.generate([Asked("long", [1] * 5000, {"max_new_tokens": 8})], lambda i, answer: None, 60.0)
        require_abort_is_ones_own(server, mine)
        server.close()
        with pytest.raises(BackendLost, match=f"{server.url}.*tried for engine.timeout_s = 20 s"):
            engine.generate(requests, PARAMS)
    finally:
        engine.close()
        server.close()


def require_abort_is_ones_own(server: Own, mine: Served) -> None:
    """Two clients, each with a request of 400 tokens; one aborts."""
    answers: dict[str, Answer] = {}

    def ask(client: Served, name: str) -> threading.Thread:
        asked = [Asked(name, [1, 2, 3], {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True})]
        thread = threading.Thread(target=client.generate, args=(asked, lambda i, a: answers.update({name: a}), 120.0))
        thread.start()
        return thread

    threads = [ask(mine, "mine"), ask(Served(server.url, batch=8, timeout_s=60.0), "theirs")]
    time.sleep(1.0)
    mine.abort()
    for thread in threads:
        thread.join()
    assert answers["mine"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers["theirs"]["meta_info"]["finish_reason"]["type"] == "length"


def test_arguments_that_sglang_does_not_know(policies) -> None:
    config = EngineConfig(kind="sglang", replicas=2, arguments={"no_such_thing": 3})
    replicas = Replicas(config, "cpu", 1, text=False)
    with pytest.raises(ValueError, match=r"engine.arguments: SGLang does not take them .*no-such-thing"):
        replicas.load(Wanted(policies[0][0], "policy", lambda backend: None), in_place=False)
    replicas.close()
