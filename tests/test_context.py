"""Random bits are a function of where an element is, whatever order things are computed in."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvfp4 import backends
from nvfp4.errors import UserError
from nvfp4.precision.context import (
    StepContext,
    bind,
    current,
    next_call,
    token_addresses,
    use_context,
)
from nvfp4.precision.linear import linear
from nvfp4.precision.operands import policy_from_dict
from nvfp4.precision.presets import PRESETS

S, K = 32, 64
NVFP4 = PRESETS["nvfp4"]
# Also fprop rounds stochastically, so that recomputed activations need the first run's bits.
NOISY = policy_from_dict(
    "noisy", {"base": "nvfp4", "fprop": {"input": {"rounding": "stochastic"}}}, PRESETS, "here"
)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def bits(monkeypatch):
    """Random bits of every stochastic quantisation, as (rows, features) of dy, in order."""
    reference, seen = backends.choose("reference"), []

    def watched(tensor, spec, *, random_bits=None):
        if random_bits is not None:
            drawn = random_bits.tensor()
            seen.append(drawn.t() if spec.hadamard else drawn)
        return reference.quantize(tensor, spec, random_bits=random_bits)

    monkeypatch.setattr(backends, "_active", replace(reference, quantize=watched))
    return seen


def run(x, context, *, layout="bsh", layer=0, repeat=1, offset=0):
    """One pass with `repeat` uses of one 64 -> 64 linear; returns dx."""
    x, w = x.clone().requires_grad_(), nn.Parameter(numbers(K, K, seed=1))
    with use_context(context):
        y = x
        for _ in range(repeat):
            y = linear(
                y, w, policy=NVFP4, name="fc", layer=layer, layout=layout, feature_offset=offset
            )
    y.sum().backward()
    return x.grad


def same(a, b):
    """Share of equal bytes; independent bytes agree in 1 of 256."""
    return (a == b).double().mean().item()


def test_bits_depend_on_every_part_of_the_address(bits):
    x = numbers(2, S, K)
    variants = [
        dict(context=StepContext(1, 1)), dict(context=StepContext(2, 1)),
        dict(context=StepContext(1, 2)), dict(context=StepContext(1, 1, sample_offset=2)),
        dict(context=StepContext(1, 1, position_offset=S)),
        dict(context=StepContext(1, 1), layer=1), dict(context=StepContext(1, 1), offset=K),
        dict(context=StepContext(1, 1), repeat=2),
    ]  # fmt: skip
    for variant in variants:
        run(x, **variant)
    # The last variant runs the linear twice; its backward begins with call 1.
    assert len(bits) == 2 * (len(variants) + 1)
    first, repeated = bits[:2], bits[-2:]
    assert torch.equal(first[0], repeated[0]) and torch.equal(first[1], repeated[1])
    streams = [part for one in bits[:-2] for part in one.view(2, S, K)]  # per sample, too
    for index, one in enumerate(streams):
        for other in streams[index + 1 :]:
            assert same(one, other) < 0.03  # 2048 bytes: 0.004 expected, 0.03 is 18 sigma away


def test_bits_repeat(bits):
    for _ in range(2):
        run(numbers(2, S, K), StepContext(1, 1))
    assert torch.equal(bits[0], bits[2]) and torch.equal(bits[1], bits[3])


def test_bits_do_not_depend_on_micro_batches(bits):
    x = numbers(4, S, K)
    run(x, StepContext(5, 9, sample_offset=4))
    for half in (0, 2):
        run(x[half : half + 2], StepContext(5, 9, sample_offset=4 + half))
    for gemm in (0, 1):
        assert torch.equal(bits[gemm], torch.cat([bits[2 + gemm], bits[4 + gemm]]))


def test_bits_do_not_depend_on_the_layout(bits):
    x = numbers(4, S, K)
    run(x, StepContext(5, 9))
    run(x.transpose(0, 1), StepContext(5, 9), layout="sbh")
    for gemm in (0, 1):
        turned = bits[2 + gemm].reshape(S, 4, K).transpose(0, 1).reshape(4 * S, K)
        assert torch.equal(bits[gemm], turned)


def test_bits_do_not_depend_on_tensor_or_context_parallelism(bits):
    x, w = numbers(2, S, K), nn.Parameter(numbers(K, K, seed=1))

    def backward(x, w, context, **offsets):
        with use_context(context):
            y = linear(x.clone().requires_grad_(), w, policy=NVFP4, name="fc", layer=0, **offsets)
        y.sum().backward()

    backward(x, w, StepContext(3, 3))
    for rank in (0, 1):  # output features cut in two
        half = nn.Parameter(w[32 * rank : 32 * rank + 32].detach())
        backward(x, half, StepContext(3, 3), feature_offset=32 * rank)
    for gemm in (0, 1):
        assert torch.equal(bits[gemm], torch.cat([bits[2 + gemm], bits[4 + gemm]], dim=1))
    # Sequence of 32 over two ranks in zig-zag order: rank 0 has pieces 0 and 3, rank 1 has 1 and 2.
    pieces = x.view(2, 4, 8, K)
    for chosen in ((0, 3), (1, 2)):
        part = pieces[:, chosen].reshape(2, 16, K)
        backward(part, w, StepContext(3, 3, position_offset=tuple(8 * piece for piece in chosen)))
    for gemm in (0, 1):
        whole = bits[gemm].reshape(2, 4, 8, K)
        for index, chosen in ((6, (0, 3)), (8, (1, 2))):
            assert torch.equal(bits[index + gemm].reshape(2, 2, 8, K), whole[:, chosen])


def test_padded_rows_have_addresses_of_their_own():
    context = StepContext(1, 1, sample_offset=3, position_offset=10)
    sample, position = token_addresses(context, (2, 5), "bsh", 16, torch.device("cpu"))
    real = list(zip(sample.tolist(), position.tolist(), strict=True))[:10]
    assert real == [(3 + b, 10 + s) for b in range(2) for s in range(5)]
    assert sample[10:].tolist() == [2**32 - 4] * 6
    assert position[10:].tolist() == list(range(1280, 1286))


def test_passes_of_a_step_share_no_address():
    """One token and 127 padded rows per pass: the most crowded there can be."""
    offsets: list[int | tuple[int, ...]] = [0, 1, 2, 3, (4, 8), (5, 7), 127, 2**25 - 1]
    found = Counter()
    for first in (0, 1, 2, 7, 2**28 - 1, 2**28, 2**31 - 1):
        for position in offsets:
            here = StepContext(1, 1, sample_offset=first, position_offset=position)
            length = len(position) if isinstance(position, tuple) else 1
            rows = token_addresses(here, (1, length), "bsh", 128, torch.device("cpu"))
            assert all(0 <= part.min() and part.max() < 2**32 for part in rows)
            found.update(zip(*(part.tolist() for part in rows), strict=True))
    assert max(found.values()) == 1 and len(found) == 7 * 8 * 128
    here = StepContext(1, 1, position_offset=2**25)
    token_addresses(here, (1, 16), "bsh", 16, torch.device("cpu"))
    with pytest.raises(UserError, match="position_offset 33554432 with padded rows"):
        token_addresses(here, (1, 1), "bsh", 16, torch.device("cpu"))


class Twice(nn.Module):
    """Two linears, the first of which runs twice: its call numbers matter."""

    def __init__(self, policy, uses=2):
        super().__init__()
        self.policy, self.uses = policy, uses
        self.a, self.b = (nn.Parameter(numbers(K, K, seed=s) * 0.1) for s in (1, 2))
        for weight in (self.a, self.b):  # dw of each use is added in order of execution
            weight.main_grad = torch.zeros(K, K)

    def forward(self, x):
        for _ in range(self.uses):
            x = x + linear(x, self.a, policy=self.policy, name="a", layer=0)
        return x + linear(x.relu(), self.b, policy=self.policy, name="b", layer=1)


def gradients(policy, how, *, uses=2, inside=False, wrap=bind):
    """Gradients of two Twice blocks in a row, the parameters shared; how: None or use_reentrant."""
    block, x = Twice(policy, uses), numbers(2, S, K).requires_grad_()

    def step(x):
        return block(x) if how is None else checkpoint(wrap(block), x, use_reentrant=how)

    with use_context(StepContext(11, 4, sample_offset=6)):
        y = step(step(x) if uses == 2 else x)
        if inside:
            y.float().square().sum().backward()
    if not inside:
        # 1F1B: backward runs when another micro-batch is the current pass, or none.
        with use_context(StepContext(11, 4, sample_offset=8)):
            step(numbers(2, S, K, seed=9).requires_grad_())
            y.float().square().sum().backward()
    return y.detach(), x.grad, block.a.main_grad, block.b.main_grad


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", [NVFP4, NOISY], ids=lambda policy: policy.name)
def test_recompute_sees_the_same_bits(policy, reentrant):
    for one, other in zip(gradients(policy, None), gradients(policy, reentrant), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_inside_recompute(reentrant):
    """A bound function that checkpoints a bound function of its own."""

    def results(nested):
        block, x = Twice(NOISY), numbers(2, S, K).requires_grad_()

        def outer(x):
            x = checkpoint(bind(block), x, use_reentrant=reentrant) if nested else block(x)
            return block(x)

        with use_context(StepContext(11, 4)):
            y = checkpoint(bind(outer), x, use_reentrant=reentrant) if nested else outer(x)
        y.float().square().sum().backward()
        return y.detach(), x.grad, block.a.main_grad, block.b.main_grad

    for one, other in zip(results(False), results(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_unbound_recompute(reentrant):
    """Accepted where only one answer is possible, refused where bits could be others."""
    plain = gradients(NOISY, None, uses=1, inside=True)
    unbound = gradients(NOISY, reentrant, uses=1, inside=True, wrap=lambda block: block)
    for one, other in zip(plain, unbound, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match=r"linear 'a' is recomputed in backward and ran 4 times"):
        gradients(NOISY, reentrant, inside=True, wrap=lambda block: block)
    # Backward of one pass while another is current: both would get the other's address.
    block, x = Twice(NVFP4, uses=1), numbers(2, S, K).requires_grad_()
    losses = []
    for offset in (0, 2):
        with use_context(StepContext(1, 1, sample_offset=offset)):
            losses.append(checkpoint(block, x, use_reentrant=reentrant).float().sum())
            if offset == 2:
                with pytest.raises(UserError, match=r"bind\(function\) instead of function"):
                    (losses[0] + losses[1]).backward()


def test_missing_context_names_linear_and_gemm():
    w, policy = numbers(K, K), NVFP4
    weight = nn.Parameter(w)
    for x, parameter, gemm in (
        (numbers(S, K).requires_grad_(), weight, "dgrad"), (numbers(S, K), weight, "wgrad"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            linear(x, parameter, policy=policy, name="layers.0.fc", layer=0)
        assert f"linear 'layers.0.fc': {gemm} rounds stochastically under policy nvfp4" in str(
            caught.value
        )
        assert "use_context(StepContext(seed=..., step=...))" in str(caught.value)
    with pytest.raises(UserError, match="fprop rounds stochastically under policy noisy"):
        linear(numbers(S, K), w, policy=NOISY, name="fc", layer=0)
    with torch.no_grad():  # evaluation rounds nothing stochastically
        linear(numbers(S, K), weight, policy=policy, name="fc", layer=0)


def test_passes_nest_and_end():
    outer, inner = StepContext(1, 1), StepContext(1, 2)
    assert current() is None and next_call(0, "fc") is None
    with use_context(outer):
        assert next_call(0, "fc") == (outer, 0)
        with use_context(inner):
            assert current() == inner and next_call(0, "fc") == (inner, 0)
        assert next_call(0, "fc") == (outer, 1) and next_call(1, "other") == (outer, 0)
    assert current() is None


def test_limits_of_an_address():
    with pytest.raises(UserError, match="StepContext.step is -1; it must be 0 to 4294967295"):
        StepContext(0, -1)
    with use_context(StepContext(0, 0)):
        for _ in range(256):
            next_call(0, "fc")
        with pytest.raises(UserError, match="linear 'fc' has run 256 times in one pass"):
            next_call(0, "fc")
    with pytest.raises(UserError, match="10 positions do not divide into 3 equal pieces"):
        context = StepContext(0, 0, position_offset=(0, 10, 20))
        token_addresses(context, (2, 10), "bsh", 32, torch.device("cpu"))
