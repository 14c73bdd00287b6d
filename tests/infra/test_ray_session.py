"""Residents and gangs on a real Ray: what comes back, what is raised, and what happens when a process dies."""

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray

from infra import ray_session
from infra.ray_session import Fleet, FleetClosed, Role, WorkerLost


class Counter:
    def __init__(self, *args: object) -> None:
        self.args, self.calls = args, 0


class UserError(Exception):
    """Does not pickle by its arguments alone, as many do not."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def count(counter: Counter, step: int) -> tuple[int, tuple[object, ...], int]:
    counter.calls += step
    return counter.calls, counter.args, os.getpid()


def fail(counter: Counter) -> None:
    raise ValueError("the value, the rule and the fix")


def fail_oddly(counter: Counter) -> None:
    raise UserError(7, "odd")


def sleep(counter: Counter) -> None:
    time.sleep(60)


def die(counter: Counter) -> None:
    os._exit(9)


def fail_on_the_last(counter: Counter) -> int:
    """Rank 0 waits for the rank that fails, as in a collective."""
    rank, world, *_ = counter.args
    if rank == world - 1:
        raise ValueError("the last rank fails")
    time.sleep(60)
    return os.getpid()


def warn(counter: Counter) -> None:
    logging.getLogger("rollbook").warning("the store does not answer")
    logging.getLogger("rollbook").info("not for the driver")


def broken() -> None:
    raise ImportError("no such engine")


def test_resident_stays_warm(fleet: Fleet) -> None:
    role = Role("counter", Counter, ("a", 1))
    assert fleet.run(role, count, 2)[:2] == (2, ("a", 1))
    assert fleet.run(role, count, 3)[0] == 5


def test_what_a_resident_warns_of_is_on_the_drivers_log(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    role, deadline = Role("counter", Counter), time.monotonic() + 60

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "rollbook"]

    for _ in range(2):  # the second time the actor that carries it is there
        caplog.clear()
        fleet.run(role, warn)
        while not said() and time.monotonic() < deadline:
            fleet.run(role, count, 0)
        assert said() == ["the store does not answer"]


@pytest.mark.parametrize(("ranks", "wanted"), [(None, "0.5"), (3, "1.5")])
def test_gpus_that_the_cluster_lacks_are_refused(fleet: Fleet, ranks: int | None, wanted: str) -> None:
    """Ray itself would wait."""
    with pytest.raises(ValueError, match=rf"spare_gpus: 0.5 for each of .*, in all {wanted} GPUs, .* has 0; ask"):
        fleet.run(Role("spare", Counter, ranks=ranks, gpus=0.5), count, 0)


def test_gang_gives_its_ranks_one_meeting_place(fleet: Fleet) -> None:
    _, (rank, world, rendezvous, extra), _ = fleet.run(Role("gang", Counter, ("x",), ranks=1), count, 1)
    assert (rank, world, extra) == (0, 1, "x")
    assert str(rendezvous).startswith("tcp://") and int(str(rendezvous).rsplit(":", 1)[1]) > 0


def test_rank_that_fails_takes_its_gang_with_it(fleet: Fleet) -> None:
    """More ranks than this machine has CPUs; the others must not keep waiting, and the next call finds fresh ones."""
    role = Role("crowd", Counter, ranks=1 + (os.cpu_count() or 1))
    _, (rank, world, *_), pid = fleet.run(role, count, 1)
    assert (rank, world) == (0, role.ranks)
    started = time.monotonic()
    with pytest.raises(ValueError, match="the last rank fails"):
        fleet.run(role, fail_on_the_last)
    calls, _, other = fleet.run(role, count, 1)
    assert calls == 1 and other != pid and time.monotonic() - started < 50


def test_what_a_body_raises_arrives_as_itself_with_its_traceback(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match="the value, the rule and the fix") as caught:
        fleet.run(Role("counter", Counter), fail)
    assert "in fail" in "".join(caught.value.__notes__)
    with pytest.raises(Exception, match="odd"):
        fleet.run(Role("counter", Counter), fail_oddly)


def test_factory_that_fails_tells_the_first_caller(fleet: Fleet) -> None:
    with pytest.raises(ImportError, match="no such engine"):
        fleet.run(Role("broken", broken), count, 1)


def test_dead_resident_is_worker_lost_and_comes_back_fresh(fleet: Fleet) -> None:
    role = Role("mortal", Counter)
    _, _, pid = fleet.run(role, count, 5)
    with pytest.raises(WorkerLost):
        fleet.run(role, die)
    calls, _, other = fleet.run(role, count, 1)
    assert calls == 1 and other != pid


def test_resident_killed_while_idle_is_made_again_before_it_is_needed(fleet: Fleet) -> None:
    role = Role("idle", Counter)
    _, _, pid = fleet.run(role, count, 5)
    assert psutil.Process(pid).cmdline()[0].startswith("ray::rollbook idle")
    os.kill(pid, signal.SIGKILL)
    fleet.await_ready(role)
    calls, _, other = fleet.run(role, count, 1)
    assert calls == 1 and other != pid


def test_gang_that_dies_before_it_has_met_leaves_its_places_free(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    role = Role("early", Counter, ranks=1)
    with monkeypatch.context() as patched:
        patched.setattr(ray_session, "_wait", lose)
        with pytest.raises(WorkerLost):
            fleet.run(role, count, 1)
    assert fleet.run(role, count, 1)[0] == 1
    places = ray.util.placement_group_table().values()
    assert sum(place["state"] == "CREATED" for place in places) == len(fleet._groups)


def lose(references: list[object]) -> list[object]:
    raise WorkerLost("killed while it started")


def test_what_runs_when_the_fleet_is_closed_is_not_tried_again(fleet: Fleet) -> None:
    """As the rollouts of the next iteration, when this one's training fails: nothing comes up behind the end."""
    own = Fleet("local")  # on the same Ray
    role = Role("closing", Counter)
    assert own.run(role, count, 1)[0] == 1
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(own.run, role, sleep)
        time.sleep(0.5)
        own.close()
        with pytest.raises(FleetClosed, match="the run ended while this ran"):
            under_way.result(timeout=30)
    with pytest.raises(FleetClosed, match="no resident is made for it any more"):
        own.run(role, count, 1)
    assert not own.has(role)


def test_warm_returns_at_once(fleet: Fleet) -> None:
    """Starting a resident must not hold up the step before: far less than the 2 s that its factory takes."""
    fleet.run(Role("counter", Counter), count, 1)
    started = time.monotonic()
    fleet.warm(Role("slow", time.sleep, (2.0,)))
    assert fleet.run(Role("counter", Counter), count, 0)
    assert time.monotonic() - started < 2.0
