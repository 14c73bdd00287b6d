"""The sections `environment` and `partial` of a run's config: what answers the policy, and when waiting for it ends."""

from typing import Literal

from pydantic import Field, JsonValue, model_validator

from data.sections import Positive, Section, execution

ENVIRONMENT_NAMES = ("tools", "textworld", "gym")  # of models.environments.spec
TOOL_NAMES = ("calculator", "python", "search", "visit")  # likewise


class EnvironmentConfig(Section):
    """The world that answers the policy's turns; without a kind, trajectories have one turn."""

    kind: str | None = Field(None, description="tools, textworld, gym, or path/to/file.py:Class")
    tools: list[str] = Field(
        [], description="of kind tools: calculator, python, search, visit, or path/to/file.py:function (or class)"
    )
    options: dict[str, JsonValue] = Field(
        {}, description="keyword arguments of the environment; of kind tools, those of each tool under its name"
    )
    announce: bool = Field(True, description="show the tools' schemas to the policy, by its chat template")
    max_turns: Positive = Field(8, description="of the policy; then the trajectory is cut off")
    timeout_s: float = Field(30.0, gt=0.0, description="seconds the environment may take for a turn")
    in_flight: Positive | None = execution(
        None, description="trajectories that are played at a time; unset: 512, or 48 if each has a process of its own"
    )

    @model_validator(mode="after")
    def _known_or_own(self) -> "EnvironmentConfig":
        if self.kind is None:
            changed = [name for name, f in type(self).model_fields.items() if getattr(self, name) != f.default]
            if changed:
                raise ValueError(
                    f"{changed[0]} = {getattr(self, changed[0])!r} without a kind; set environment.kind, or remove it"
                )
            return self
        _require_known("kind", self.kind, ENVIRONMENT_NAMES)
        for tool in self.tools:
            _require_known("tools", tool, TOOL_NAMES)
        if (self.kind == "tools") != bool(self.tools):
            raise ValueError(
                f"kind = {self.kind!r} with tools = {self.tools}: kind 'tools' needs one or more, the others have none"
            )
        names = [tool.rpartition(":")[2] for tool in self.tools]
        if self.kind == "tools" and (wrong := sorted(set(self.options) - set(names))):
            raise ValueError(
                f"options has {wrong[0]!r}, which is none of the tools ({', '.join(names)}); these are "
                "options of each tool under its name"
            )
        return self


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if ":" not in value and value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}, and not of the form path/to/file.py:name")


class PartialConfig(Section):
    """More groups are in play than an iteration trains on: it ends as soon as enough of them are whole."""

    groups: Positive | None = Field(None, description="in play, more than prompts.per_iteration; unset: as many")
    tail: Literal["carry", "drop"] = Field(
        "carry", description="unfinished groups: go on in the next iteration, or are given up with all their siblings"
    )
    max_staleness: int = Field(
        1024, ge=0, description="optimizer updates since a group's first turn; an older one is given up"
    )
