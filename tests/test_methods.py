"""Every preset trains; sources, signs, random addresses and accumulation reach the GEMMs."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from nvfp4 import backends
from nvfp4.numerics import hadamard, philox
from nvfp4.numerics.quantize import dequantize, quantize
from nvfp4.precision import audit, call, collect
from nvfp4.precision.apply import apply_precision
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.linear import linear
from nvfp4.precision.operands import policy_from_dict
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.state import MethodState, use_state

K, N, T = 128, 128, 128


def make(base, **changes):
    """A preset with changes."""
    return policy_from_dict("mine", {"base": base, **changes}, PRESETS, "here")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(policy, *, context=None, layer=0, uses=1, samples=1):
    """y, dx, dw of a square linear used one or more times in a pass."""
    x, w = numbers(samples, T // samples, K).requires_grad_(), nn.Parameter(numbers(N, K, seed=1))
    with use_context(context or StepContext(1, 1)):
        y = x
        for _ in range(uses):
            y = linear(y, w, policy=policy, name="fc", layer=layer)
    y.backward(numbers(samples, T // samples, N, seed=2))
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains(name):
    """A few steps on one batch, executed as planned: the loss goes down."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 256), nn.ReLU(), nn.Linear(256, K))
    plan = apply_precision(model, name, echo=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, target = torch.randn(2, 32, K), torch.randn(2, 32, K)
    state, losses = MethodState(plan), []
    for step in range(8):
        with use_state(state), use_context(StepContext(1, step)), audit.recording() as log:
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
        assert len(log.records) == 5  # the first linear has no dgrad
        optimizer.step()
        optimizer.zero_grad()
        state.update()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def watch(monkeypatch):
    """Signs and random bits that quantize gets, and how gemm accumulates."""
    reference = backends.choose("reference")
    seen = {"signs": [], "bits": [], "accumulate": []}

    def quantise(tensor, spec, **given):
        for key in ("signs", "random_bits"):
            if key in given:
                seen[key.removeprefix("random_")].append(given[key])
        return reference.quantize(tensor, spec, **given)

    def gemm(a, b, *, accumulate="fp32", **given):
        seen["accumulate"].append(accumulate)
        return reference.gemm(a, b, accumulate=accumulate, **given)

    changed = replace(reference, quantize=quantise, gemm=gemm)
    monkeypatch.setattr(backends, "_active", changed)
    return seen


def rotated(kind, size=64):
    """Both backward GEMMs rotated, with signs drawn per layer or per step."""
    turn = {"hadamard": size, "signs": kind, "rounding": "nearest"}
    return make(
        "nvfp4_1d", dgrad={"grad_output": turn, "weight": turn},
        wgrad={"grad_output": turn, "input": turn},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["layer", "step"])
def test_signs_are_addressed(monkeypatch, kind):
    """One vector for both operands of a GEMM; layers, GEMMs and uses differ, micro-batches not."""
    seen = watch(monkeypatch)["signs"]

    def vectors(**where):
        seen.clear()
        run(rotated(kind), **where)
        assert all(torch.equal(a, b) for a, b in zip(seen[::2], seen[1::2], strict=True))
        assert all(set(one.tolist()) == {-1.0, 1.0} and one.shape == (64,) for one in seen)
        return [tuple(one.tolist()) for one in seen[::2]]

    first = vectors()
    assert len(set(first)) == 2
    assert vectors() == first == vectors(context=StepContext(1, 1, sample_offset=4))
    others = [vectors(layer=1), vectors(context=StepContext(2, 1))]
    later = vectors(context=StepContext(1, 2))
    if kind == "layer":
        assert later == first and set(vectors(uses=2)) == set(first)
    else:
        assert len(set(vectors(uses=2))) == 4
        others.append(later)
    for one in others:
        assert not set(one) & set(first)
    assert set(first[0]) == {-1.0, 1.0}


@pytest.mark.parametrize("kind", ["fixed", "layer", "step", "none"])
def test_rotations_cancel(monkeypatch, kind):
    """With a quantiser that only rotates, all three products are the unquantised ones."""

    def only_rotate(tensor, spec, signs=None, **_):
        if not spec.hadamard:
            return tensor
        vector = hadamard.sign_vector(spec.hadamard, spec.signs) if signs is None else signs
        return hadamard.rotate(tensor, vector, spec.hadamard)

    plain = run(PRESETS["bf16"])
    reference = backends.choose("reference")
    monkeypatch.setattr(backends, "_active", replace(reference, quantize=only_rotate))
    for one, other in zip(run(rotated(kind)), plain, strict=True):
        assert (one - other).float().norm() < 1e-2 * other.float().norm()


@pytest.mark.parametrize("name", ["nvfp4", "quartet2", "averis", "mxfp4_tseng", "tetrajet2"])
def test_no_two_uses_share_random_bits(monkeypatch, name):
    """Addresses of all bytes of a step: two layers, a layer used twice, two micro-batches."""
    found = []

    def addressed(**address):
        tokens = torch.stack([address["sample"], address["position"]], 1)
        features = torch.arange(address["num_features"]) + address["feature_offset"]
        place = [address[part] for part in ("step", "layer", "call", "gemm", "operand")]
        found.append((tuple(place), tokens, features))
        return real(**address)

    monkeypatch.setattr(backends, "_active", backends.choose("reference"))
    real = call.random_bits
    for module in (call, philox):  # for means and signs, and for elements
        monkeypatch.setattr(module, "random_bits", addressed)
    for offset in (0, 2):
        run(PRESETS[name], context=StepContext(1, 1, offset), uses=2, samples=2)
        run(PRESETS[name], context=StepContext(1, 1, offset), layer=1, samples=2)
    bytes_of: Counter[tuple] = Counter()
    signs: Counter[tuple] = Counter()
    for place, tokens, features in found:
        if place[3] == call.NO_GEMM:
            signs[place] += 1
            continue
        for token in tokens.tolist():
            bytes_of[(*place, *token, int(features[0]), len(features))] += 1
    # A weight is the same in both micro-batches of a step, and so is what it is rounded to.
    weight = call.OPERAND_NUMBERS["weight"]
    assert bytes_of
    assert all(count == (2 if place[4] == weight else 1) for place, count in bytes_of.items())
    # Signs: both operands of both micro-batches, and nothing else.
    assert all(count == 4 for count in signs.values())
    assert bool(signs) == any(s.hadamard and s.signs == "step" for s in PRESETS[name].specs)


def test_scales_and_elements_get_as_many_bits_as_they_need(monkeypatch):
    seen = watch(monkeypatch)["bits"]
    run(PRESETS["quartet2"])
    assert [tuple(bits.shape) for bits in seen] == [(T, N // 16), (K, N // 16), (N, T // 16),
                                                    (K, T // 16)]  # fmt: skip
    flat = torch.cat([bits.tensor().reshape(-1) for bits in seen]).double()
    assert all(bits.tensor().shape == bits.shape for bits in seen)
    assert abs(flat.mean() - 127.5) < 5 and flat.unique().numel() == 256


def test_source_forward_is_what_forward_multiplied():
    """BF16 backward on dequantised operands: Transformer Engine's override `dequantized`."""
    original = make("nvfp4_1d", dgrad=None, wgrad=None)
    forward = make("nvfp4_1d", dgrad={"grad_output": None, "weight": None, "source": "forward"},
                   wgrad={"grad_output": None, "input": None, "source": "forward"})  # fmt: skip
    x, w, dy = numbers(T, K), numbers(N, K, seed=1), numbers(T, N, seed=2)
    x_hat, w_hat = (
        dequantize(quantize(t, PRESETS["nvfp4"].fprop.input)).bfloat16().double() for t in (x, w)
    )
    for policy, inputs, weight in ((original, x, w), (forward, x_hat, w_hat)):
        _, dx, dw = run(policy)
        for got, true in (
            (dx[0], dy.double() @ weight.double()),
            (dw, dy.double().t() @ inputs.double()),
        ):
            assert (got.double() - true).norm() < 4e-3 * true.norm()


def test_forward_operands_are_kept_as_codes():
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    x, w = numbers(T, K).requires_grad_(), nn.Parameter(numbers(N, K, seed=1))
    with (
        use_context(StepContext(0, 0)),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        linear(x, w, policy=PRESETS["quartet2"], name="fc", layer=0)
    assert not {tensor.data_ptr() for tensor in kept} & {x.data_ptr(), w.data_ptr()}
    assert sum(t.numel() * t.dtype.itemsize for t in kept) == (T + N) * K * 17 // 16 + 8


def test_accumulation_is_handed_to_quantised_products(monkeypatch):
    seen = watch(monkeypatch)["accumulate"]
    for changes, expected in [
        ({}, ["fp32"] * 3),
        ({"accumulate": "blackwell"}, ["blackwell"] * 3),
        (
            {"accumulate": "blackwell", "dgrad": {"weight": None}},
            ["blackwell", "fp32", "blackwell"],
        ),
        ({"accumulate": "fp64", "fprop": None}, ["fp64"] * 3),
    ]:
        seen.clear()
        run(make("nvfp4", **changes))
        assert seen == expected


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "quartet2", "averis", "chon"])
def test_collect_compares_with_the_unquantised_operands(name):
    with collect.observing() as errors:
        run(PRESETS[name])
    rows = {row["gemm"]: row for row in errors.summary()["linears"]}
    assert list(rows) == ["fprop", "dgrad", "wgrad"]
    for row in rows.values():
        low, high = (0, 2**-8) if name == "bf16" else (0.01, 0.3)
        assert low <= row["relative_error"] < high
