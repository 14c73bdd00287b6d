"""Saving and resuming: a trainer that stopped goes on as one that did not, to the last bit."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.config import LayoutConfig, TrainConfig
from models.megatron.contract import TrainBatch, TrainOptions
from models.weights import WeightsMismatch
from tests.models.gang import save_state

PLAN = [[np.array([0, 1, 2, 3]), np.array([4])], [np.array([5, 6, 7])]]
HOW = TrainOptions(TrainConfig(entropy_bonus=0.01, max_kl=None), 1.0)
KINDS = ["none", "shared", "separate"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_continues_bit_for_bit(
    trainer, world, make_model, digest_of, make_setup, eight: TrainBatch, tmp_path, kind: str, dtype: str
) -> None:
    import torch

    from models.megatron.trainer import Trainer

    folder = make_model("qwen2", tied=False, dtype=getattr(torch, dtype))
    setup = make_setup(kind, schedule="cosine", warmup_steps=1, decay_steps=9)
    trainer.bring_to_policy(folder, digest_of(folder), setup)
    trainer.train(eight, PLAN, HOW)
    saved = save_state(trainer, tmp_path / "state")
    assert trainer.digest == saved
    metrics, after = trainer.train(eight, PLAN, HOW), trainer.digest

    cold = Trainer(*world)
    cold.bring_to_state(tmp_path / "state", saved, setup)
    assert cold.digest == saved
    assert cold.train(eight, PLAN, HOW) == metrics
    assert cold.digest == after

    # Warm: the first trainer, which is two steps ahead, is brought back.
    trainer.bring_to_state(tmp_path / "state", saved, setup)
    assert trainer.digest == saved
    trainer.train(eight, PLAN, HOW)
    assert trainer.digest == after
    assert trainer.export_policy(tmp_path / "warm") == cold.export_policy(tmp_path / "cold")


SCRIPT = """
import pickle, sys
from pathlib import Path
from data.config import LayoutConfig
from models.megatron.trainer import Trainer
rendezvous, state, digest, pickled = sys.argv[1:]
setup, batch, plan, how = pickle.loads(Path(pickled).read_bytes())
trainer = Trainer(0, 1, rendezvous, 1, LayoutConfig())
trainer.bring_to_state(Path(state), digest, setup)
trainer.train(batch, plan, how)
print("digest", trainer.digest)
"""


def test_a_fresh_process_continues_like_a_warm_one(
    trainer, rendezvous, small_model, digest_of, make_setup, eight: TrainBatch, tmp_path: Path
) -> None:
    import pickle

    setup = make_setup("shared")
    trainer.bring_to_policy(small_model, digest_of(small_model), setup)
    trainer.train(eight, PLAN, HOW)
    saved = save_state(trainer, tmp_path / "state")
    trainer.replay(eight.streams, eight.action_mask, [np.arange(8)], 1.0, values=True)  # other work in between
    trainer.train(eight, PLAN, HOW)
    (tmp_path / "arguments").write_bytes(pickle.dumps((setup, eight, PLAN, HOW)))
    arguments = [rendezvous(), str(tmp_path / "state"), saved, str(tmp_path / "arguments")]
    child = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    assert f"digest {trainer.digest}" in child.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_brought_twice_trains_the_same(
    trainer, world, small_model, digest_of, make_setup, eight: TrainBatch, kind: str
) -> None:
    from models.megatron.trainer import Trainer

    digest, setup = digest_of(small_model), make_setup(kind)
    digests = set()
    for holder in (trainer, trainer, Trainer(*world)):
        holder.bring_to_policy(small_model, digest, setup)
        assert holder.digest == digest
        holder.train(eight, PLAN, HOW)
        digests.add(holder.digest)
    assert len(digests) == 1


def test_bringing_it_where_it_is_does_nothing(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models.megatron import trainer as module

    digest, setup = digest_of(small_model), make_setup("shared")
    trainer.bring_to_policy(small_model, digest, setup)

    def read(*_: object) -> None:
        raise InterruptedError("it reads")

    monkeypatch.setattr(module, "read_policy", read)
    monkeypatch.setattr(module.state, "describe", read)
    trainer.replay(eight.streams, eight.action_mask, [np.arange(8)], 1.0, values=True)
    trainer.bring_to_policy(small_model, digest, setup)
    trainer.train(eight, PLAN, HOW)
    trainer.bring_to_state(tmp_path / "nowhere", trainer.digest, setup)
    # A trained policy is no longer that policy; another kind of critic is another trainer.
    with pytest.raises(InterruptedError):
        trainer.bring_to_policy(small_model, digest, setup)
    with pytest.raises(InterruptedError):
        trainer.bring_to_state(tmp_path / "nowhere", trainer.digest, make_setup("none"))


def test_the_digest_is_of_the_content(
    trainer, world, small_model, digest_of, make_setup, eight: TrainBatch, tmp_path: Path
) -> None:
    setup = make_setup("shared")
    trainer.bring_to_policy(small_model, digest_of(small_model), setup)
    fresh = save_state(trainer, tmp_path / "fresh")  # an untrained state can be saved
    assert fresh == save_state(trainer, tmp_path / "again") != trainer.digest
    trainer.train(eight, PLAN, HOW)
    trained = save_state(trainer, tmp_path / "trained")
    assert trained != fresh
    assert save_state(trainer, tmp_path / "trained again") == trained
    trainer.bring_to_state(tmp_path / "fresh", fresh, setup)
    trainer.train(eight, PLAN, HOW)
    assert trainer.digest == trained


def test_a_state_that_is_not_the_one_asked_for_is_refused(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, tmp_path: Path
) -> None:
    setup = make_setup("shared")
    trainer.bring_to_policy(small_model, digest_of(small_model), setup)
    saved = save_state(trainer, tmp_path / "state")
    with pytest.raises(FileExistsError, match="not empty"):
        save_state(trainer, tmp_path / "state")
    trainer.train(eight, PLAN, HOW)
    with pytest.raises(WeightsMismatch, match="beef"):
        trainer.bring_to_state(tmp_path / "state", "beef", setup)
    assert trainer.digest is None  # it holds nothing rather than something else
    with pytest.raises(ValueError, match=r"critic is 'shared', critic\.kind is 'none'"):
        trainer.bring_to_state(tmp_path / "state", saved, make_setup("none"))
    with pytest.raises(FileNotFoundError, match="no complete training state"):
        trainer.bring_to_state(tmp_path / "nowhere", saved, setup)


def test_a_copy_does_not_follow_the_training(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, tmp_path: Path
) -> None:
    setup = make_setup("separate")
    trainer.bring_to_policy(small_model, digest_of(small_model), setup)
    copied = trainer.copy_state()
    trainer.train(eight, PLAN, HOW)
    after = trainer.digest
    copied.write(tmp_path / "before")
    trainer.bring_to_state(tmp_path / "before", copied.digest, setup)
    trainer.train(eight, PLAN, HOW)
    assert trainer.digest == after != copied.digest


def test_a_second_world_in_one_process_is_refused(device, rendezvous) -> None:
    from models.megatron import ranks

    with pytest.raises(ValueError, match="rank 0 of world 2: this layout has 1 ranks"):
        ranks.join(0, 2, rendezvous(), 1, LayoutConfig())
    with pytest.raises(ValueError, match="in a training world already"):
        ranks.join(0, 1, rendezvous(), 1, LayoutConfig())
