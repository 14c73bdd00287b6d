"""Tables and what must hold in them. `conform` gives a table its exact columns, `validate` checks its invariants."""

import difflib
from collections.abc import Callable

import pyarrow as pa

from data.checks import Rows, SchemaError
from data.checks_rollouts import check_rollouts
from data.checks_scored import check_advantages, check_replays, check_rewards
from data.columns import ADVANTAGES, REPLAYS, REWARDS, ROLLOUTS, SCHEMA_VERSION, SCHEMAS, VOLATILE

__all__ = [
    "ADVANTAGES",
    "REPLAYS",
    "REWARDS",
    "ROLLOUTS",
    "SCHEMAS",
    "SCHEMA_VERSION",
    "VOLATILE",
    "SchemaError",
    "conform",
    "validate",
]

CHECKS: dict[str, Callable[[Rows], None]] = {
    "rollouts": check_rollouts,
    "carry": check_rollouts,
    "rewards": check_rewards,
    "replays": check_replays,
    "advantages": check_advantages,
}


def conform(kind: str, table: pa.Table) -> pa.Table:
    """The table with the columns, types and column order of its kind; optional columns that it lacks are null.

    Raises SchemaError for a required column that is missing, an unknown one, or a type that cannot be converted.
    """
    schema = _schema(kind)
    for name in table.column_names:
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, 1, 0.0)
            raise SchemaError(f"{kind}: unknown column {name!r}; did you mean {near[0]!r}?")
    return pa.Table.from_arrays([_column(kind, table, field) for field in schema], schema=schema)


def validate(
    kind: str, table: pa.Table, *, rollouts: pa.Table | None = None, policy_version: int | None = None
) -> None:
    """Check every invariant of a conformed table.

    `rollouts` (trajectory_id, token_ids, action_mask) adds the checks against the trajectories' streams,
    `policy_version` that no turn is by a later policy. Raises SchemaError naming the first trajectory, the rule and the
    fix.
    """
    if table.schema != _schema(kind):
        raise SchemaError(f"{kind}: columns {table.schema.names} are not those of the kind; call conform first")
    rows = Rows(kind, table, rollouts, policy_version)
    rows.check_identity()
    CHECKS[kind](rows)


def _schema(kind: str) -> pa.Schema:
    if kind not in SCHEMAS:
        near = difflib.get_close_matches(kind, SCHEMAS, 1, 0.0)
        raise SchemaError(f"unknown kind of table {kind!r}; did you mean {near[0]!r}?")
    return SCHEMAS[kind]


def _column(kind: str, table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in table.column_names:
        if not field.nullable:
            raise SchemaError(f"{kind}: column {field.name!r} is missing; it is required, as {field.type}")
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(field.name)
    try:
        if not pa.types.is_dictionary(field.type):
            return column.cast(field.type)
        return column.cast(pa.string()).dictionary_encode().cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise SchemaError(f"{kind}: column {field.name!r} is {column.type}, must be {field.type}: {error}") from None
