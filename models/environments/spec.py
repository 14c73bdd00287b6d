"""Which environment a config names, small and picklable; made of it in the process that generates."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from pydantic import JsonValue

from data.user_code import UserCode
from models.environments.contract import Environment

# Modules are named, not imported: each loads what it needs when it is asked for.
ENVIRONMENTS = {
    "textworld": "models.environments.textworld:TextWorldEnvironment",
    "gym": "models.environments.gym:GymEnvironment",
}
TOOLS = {
    "calculator": "models.tools.calculator:calculator",
    "python": "models.tools.sandbox:Python",
    "search": "models.tools.search:Search",
    "visit": "models.tools.visit:Visit",
}
FILES = {"search": "index"}  # options that name a file which decides what a tool says


@dataclass(frozen=True)
class EnvironmentSpec:
    """kind: "tools", a name of ENVIRONMENTS, or a user's class. tools: names of TOOLS, a user's functions or classes.

    options: keyword arguments of the class; of "tools" those of each tool, by its name. announce: whether the policy
    is shown the tools' schemas.
    """

    kind: str | UserCode
    tools: tuple[str | UserCode, ...] = ()
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    announce: bool = True

    @cached_property
    def make(self) -> Callable[[], Environment]:
        """Makes the environment of one trajectory."""
        if self.kind == "tools":
            from models.environments.tools import ToolEnvironment, make_tool

            tools = [make_tool(found(tool, TOOLS), self._options_of(tool)) for tool in self.tools]
            return partial(ToolEnvironment, tools)
        return partial(found(self.kind, ENVIRONMENTS), **self.options)

    @property
    def isolate(self) -> bool:
        """Whether each environment is to live in a process of its own."""
        return self.kind != "tools" and bool(getattr(found(self.kind, ENVIRONMENTS), "isolate", False))

    @property
    def resumable(self) -> bool:
        """Whether a trajectory that was cut off at a turn can go on later: what answers it keeps nothing of its own."""
        if self.kind == "tools":
            from models.environments.tools import keeps_state

            return not any(keeps_state(found(tool, TOOLS)) for tool in self.tools)
        return bool(getattr(found(self.kind, ENVIRONMENTS), "resumable", False))

    @property
    def files(self) -> list[str]:
        """What built-in tools read."""
        named = [self._options_of(tool).get(option) for tool, option in FILES.items() if tool in self.tools]
        return [name for name in named if isinstance(name, str)]

    @property
    def modules(self) -> list[str]:
        """What a process for an environment has to load."""
        return (
            []
            if isinstance(self.kind, UserCode) or self.kind not in ENVIRONMENTS
            else [ENVIRONMENTS[self.kind].partition(":")[0]]
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def _options_of(self, tool: str | UserCode) -> Mapping[str, JsonValue]:
        options = self.options.get(tool.name if isinstance(tool, UserCode) else tool, {})
        return options if isinstance(options, Mapping) else {}

    @property
    def code(self) -> dict[str, UserCode]:
        """What of it is a user's, by the name that a step's key has for it."""
        units = {f"tool {tool.name}": tool for tool in self.tools if isinstance(tool, UserCode)}
        return units | ({"environment": self.kind} if isinstance(self.kind, UserCode) else {})


def found(named: str | UserCode, built_in: Mapping[str, str]) -> Any:
    """The class or function of a name. Raises UserCodeError for a user's file that cannot be run."""
    if isinstance(named, UserCode):
        return named.function
    module, _, name = built_in[named].partition(":")
    return getattr(importlib.import_module(module), name)
