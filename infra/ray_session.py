"""Ray: one session per process, warm residents that own an engine or a trainer, and waiting that can be interrupted."""

import concurrent.futures
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from infra.notices import Listener, ToDriver

log = logging.getLogger("rollbook")
OBJECT_STORE_BYTES = 256 * 2**20
LOCAL_RANK_CPUS = 0.01  # the operating system shares one machine's well; Ray would wait for ever for more than it has
POLL_S = 0.05


class WorkerLost(RuntimeError):
    """A Ray worker, actor or node died: the step may be tried again."""


class FleetClosed(RuntimeError):
    """The run is over: what it still had under way is not tried again."""


@contextlib.contextmanager
def session(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at `address`, or start one on this machine for 'local'; leave it as it was found."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        # On one machine, Ray's own CPU count would cap what the operating system shares well.
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": os.cpu_count()}
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise ConnectionError(
            f"Ray at {address!r} takes no connection ({error}); check resources.ray_address, and if that cluster wants "
            "a token (Ray's default) set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless ~/.ray/auth_token has it"
        ) from None
    except SystemExit:  # Ray's answer to a SIGTERM that meets it while it starts
        ray.shutdown()
        raise KeyboardInterrupt from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminate)  # Ray puts its own in place, which ends the process at once
    try:
        yield
    finally:
        ray.shutdown()


class Resident:
    """A warm process that owns what a factory made, and runs the bodies of steps on it."""

    def __init__(self) -> None:
        self._resource: Any = None
        self._failure: Exception | None = None
        logging.getLogger("rollbook").addHandler(ToDriver())

    def address(self) -> str:
        """tcp://ip:port, a free port of this process's machine, where the ranks of a gang can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def own(self, factory: Callable[..., Any], *args: Any) -> None:
        try:
            self._resource = factory(*args)
        except Exception as failure:  # told to whoever asks for work first: nobody waits for this call
            self._failure = failure

    def run(self, body: Callable[..., Any], *args: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        return body(self._resource, *args)


@dataclass(frozen=True)
class Role:
    """How to make the resident, or the gang of ranks, that plays one part in a run.

    A gang's ranks are one placement group; its factory is called with (rank, world, rendezvous) before `args`.
    """

    name: str
    factory: Callable[..., Any]
    args: tuple[Any, ...] = ()
    ranks: int | None = None  # None: one resident, no gang
    gpus: float = 0.0  # of Ray's, for each resident; 0: none is kept for it, and it sees all


class Fleet:
    """The residents of one run, made when first needed and again when lost. They are caches: the store is the truth."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._residents: dict[str, list[ActorHandle]] = {}
        self._groups: dict[str, PlacementGroup] = {}
        self._session = contextlib.ExitStack()
        self._listener = Listener()
        self._making = threading.RLock()  # a pipelined run has work for two residents at a time
        self._closed = False

    def close(self) -> None:
        """Stop the residents, and Ray if this fleet started it. What still runs on them then raises FleetClosed."""
        with self._making:
            self._closed = True
            for name in list(self._residents):
                self._dismiss(name)
            self._session.close()

    @property
    def local(self) -> bool:
        """Whether Ray is of this fleet alone, on this machine."""
        return self._address == "local"

    def has(self, role: Role) -> bool:
        """Whether its residents are there."""
        return role.name in self._residents

    def warm(self, role: Role) -> list[ActorHandle]:
        """The residents of a role; those that have to be made start behind, and this returns."""
        with self._making:
            if self._closed:
                raise FleetClosed("the run has ended: no resident is made for it any more")
            return self._made(role)

    def _made(self, role: Role) -> list[ActorHandle]:
        if not self._residents:
            self._session.enter_context(session(self._address))
        if role.name not in self._residents:
            self._dismiss(role.name)  # the places of a gang that died before it had met
            _require_gpus(role)
            self._residents[role.name] = self._gang(role) if role.ranks else [_actor(role.name, role.gpus).remote()]
            if not role.ranks:
                self._residents[role.name][0].own.remote(role.factory, *role.args)
        return self._residents[role.name]

    def await_ready(self, role: Role) -> None:
        """Wait until the residents can work. Those that died since they were last asked are made again."""
        try:
            self.run(role, _nothing)
        except WorkerLost as lost:
            log.warning("%s is made again: it was lost (%s)", role.name, str(lost).splitlines()[0])
            self.run(role, _nothing)

    def run(self, role: Role, body: Callable[..., Any], *args: Any) -> Any:
        """Run `body(resource, *args)` on the resident, or on every rank of a gang; returns rank 0's result.

        Raises what the body raised, or WorkerLost (and forgets the residents) if a process died. A gang of several
        ranks is forgotten whatever was raised: its other ranks may be waiting for the one that failed.
        """
        actors = self.warm(role)
        try:
            return _wait([actor.run.remote(body, *args) for actor in actors], self._listener.listen)[0]
        except (WorkerLost, KeyboardInterrupt, SystemExit) as lost:
            if self._closed:
                raise FleetClosed("the run ended while this ran") from lost
            self._dismiss(role.name)
            raise
        except Exception:
            if len(actors) > 1:
                self._dismiss(role.name)
            raise

    def _gang(self, role: Role) -> list[ActorHandle]:
        world = role.ranks or 1
        cpus = LOCAL_RANK_CPUS if self.local else 1.0
        place = {"CPU": cpus} | ({"GPU": role.gpus} if role.gpus else {})
        group = placement_group([place] * world, strategy="STRICT_PACK")  # ranks write one checkpoint folder
        self._groups[role.name] = group
        strategies = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(world)]
        actors = [_actor(f"{role.name} {rank}", role.gpus, s, cpus).remote() for rank, s in enumerate(strategies)]
        rendezvous = _wait([actors[0].address.remote()])[0]
        for rank, actor in enumerate(actors):
            actor.own.remote(role.factory, rank, len(actors), rendezvous, *role.args)
        return actors

    def _dismiss(self, name: str) -> None:
        with self._making:
            for actor in self._residents.pop(name, []):
                ray.kill(actor)
            if name in self._groups:
                remove_placement_group(self._groups.pop(name))


