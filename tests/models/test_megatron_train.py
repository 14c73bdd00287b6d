"""Optimizer steps against transformers with torch's AdamW, and the properties that a step must have."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import TrainConfig
from models.megatron.contract import BeyondLimit, NonFiniteLoss, Setup, TrainBatch, TrainOptions
from models.weights import read_tensors
from ops.ragged import Ragged

EVERYTHING = [np.arange(8)]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def options(temperature: float = 1.0, frozen: bool = False, **train: object) -> TrainOptions:
    """The old log-probs of `eight` are made up, and far from any policy: no limit but a test's own."""
    return TrainOptions(TrainConfig(**({"max_kl": None} | train)), temperature, frozen)


class Reference:
    """The same training, row by row and token by token, with transformers, torch's AdamW and a Linear head."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        from transformers import AutoModelForCausalLM

        self.setup = setup
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        policy, decay = list(self.model.parameters()), setup.optimizer.weight_decay
        common = {"betas": tuple(setup.optimizer.betas), "eps": setup.optimizer.eps}
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in policy if p.ndim > 1], "lr": setup.optimizer.lr, "weight_decay": decay},
                {"params": [p for p in policy if p.ndim == 1], "lr": setup.optimizer.lr, "weight_decay": 0.0},
                {"params": [self.head.weight], "lr": setup.critic.head_lr, "weight_decay": decay},
                {"params": [self.head.bias], "lr": setup.critic.head_lr, "weight_decay": 0.0},
            ],
            **common,
        )

    def look(self, ids: np.ndarray, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, entropies and values of tokens 1, 2, …: read at the token before."""
        tokens = torch.from_numpy(ids.astype(np.int64))
        hidden = self.model.model(tokens[None]).last_hidden_state[0, :-1]
        logp = torch.log_softmax(self.model.lm_head(hidden) / temperature, -1)
        return logp.gather(1, tokens[1:, None])[:, 0], -(logp.exp() * logp).sum(-1), self.head(hidden)[:, 0]

    def loss(self, batch: TrainBatch, rows: np.ndarray, how: TrainOptions) -> torch.Tensor:
        """math.md 5, one token at a time."""
        train, critic, total, weights = how.train, self.setup.critic, torch.zeros(()), []
        tokens = sum(int(batch.loss_mask.row(r).sum()) for r in rows)
        for row in rows:
            logp, entropy, values = self.look(batch.streams.row(row), how.temperature)
            mask = batch.loss_mask.row(row)
            for i in np.flatnonzero(mask):
                advantage = float(batch.advantages.row(row)[i])
                ratio = torch.exp(logp[i - 1] - float(batch.old_logprobs.row(row)[i]))
                clipped = torch.clamp(ratio, 1 - train.clip_low, 1 + train.clip_high)
                weight = 1.0 if batch.weights is None else float(batch.weights.row(row)[i])
                term = weight * torch.max(-advantage * ratio, -advantage * clipped)
                term = term - train.entropy_bonus * entropy[i - 1]
                if critic.kind == "shared":
                    old, target = float(batch.old_values.row(row)[i]), float(batch.returns.row(row)[i])
                    near = old + torch.clamp(values[i - 1] - old, -critic.clip, critic.clip)
                    error = torch.max((values[i - 1] - target) ** 2, (near - target) ** 2)
                    term = term + critic.loss_weight * 0.5 * error
                weights.append(term)
                per_row = {"token_mean": tokens, "seq_mean_token_mean": mask.sum() * len(rows)}
                total = total + term / per_row.get(train.aggregation, train.horizon * len(rows))
        return total

    def step(self, batch: TrainBatch, rows: np.ndarray, how: TrainOptions) -> float:
        """Returns the gradient norm before clipping."""
        self.adam.zero_grad()
        self.loss(batch, rows, how).backward()
        norm = torch.nn.utils.clip_grad_norm_(
            [*self.model.parameters(), *self.head.parameters()], self.setup.optimizer.max_grad_norm
        )
        self.adam.step()
        return float(norm)


