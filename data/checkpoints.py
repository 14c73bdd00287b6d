"""Full training states (weights and optimizer) that are kept. Any other is made again from recorded train steps.

`train` records which state it made, by digest. Its files are a result of their own, in <run>/checkpoints/<iteration>,
and of what is on record the one thing that is ever removed by itself: by `retain`, as the config says.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from data.attempt import Attempt, read_manifest
from data.config import CheckpointConfig
from data.ledger import RUN_NAME, Ledger
from data.manifest import Manifest
from data.request import Address, Request

STEP, VERSION, FOLDER = "checkpoint", 1, "checkpoints"


TAGS, TAG_FILE = "tags", "iteration"


@dataclass(frozen=True)
class Checkpoints:
    """Those of one run."""

    ledger: Ledger

    def find(self, state: Manifest) -> Manifest | None:
        """The kept state that a train step of this run made; None if it is not kept."""
        if state.iteration is None:
            return None
        found = self.manifest(state.iteration)
        return found if found is not None and found.content_digest == state.content_digest else None

    def live(self) -> list[int]:
        """Iterations whose state is kept, in order."""
        names = self.ledger.store.list_dirs(f"{self.ledger.run}/{FOLDER}")
        return sorted(int(n) for n in names if self.ledger.store.exists(self._at(int(n)).manifest))

    def keep(self, state: Manifest, folder: Path, execution: Mapping[str, JsonValue]) -> Manifest:
        """Copy a state, saved in a local folder, into the store."""
        if state.iteration is None:
            raise ValueError(f"{state.uri}: a state of no iteration; only those that a run's train steps made are kept")
        request = Request(STEP, VERSION, STEP, {"state": state}, execution=dict(execution))
        attempt: Attempt = self.ledger.writer(self._at(state.iteration), request)
        attempt.add_folder(folder)
        return attempt.commit(content_digest=state.content_digest)

    def surplus(self, config: CheckpointConfig) -> list[int]:
        """Iterations whose state neither the config nor a tag keeps."""
        live, tagged = self.live(), self.tags().values()
        return sorted(set(live) - kept(live, config, tagged, self._reward))

    def retain(self, config: CheckpointConfig) -> list[int]:
        """Remove what neither the config nor a tag keeps; the iterations removed."""
        gone = self.surplus(config)
        for iteration in gone:
            self.remove(iteration)
        return gone

    def tags(self) -> dict[str, int]:
        """Iterations by the names that people gave them."""
        store, folder, found = self.ledger.store, f"{self.ledger.run}/{TAGS}", {}
        for name in store.list_dirs(folder):
            with contextlib.suppress(FileNotFoundError):  # some object stores list folders that are empty
                found[name] = int(store.read_bytes(f"{folder}/{name}/{TAG_FILE}"))
        return found

    def tag(self, name: str, iteration: int) -> None:
        """Keep an iteration's state under a name. Raises FileExistsError if the name has another iteration."""
        if not RUN_NAME.fullmatch(name):
            raise ValueError(f"tag {name!r}: use 1 to 100 letters, digits, '.', '_' or '-', beginning with no sign")
        path = f"{self.ledger.run}/{TAGS}/{name}/{TAG_FILE}"
        if not self.ledger.store.create(path, str(iteration).encode()) and self.tags()[name] != iteration:
            raise FileExistsError(
                f"tag {name!r} of {self.ledger.run!r}: names iteration {self.tags()[name]}; remove it first with "
                f"`rollbook tag {self.ledger.run} {name} --remove`, or take another name"
            )

    def untag(self, name: str) -> None:
        """The state goes with the next one that is kept, if nothing else keeps it. Raises LookupError if not tagged."""
        if name not in (tags := self.tags()):
            raise LookupError(f"tag {name!r}: run {self.ledger.run!r} has {', '.join(tags) or 'none'}")
        self.ledger.store.remove([f"{self.ledger.run}/{TAGS}/{name}/{TAG_FILE}"])

    def manifest(self, iteration: int) -> Manifest | None:
        return read_manifest(self.ledger.store, self._at(iteration).manifest)

    def remove(self, iteration: int) -> None:
        """The manifest first: what is on record is always whole."""
        store, path = self.ledger.store, self._at(iteration).manifest
        manifest = self.manifest(iteration)
        if manifest is None:
            return
        store.remove([path])
        store.remove([store.path_of(entry.uri) for entry in manifest.files])

    def _reward(self, iteration: int) -> float | None:
        """Mean reward of the rollouts that the policy of this state made: those of the iteration after."""
        scored = self.ledger.find(self.ledger.at(iteration + 1, "score"))
        return None if scored is None else scored.metrics.get("reward/mean")

    def _at(self, iteration: int) -> Address:
        return Address(f"{self.ledger.run}/{FOLDER}/{iteration:06d}", self.ledger.run, iteration)


def kept(
    live: Collection[int], config: CheckpointConfig, tagged: Collection[int], reward: Callable[[int], float | None]
) -> set[int]:
    """Of the states that are there, those to keep: the last, every so many, the tagged, and the best.

    The best so far has always been kept, so that it is among `live`; of equals the earlier one.
    """
    order = sorted(live)
    keep = set(order[-config.keep_last :]) | (set(order) & set(tagged))
    if config.keep_every:
        keep |= {k for k in order if (k + 1) % config.keep_every == 0}
    scores = {k: score for k in order if (score := reward(k)) is not None} if config.keep_best else {}
    return keep | ({max(scores, key=lambda k: (scores[k], -k))} if scores else set())


def way_to(ledger: Ledger, state: Manifest) -> tuple[Manifest, list[Manifest]]:
    """(a kept state or policy to start from, the train steps to repeat, in order), the shortest way to a state.

    Follows the recorded inputs, through forks into other runs. Raises ManifestError if a record on the way is missing.
    """
    steps: list[Manifest] = []
    while state.kind == "state":
        home = Ledger(ledger.store, state.run or ledger.run)
        if (found := Checkpoints(home).find(state)) is not None:
            return found, steps[::-1]
        steps.append(state)
        state = ledger.open(state.input_uris["state"])
    return state, steps[::-1]
