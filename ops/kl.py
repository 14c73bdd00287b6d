"""Estimators of KL(pi || pi_ref) from tokens sampled from pi, as torch functions. Source: Schulman 2020; math.md 5."""

import torch


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log pi - log pi_ref per token: unbiased, of either sign. All [tokens] float32."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """k1^2 / 2 per token: never negative, biased, of low variance. All [tokens] float32."""
    return 0.5 * k1(logprobs, ref_logprobs) ** 2


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """e^-k1 - 1 + k1 per token: unbiased and never negative. All [tokens] float32.

    k1 is clamped at -20 in the exponent, where float32 would overflow.
    """
    difference = k1(logprobs, ref_logprobs)
    # expm1 keeps the digits that e^x - 1 loses for a small x, and with them the sign.
    return torch.expm1(-difference.clamp(min=-20.0)) + difference
