"""What is not loaded where it is not needed: each of these libraries takes seconds of every command."""

import subprocess
import sys

import pytest

TO_PLAN = ("flows.launch", "flows.training")
IN_RESIDENTS = ("tasks.generate", "tasks.score", "tasks.replay", "tasks.advantages", "tasks.train", "tasks.publish")


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (TO_PLAN, {"torch", "transformers", "megatron", "mlflow", "matplotlib", "numba", "sympy", "prefect.server"}),
        (IN_RESIDENTS, {"prefect", "torch", "mlflow", "sympy"}),
    ],
)
def test_heavy_libraries_stay_out(modules: tuple[str, ...], heavy: set[str]) -> None:
    program = f"import sys, {', '.join(modules)}; print(*sorted({heavy!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
