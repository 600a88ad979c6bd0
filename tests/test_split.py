"""Decompositions of operands: exact where nothing is quantised, better where something is."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nvfp4 import backends
from nvfp4.numerics.spec import QuantSpec
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.linear import linear
from nvfp4.precision.operands import policy_from_dict
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.split import hot_count, off_mean

T, K, N = 72, 64, 48  # 72 tokens are padded


def run(policy, x, w, dy):
    x, w = x.clone().requires_grad_(), nn.Parameter(w.clone())
    with use_context(StepContext(1, 2)):
        y = linear(x, w, policy=policy, name="fc", layer=0)
        y.backward(dy)
    return y.detach(), x.grad, w.grad


def exact(x, w, dy):
    return x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double()


def biased(seed, *shape, mean=4.0):
    """Numbers whose columns have means much larger than their spread."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) + mean * torch.randn(
        1, shape[1], generator=generator
    )


def errors(got, true):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, true, strict=True)]


@pytest.fixture
def no_quantiser(monkeypatch):
    """A backend whose quantiser changes nothing."""
    plain = replace(
        backends.choose("reference"),
        quantize=lambda tensor, spec, **_: tensor.float(),
        transpose=lambda tensor: tensor.t(),
    )
    monkeypatch.setattr(backends, "_active", plain)


@pytest.mark.usefixtures("no_quantiser")
@pytest.mark.parametrize("name", ["averis", "chon"])
@pytest.mark.parametrize("wgrad", ["as it is", "one-sided"])
def test_without_quantisation_it_is_the_plain_product(name, wgrad):
    """With a quantiser that changes nothing the parts add up to x w^T, dy w, dy^T x."""
    changes = {"base": name, "compute_dtype": "fp32", "dgrad": {"weight": None}}
    if wgrad == "one-sided":
        changes["wgrad"] = {"input": None, "grad_output": {"hadamard": 0}}
    elif name == "chon":
        changes["wgrad"] = {role: {"hadamard": 0} for role in ("input", "grad_output")}
    policy = policy_from_dict("p", changes, PRESETS, "here")
    tensors = biased(0, T, K), biased(1, N, K, mean=0), biased(2, T, N)
    assert max(errors(run(policy, *tensors), exact(*tensors))) < 1e-6


@pytest.mark.usefixtures("no_quantiser")
@pytest.mark.parametrize(("offset", "limit"), [(1, 1e-4), (4, 1e-5), (30, 1e-6)])
def test_wgrad_of_bf16_tensors_leaves_nothing_out(offset, limit):
    """Only the rest is rounded to BF16; a mean in BF16 would be an error of 6e-4 to 3e-3.

    The rank-1 cross terms of a BF16 mean would do as well: 4e-4, 5e-6 and 2e-8.
    """
    generator = torch.Generator().manual_seed(0)
    x, dy = (
        (torch.randn(4096, features, generator=generator) + offset).bfloat16()
        for features in (128, 64)
    )
    dw = run(PRESETS["averis"], x, torch.zeros(64, 128), dy)[2]
    assert errors([dw], [exact(x, torch.zeros(64, 128), dy)[2]])[0] < limit


def test_mean_and_rest():
    x = biased(0, 48, 8)
    mu, rest = off_mean(torch.cat([x, torch.zeros(16, 8)]), 48)
    assert mu.shape == (1, 8) and not rest[48:].any()
    assert torch.allclose(mu[0], x.mean(0), atol=1e-6)
    assert torch.allclose(rest[:48] + mu, x, atol=1e-6)
    assert rest[:48].sum(0).abs().max() < 1e-4
    assert not any(part.any() for part in off_mean(torch.zeros(16, 8), 0))
    half = x.bfloat16()
    mu, rest = off_mean(half, 48, exact=True)
    assert mu.dtype == torch.float32 and rest.dtype == torch.bfloat16
    assert torch.equal(rest, (half.float() - mu).bfloat16())
    assert off_mean(half, 48)[0].dtype == torch.bfloat16


def test_averis_helps_where_the_mean_is_large():
    """What tells the tokens apart has a finer grid; what they share has one error for all."""
    tensors = biased(0, T, K), biased(1, N, K, mean=0), biased(2, T, N)
    without = policy_from_dict("p", {"base": "averis", "split": "none"}, PRESETS, "here")
    true, ours, other = exact(*tensors), run(PRESETS["averis"], *tensors), run(without, *tensors)
    spread = [
        errors([y - y.mean(0) for y in got[:2]], [y - y.mean(0) for y in true[:2]])
        for got in (ours, other)
    ]
    for mine, plain in zip(*spread, strict=True):
        assert mine < 0.6 * plain
    assert errors(ours, true)[2] < 0.5 * errors(other, true)[2]


def test_hot_channels_help_where_few_channels_are_large():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(T, K, generator=generator), torch.randn(N, K, generator=generator)
    x[:, 5] *= 30
    dy = torch.randn(T, N, generator=generator)
    true = exact(x, w, dy)
    ours, other = (errors(run(PRESETS[name], x, w, dy), true) for name in ("chon", "nvfp4"))
    assert ours[0] < 0.5 * other[0]
    assert ours[1:] == other[1:]  # fprop only


def test_hot_channels_fit_the_outer_blocks():
    """A share that is 16 columns, of which outer128 takes 64: twice that is one outer block."""
    narrow, wide = PRESETS["chon"].fprop.input, QuantSpec(block="1x16", second_level="outer128")
    assert hot_count(0.0625, 256, (narrow, narrow)) == 16
    assert hot_count(0.0625, 256, (narrow, wide)) == hot_count(0.0625, 256, (wide, wide)) == 64
    assert hot_count(0.3, 256, (wide, wide)) == hot_count(0.5, 256, (wide, narrow)) == 128
    for roles in (("input",), ("weight",), ("input", "weight")):
        table = {role: {"block": "1x16", "second_level": "outer128"} for role in roles}
        policy = policy_from_dict("p", {"base": "chon", "fprop": table}, PRESETS, "here")
        plain = replace(policy, split="none", split_fraction=0.0)
        generator = torch.Generator().manual_seed(0)
        x, w = torch.randn(T, 256, generator=generator), torch.randn(N, 256, generator=generator)
        x[:, 5] *= 30
        dy = torch.randn(T, N, generator=generator)
        true = exact(x, w, dy)
        ours, other = (errors(run(one, x, w, dy), true) for one in (policy, plain))
        assert ours[0] < 0.9 * other[0]  # column 5 of x, largest in its outer blocks, is exact


def test_mean_of_gradients_is_unbiased():
    """Stochastic rounding of mean and rest averages out over steps."""
    x, w, dy = biased(0, 32, K), biased(1, N, K, mean=0), biased(2, 32, N)
    policy = policy_from_dict("p", {"base": "averis", "dgrad": {"weight": None}}, PRESETS, "here")
    draws = []
    for step in range(48):
        inputs = x.clone().requires_grad_()
        with use_context(StepContext(1, step)):
            linear(inputs, w, policy=policy, name="fc", layer=0).backward(dy)
        draws.append(inputs.grad.double())
    true = dy.bfloat16().double() @ w.bfloat16().double()
    single = (draws[0] - true).norm() / true.norm()
    assert (torch.stack(draws).mean(0) - true).norm() / true.norm() < 0.35 * single
