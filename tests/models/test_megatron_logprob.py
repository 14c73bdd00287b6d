"""Log-prob and entropy against torch's log_softmax, values and gradients."""

import math

import pytest
import torch

from models.megatron.logprob import logprob_and_entropy


class OneRank:
    """A process group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits.double() / temperature, -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def test_two_tokens_by_hand() -> None:
    # Logits log 3 and 0 at temperature 1: p = 3/4, 1/4. H = -(.75 ln .75 + .25 ln .25) = .562335.
    logits = torch.tensor([[math.log(3.0), 0.0]] * 2)
    logprob, entropy = logprob_and_entropy(logits, torch.tensor([0, 1]), 1.0, OneRank())
    assert logprob.tolist() == pytest.approx([math.log(0.75), math.log(0.25)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.562335] * 2, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_values_and_gradients(temperature: float, scale: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(20, 300) * scale + 100).requires_grad_()
    targets, weights = torch.randint(0, 300, (20,)), torch.randn(2, 20)
    before = logits.detach().clone()
    got = logprob_and_entropy(logits, targets, temperature, OneRank())
    want = reference(logits, targets, temperature)
    # float32 holds a log-prob of -100 to 4e-6: relative there, absolute near 0.
    for mine, exact in zip(got, want, strict=True):
        assert torch.allclose(mine.double(), exact, rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, got, strict=True)), logits)
    (exact,) = torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, want, strict=True)), logits)
    assert torch.allclose(grad, exact, atol=2e-6)
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_output_alone(which: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 12, requires_grad=True)
    targets = torch.randint(0, 12, (5,))
    (grad,) = torch.autograd.grad(logprob_and_entropy(logits, targets, 1.5, OneRank())[which].sum(), logits)
    (exact,) = torch.autograd.grad(reference(logits, targets, 1.5)[which].sum(), logits)
    assert torch.allclose(grad, exact, atol=1e-6)


def test_bfloat16_logits_are_computed_in_float32() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 40).bfloat16()
    targets = torch.randint(0, 40, (6,))
    logprob, entropy = logprob_and_entropy(logits, targets, 0.9, OneRank())
    exact = reference(logits, targets, 0.9)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprob.double(), exact[0], atol=1e-6)
    assert torch.allclose(entropy.double(), exact[1], atol=1e-6)


def test_no_tokens() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    logprob, entropy = logprob_and_entropy(logits, torch.zeros(0, dtype=torch.int64), 1.0, OneRank())
    (logprob.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 7)
