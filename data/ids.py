"""Trajectory ids are paths: a root without '/', then one branch number per fork: `R`, `R/0`, `R/0/2`.

The root names one drawing of one prompt, so that a prompt drawn again in a later epoch never joins its earlier group.
"""

from dataclasses import dataclass

import pyarrow as pa

from data.arrow import pc

PATTERN = r"^[^/]+(/(0|[1-9][0-9]*))*$"


@dataclass(frozen=True)
class Lineage:
    """What a column of ids says by itself, one value per row."""

    root: pa.Array  # [rows] string
    parent: pa.Array  # [rows] string, null for a root
    depth: pa.Array  # [rows] int16, number of forks


def root_id(prompt_id: str, cursor: int) -> str:
    """The root of the prompt drawn at global position `cursor`; '/' and '%' of the prompt's id are percent-encoded."""
    return f"{prompt_id.replace('%', '%25').replace('/', '%2F')}@{cursor}"


def cursor_of(root: str) -> int:
    """The position of the drawing that a root names."""
    return int(root.rpartition("@")[2])


def child(parent: str, branch: int) -> str:
    """The id of a fork. Raises ValueError for a negative branch number."""
    if branch < 0:
        raise ValueError(f"{parent}: branch {branch}; branches are numbered from 0")
    return f"{parent}/{branch}"


def parent_of(trajectory_id: str) -> str | None:
    """The id it was forked from, None for a root."""
    head, slash, _ = trajectory_id.rpartition("/")
    return head if slash else None


def root_of(trajectory_id: str) -> str:
    return trajectory_id.partition("/")[0]


def lineage(ids: pa.Array | pa.ChunkedArray) -> Lineage:
    """Root, parent and depth of every id, [rows] string."""
    ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
    depth = pc.count_substring(ids, "/").cast(pa.int16())
    head = pc.replace_substring_regex(ids, r"/[^/]*$", "")
    parent = pc.if_else(pc.greater(depth, 0), head, pa.scalar(None, pa.string()))
    return Lineage(pc.replace_substring_regex(ids, r"(?s)/.*$", ""), parent, depth)
