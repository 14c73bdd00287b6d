"""Policies handed from the trainer to an engine on the same machine, in memory, beside the copy that the store gets."""

import logging
import os
import shutil
import uuid
from pathlib import Path

import psutil

log = logging.getLogger("rollbook")
MEMORY = Path("/dev/shm")


def root() -> Path:
    """Where this user's processes hand policies over."""
    return MEMORY / f"rollbook-{os.getuid()}"


def sweep() -> None:
    """Clear away what processes that are gone left."""
    for left in root().glob("*-*"):
        pid = left.name.split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def place(room: int) -> Path | None:
    """A new empty folder in memory, for a policy of `room` bytes; None if this machine has no such place."""
    folder = root() / f"{os.getpid()}-new-{uuid.uuid4().hex}"
    try:
        root().mkdir(mode=0o700, exist_ok=True)
        sweep()
        if (free := shutil.disk_usage(MEMORY).free) < room:
            raise OSError(f"{MEMORY} has {free / 1e6:,.0f} MB left, it needs {room / 1e6:,.0f}: make it larger")
        folder.mkdir()
    except OSError as error:
        log.warning("no policy can be handed over in memory (%s); engines read the store", error)
        return None
    return folder


def offer(folder: Path, digest: str) -> None:
    """The folder from `place` holds the policy of that digest, whole.

    Of those offered before by this process the last one stays: an engine that refuses this one goes back to it.
    """
    target = root() / f"{os.getpid()}-{digest}"
    others = set(root().glob(f"{os.getpid()}-*")) - {folder, target}
    offers = sorted(others - set(root().glob(f"{os.getpid()}-new-*")), key=lambda path: path.stat().st_mtime_ns)
    for old in others - set(offers[-1:]) | {target}:
        shutil.rmtree(old, ignore_errors=True)
    folder.rename(target)


def offered(digest: str) -> Path | None:
    """The folder with that policy, if a process on this machine offers it."""
    return next(root().glob(f"*-{digest}"), None)
