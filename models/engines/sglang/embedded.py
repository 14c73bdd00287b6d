"""SGLang inside this process: its scheduler is a child of it, and requests and weights go there without HTTP."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import torch

from models.engines.sglang.backend import Answer, Asked, BackendLost, BackendRefused, too_late
from models.engines.sglang.complaints import explain

LOOK_S = 0.2  # how often it is looked whether the children live


class Embedded:
    """A Backend (backend.py). One in a process: SGLang keeps its state in globals.

    SGLang works in a thread of its own. In the main thread it would install signal handlers, and end this process
    whenever a child of it dies.
    """

    def __init__(self, arguments: dict[str, Any], device: str) -> None:
        """Returns when it can generate. Raises BackendLost, with what SGLang said, if it cannot be started."""
        self.device = device
        self._log = Path(tempfile.mkstemp(prefix="rollbook-sglang-", suffix=".log")[1])
        self._thread = ThreadPoolExecutor(1, "sglang")
        self._earlier = set(psutil.Process().children(recursive=True))
        self._children: list[psutil.Process] = []  # that must live
        self._loop: asyncio.AbstractEventLoop | None = None  # SGLang's, in its thread
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # how the children report a failure; _wait sees it without
        try:
            with _errors_into(self._log):
                self._engine = self._wait("start", self._thread.submit(_start, arguments))
        except BaseException:
            self._end()
            raise
        self._manager, self._loop = self._engine.tokenizer_manager, self._engine.loop
        self._children = self._started()

    def generate(self, asked: Sequence[Asked], arrived: Callable[[int, Answer], None], timeout_s: float) -> None:
        async def one(place: int, request: Asked) -> None:
            arrived(place, await anext(self._manager.generate_request(_wire(request), None)))

        async def everything() -> int:
            tasks = [asyncio.ensure_future(one(place, request)) for place, request in enumerate(asked)]
            done, late = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in late:
                task.cancel()
            if late:  # of the time limit, or given up since another one was refused
                self._manager.abort_request(abort_all=True)
            for task in done:
                task.result()
            return len(late)

        if asked and (late := self._run("generate", everything())):
            raise too_late(late, len(asked), timeout_s)

    def abort(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._manager.abort_request, "", True)

    def load_folder(self, folder: Path, tag: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput  # ty: ignore[unresolved-import]

        ask = UpdateWeightFromDiskReqInput(model_path=str(folder), weight_version=tag, flush_cache=True)
        self._load(folder, lambda: self._manager.update_weights_from_disk(ask, None))

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], folder: Path, tag: str) -> None:
        """In one flat bucket, which the scheduler maps: on a GPU nothing is copied but into its own parameters."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput  # ty: ignore[unresolved-import]
        from sglang.srt.utils import MultiprocessingSerializer  # ty: ignore[unresolved-import]
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # ty: ignore[unresolved-import]

        bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
        content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        ask = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(content)],
            load_format="flattened_bucket",
            flush_cache=True,
            weight_version=tag,
        )

        async def update() -> Any:
            if not hasattr(self._engine, "begin_weight_update"):  # SGLang 0.5.17
                return await self._manager.update_weights_from_tensor(ask, None)
            from sglang.srt.managers import io_struct  # ty: ignore[unresolved-import]

            await self._manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector="all"), None)
            answer = await self._manager.update_weights_from_tensor(ask, None)
            await self._manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None)
            return answer

        self._load(folder, update)

    def _load(self, folder: Path, update: Callable[[], Awaitable[Any]]) -> None:
        """Between a pause and going on. Raises BackendRefused."""
        from sglang.srt.managers import io_struct  # ty: ignore[unresolved-import]

        async def load() -> tuple[bool, str]:
            await self._manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
            try:
                fine, message, *_ = await update()
            finally:
                await self._manager.continue_generation(io_struct.ContinueGenerationReqInput())
            return fine, message

        fine, message = self._run("load weights", load())
        if not fine:
            raise BackendRefused(f"SGLang does not load {folder}: {message}")

    def serving(self) -> str:
        return str(self._manager.config_value("weight_version"))

    def checksums(self) -> list[dict[str, str]]:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput  # ty: ignore[unresolved-import]

        ask = CheckWeightsReqInput(action="checksum")
        fine, message, ranks, *_ = self._run("hash its weights", self._manager.check_weights(ask, None))
        if not fine or not ranks:
            raise BackendRefused(f"SGLang cannot hash its weights: {message}")
        return [dict(rank["checksums"]) for rank in ranks]

    def close(self) -> None:
        """SGLang's own shutdown would end every child of this process, whoever started it."""
        watchdog = getattr(self._manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        self._end()

    def _run(self, what: str, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return self._wait(what, self._thread.submit(self._loop.run_until_complete, work))

    def _wait(self, what: str, work: Future[Any]) -> Any:
        """Its result. Raises BackendLost if a child of SGLang dies meanwhile, or SGLang says that one did."""
        while not work.done():
            wait([work], LOOK_S)
            if not work.done() and (dead := [child for child in self._children if not _alive(child)]):
                self._stop_waiting()
                raise BackendLost(f"SGLang died while it was to {what}: {explain(self._log, f'process {dead[0].pid}')}")
        try:
            return work.result()
        except (RuntimeError, EOFError, SystemExit) as error:
            raise BackendLost(f"SGLang failed to {what}: {explain(self._log, str(error))}") from error

    def _stop_waiting(self) -> None:
        """Free the thread of an answer that will not come."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _started(self) -> list[psutil.Process]:
        """The processes that SGLang started and that live; Python's own resource tracker serves others too."""
        new = [child for child in psutil.Process().children(recursive=True) if child not in self._earlier]
        return [child for child in new if _alive(child) and "resource_tracker" not in " ".join(child.cmdline())]

    def _end(self) -> None:
        started = self._loop is not None  # else what there is of a start that failed
        left = [p for child in self._children for p in _with_children(child)] if started else self._started()
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=10.0)
        if self._loop is not None:
            self._thread.submit(_cancel_all, self._loop).result(timeout=10.0)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._log.unlink(missing_ok=True)


def _start(arguments: dict[str, Any]) -> Any:
    import sglang  # ty: ignore[unresolved-import]
    from sglang.srt.server_args import ServerArgs  # ty: ignore[unresolved-import]

    try:
        settings = ServerArgs(**arguments)
    except TypeError as error:
        raise ValueError(
            f"engine.arguments: SGLang {sglang.__version__} does not take them ({error}); "
            "`python -m sglang.launch_server --help` lists what it takes (with underscores here)"
        ) from error
    return sglang.Engine(server_args=settings)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """What SGLang left waiting for its processes."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _wire(request: Asked) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput  # ty: ignore[unresolved-import]

    return GenerateReqInput(
        rid=request.name, input_ids=request.token_ids, sampling_params=request.sampling, return_logprob=True
    )


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def _errors_into(path: Path) -> Iterator[None]:
    """Children started meanwhile write there what they would write to stdout and stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(1), os.dup(2)]
    with path.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        for descriptor, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, descriptor)
            os.close(kept)
