"""What every section of a run's config is: a frozen pydantic model that knows which of its fields enter keys."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, lt=1.0)]


def execution(default: Any, **kwargs: Any) -> Any:
    """A field that says how to run, not what to compute: it never enters a step's key."""
    return Field(default, json_schema_extra={"execution": True}, **kwargs)


def later(default: Any, **kwargs: Any) -> Any:
    """A semantic field that older records lack: it enters a key only while it differs from its default.

    So the default must mean what was done before the field came, and may never change.
    """
    return Field(default, json_schema_extra={"later": True}, **kwargs)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    def semantic(self) -> dict[str, Any]:
        """The fields that change the result, as plain JSON values, nested ones included; see `execution`, `later`."""
        return dict(_walk(self))


def _walk(section: BaseModel) -> list[tuple[str, Any]]:
    rows = []
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        value = getattr(section, name)
        if extra.get("execution") or (extra.get("later") and value == field.default):
            continue
        rows.append((name, dict(_walk(value)) if isinstance(value, BaseModel) else value))
    return rows
