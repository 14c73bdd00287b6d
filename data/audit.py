"""Whether all that a run is made of is still there and unaltered: files are hashed again, keys summed up again."""

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

from data.attempt import read_manifest
from data.checkpoints import FOLDER
from data.digest import json_digest
from data.files import check_sha256, check_size, missing
from data.ledger import THREADS, Ledger
from data.manifest import FileEntry, Manifest, ManifestError
from data.request import KEYED
from data.store import Store

BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Checked:
    """The files of one kind of result."""

    kind: str
    manifests: int
    files: int
    bytes: int
    seconds: float  # of reading and hashing, summed over threads


@dataclass(frozen=True)
class Audit:
    """What was looked at, and every fault found, each by address."""

    kinds: tuple[Checked, ...]
    faults: tuple[str, ...]


def audit(ledger: Ledger, tell: Callable[[int, int], None] = lambda done, total: None) -> Audit:
    """Check the run's steps and states, its parent's that it refers to, and what they were made of.

    `tell(done, total)` is called as files are done, in bytes.
    """
    faults: list[str] = []
    manifests = _collect(ledger, faults)
    for manifest in manifests.values():
        faults += _inconsistent(manifest, manifests)
    seconds = dict.fromkeys(sorted(manifest.kind for manifest in manifests.values()), 0.0)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = {
            pool.submit(_check, ledger.store, entry): (manifest.kind, entry.bytes)
            for manifest in manifests.values()
            for entry in manifest.files
        }
        total, done = sum(size for _, size in waiting.values()), 0
        for future in as_completed(waiting):
            kind, size = waiting[future]
            fault, took = future.result()
            faults += fault
            seconds[kind] += took
            done += size
            tell(done, total)
    kinds = tuple(_sum(kind, list(manifests.values()), took) for kind, took in seconds.items())
    return Audit(kinds, tuple(sorted(faults)))


def _collect(ledger: Ledger, faults: list[str]) -> dict[str, Manifest]:
    """Manifests by URI; those that cannot be read, or are named and not there, are faults."""
    store, found, asked, waiting = ledger.store, dict[str, Manifest](), set[str](), list(_entries(ledger))
    users: dict[str, str] = {}
    while waiting:
        asked.update(waiting)
        with ThreadPoolExecutor(THREADS) as pool:
            for manifest, fault in pool.map(partial(_read, store), waiting):
                faults += fault
                found |= {manifest.uri: manifest} if manifest else {}
        users = {store.path_of(uri): m.uri for m in found.values() for uri in m.input_uris.values()}
        waiting = sorted(set(users) - asked)
    for path, user in users.items():
        if not store.exists(path):
            faults.append(f"{store.url_of(path)}: missing, but {user} was made from it; restore the file")
    return found


def _entries(ledger: Ledger) -> Iterator[str]:
    """Paths of the manifests that the run's own folder may hold."""
    kept = f"{ledger.run}/{FOLDER}"
    yield from (f"{kept}/{name}/manifest.json" for name in ledger.store.list_dirs(kept))
    for iteration in ledger.iterations():
        yield from (place.manifest for place in ledger.places(iteration))


def _read(store: Store, path: str) -> tuple[Manifest | None, list[str]]:
    """(a manifest, what is wrong with it). One that is not there may be an attempt's that was not committed."""
    try:
        return read_manifest(store, path), []
    except ManifestError as error:
        return None, [str(error)]


def _inconsistent(manifest: Manifest, others: dict[str, Manifest]) -> Iterator[str]:
    keyed = manifest.model_dump(mode="json", include=set(KEYED))
    if json_digest(keyed) != manifest.key:
        yield f"{manifest.uri}: altered: its key is not that of step, inputs, config, seed and code; restore it"
    for name, uri in manifest.input_uris.items():
        if uri in others and others[uri].content_digest != manifest.inputs[name]:
            yield f"{uri}: altered: its content digest is not what {manifest.uri} was made from; restore it"


def _check(store: Store, entry: FileEntry) -> tuple[list[str], float]:
    started = time.perf_counter()
    try:
        size, digest = _hash(store, entry)
        check_size(size, entry)
        check_sha256(digest, entry)
        fault = []
    except FileNotFoundError:
        fault = [str(missing(entry))]
    except ManifestError as error:
        fault = [str(error)]
    return fault, time.perf_counter() - started


def _hash(store: Store, entry: FileEntry) -> tuple[int, str]:
    """(bytes, SHA-256) as stored, in blocks; the last asks for a byte too much, to see a file that has grown."""
    path, size, digest = store.path_of(entry.uri), 0, hashlib.sha256()
    if entry.bytes == 0:
        return len(data := store.read_bytes(path)), hashlib.sha256(data).hexdigest()
    for start in range(0, entry.bytes, BLOCK_BYTES):
        stop = start + BLOCK_BYTES
        data = store.read_span(path, start, stop if stop < entry.bytes else entry.bytes + 1, entry.version_id)
        digest.update(data)
        size += len(data)
    return size, digest.hexdigest()


def _sum(kind: str, manifests: list[Manifest], seconds: float) -> Checked:
    mine = [manifest for manifest in manifests if manifest.kind == kind]
    entries = [entry for manifest in mine for entry in manifest.files]
    return Checked(kind, len(mine), len(entries), sum(entry.bytes for entry in entries), seconds)
