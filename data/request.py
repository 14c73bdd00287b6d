"""What a step is asked to make: everything that decides its result, and the key that sums it up."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from data.digest import json_digest
from data.manifest import Manifest

UNSET = "not set"
KEYED = ("step", "step_version", "inputs", "config", "seed", "user_code")  # fields of a manifest that enter its key


class StepConflict(ValueError):
    """A step is on record with another request; the message names the first field that differs, and the fix."""


@dataclass(frozen=True)
class Address:
    """Where a result is entered in a store."""

    path: str  # folder, relative to the store's root
    run: str | None  # None: shared by runs
    iteration: int | None

    @property
    def manifest(self) -> str:
        return f"{self.path}/manifest.json"


@dataclass(frozen=True)
class Request:
    """One call of a step. An input is a manifest, or the content digest of something that has none (a prompt file)."""

    step: str
    step_version: int  # raised when the step's meaning changes
    kind: str  # of what it makes
    inputs: Mapping[str, Manifest | str] = field(default_factory=dict)
    config: Mapping[str, JsonValue] = field(default_factory=dict)  # semantic fields that the step reads
    seed: int = 0
    user_code: Mapping[str, str] = field(default_factory=dict)  # name -> digest
    execution: Mapping[str, JsonValue] = field(default_factory=dict)  # recorded, not in the key

    @property
    def input_digests(self) -> dict[str, str]:
        return {n: m.content_digest if isinstance(m, Manifest) else m for n, m in self.inputs.items()}

    @property
    def input_uris(self) -> dict[str, str]:
        return {n: m.uri for n, m in self.inputs.items() if isinstance(m, Manifest)}

    @property
    def keyed(self) -> dict[str, JsonValue]:
        """What enters the key, in the order in which a conflict is looked for."""
        return {
            "step": self.step,
            "step_version": self.step_version,
            "inputs": dict(self.input_digests),
            "config": json.loads(json.dumps(dict(self.config))),
            "seed": self.seed,
            "user_code": dict(self.user_code),
        }

    @property
    def key(self) -> str:
        return json_digest(self.keyed)


@dataclass(frozen=True)
class Difference:
    """One field with two values, JSON or UNSET."""

    name: str  # dotted
    recorded: str
    asked: str

    def __str__(self) -> str:
        return f"{self.name} was {self.recorded}, now {self.asked}"


def differences(
    recorded: Mapping[str, JsonValue], asked: Mapping[str, JsonValue], prefix: str = ""
) -> Iterator[Difference]:
    """Fields in which two JSON objects differ, by dotted name, in the order of the second; then those it lacks."""
    for name in dict.fromkeys([*asked, *recorded]):
        old, new = recorded.get(name, UNSET), asked.get(name, UNSET)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{name}.")
        elif _shown(name, recorded) != _shown(name, asked):
            yield Difference(f"{prefix}{name}", _shown(name, recorded), _shown(name, asked))


def conflict(found: Manifest, request: Request) -> StepConflict:
    """The error for a request whose address holds the result of another."""
    recorded = found.model_dump(mode="json", include=set(request.keyed))
    first = next(differences(recorded, request.keyed), Difference("key", found.key, request.key))
    return StepConflict(
        f"step {request.step!r} at {found.uri} is on record with other {first.name.split('.')[0]}: {first}. A recorded "
        f"step is never overwritten: pick a new run name with --set run=NAME, or undo the change of {first.name}"
    )


def _shown(name: str, values: Mapping[str, JsonValue]) -> str:
    return json.dumps(values[name], sort_keys=True) if name in values else UNSET
