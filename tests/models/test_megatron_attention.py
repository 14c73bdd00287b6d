"""Packed attention and rotary embedding against a loop over rows and positions."""

import math

import numpy as np
import pytest
import torch

from models.megatron.batch import pack
from models.megatron.rotary import Rotate, inverse_frequencies
from models.megatron.shape import Rope
from ops.ragged import from_rows


def test_rotation_by_a_right_angle() -> None:
    # One head of size 4, angles 90 and 0 degrees: the pair (1, 3) of dimensions 0 and 2 becomes (-3, 1), (2, 4) stays.
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    out = Rotate.apply(x, torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]]))
    assert out.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_rotation_has_the_right_gradient() -> None:
    angles = torch.randn(3, 1, 2, dtype=torch.float64)
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, angles.cos(), angles.sin()), (x,))


def test_frequencies() -> None:
    # theta^(-2i/d): 100^0, 100^(-1/2).
    assert inverse_frequencies(Rope(100.0), 4).tolist() == pytest.approx([1.0, 0.1])


def test_llama3_scaling_by_hand() -> None:
    # d = 6, theta = 1000: frequencies 1, .1, .01; in 100 tokens they turn 15.9, 1.59, .159 times. Low 1, high 4: more
    # than 4 turns are kept; 1.5915 lies .19718 of the way, .1 (.19718 + .80282 / 8) = .029753; less than 1 turn: / 8.
    got = inverse_frequencies(Rope(1000.0, 8.0, 1.0, 4.0, 100), 6)
    assert got.tolist() == pytest.approx([1.0, 0.029753, 0.00125], rel=1e-4)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], angles: torch.Tensor) -> torch.Tensor:
    """Row by row, head by head, softmax over the tokens up to each one."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
        return torch.cat([turned[..., 0], turned[..., 1]], -1)

    q, k, out = turn(q), turn(k), []
    for start, end in zip(np.cumsum([0, *lengths])[:-1], np.cumsum(lengths), strict=True):
        for i in range(start, end):
            heads = []
            for head in range(q.size(1)):
                shared = head * k.size(1) // q.size(1)
                score = k[start : i + 1, shared] @ q[i, head] / math.sqrt(q.size(2))
                heads.append(torch.softmax(score, 0) @ v[start : i + 1, shared])
            out.append(torch.cat(heads))
    return torch.stack(out)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 1, 5, 2], [40, 2, 3, 38], [7]])
def test_packed_attention_equals_the_naive_loop(device: torch.device, lengths: list[int]) -> None:
    from models.megatron.attention import PackedAttention

    torch.manual_seed(0)
    total, heads, groups, size = sum(lengths), 4, 2, 8
    q, k, v = (torch.randn(total, n, size, requires_grad=True) for n in (heads, groups, groups))
    batch = pack(from_rows([np.zeros(n) for n in lengths], np.int32), np.arange(len(lengths)), torch.device("cpu"))
    angles = torch.outer(batch.positions, inverse_frequencies(Rope(10000.0), size))
    batch.cos, batch.sin = angles.cos()[:, None], angles.sin()[:, None]
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.scale = size**-0.5

    out = attention(q, k, v, None, packed_seq_params=batch)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
    wanted = naive(q, k, v, lengths, angles)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    assert torch.allclose(out, wanted, atol=1e-5)
    for got, want in zip(grads, wanted_grads, strict=True):
        assert torch.allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("lengths", [[3, 1, 5, 2], [7]])
def test_what_the_kernel_for_ragged_rows_is_told(
    device: torch.device, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has it for GPUs only: here a loop over the rows stands in, which reads its arguments as its manual says."""
    from models.megatron import attention

    def rows_of(q, k, v, begin_q, begin_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
        assert window_size == (-1, 0) and enable_gqa and longest_q == longest_k == max(lengths)
        assert begin_q.dtype == begin_k.dtype == torch.int32
        attend = torch.nn.functional.scaled_dot_product_attention
        parts = [
            attend(*(x[a:b].transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True)
            for a, b in zip(begin_q[:-1].tolist(), begin_k[1:].tolist(), strict=True)
        ]
        return torch.cat(parts, 1).transpose(0, 1)

    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), n, 8) for n in (4, 2, 2))
    batch = pack(from_rows([np.zeros(n) for n in lengths], np.int32), np.arange(len(lengths)), torch.device("cpu"))
    angles = torch.outer(batch.positions, inverse_frequencies(Rope(100.0), 8))
    batch.cos, batch.sin = angles.cos()[:, None], angles.sin()[:, None]
    layer = attention.PackedAttention.__new__(attention.PackedAttention)
    torch.nn.Module.__init__(layer)
    layer.scale = 8**-0.5
    monkeypatch.setattr(attention, "has_kernel", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attn", rows_of)
    out = layer(q, k, v, None, packed_seq_params=batch)
    assert torch.allclose(out, naive(q, k, v, lengths, angles), atol=1e-5)
    assert "padded" not in vars(batch)  # nothing was laid out in buckets
    # Rows that are long go to SDPA.
    monkeypatch.setattr(attention, "LONG", max(lengths))
    monkeypatch.setattr(attention, "varlen_attn", None)
    assert torch.allclose(layer(q, k, v, None, packed_seq_params=batch), out, atol=1e-5)
