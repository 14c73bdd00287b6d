"""What the commands about records print: lineage as a tree, differences, faults, and what would be removed."""

import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from data.audit import Audit
from data.compare import TableDifference
from data.diff import ManifestDifference, Parting, RunDifference
from data.index import Node
from data.lineage import Lineage
from data.prune import Removal
from data.request import Difference
from flows.views import plain, table

if TYPE_CHECKING:
    from flows.reasons import Reasons

SHORT = 16  # characters of a digest
CELL = 60  # characters of a query's value
LISTED = 5  # of many names


def lineage(console: Console, traced: Lineage, depth: int) -> None:
    """Both ways, each thing once, `depth` steps far; then where it all comes from."""
    console.print(f"[bold]{_label(traced.node)}[/]", highlight=False, soft_wrap=True)
    nodes = {node.path: node for node in (*traced.up, traced.node, *traced.down)}
    users: dict[str, list[tuple[str, str]]] = {}
    for node in traced.down:
        for name, value in node.inputs.items():
            users.setdefault(value.path or "", []).append((f"as {name}", node.path))

    def sources(node: Node) -> list[tuple[str, str]]:
        return [(name, value.path or value.digest) for name, value in node.inputs.items()]

    for title, found, beside in (
        ("made of", traced.up, sources),
        ("made into", traced.down, lambda node: users.get(node.path, [])),
    ):
        _branches(console, title, traced.node, nodes, beside, depth, len(found))
    _origins(console, traced)


def _branches(
    console: Console,
    title: str,
    node: Node,
    nodes: dict[str, Node],
    beside: Callable[[Node], list[tuple[str, str]]],
    depth: int,
    total: int,
) -> None:
    seen = {node.path}

    def grow(tree: Tree, node: Node, left: int) -> None:
        for name, path in beside(node):
            found = nodes.get(path)
            if found is None:
                lost = "missing" if "/" in path else "no manifest"
                tree.add(f"[dim]{escape(name)}[/] {escape(path[:64] if '/' in path else path[:SHORT])} [dim]{lost}[/]")
                continue
            again = path in seen
            seen.add(path)
            label = _label(found).removeprefix(f"{name} ")
            branch = tree.add(f"[dim]{escape(name)}[/] {label}{' [dim]as above[/]' if again else ''}")
            if not again and left > 1:
                grow(branch, found, left - 1)

    tree = Tree(f"[bold]{title}[/]")
    grow(tree, node, depth)
    hidden = total + 1 - len(seen)
    if hidden > 0:
        tree.add(f"[dim]{hidden} more beyond; --depth N goes further, --json has all[/]")
    console.print(tree if total or tree.children else f"[bold]{title}[/] nothing", highlight=False, soft_wrap=True)


def _label(node: Node) -> str:
    version = "" if node.policy_version is None or node.kind != "policy" else f" version {node.policy_version}"
    name = node.name if node.run is not None else f"{node.step} in {node.name[: -64 + SHORT]}"
    return f"{node.kind} {escape(name)} [cyan]{node.content_digest[:SHORT]}[/]{version}"


def _origins(console: Console, traced: Lineage) -> None:
    lines = [f"model {traced.configs[n.config_digest].get('toy') or 'imported'} {_label(n)}" for n in traced.models]
    lines += [f"{name} {digest}" for digest, name in traced.outside.items()]
    lines += [f"code of {name} {digest}" for digest, name in traced.code.items()]
    lines += [f"run {run}, seed {seed}" for run, seed in traced.runs.items()]
    console.print("[bold]comes from[/]")
    for line in lines:
        console.print(f"  {line}", highlight=False, soft_wrap=True)


def run_difference(console: Console, found: RunDifference) -> None:
    _fields(console, "config", found.config, found.first, found.second)
    for what, parting in (("by key", found.by_key), ("by content", found.by_content)):
        console.print(f"{what}: {_parting(found, parting)}", highlight=False, soft_wrap=True)
    if found.by_content is not None and found.by_content.first and found.by_content.second:
        command = f"rollbook diff {found.by_content.first} {found.by_content.second}"
        console.print(f"{found.shared} steps before have the same content; {command}", highlight=False, soft_wrap=True)


def _parting(found: RunDifference, parting: Parting | None) -> str:
    if parting is None:
        return "they are the same throughout"
    where = f"iteration {parting.iteration}, {parting.step}"
    if parting.first is not None and parting.second is not None:
        return f"they part at {where}"
    return f"they are the same up to {where}, which {found.first if parting.first is None else found.second} lacks"


