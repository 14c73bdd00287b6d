"""Without the games' packages an environment says what to install."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(("package", "module"), [("textworld", "textworld"), ("gymnasium", "gym")])
def test_a_missing_package_is_named_with_its_fix(package: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models.environments.generated", f"models.environments.{module}"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"uv sync --extra games"):
        importlib.import_module(f"models.environments.{module}")