def exported(trainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.export_policy(folder)
    return read_tensors(folder)


@pytest.mark.parametrize("kind", ["none", "shared"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_three_steps_equal_transformers_with_adamw(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, tmp_path, kind: str, aggregation: str
) -> None:
    # eps large: Adam otherwise turns rounding errors of tiny gradients into full steps.
    setup = make_setup(kind, eps=1e-3)
    trainer.bring_to_policy(small_model, digest_of(small_model), setup)
    reference = Reference(small_model, setup)
    how = options(0.9, aggregation=aggregation, horizon=7, clip_low=0.3, clip_high=0.5, entropy_bonus=0.02)
    plan = [[np.array([0, 1, 2]), np.array([3])], [np.array([4, 5, 6, 7])], EVERYTHING]

    norms = [reference.step(eight, np.concatenate(rows), how) for rows in plan]
    metrics = trainer.train(eight, plan, how)
    assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=2e-4)
    for name, tensor in exported(trainer, tmp_path / "p").items():
        assert torch.allclose(tensor, reference.model.state_dict()[name], atol=2e-5), name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_multiply_the_policy_loss_alone(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, tmp_path, aggregation: str
) -> None:
    """Against the reference, with a value loss and an entropy bonus that the weights must leave as they are.

    A weight of 0 takes a token out of the policy's loss, and not out of what the loss is divided by.
    """
    setup = make_setup("shared", eps=1e-3)
    trainer.bring_to_policy(small_model, digest_of(small_model), setup)
    reference = Reference(small_model, setup)
    weights = np.random.default_rng(3).choice(np.array([0.0, 0.25, 1.0, 2.0], np.float32), len(eight.streams.values))
    batch = replace(eight, weights=eight.streams.like(weights))
    how = options(0.9, aggregation=aggregation, horizon=7, entropy_bonus=0.02)
    plan = [[np.array([0, 1, 2]), np.array([3])], EVERYTHING]
    norms = [reference.step(batch, np.concatenate(rows), how) for rows in plan]
    assert [step["grad_norm"] for step in trainer.train(batch, plan, how)] == pytest.approx(norms, rel=2e-4)
    for name, tensor in exported(trainer, tmp_path / "p").items():
        assert torch.allclose(tensor, reference.model.state_dict()[name], atol=2e-5), name


def test_weights_of_one_change_no_bit(trainer, small_model, digest_of, make_setup, eight: TrainBatch) -> None:
    """Neither gradient nor, after the step, weights and moments; other weights do, though not the value loss."""
    digest, setup = digest_of(small_model), make_setup("shared")
    gradients, digests, losses = [], [], []
    for weight in (None, 1.0, 0.5):
        column = None if weight is None else eight.streams.like(np.full(len(eight.streams.values), weight, np.float32))
        trainer.bring_to_policy(small_model, digest, setup)
        (step,) = trainer.train(replace(eight, weights=column), [EVERYTHING], options())
        buffers = [b.grad_data for part in trainer._networks.parts.values() for b in part.module.buffers]
        gradients.append(torch.cat([buffer.flatten() for buffer in buffers]))
        digests.append(trainer.digest)
        losses.append((step["loss/policy"], step["loss/value"]))
    assert torch.equal(gradients[0], gradients[1]) and digests[0] == digests[1]
    assert not torch.equal(gradients[0], gradients[2]) and digests[0] != digests[2]
    assert losses[0] == losses[1] and losses[2] == (pytest.approx(losses[0][0] / 2), losses[0][1])


def test_experts_learn_as_in_transformers(trainer, make_model, digest_of, make_setup, eight: TrainBatch) -> None:
    """Gradient norms of three steps: the later ones are those of weights, router's included, that moved alike."""
    folder, setup = make_model("qwen3_moe"), make_setup("shared", eps=1e-3)
    trainer.bring_to_policy(folder, digest_of(folder), setup)
    reference = Reference(folder, setup)
    plan = [[np.array([0, 1, 2]), np.array([3])], [np.array([4, 5, 6, 7])], EVERYTHING]
    norms = [reference.step(eight, np.concatenate(rows), options()) for rows in plan]
    assert [step["grad_norm"] for step in trainer.train(eight, plan, options())] == pytest.approx(norms, rel=2e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_c15_the_gradient_does_not_depend_on_the_micro_batches(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, kind: str, aggregation: str
) -> None:
    digest, setup = digest_of(small_model), make_setup(kind, max_grad_norm=1e9)
    splits = [EVERYTHING, *([list(g) for g in np.split(np.array([5, 2, 7, 0, 3, 1, 6, 4]), n)] for n in (2, 4, 8))]
    gradients = []
    for split in splits:
        trainer.bring_to_policy(small_model, digest, setup)
        trainer.train(eight, [[np.asarray(rows) for rows in split]], options(aggregation=aggregation, horizon=7))
        buffers = [b.grad_data for part in trainer._networks.parts.values() for b in part.module.buffers]
        gradients.append(torch.cat([buffer.flatten().double() for buffer in buffers]))
    assert gradients[0].norm() > 1e-3
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() <= 1e-6


@pytest.mark.parametrize("kind", ["none", "shared", "separate"])
def test_first_ratio_is_exactly_one_with_the_grouping_of_replay(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, kind: str
) -> None:
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup(kind))
    trainer.train(eight, [EVERYTHING], options())  # somewhere else than at the start
    grouping = [np.array([0, 4, 2]), np.array([6, 1]), np.array([3, 5, 7])]
    replayed = trainer.replay(eight.streams, eight.action_mask, grouping, 1.0, values=kind != "none")
    batch = replace(eight, old_logprobs=replayed.logprobs, old_values=replayed.values)
    first, second = trainer.train(batch, [grouping[:2], grouping[2:]], options())
    assert [first[f"ratio/{x}"] for x in ("mean", "min", "max", "std")] == [1.0, 1.0, 1.0, 0.0]
    assert (first["kl/k2"], first["kl/k3"], first["clip_fraction/low"], first["clip_fraction/high"]) == (0, 0, 0, 0)
    assert second["ratio/std"] > 0 and second["kl/k2"] > 0


def test_metrics_of_a_uniform_step(trainer, small_model, digest_of, make_setup, eight: TrainBatch) -> None:
    """Old log-probs log 2 below the present ones: every ratio is 2."""
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("shared"))
    now = trainer.replay(eight.streams, eight.action_mask, EVERYTHING, 1.0, values=True)
    assert not now.values.values.any()  # a zero head
    column = eight.streams.like(np.ones(len(eight.streams.values), np.float32))
    batch = replace(
        eight,
        old_logprobs=column.like(now.logprobs.values - np.float32(math.log(2))),
        advantages=column,
        returns=column,
        old_values=column.like(column.values * 0.3),
    )
    (step,) = trainer.train(batch, [[np.array([2, 6]), np.array([3]), np.array([5, 1])]], options(temperature=1.0))
    # Loss tokens: rows 2, 6, 3, 5, 1 have 9, 1, 0, 7 - 1, 2 = 18.
    assert step["train/tokens"] == 18
    assert [step[f"ratio/{x}"] for x in ("mean", "min", "max")] == pytest.approx([2, 2, 2], rel=1e-5)
    assert step["ratio/std"] == pytest.approx(0, abs=2e-3)  # float32 log-probs
    assert (step["clip_fraction/low"], step["clip_fraction/high"]) == (0, 1)
    # A = 1, r = 2, clip 1.2: -1.2. V = 0, old .3, R = 1: clipped value .1; max(1, .81) / 2 = .5; |0 - .3| > .2.
    assert step["loss/policy"] == pytest.approx(-1.2, rel=1e-5)
    assert step["loss/value"] == pytest.approx(0.5, rel=1e-6)
    assert step["value/clip_fraction"] == 1
    # k1 = log old - log new = -ln 2: k2 = ln²2 / 2 = .240227, k3 = e^ln2 - 1 - ln 2 = .306853.
    assert (step["kl/k2"], step["kl/k3"]) == pytest.approx((0.240227, 0.306853), rel=1e-4)
    assert (step["lr"], step["critic_lr"]) == (1e-2, 2e-2)
    assert 0 < step["entropy"] < math.log(64)


def test_a_row_outside_the_plan_and_masked_tokens_teach_nothing(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch
) -> None:
    digest, setup = digest_of(small_model), make_setup("none")
    plan = [[np.array([0, 5])]]
    digests = []
    for poison in (0.0, 1e6):
        advantages = eight.advantages.values.copy()
        advantages[eight.advantages.offsets[1] : eight.advantages.offsets[5]] += poison  # rows 1 to 4
        advantages[eight.advantages.offsets[5] + 8] += poison  # masked out
        trainer.bring_to_policy(small_model, digest, setup)
        trainer.train(replace(eight, advantages=eight.advantages.like(advantages)), plan, options())
        digests.append(trainer.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("column", ["advantages", "returns"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_anything_moves(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, column: str, poison: float
) -> None:
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("separate"))
    values = getattr(eight, column).values.copy()
    values[eight.streams.offsets[7] - 1] = poison  # row 6's only action
    sick = replace(eight, **{column: eight.streams.like(values)})
    trainer.train(eight, [EVERYTHING], options())
    before = trainer.digest
    with pytest.raises(NonFiniteLoss, match=r"optimizer step 0: the loss is not finite in rows \[6\]") as caught:
        trainer.train(sick, [[np.array([4, 6]), np.array([1])], EVERYTHING], options())
    assert (caught.value.step, caught.value.rows) == (0, [6])
    assert trainer.digest == before
    trainer.train(eight, [EVERYTHING], options())  # and the sick gradients are gone


def test_a_gradient_that_is_not_finite_stops_before_anything_moves(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models.megatron import course

    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("none"))
    trainer.train(eight, [EVERYTHING], options())
    before = trainer.digest
    steep = {"ppo_clip": lambda logprobs, old, advantages, options: torch.sqrt(logprobs - logprobs.detach())}  # slope ∞
    monkeypatch.setattr(course, "POLICY_LOSSES", steep)
    with pytest.raises(NonFiniteLoss, match="gradient") as caught:
        trainer.train(eight, [[np.array([0]), np.array([2])]], options())
    assert caught.value.rows == [0, 2] and trainer.digest == before


@pytest.fixture
def moved(trainer, small_model, digest_of, make_setup, eight: TrainBatch) -> TrainBatch:
    """Old log-probs as now, but in row 2 each of 9 tokens has become 3 times likelier, in row 1 each of 2 half so."""
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("none"))
    now = trainer.replay(eight.streams, eight.action_mask, EVERYTHING, 1.0, False).logprobs
    values = now.values.copy()
    starts = now.offsets
    values[starts[2] : starts[3]] -= math.log(3.0)
    values[starts[1] : starts[2]] += math.log(2.0)
    return replace(eight, old_logprobs=now.like(values))


@pytest.mark.parametrize(
    "limits, rows, what",
    [
        # Ratios: 3 in row 2, 1/2 in row 1, else 1; the furthest first, equals by row.
        ({"max_ratio": 2.9}, [2, 1, 0, 4], "ratios from 0.5 to 3 are beyond train.max_ratio = 2.9"),
        # k3 = r - 1 - log r: 2 - log 3 = .90139 on 9 tokens, log 2 - 1/2 = .19315 on 2, 0 on the 5 + 20 others:
        # (9 · .90139 + 2 · .19315) / 36 = .23608
        ({"max_kl": 0.236}, [2, 1, 0, 4], "kl/k3 is 0.236 nats a token, beyond train.max_kl = 0.236,"),
    ],
)
def test_a_policy_that_moved_too_far_stops_before_anything_moves(
    trainer, moved: TrainBatch, tmp_path: Path, limits: dict[str, float], rows: list[int], what: str
) -> None:
    plan = [[np.array([0, 1]), np.array([2, 4])]]
    before = trainer.export_policy(tmp_path / "before")
    with pytest.raises(BeyondLimit) as caught:
        trainer.train(moved, plan, options(**limits))
    assert caught.value.args == (0, rows, what)
    assert trainer.export_policy(tmp_path / "after") == before


def test_within_the_limits_nothing_stops(trainer, moved: TrainBatch) -> None:
    trainer.train(moved, [[np.array([0, 1]), np.array([2, 4])]], options(max_ratio=3.1, max_kl=0.237))


def test_low_ratios_count_as_high_ones(trainer, moved: TrainBatch) -> None:
    with pytest.raises(BeyondLimit, match=r"ratios from 0\.5 to 1 .* in rows \[1, 0\]"):
        trainer.train(moved, [[np.array([0, 1])]], options(max_ratio=1.9))


def test_nonfinite_loss_survives_pickling() -> None:
    import pickle

    sick = NonFiniteLoss(3, [1, 2], "the loss is not finite")
    error = pickle.loads(pickle.dumps(sick))
    assert (error.step, error.rows, str(error)) == (3, [1, 2], str(sick))


def test_supervise_is_cross_entropy_on_the_loss_tokens(
    trainer, small_model, digest_of, make_setup, reference_logprobs, eight: TrainBatch
) -> None:
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("none", warmup_steps=4))
    steps = trainer.supervise(eight.streams, eight.loss_mask, [EVERYTHING] * 30)
    logprobs, _ = reference_logprobs(small_model, eight.streams)
    assert steps[0]["loss"] == pytest.approx(-logprobs.values[eight.loss_mask.values].mean(), rel=1e-5)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    # Warm-up over 4 steps to .01.
    assert [step["lr"] for step in steps[:5]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert set(steps[0]) == {"loss", "entropy", "grad_norm", "lr", "train/tokens"}


def test_bfloat16_learns_through_float32_masters(
    trainer, make_model: Callable[..., Path], digest_of, make_setup, eight: TrainBatch, tmp_path
) -> None:
    folder = make_model("qwen3", dtype=torch.bfloat16)
    # 1e-4 is less than half of bfloat16's spacing at 1: without masters the norms' weights would never move.
    trainer.bring_to_policy(folder, digest_of(folder), make_setup("none", lr=1e-4))
    trainer.supervise(eight.streams, eight.loss_mask, [EVERYTHING] * 60)
    before, after = read_tensors(folder), exported(trainer, tmp_path / "p")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": "all"}, "row 0: a loss token that is no action"),
        ({"returns": None}, "returns is missing"),
        ({"advantages": "short"}, "advantages: its rows differ in length"),
        ({"weights": "short"}, "weights: its rows differ in length"),
    ],
)
def test_a_batch_that_lacks_something_is_refused(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, change: dict, message: str
) -> None:
    made = {"all": eight.streams.like(np.ones(len(eight.streams.values), bool)), None: None}
    made["short"] = Ragged(eight.advantages.values[:8], eight.advantages.offsets[:2])
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("shared"))
    with pytest.raises(ValueError, match=message):
        trainer.train(replace(eight, **{k: made[v] for k, v in change.items()}), [EVERYTHING], options())


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_recomputed_layers_give_the_same_gradients(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and each layer's forward pass runs once more in the backward pass of its micro-batch."""
    from models.megatron.attention import PackedAttention

    passes, forward = [], PackedAttention.forward
    monkeypatch.setattr(PackedAttention, "forward", lambda *a, **k: (passes.append(1), forward(*a, **k))[1])
    gradients, counts = [], []
    for recompute in (False, True, False):
        setup = replace(make_setup(kind), recompute=recompute)
        trainer.bring_to_policy(small_model, digest_of(small_model), setup)
        passes.clear()
        trainer.train(eight, [[np.arange(4), np.arange(4, 8)]], options(entropy_bonus=0.01))
        counts.append(len(passes))
        buffers = [b.grad_data for part in trainer._networks.parts.values() for b in part.module.buffers]
        gradients.append(torch.cat([buffer.flatten() for buffer in buffers]))
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
    trunks = 2 if kind == "separate" else 1
    assert counts == [2 * 2 * trunks, 2 * counts[0], counts[0]]  # micro-batches · layers · trunks
