"""Triton kernels for what torch runs as many passes over memory: norm, rotary embedding, log-probs. GPUs only.

Import it only where tensors are on a GPU. Statistics and sums are float32, whatever the tensors are.
"""

import torch
import triton
import triton.language as tl

_TILE = 4096  # elements that one program holds at a time
_PROGRAMS = 512  # of a norm's backward pass; each keeps its own sum of the weight's gradient


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean x² + eps) · weight over the last dimension, and that factor of each row, [rows] float32."""
    flat = x.reshape(-1, x.size(-1))
    rows, width = flat.shape
    y, factor = torch.empty_like(flat, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=torch.float32)
    columns, at_once = _norm_tile(width)
    _norm[(triton.cdiv(rows, at_once),)](
        flat, flat.stride(0), weight, y, factor, rows, width, eps, ROWS=at_once, COLUMNS=columns
    )
    return y.view(x.shape), factor


def rms_norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rms_norm's x and weight."""
    flat, grad = x.reshape(-1, x.size(-1)), grad.contiguous()
    rows, width = flat.shape
    columns, at_once = _norm_tile(width)
    programs = min(_PROGRAMS, triton.cdiv(rows, at_once))
    dx, parts = torch.empty_like(grad), x.new_empty(programs, columns, dtype=torch.float32)
    _norm_back[(programs,)](
        grad, flat, flat.stride(0), weight, factor, dx, parts, rows, width, ROWS=at_once, COLUMNS=columns
    )
    return dx.view(x.shape), parts.sum(0)[:width].to(weight.dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """rotary.turn: x [tokens, heads, head_dim], cos and sin [tokens, 1, head_dim / 2], contiguous."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tiles = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(size // 2)}
    _turn[(tokens,)](x, x.stride(0), x.stride(1), cos, sin, out, heads, size // 2, **tiles)
    return out


def statistics(logits: torch.Tensor, targets: torch.Tensor, temperature: float, out: torch.Tensor) -> None:
    """Of each row of logits, into out [4, rows] float32: peak, Σ w, Σ w z and the target's logit.

    z = (logit − peak) / temperature, w = exp z. logits [rows, vocabulary], targets [rows] int64; one that is no
    column has logit 0.
    """
    rows, vocabulary = logits.shape
    _statistics[(rows,)](logits, targets, out, out.stride(0), vocabulary, 1.0 / temperature, COLUMNS=_TILE, num_warps=8)


def to_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    peak: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor,
    grads: torch.Tensor,
) -> None:
    """Turns logits [rows, vocabulary], in place, into the gradient that reaches them.

    peak, log_total, entropy: [rows] float32, of the whole distribution; grads [2, rows] float32: of log-prob, entropy.
    """
    rows, vocabulary = logits.shape
    _to_gradient[(rows, triton.cdiv(vocabulary, _TILE))](
        logits,
        targets,
        peak,
        log_total,
        entropy,
        grads,
        grads.stride(0),
        vocabulary,
        1.0 / temperature,
        COLUMNS=_TILE,
        num_warps=8,
    )


def _norm_tile(width: int) -> tuple[int, int]:
    """Columns of a tile, and how many rows it has."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, _TILE // columns)


@triton.jit
def _norm(x, stride, weight, y, factor, rows, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / width + eps)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * width + column[None, :], values * scale[:, None] * gain[None, :], mask=inside)
    tl.store(factor + row, scale, mask=row < rows)


@triton.jit
def _norm_back(grad, x, stride, weight, factor, dx, parts, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    of_gain = tl.zeros([COLUMNS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        values = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
        normed, weighed = values * scale, g * gain[None, :]
        along = tl.sum(weighed * normed, 1)[:, None] / width
        tl.store(dx + place, (weighed - normed * along) * scale, mask=inside)
        of_gain += tl.sum(g * normed, 0)
    tl.store(parts + tl.program_id(0) * COLUMNS + column, of_gain)


@triton.jit
def _turn(x, by_token, by_head, cos, sin, out, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    first = x + token * by_token + head * by_head + column
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * half + column, mask=column < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + column, mask=column < half, other=0.0).to(tl.float32)
    to = out + (token * heads + head) * 2 * half + column
    tl.store(to, a * c - b * s, mask=inside)
    tl.store(to + half, b * c + a * s, mask=inside)


@triton.jit
def _statistics(logits, targets, out, by_name, vocabulary, inverse, COLUMNS: tl.constexpr):
    """One pass; each lane has a running peak of its own, by which its sums are scaled."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * vocabulary
    column = tl.arange(0, COLUMNS)
    peak = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    weighted = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        inside = start + column < vocabulary
        logit = tl.load(line + start + column, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, logit)
        scale = tl.exp((peak - higher) * inverse)
        z = (logit - higher) * inverse
        weight = tl.exp(z)
        weighted = scale * (weighted + total * (peak - higher) * inverse) + tl.where(weight == 0.0, 0.0, weight * z)
        total = scale * total + weight
        peak = higher
    highest = tl.max(peak, 0)
    shift = (peak - highest) * inverse
    scale = tl.exp(shift)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocabulary)
    tl.store(out + row, highest)
    tl.store(out + by_name + row, tl.sum(scale * total, 0))
    tl.store(out + 2 * by_name + row, tl.sum(tl.where(scale == 0.0, 0.0, scale * (weighted + total * shift)), 0))
    tl.store(out + 3 * by_name + row, tl.load(line + target, mask=known, other=0.0).to(tl.float32))


@triton.jit
def _to_gradient(logits, targets, peak, log_total, entropy, grads, by_name, vocabulary, inverse, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = logits + row * vocabulary + column
    logit = tl.load(place, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
    of_logprob, of_entropy = tl.load(grads + row), tl.load(grads + by_name + row)
    logp = (logit - tl.load(peak + row)) * inverse - tl.load(log_total + row)
    p = tl.exp(logp)
    surprise = tl.where(p == 0.0, 0.0, p * (logp + tl.load(entropy + row)))
    hit = tl.where(column == tl.load(targets + row), of_logprob, 0.0)
    tl.store(place, (hit - p * of_logprob - surprise * of_entropy) * inverse, mask=column < vocabulary)
