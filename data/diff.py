"""How two recorded things differ: two manifests of one kind, field by field and row by row, or two runs."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from data.columns import SCHEMAS, VOLATILE
from data.compare import TableDifference, compare_tables
from data.index import Index, Node
from data.ledger import STEPS, Ledger, require_record
from data.manifest import Manifest
from data.request import KEYED, Difference, differences
from data.store import Store
from data.tables import read_table

BESIDE = ("schema_version", "code_digest", "packages", "execution")
NAMED = frozenset({"run"})  # of a config: two runs differ in it in any case


@dataclass(frozen=True)
class ManifestDifference:
    """How the second differs from the first."""

    first: str  # URIs
    second: str
    keyed: tuple[Difference, ...]  # what made the keys differ
    beside: tuple[Difference, ...]  # versions and how it was run
    same_content: bool
    tables: Mapping[str, TableDifference]  # those that differ
    files: tuple[str, ...]  # other files that differ, or that one lacks

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | {"tables": {name: table_json(table) for name, table in self.tables.items()}}
        return found | {"keyed": _plain(self.keyed), "beside": _plain(self.beside)}


@dataclass(frozen=True)
class Parting:
    """The first entry that two runs do not share; of one that a run lacks the name is None."""

    iteration: int
    step: str
    first: str | None
    second: str | None


@dataclass(frozen=True)
class RunDifference:
    """How the second run differs from the first."""

    first: str
    second: str
    config: tuple[Difference, ...]
    shared: int  # entries before the parting by content
    by_key: Parting | None
    by_content: Parting | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"config": _plain(self.config)}


def table_json(table: TableDifference) -> dict[str, Any]:
    return asdict(table) | {"columns": [column.as_json() for column in table.columns]}


def compare_manifests(store: Store, first: Manifest, second: Manifest) -> ManifestDifference:
    """Tables are read, and their files checked, if the contents differ. Raises ValueError for two kinds."""
    if first.kind != second.kind:
        raise ValueError(f"{first.uri} has {first.kind}, {second.uri} {second.kind}: compare two of one kind")
    same = first.content_digest == second.content_digest
    return ManifestDifference(
        first=first.uri,
        second=second.uri,
        keyed=_fields(first, second, KEYED),
        beside=_fields(first, second, BESIDE),
        same_content=same,
        tables={} if same else _tables(store, first, second),
        files=_files(first, second),
    )


def compare_runs(index: Index, first: Ledger, second: Ledger) -> RunDifference:
    """Where two runs on record part. Raises LookupError for one that is not."""
    configs = [
        {name: value for name, value in require_record(ledger).config.items() if name not in NAMED}
        for ledger in (first, second)
    ]
    entries, others = index.of_run(first), index.of_run(second)
    order = sorted({*entries, *others}, key=_place)
    by_content = _parting(order, entries, others, lambda node: node.content_digest)
    return RunDifference(
        first=first.run,
        second=second.run,
        config=tuple(differences(configs[0], configs[1])),
        shared=order.index((by_content.iteration, by_content.step)) if by_content else len(order),
        by_key=_parting(order, entries, others, lambda node: node.key),
        by_content=by_content,
    )


def _fields(first: Manifest, second: Manifest, names: tuple[str, ...]) -> tuple[Difference, ...]:
    one, two = (manifest.model_dump(mode="json", include=set(names)) for manifest in (first, second))
    found = {name: list(differences({name: one[name]}, {name: two[name]})) for name in names}
    return tuple(difference for name in names for difference in found[name])


def _tables(store: Store, first: Manifest, second: Manifest) -> dict[str, TableDifference]:
    found = {}
    for name in [name for name in SCHEMAS if _has(first, name) and _has(second, name)]:
        pair = [read_table(store, manifest, name=name) for manifest in (first, second)]
        if difference := compare_tables(*pair, VOLATILE[name]):
            found[name] = difference
    return found


def _has(manifest: Manifest, table: str) -> bool:
    return any(entry.table == table for entry in manifest.files)


def _files(first: Manifest, second: Manifest) -> tuple[str, ...]:
    one, two = ({e.name: e.sha256 for e in m.files if e.table is None} for m in (first, second))
    return tuple(name for name in sorted({*one, *two}) if one.get(name) != two.get(name))


def _place(entry: tuple[int, str]) -> tuple[int, int, str]:
    """Evaluations come before the steps of their iteration."""
    iteration, step = entry
    return iteration, STEPS.index(step) if step in STEPS else -1, step


def _parting(
    order: list[tuple[int, str]],
    entries: Mapping[tuple[int, str], Node],
    others: Mapping[tuple[int, str], Node],
    value: Callable[[Node], str],
) -> Parting | None:
    for iteration, step in order:
        one, two = (found.get((iteration, step)) for found in (entries, others))
        if one is None or two is None or value(one) != value(two):
            return Parting(iteration, step, one.name if one else None, two.name if two else None)
    return None


def _plain(found: tuple[Difference, ...]) -> list[dict[str, Any]]:
    return [{"name": d.name, "first": d.recorded, "second": d.asked} for d in found]