def _nothing(resource: object) -> None:
    """The body of a resident that is only waited for."""


def _require_gpus(role: Role) -> None:
    """Raises ValueError for more than the cluster has: Ray would wait for them for ever."""
    wanted, there = role.gpus * (role.ranks or 1), ray.cluster_resources().get("GPU", 0.0)
    if wanted > there:
        raise ValueError(
            f"resources.{role.name}_gpus: {role.gpus:g} for each of {role.ranks or 1}, in all {wanted:g} GPUs, where "
            f"Ray has {there:g}; ask for fewer, or 0 to keep none"
        )


def _actor(part: str, gpus: float, strategy: PlacementGroupSchedulingStrategy | None = None, cpus: float = 0.0) -> Any:
    """A resident whose process has the title `ray::rollbook <part>`, for people who look at `ps` or `nvidia-smi`."""
    options: dict[str, Any] = {"num_cpus": cpus, "max_restarts": 0} | ({"num_gpus": gpus} if gpus else {})
    if strategy is not None:
        options["scheduling_strategy"] = strategy
    return ray.remote(**options)(type(f"rollbook {part}", (Resident,), {}))


def _wait(references: list[Any], meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
    """The results of actor calls, in order; the first failure ends the wait. `meanwhile` is called again and again.

    A bare `ray.get` in the main thread cannot be interrupted by Prefect's cancel or a timeout, so this polls futures.
    """
    futures = [reference.future() for reference in references]
    try:
        pending = set(futures)
        while pending:
            done, pending = concurrent.futures.wait(pending, POLL_S, concurrent.futures.FIRST_COMPLETED)
            for future in done:
                future.result()
            meanwhile()
        return [future.result() for future in futures]
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error))
        cause.add_note(str(error))  # the traceback from inside the worker
        raise cause from None
    except RayError as error:
        raise WorkerLost(f"{type(error).__name__}: {error}") from None