def manifest_difference(console: Console, found: ManifestDifference) -> None:
    _fields(console, "key", found.keyed, "A", "B")
    _fields(console, "beside the key", found.beside, "A", "B")
    if found.same_content:
        console.print("the content is the same")
    for name, difference in found.tables.items():
        table_difference(console, name, difference)
    if found.files:
        console.print(f"files that differ: {', '.join(found.files)}", markup=False, highlight=False, soft_wrap=True)


def table_difference(console: Console, name: str, found: TableDifference) -> None:
    made = table(f"{name}: {found.rows} rows in both", "column", "rows that differ", "first", "largest difference")
    for column in found.columns:
        largest = "-" if column.largest is None else f"{column.largest:.6g}"
        made.add_row(column.column, str(column.rows), escape(column.first), largest)
    console.print(made if found.columns else f"{name}: {found.rows} rows in both")
    for what, names in (("A", found.only_recorded), ("B", found.only_again)):
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            console.print(
                f"{len(names)} only in {what}: {', '.join(names[:LISTED])}{more}", markup=False, soft_wrap=True
            )
    if found.unlike:
        console.print(f"columns of one alone, or of two types: {', '.join(found.unlike)}", highlight=False)
    if found.reordered:
        console.print("the rows in both come in another order")


def _fields(console: Console, title: str, found: Sequence[Difference], first: str, second: str) -> None:
    if not found:
        console.print(f"{title}: the same", highlight=False)
        return
    console.print(f"{title}:", highlight=False, soft_wrap=True)
    made = table("", "field", first, second)
    for difference in found:
        made.add_row(*(escape(_cut(text)) for text in (difference.name, difference.recorded, difference.asked)))
    console.print(made)


def reasons(console: Console, found: "Reasons") -> None:
    if found.key is None:
        console.print(f"{found.step} of iteration {found.iteration} is not on record: it would run", highlight=False)
    elif not found.own and not found.above:
        console.print(f"nothing: it is on record under this key, {found.key[:SHORT]}", highlight=False)
    if found.own:
        title = f"{found.step} of iteration {found.iteration} would run again; its key {(found.key or '')[:SHORT]}"
        _fields(console, title, found.own, "recorded", "now")
    if found.above:
        first = found.above[0]
        where = "" if first.iteration is None else f" of iteration {first.iteration}"
        count = f"{len(found.above)} recorded step{'s' * (len(found.above) > 1)} that it is made of would run again"
        _fields(console, f"{count}; the first, {first.step}{where}", first.fields, "recorded", "now")


def audit(console: Console, run: str, found: Audit) -> None:
    made = table("", "kind", "manifests", "files", "MiB", "s")
    for kind in found.kinds:
        size, seconds = f"{kind.bytes / 2**20:.2f}", f"{kind.seconds:.2f}"
        made.add_row(kind.kind, str(kind.manifests), str(kind.files), size, seconds)
    console.print(made)
    for fault in found.faults:
        console.print(fault, style="red", markup=False, highlight=False, soft_wrap=True)
    count = len(found.faults)
    console.print(f"{run}: {f'{count} fault{"s" * (count > 1)}' if count else 'everything is there and unaltered'}")


def removals(console: Console, found: Sequence[Removal], copies: Sequence[Path], done: bool) -> None:
    made = table("", "what", "name", "files", "MiB")
    for removal in found:
        size = f"{removal.bytes / 2**20:.2f}"
        made.add_row(removal.what, escape(removal.name), str(len(removal.paths)), size)
    for folder in copies:
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
        made.add_row("local copy", escape(folder.name[:SHORT]), str(len(sizes)), f"{sum(sizes) / 2**20:.2f}")
    if not found and not copies:
        console.print("nothing to remove")
        return
    console.print(made)
    console.print("removed" if done else "nothing was removed; --yes removes it")


def rows(console: Console, columns: Sequence[str], found: Sequence[Sequence[object]]) -> None:
    """The answer to a query."""
    made = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(escape(column))
    for row in found:
        made.add_row(*(Text(_short(plain(cell_text(value)))) for value in row))
    console.print(made)
    console.print(f"{len(found)} row{'' if len(found) == 1 else 's'}", highlight=False)


def _short(text: str) -> str:
    return text if len(text) <= CELL else f"{text[: CELL - 3]}..."


def cell_text(value: object) -> str:
    """A value as text: nothing for null, JSON for what is nested."""
    if value is None:
        return ""
    nested = isinstance(value, dict | list | tuple)
    return json.dumps(plain_json(value)) if nested else str(value)


def plain_json(value: object) -> Any:
    """As JSON has it: what is not finite is null, what it has no form for is text."""
    if isinstance(value, dict):
        return {str(name): plain_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(part) for part in value]
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _cut(text: str) -> str:
    """Digests as long as people read them."""
    return re.sub(r"[0-9a-f]{64}", lambda digest: digest[0][:SHORT], text)
