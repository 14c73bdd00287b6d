"""A user's own function, `path/to/file.py:function`. Its source travels with it, to workers that lack the file."""

import ast
import difflib
import linecache
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data.digest import json_digest


class UserCodeError(ValueError):
    """A user's function that cannot be used; the message names file and function, and the fix."""


@dataclass(frozen=True)
class UserCode:
    """A function by its source; equal names and sources have equal digests, wherever the file lies."""

    name: str  # of the function
    path: str  # for messages and tracebacks
    source: str

    @cached_property
    def digest(self) -> str:
        return json_digest([self.name, self.source])

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function, its file run once in this process. Raises UserCodeError if that fails."""
        try:
            found = getattr(self._module(), self.name, None)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserCodeError(f"{self.path}: running it raises {reason}; mend the file") from error
        if not callable(found):
            raise UserCodeError(f"{self.path}: {self.name} is {type(found).__name__}; it must be a function")
        return found

    def __getstate__(self) -> dict[str, str]:
        return {"name": self.name, "path": self.path, "source": self.source}

    def _module(self) -> types.ModuleType:
        """Known to sys.modules, so that its classes pickle, and to linecache, so that tracebacks show its lines."""
        name = f"rollbook_user_{json_digest([self.path, self.source])[:16]}"
        if name in sys.modules:
            return sys.modules[name]
        module = types.ModuleType(name)
        module.__file__ = self.path
        linecache.cache[self.path] = (len(self.source), None, self.source.splitlines(keepends=True), self.path)
        sys.modules[name] = module
        try:
            exec(compile(self.source, self.path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def is_user_code(spec: str) -> bool:
    """Whether a name in a config means a user's function."""
    path, colon, name = spec.rpartition(":")
    return bool(colon) and path.endswith(".py") and bool(name)


def load(spec: str) -> UserCode:
    """Read `path/to/file.py:function` and check that the function is there, without running the file.

    Raises UserCodeError for another form, a missing file, a syntax error (with its line) or a missing function.
    """
    if not is_user_code(spec):
        raise UserCodeError(f"{spec!r}: not a user function; write path/to/file.py:function")
    path, _, name = spec.rpartition(":")
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserCodeError(f"{path}: cannot be read ({reason}); give a path to a Python file of yours") from None
    _require_function(path, source, name)
    return UserCode(name, str(Path(path).resolve()), source)


def _require_function(path: str, source: str, name: str) -> None:
    try:
        tree = ast.parse(source, path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise UserCodeError(f"{path}:{line or 1}: not Python: {getattr(error, 'msg', error)}; mend the file") from None
    names = list(_bound_names(tree))
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0.5)
        fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
        raise UserCodeError(f"{path}: no function {name!r}; {fix}")


def _bound_names(tree: ast.Module) -> list[str]:
    """Names that the file binds at its top level: functions, classes, imports and assignments."""
    names: list[str] = []
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names.extend(target.id for target in targets if isinstance(target, ast.Name))
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names.extend(alias.asname or alias.name for alias in aliases)
    return names
