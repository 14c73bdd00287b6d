"""What is recorded of the program itself, and what importing `data` may cost."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from data.provenance import code_digest, packages

ROOT = Path(__file__).parents[2]


def test_packages_are_those_that_run():
    assert packages()["pyarrow"] == pa.__version__
    assert "no-such-package" not in packages()


def test_the_code_digest_follows_the_source(monkeypatch, tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a.py").write_text("x = 1")
    monkeypatch.setattr("data.provenance.__file__", str(tmp_path / "data" / "provenance.py"))
    fresh = code_digest.__wrapped__
    first = fresh()
    assert fresh() == first
    (tmp_path / "ops" / "notes.txt").write_text("not code")
    assert fresh() == first
    (tmp_path / "ops" / "a.py").write_text("x = 2")
    second = fresh()
    (tmp_path / "ops" / "a.py").rename(tmp_path / "ops" / "b.py")
    assert len({first, second, fresh()}) == 3


def test_data_imports_on_a_laptop_without_the_heavy_packages():
    modules = sorted(f"data.{path.stem}" for path in (ROOT / "data").glob("*.py") if path.stem != "__init__")
    heavy = ("torch", "megatron", "mlflow", "transformers", "prefect", "ray", "sglang")
    program = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
