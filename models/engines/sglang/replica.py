"""One SGLang of several: it holds the present weights, proven, or is being brought back to them."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import torch
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_random_exponential,
)

from models.engines.sglang.backend import Answer, Asked, Backend, BackendLost

log = logging.getLogger("rollbook")


@dataclass(frozen=True)
class Wanted:
    """The weights to serve, and what raises unless a backend does."""

    folder: Path
    tag: str
    prove: Callable[[Backend], None]
    tensors: Callable[[], Mapping[str, torch.Tensor] | None] = lambda: None  # the same weights, while in memory


Make = Callable[[Wanted, threading.Event], Backend]  # one that has the weights; the event, once set, ends the waiting


class Replica:
    """Its calls are done one after the other by its `worker`, and give futures. It owns the worker."""

    def __init__(self, make: Make, worker: Executor, ours: bool, patience_s: float) -> None:
        """`ours`: it can be started with other weights. `patience_s`: for how long one that is lost is tried again."""
        self._make, self._worker, self._ours, self._patience_s = make, worker, ours, patience_s
        self._backend: Backend | None = None
        self._wanted: Wanted | None = None
        self._revival: Future[None] | None = None
        self._closing = threading.Event()
        self.ready = False  # its weights are proven

    def load(self, wanted: Wanted, in_place: bool) -> Future[None]:
        """Serve other weights: in place where possible, else by a new start."""
        self._wanted = wanted
        return self._submit(self._load, wanted, in_place)

    def generate(
        self, asked: Sequence[Asked], arrived: Callable[[int, Answer], None], timeout_s: float
    ) -> Future[None]:
        return self._submit(self._generate, asked, arrived, timeout_s)

    def revive(self) -> Future[None]:
        """Bring back one that is not ready. Asked again meanwhile, it is the same future."""
        if self._revival is None:
            self._revival = self._submit(self._revive)
        return self._revival

    def forget_failure(self) -> None:
        """The next `revive` is another try."""
        if self._revival is not None and self._revival.done():
            self._revival = None

    def abort(self) -> None:
        if (backend := self._backend) is not None:
            backend.abort()

    def close(self) -> None:
        self._closing.set()
        self._drop()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._drop()

    def _submit[**P](self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Future[None]:
        if not self._closing.is_set():
            return self._worker.submit(work, *args, **kwargs)
        stopped: Future[None] = Future()
        stopped.set_exception(BackendLost("SGLang was stopped"))
        return stopped

    def _load(self, wanted: Wanted, in_place: bool) -> None:
        self.ready = False
        if self._backend is not None and (in_place or not self._ours):
            try:
                if (tensors := wanted.tensors()) is not None:
                    self._backend.load_tensors(tensors, wanted.folder, wanted.tag)
                else:
                    self._backend.load_folder(wanted.folder, wanted.tag)
                wanted.prove(self._backend)
                self.ready = True
                return
            except BackendLost as lost:
                log.warning("%s; it is %s", lost, "started again" if self._ours else "tried again")
        self._begin(wanted)

    def _generate(self, asked: Sequence[Asked], arrived: Callable[[int, Answer], None], timeout_s: float) -> None:
        if self._backend is None:
            raise BackendLost("SGLang was given up")
        try:
            self._backend.generate(asked, arrived, timeout_s)
        except BackendLost:
            self.ready = False
            self._drop()
            raise

    def _revive(self) -> None:
        if self._wanted is not None and not self.ready:
            self._begin(self._wanted)

    def _begin(self, wanted: Wanted) -> None:
        self._drop()
        retrying = Retrying(
            retry=retry_if_exception_type(BackendLost),
            stop=stop_after_delay(self._patience_s) | stop_when_event_set(self._closing),
            sleep=sleep_using_event(self._closing),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            before_sleep=self._tell,
            reraise=True,
        )
        try:
            self._backend = retrying(self._proven, wanted)
        except BackendLost as lost:
            if self._ours:
                raise
            raise BackendLost(
                f"{lost}; tried for engine.timeout_s = {self._patience_s:g} s: start that server again, or take it out "
                "of engine.urls"
            ) from lost
        self.ready = True

    def _tell(self, state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            log.warning("%s; trying for another %g s", state.outcome.exception(), self._patience_s)

    def _proven(self, wanted: Wanted) -> Backend:
        backend = self._make(wanted, self._closing)
        try:
            wanted.prove(backend)
        except BaseException:
            backend.close()
            raise
        return backend

    def _drop(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
