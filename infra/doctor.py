"""What this machine has of what Rollbook needs, tried for real."""

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from data.addresses import without_password
from data.provenance import packages
from data.store import Store
from infra.home import Home
from infra.servers import answers


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    found: str


def examine(home: Home, store: Store, ray_address: str) -> list[Check]:
    """Every check, in order; a check that fails says what it met and never stops the others."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", platform.python_version),
        ("packages", lambda: ", ".join(f"{name} {version}" for name, version in packages().items())),
        ("machine", _machine),
        ("gpu", _gpu),
        ("home", lambda: f"{home.root}, {shutil.disk_usage(home.root).free / 2**30:.0f} GiB free"),
        ("store", lambda: _store(store)),
        ("ray", lambda: _ray(ray_address)),
        ("mlflow", lambda: _mlflow(home)),
        ("prefect", _prefect),
    ]
    return [_try(name, call) for name, call in checks]


def _try(name: str, call: Callable[[], str]) -> Check:
    try:
        return Check(name, True, call())
    except Exception as error:  # the point of a check-up is to go on and tell
        return Check(name, False, f"{type(error).__name__}: {error}")


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} CPU cores, {memory:.0f} GiB memory"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none: engine and trainer use the CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{', '.join(names)} (CUDA {torch.version.cuda})"


def _store(store: Store) -> str:
    store.check_writable()
    return f"{store.url} can be written"


def _ray(address: str) -> str:
    import ray

    from infra.ray_session import session

    with session(address):
        return f"{ray.__version__}, {address}: {ray.cluster_resources().get('CPU', 0):.0f} CPUs"


def _mlflow(home: Home) -> str:
    from infra.tracking import connect

    return f"{connect(home.tracking_uri)}, {without_password(home.tracking_uri)}"


def _prefect() -> str:
    from infra.prefect_tasks import prefect_url

    url = prefect_url()
    if url is None:
        return "no server: each run starts one for itself; `rollbook up` keeps one"
    if not answers(f"{url}/health"):
        raise ConnectionError(f"{url} does not answer; start it with `rollbook up`, or unset PREFECT_API_URL")
    return f"{url} answers"
