"""What the commands about records print: lineage as a tree, differences, faults, and what would be removed."""

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from data.index import Node
from data.lineage import Lineage

SHORT = 16  # characters of a digest


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
