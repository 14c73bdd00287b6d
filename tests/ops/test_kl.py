"""KL estimators on a bandit with two arms, where every expectation is a sum of two terms (C17)."""

import math

import pytest
import torch

from ops.kl import k1, k2, k3
from ops.losses import LossOptions, reinforce

REF = torch.tensor([0.3, 0.7], dtype=torch.float64).log()


def policy(theta: float | torch.Tensor) -> torch.Tensor:
    """Log-probs of the two arms at logits (theta, 0)."""
    logit = torch.as_tensor(theta, dtype=torch.float64)
    return torch.log_softmax(torch.stack([logit, torch.zeros_like(logit)]), 0)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) by its definition, from log-probs."""
    return float((p.exp() * (p - q)).sum())


def slope(function, theta: float) -> float:
    return (function(theta + 1e-5) - function(theta - 1e-5)) / 2e-5


def test_values():
    # pi .6, ref .3: k1 = ln 2 = .693147, k2 = .240227, k3 = .5 - 1 + .693147 = .193147
    pi, ref = torch.tensor([0.6]).log(), torch.tensor([0.3]).log()
    assert k1(pi, ref).item() == pytest.approx(0.693147, abs=1e-6)
    assert k2(pi, ref).item() == pytest.approx(0.240227, abs=1e-6)
    assert k3(pi, ref).item() == pytest.approx(0.193147, abs=1e-6)
    # and the other way round: k1 = -.693147, k3 = 2 - 1 - .693147 = .306853
    assert k1(ref, pi).item() == pytest.approx(-0.693147, abs=1e-6)
    assert k3(ref, pi).item() == pytest.approx(0.306853, abs=1e-6)


def test_c17_k2_and_k3_are_never_negative():
    pi = -torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 5
    noise = torch.logspace(-9, 1, 10_000) * torch.tensor([1.0, -1.0]).repeat(5_000)
    assert (k2(pi, pi + noise) >= 0).all()
    assert (k3(pi, pi + noise) >= 0).all()
    assert k3(pi, pi).abs().max() == 0


def test_k3_of_a_small_difference_keeps_its_digits():
    # k1 = 1e-3: k1^2 / 2 - k1^3 / 6 = 4.9983e-7; e^x - 1 in float32 alone would be off by 6e-8
    assert k3(torch.tensor([1e-3]), torch.zeros(1)).item() == pytest.approx(4.9983e-7, rel=1e-3)


def test_k3_of_a_huge_difference_is_finite():
    logprobs = torch.tensor([-200.0], requires_grad=True)
    k3(logprobs, torch.zeros(1)).sum().backward()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("theta", [-1.5, 0.0, 2.0])
def test_c17_k1_and_k3_are_unbiased(theta):
    pi = policy(theta)
    for estimator in (k1, k3):
        assert float((pi.exp() * estimator(pi, REF)).sum()) == pytest.approx(kl(pi, REF), abs=1e-12)


@pytest.mark.parametrize("theta", [-1.5, 0.0, 2.0])
def test_c17_gradient_of_the_loss_terms(theta):
    # Sampled from pi, weights without gradient: E[grad k2] = grad KL(pi || ref), E[grad k3] = grad KL(ref || pi).
    for estimator, target in ((k2, lambda t: kl(policy(t), REF)), (k3, lambda t: kl(REF, policy(t)))):
        logit = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
        pi = policy(logit)
        (pi.detach().exp() * estimator(pi, REF)).sum().backward()
        assert logit.grad.item() == pytest.approx(slope(target, theta), abs=1e-8)


@pytest.mark.parametrize("theta", [-1.5, 0.0, 2.0])
def test_c17_kl_in_the_reward_pulls_towards_the_reference(theta):
    # The policy gradient of the reward -k1 descends KL(pi || ref).
    logit = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    pi = policy(logit)
    advantages = -k1(pi, REF).detach()
    (pi.detach().exp() * reinforce(pi, pi.detach(), advantages, LossOptions())).sum().backward()
    assert logit.grad.item() == pytest.approx(slope(lambda t: kl(policy(t), REF), theta), abs=1e-8)


def trained_kl(beta: float) -> float:
    """KL(pi || ref) after gradient descent on -E[r] + beta E[k3], arm 0 paying 1 and arm 1 nothing."""
    logit = torch.tensor(math.log(0.3 / 0.7), dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        pi = policy(logit)
        weights, rewards = pi.detach().exp(), torch.tensor([1.0, 0.0], dtype=torch.float64)
        loss = (weights * (reinforce(pi, pi.detach(), rewards, LossOptions()) + beta * k3(pi, REF))).sum()
        (gradient,) = torch.autograd.grad(loss, logit)
        logit = (logit - 0.5 * gradient).detach().requires_grad_()
    return kl(policy(logit.detach()), REF)


def test_c17_larger_beta_lowers_kl():
    found = [trained_kl(beta) for beta in (0.0, 0.1, 1.0, 10.0)]
    assert found == sorted(found, reverse=True)
    # beta 0 has nearly reached the paying arm, KL -> -ln .3 = 1.204; beta 10 has hardly moved
    assert found[0] > 1.0
    assert found[-1] < 0.01
