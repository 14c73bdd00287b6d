"""The GPU's kernels against plain torch: run by Triton's interpreter here, compiled where a GPU is."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import LayoutConfig, TrainConfig
from models.megatron.batch import pack
from models.megatron.contract import Setup, TrainBatch, TrainOptions
from models.megatron.logprob import logprob_and_entropy
from ops.ragged import from_rows
from tests.models import gang
from tests.models.interpreted import interpreted
from tests.models.test_megatron_logprob import OneRank

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
# Of one rounding to bfloat16 (2^-9), and a half more for float32 sums in another order.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@pytest.fixture(scope="module", params=["cpu", GPU])
def place(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the kernels can run."""
    with interpreted() if request.param == "cpu" else nullcontext():
        yield torch.device(request.param)


def near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> bool:
    """Relative to the largest of the exact values."""
    return bool((got.double().cpu() - exact.cpu()).abs().max() <= slack * ROUNDING[dtype] * exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(5, 48), (77, 128), (1, 2), (3, 5000)])
def test_norm(place: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    from models.megatron.norm import Normalise

    torch.manual_seed(0)
    # Every second group of columns: rows further apart than they are wide, as keys lie in a projection's output.
    x = torch.randn(rows, 2, width).to(dtype).to(place)[:, 0].requires_grad_()
    weight = torch.randn(width).to(dtype).to(place).requires_grad_()
    grad = torch.randn(rows, width).to(dtype).to(place)
    out = Normalise.apply(x, weight, 1e-6)
    got = (out, *torch.autograd.grad(out, (x, weight), grad))
    x64, weight64 = (t.detach().double().cpu().requires_grad_() for t in (x, weight))
    exact = torch.nn.functional.rms_norm(x64, (width,), weight64, 1e-6)
    exacts = (exact, *torch.autograd.grad(exact, (x64, weight64), grad.double().cpu()))
    assert all(a.dtype == dtype and near(a, b, dtype) for a, b in zip(got, exacts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size"), [(3, 16), (16, 128)])
def test_rotation(place: torch.device, dtype: torch.dtype, heads: int, size: int) -> None:
    from models.megatron import kernels
    from models.megatron.rotary import turn

    torch.manual_seed(1)
    x = torch.randn(6, heads, 2, size).to(dtype).to(place)[:, :, 1]
    angles = torch.randn(6, 1, size // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    exact = turn(x.double().cpu(), cos.double(), sin.double())
    assert near(kernels.turn(x, cos.to(place), sin.to(place)), exact, dtype)


# Two tiles and a part of one; a row whose peak comes late; the vocabulary's last token.
@pytest.mark.parametrize("vocabulary", [7, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_logprobs(
    place: torch.device, vocabulary: int, temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against logits held whole: the op on the CPU, in float64 for the gradients; chunks of 4, 4 and 1 tokens."""
    from models.megatron import head

    monkeypatch.setattr(head, "CHUNK", 4)
    torch.manual_seed(2)
    # From nearly uniform rows, where every lane's running peak counts, to sharp ones.
    hidden = (torch.randn(9, 16) * torch.logspace(-2, 0, 9)[:, None]).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 16) * 4).to(dtype).requires_grad_()
    targets, grads = torch.randint(0, vocabulary, (9,)), torch.randn(2, 9)
    targets[0] = vocabulary - 1
    there = [x.detach().to(place).requires_grad_() for x in (hidden, weight)]
    got = head.Chunked.apply(*there, targets.to(place), temperature, OneRank())
    want = logprob_and_entropy(hidden @ weight.t(), targets, temperature, OneRank())
    # The same float32 sums of the same logits, in another order; on a GPU the logits themselves are others'.
    bound = 2e-6 if place.type == "cpu" else 0.2 if dtype == torch.bfloat16 else 1e-4
    for mine, exact in zip(got, want, strict=True):
        assert torch.allclose(mine.cpu(), exact, rtol=bound, atol=bound)
    got_grads = torch.autograd.grad(got, there, [g.to(place) for g in grads])
    want_grads = torch.autograd.grad(want, (hidden, weight), list(grads))
    for mine, exact in zip(got_grads, want_grads, strict=True):
        assert mine.dtype == dtype and near(mine, exact.double(), dtype, slack=2)  # both are rounded


@pytest.mark.parametrize("which", [0, 1])
def test_chunked_gradient_of_one_output_alone(place: torch.device, which: int) -> None:
    from models.megatron.head import Chunked

    torch.manual_seed(3)
    hidden, weight = torch.randn(5, 8), torch.randn(12, 8)
    targets = torch.randint(0, 12, (5,))
    there = [x.to(place).requires_grad_() for x in (hidden, weight)]
    got = torch.autograd.grad(Chunked.apply(*there, targets.to(place), 1.5, OneRank())[which].sum(), there)
    here = [x.double().requires_grad_() for x in (hidden, weight)]
    logp = torch.log_softmax(here[0] @ here[1].t() / 1.5, -1)
    exact = (logp.gather(-1, targets[:, None]), -(logp.exp() * logp).sum(-1))[which]
    wanted = torch.autograd.grad(exact.sum(), here)
    assert all(near(a, b, torch.float32) for a, b in zip(got, wanted, strict=True))


def test_chunked_of_no_tokens(place: torch.device) -> None:
    from models.megatron.head import Chunked

    there = [torch.ones(n, 4, device=place, requires_grad=True) for n in (0, 6)]
    logprob, entropy = Chunked.apply(*there, torch.zeros(0, dtype=torch.int64, device=place), 1.0, OneRank())
    (logprob.sum() + entropy.sum()).backward()
    assert there[0].grad.shape == (0, 4) and there[1].grad.abs().sum() == 0


@pytest.mark.parametrize(("bad", "sick"), [(float("nan"), True), (float("inf"), True), (-float("inf"), False)])
def test_a_sick_logit_is_seen(place: torch.device, bad: float, sick: bool) -> None:
    """Training looks for losses that are not finite. A token that cannot come is no sickness: 1 + e^-1 without it."""
    from models.megatron import kernels

    logits = torch.tensor([[2.0, 1.0, -90.0], [2.0, 1.0, bad]], device=place)
    peak, total, weighted, hit = out = torch.empty(4, 2, device=place)
    kernels.statistics(logits, torch.tensor([1, 1], device=place), 1.0, out)
    assert torch.isfinite(total).tolist() == [True, not sick]
    # Weights 1 and e^-1 at z = 0 and -1.
    values = [x[0 if sick else 1].item() for x in (peak, total, weighted, hit)]
    assert values == pytest.approx([2.0, 1.3678794, -0.3678794, 1.0])


def work(trainer, folder: Path, digest: str, setup: Setup, batch: TrainBatch) -> tuple:
    """(log-probs and entropies of the actions, gradient norm) of three rows."""
    trainer.bring_to_policy(folder, digest, setup)
    replayed = trainer.replay(batch.streams, batch.action_mask, [np.arange(3)], 0.9, values=False)
    how = TrainOptions(TrainConfig(entropy_bonus=0.02, max_kl=None), 0.9)
    (step,) = trainer.train(batch, [[np.arange(3)]], how)
    seen = None if replayed is None else (replayed.logprobs.values, replayed.entropy.values)
    return seen, step["grad_norm"]


def both_ways(trainer, *args) -> list[tuple]:
    """`work` first as on a CPU, then with the kernels."""
    from models.megatron import head, norm, rotary

    plain = work(trainer, *args)
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        from models.megatron import kernels

        patch.setattr(head, "CHUNK", 7)
        patch.setattr(head, "in_chunks", lambda hidden: True)
        patch.setattr(rotary, "turn", kernels.turn)
        patch.setattr(norm.RMSNorm, "forward", lambda self, x: norm.Normalise.apply(x, self.weight, self.eps))
        return [plain, work(trainer, *args)]


def require_alike(found: list[tuple], logprobs: float = 1e-5, gradient: float = 1e-5) -> None:
    (plain, plain_norm), (kernels, kernels_norm) = found
    for mine, theirs in zip(kernels, plain, strict=True):
        assert np.allclose(mine, theirs, atol=logprobs)
    assert kernels_norm == pytest.approx(plain_norm, rel=gradient)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where they cannot run")
def test_a_model_of_kernels(trainer, small_model: Path, digest_of, make_setup, eight: TrainBatch) -> None:
    """Log-probs, entropies and the gradient's norm are those of torch's norm and rotation and of whole logits."""
    require_alike(both_ways(trainer, small_model, digest_of(small_model), make_setup("none"), eight))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where they cannot run")
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_kernels_on_two_tensor_ranks(
    make_model, digest_of, make_setup, eight: TrainBatch, tied: bool
) -> None:
    """The same where each rank has half of the vocabulary."""
    folder = make_model("qwen3", tied=tied)
    first, _ = gang.run(LayoutConfig(tensor=2), both_ways, folder, digest_of(folder), make_setup("none"), eight)
    require_alike(first)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_on_a_gpu(trainer, make_model, digest_of, make_setup, eight: TrainBatch, recompute: bool) -> None:
    """In bfloat16, against SDPA, torch's norm and whole logits on the same GPU."""
    from models.megatron import attention, head, norm

    folder = make_model("qwen3", dtype=torch.bfloat16)
    args = (trainer, folder, digest_of(folder), replace(make_setup("none"), recompute=recompute), eight)
    fast = work(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "has_kernel", lambda query: False)
        patch.setattr(head, "in_chunks", lambda hidden: False)
        patch.setattr(norm.RMSNorm, "forward", torch.nn.RMSNorm.forward)
        require_alike([work(*args), fast], logprobs=0.1, gradient=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8), (4, 4), (6, 1)])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [700, 1, 33, 256, 1, 129], [2048, 5]])
def test_varlen_attention_equals_sdpa(
    heads: tuple[int, int], size: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients in bfloat16: within 1e-2 of float64 (of the largest value), 2e-2 of each other."""
    from models.megatron import attention

    torch.manual_seed(0)
    device, total = torch.device("cuda"), sum(lengths)
    q, k, v = (torch.randn(total, n, size, device=device).bfloat16() for n in (heads[0], heads[1], heads[1]))
    batch = pack(from_rows([np.zeros(n) for n in lengths], np.int32), np.arange(len(lengths)), device)
    angles = torch.outer(batch.positions, 10.0 ** -torch.arange(size // 2, device=device).float())[:, None]
    layer = attention.PackedAttention.__new__(attention.PackedAttention)
    torch.nn.Module.__init__(layer)
    layer.scale = size**-0.5
    weights = torch.randn(total, heads[0] * size, device=device).bfloat16()

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        batch.cos, batch.sin = angles.cos().bfloat16().to(dtype), angles.sin().bfloat16().to(dtype)
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = layer(*inputs, None, packed_seq_params=batch)
        return [out, *torch.autograd.grad(out, inputs, weights.to(dtype))]

    assert attention.has_kernel(q)
    kernel = run(torch.bfloat16)
    monkeypatch.setattr(attention, "has_kernel", lambda query: False)
    sdpa, exact = run(torch.bfloat16), run(torch.float64)
    for mine, theirs, true in zip(kernel, sdpa, exact, strict=True):
        # Rows of one token have gradients of 0 for query and key; a kernel's rounding may leave 1e-6.
        largest = true.abs().max() + 1e-3
        assert (mine.double() - true).abs().max() <= 1e-2 * largest
        assert (mine.double() - theirs.double()).abs().max() <= 2e-2 * largest
