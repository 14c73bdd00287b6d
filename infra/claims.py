"""Which driver a run belongs to where several machines or homes share its store: the one that came last.

A killed driver then never stands in the way, and no clock and no heartbeat is needed. Until the earlier one notices,
the conditional commit of each step keeps the two apart.
"""

import json
from dataclasses import asdict

from data.ledger import Ledger
from infra.driver import Holder, RunBusy


class Claim:
    """A driver's claim to a run: a file under the next free number, created once and never changed."""

    def __init__(self, ledger: Ledger, mine: Holder) -> None:
        self._store, self._run, self._mine = ledger.store, ledger.run, mine
        self._number = 0  # not claimed yet: a command that finds everything on record takes the run from nobody

    def hold(self) -> None:
        """Claim the run, at the first call; afterwards look whether it is still held.

        Raises RunBusy, naming the holder, if another driver was faster, or came later.
        """
        if self._number == 0:
            number = 1 + max((int(name) for name in self._store.list_dirs(f"{self._run}/drivers")), default=0)
            if not self._store.create(self._path(number), json.dumps(asdict(self._mine)).encode()):
                raise self._busy(number, "was faster")
            self._number = number
        elif self._store.exists(self._path(self._number + 1)):
            raise self._busy(self._number + 1, "came later, so this one stops")

    def _path(self, number: int) -> str:
        return f"{self._run}/drivers/{number:06d}/claim.json"

    def _busy(self, number: int, why: str) -> RunBusy:
        other = Holder(**json.loads(self._store.read_bytes(self._path(number))))
        return RunBusy(
            f"run {self._run!r} is driven by process {other.pid} on {other.host} under another home, which {why}; what "
            "is on record stays. To drive it from here, stop that process and give this command again"
        )
