"""The chunked scan against the recurrence it stands for."""

import pytest
import torch
from torch.nn import functional as F

from nvfp4.models.ssd import ssd

BATCH, LENGTH, HEADS, HEAD_DIM, GROUPS, STATE = 2, 75, 6, 5, 3, 7


def recurrence(x, dt, a, b, c, d, dt_bias):
    """One token at a time, in the dtype given."""
    repeat = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(repeat, 2), c.repeat_interleave(repeat, 2)
    dt = F.softplus(dt + dt_bias)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3])
    out = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        update = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        state = state * decay + update
        out.append((state * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(out, 1)


def inputs(length=LENGTH, dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    x, dt, b, c = (
        torch.randn(BATCH, length, *shape, generator=make, dtype=torch.float64)
        for shape in ((HEADS, HEAD_DIM), (HEADS,), (GROUPS, STATE), (GROUPS, STATE))
    )
    a = -torch.empty(HEADS, dtype=torch.float64).uniform_(1, 16, generator=make)
    d = torch.randn(HEADS, generator=make, dtype=torch.float64)
    bias = torch.randn(HEADS, generator=make, dtype=torch.float64) - 3
    return [t.to(dtype) for t in (x, dt, a, b, c, d, bias)]


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_equals_the_recurrence(length):
    expected = recurrence(*inputs(length))
    got = ssd(*inputs(length, torch.float32), chunk=64)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("chunk", [1, 16, 32, 64, 128])
def test_chunk_does_not_change_the_result(chunk):
    expected = recurrence(*inputs())
    got = ssd(*inputs(dtype=torch.float32), chunk=chunk)
    assert (got - expected).abs().max() < 2e-6 * expected.abs().max()


def test_gradients_equal_the_recurrence():
    exact = [t.requires_grad_() for t in inputs()]
    weights = torch.randn(
        BATCH, LENGTH, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)
    )
    (recurrence(*exact) * weights).sum().backward()
    tested = [t.requires_grad_() for t in inputs(dtype=torch.float32)]
    (ssd(*tested, chunk=32) * weights).sum().backward()
    for name, ours, truth in zip("x dt a b c d dt_bias".split(), tested, exact, strict=True):
        error = (ours.grad - truth.grad).norm() / truth.grad.norm()
        assert error < 5e-6, name


def test_a_token_reaches_later_ones_only():
    arguments = inputs(dtype=torch.float32)
    before = ssd(*arguments, chunk=16)
    for index in (0, 1, 3, 4):  # x, dt, b, c at position 40
        arguments[index] = arguments[index].clone()
        arguments[index][:, 40] += 1
    after = ssd(*arguments, chunk=16)
    assert torch.equal(before[:, :40], after[:, :40])
    assert (before[:, 40:42] != after[:, 40:42]).any(-1).all()


def test_decay_beyond_the_exponents_range_stays_finite():
    # 64 steps of dt A = -16 * 8 sum to -8192: exp of the future's positive difference overflows
    x, dt, _, b, c, d, bias = inputs(dtype=torch.float32)
    a = torch.full((HEADS,), -16.0, requires_grad=True)
    x.requires_grad_()
    y = ssd(x, torch.full_like(dt, 8.0), a, b, c, d, torch.zeros_like(bias))
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and a.grad.isfinite().all()


def test_bf16_input_is_computed_in_fp32_and_rounded_once():
    arguments = [t.bfloat16() for t in inputs()]
    exact = ssd(*(t.float() for t in arguments))
    assert torch.equal(ssd(*arguments), exact.bfloat16())
