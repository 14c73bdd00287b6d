"""Several SGLangs that serve one policy: work shared by tokens, the dead replaced, no trajectory answered twice."""

import heapq
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed, wait
from typing import Any

from data.config import EngineConfig
from models.engines.sglang.arguments import server_arguments
from models.engines.sglang.backend import Answer, Asked, Backend, BackendLost
from models.engines.sglang.embedded import Embedded
from models.engines.sglang.http import KEY, Served
from models.engines.sglang.replica import Replica, Wanted
from models.engines.sglang.servers import Own, visible_gpus

log = logging.getLogger("rollbook")
ATTEMPTS = 3  # of a request, each on replicas that live


class Replicas:
    """Made with the first weights. To load weights, all must live; to generate, one."""

    def __init__(self, config: EngineConfig, device: str, threads: int, text: bool) -> None:
        self._config, self._device, self._threads, self._text = config, device, threads, text
        self._replicas: list[Replica] = []

    def load(self, wanted: Wanted, in_place: bool) -> None:
        """Weights to every replica at once; those that cannot take them in place, or are lost, are started with them.

        Raises what one of them raised, when all have ended.
        """
        self._replicas = self._replicas or self._made()
        jobs = [replica.load(wanted, in_place) for replica in self._replicas]
        wait(jobs)
        for job in jobs:
            job.result()

    def generate(self, asked: Sequence[Asked]) -> list[Answer]:
        """One answer each, in order. Raises BackendLost if the replicas die again and again.

        What a lost one had not finished is shared among the others when they have finished theirs.
        """
        answers: dict[int, Answer] = {}
        lost: BackendLost | None = None
        for attempt in range(ATTEMPTS):
            left = {place: request for place, request in enumerate(asked) if place not in answers}
            if not left:
                break
            again = {p: Asked(f"{r.name}.{attempt}", r.token_ids, r.sampling) for p, r in left.items()}
            lost = self._round(again, answers, last=attempt + 1 == ATTEMPTS)
        if lost is not None and len(answers) < len(asked):
            raise lost
        return [answers[place] for place in range(len(asked))]

    def close(self) -> None:
        replicas, self._replicas = self._replicas, []
        for replica in replicas:
            replica.close()

    def _round(self, asked: dict[int, Asked], answers: dict[int, Answer], last: bool) -> BackendLost | None:
        """Ask each once. What one that was lost raised; unless it was the last round, it is being started again."""
        replicas, places = self._living(), list(asked)
        shares = balance([_tokens(asked[place]) for place in places], len(replicas))
        jobs: dict[Future[None], Replica] = {}
        for replica, share in zip(replicas, shares, strict=True):
            mine = [places[i] for i in share]

            def arrived(i: int, answer: Answer, mine: list[int] = mine) -> None:
                answers.setdefault(mine[i], answer)

            jobs[replica.generate([asked[p] for p in mine], arrived, self._config.timeout_s)] = replica
        lost = None
        for job in as_completed(jobs):
            error = job.exception()
            if isinstance(error, BackendLost):
                lost = error
                if not last:
                    log.warning("%s; it is brought back, and what it had not finished is asked for again", lost)
                    jobs[job].revive()
            elif error is not None:
                _stop(jobs)
                raise error
        return lost

    def _living(self) -> list[Replica]:
        """Those that can generate now; if none can, the first that is brought back. Raises if none comes back."""
        if not self._replicas:
            raise BackendLost("no SGLang has been started; call update_weights first")
        revivals = [replica.revive() for replica in self._replicas if not replica.ready]
        living = [replica for replica in self._replicas if replica.ready]
        error: BaseException | None = None
        for revival in as_completed(revivals if not living else []):
            if (error := revival.exception()) is None:
                living = [replica for replica in self._replicas if replica.ready]
                break
        for replica in self._replicas:
            replica.forget_failure()
        if error is not None:
            raise error
        return living

    def _made(self) -> list[Replica]:
        config = self._config
        if config.urls:
            return [Replica(self._at(url), _thread(), ours=False, patience_s=config.timeout_s) for url in config.urls]
        if config.replicas == 1:
            return [Replica(self._embedded, Here(), ours=True, patience_s=0.0)]
        gpus = visible_gpus()
        chosen = [gpus[number % len(gpus)] if gpus else None for number in range(config.replicas)]
        return [Replica(self._own(gpu), _thread(), ours=True, patience_s=0.0) for gpu in chosen]

    def _embedded(self, wanted: Wanted, closing: threading.Event) -> Backend:
        return Embedded(self._arguments(wanted), self._device)

    def _own(self, gpu: str | None) -> Callable[[Wanted, threading.Event], Backend]:
        return lambda wanted, closing: Own(self._arguments(wanted), self._config, gpu, closing)

    def _at(self, url: str) -> Callable[[Wanted, threading.Event], Backend]:
        def connect(wanted: Wanted, closing: threading.Event) -> Backend:
            served = Served(url, self._config.batch, self._config.timeout_s, os.environ.get(KEY))
            served.load_folder(wanted.folder, wanted.tag)
            return served

        return connect

    def _arguments(self, wanted: Wanted) -> dict[str, Any]:
        return server_arguments(self._config, wanted.folder, self._device, wanted.tag, self._threads, self._text)


class Here(Executor):
    """Works at once, in the thread that asks: SGLang inside this process wants the main one."""

    def submit[**P, T](self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def balance(tokens: Sequence[int], shares: int) -> list[list[int]]:
    """Places of `tokens` in so many shares: the longest first, each to the share that has the fewest tokens so far."""
    found: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for place in sorted(range(len(tokens)), key=lambda place: -tokens[place]):
        load, share = heapq.heappop(loads)
        found[share].append(place)
        heapq.heappush(loads, (load + tokens[place], share))
    return found


def _tokens(asked: Asked) -> int:
    """At most, prompt and answer."""
    return len(asked.token_ids) + asked.sampling["max_new_tokens"]


def _thread() -> Executor:
    """One thread, which lives until the replica is closed: our servers end with the one that started them."""
    return ThreadPoolExecutor(1, "replica")


def _stop(jobs: dict[Future[None], Replica]) -> None:
    """After one was refused: no one waits for the others."""
    for replica in jobs.values():
        replica.abort()
    wait(jobs)
