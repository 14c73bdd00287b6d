"""What a recorded thing was made of, down to model, prompts, code and seed, and what was made of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from data.index import Index, Node
from data.ledger import Ledger


@dataclass(frozen=True)
class Lineage:
    """Nodes in the order in which they were made."""

    node: Node
    up: tuple[Node, ...]
    down: tuple[Node, ...]
    configs: dict[str, Any]  # by digest: what the steps read of their settings
    runs: dict[str, int]  # the runs that it was made in, with their seeds

    @property
    def _makers(self) -> tuple[Node, ...]:
        return (*self.up, self.node)

    @property
    def models(self) -> list[Node]:
        """Manifests that were made of no other: imported models."""
        return [node for node in self._makers if not any(value.path for value in node.inputs.values())]

    @property
    def outside(self) -> dict[str, str]:
        """Inputs that have no manifest, as prompts, by digest: what they are called."""
        read = [(value.digest, name) for node in self._makers for name, value in node.inputs.items() if not value.path]
        return dict(read)

    @property
    def code(self) -> dict[str, str]:
        """The user's functions, by digest: what they are called."""
        return {digest: name for node in self._makers for name, digest in node.user_code.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "node": described(self.node),
            "up": [described(node) for node in self.up],
            "down": [described(node) for node in self.down],
            "configs": self.configs,
            "models": [node.content_digest for node in self.models],
            "outside": self.outside,
            "code": self.code,
            "runs": self.runs,
        }


def trace(index: Index, node: Node) -> Lineage:
    """Raises ManifestError if its manifest is gone."""
    index.manifest(node)
    up, down = index.ancestors(node), index.descendants(node)
    return Lineage(node, tuple(up), tuple(down), index.configs([*up, node, *down]), _seeds(index, [*up, node]))


def described(node: Node) -> dict[str, Any]:
    """JSON-ready."""
    return {"name": node.name, **vars(node), "inputs": {name: vars(value) for name, value in node.inputs.items()}}


def _seeds(index: Index, nodes: Iterable[Node]) -> dict[str, int]:
    records = {run: Ledger(index.store, run).record for run in sorted({node.run for node in nodes if node.run})}
    return {run: int(str(record.config["seed"])) for run, record in records.items() if record is not None}
