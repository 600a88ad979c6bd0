"""The registry: the choice, its reasons, and refusals."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nvfp4 import backends
from nvfp4.errors import MachineError, UserError
from nvfp4.numerics import gemm, quantize
from nvfp4.numerics.spec import NVFP4
from nvfp4.precision.linear import linear
from nvfp4.precision.operands import policy_from_dict
from nvfp4.precision.presets import PRESETS


def test_reference_is_the_definition():
    chosen = backends.choose("reference")
    assert chosen.name == "reference" and chosen.reasons == (
        "reference: chosen, requested; PyTorch operations",
    )
    assert chosen.transpose is quantize.transpose and chosen.gemm is gemm.gemm
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    got, want = chosen.quantize(x.t(), NVFP4), quantize.quantize(x.t().contiguous(), NVFP4)
    assert torch.equal(got.codes, want.codes) and torch.equal(got.block_scale, want.block_scale)


def test_auto_says_why(monkeypatch):
    """The first supported one, with a line for each that was passed over."""
    auto = backends.choose()
    assert auto.name in backends.NAMES and "first one supported here" in auto.reasons[-1]

    def module(name):
        reason = "needs compute capability 10.0" if name == "fast" else None
        return SimpleNamespace(
            unsupported_reason=lambda: reason,
            description=lambda: "some code",
            quantize=None,
            dequantize=None,
            transpose=None,
            gemm=None,
            kernel=None,
            finite=None,
        )

    monkeypatch.setattr(backends, "NAMES", ("fast", "reference"))
    monkeypatch.setattr(backends, "_module", module)
    chosen = backends.choose("auto")
    assert chosen.name == "reference"
    assert chosen.reasons == (
        "fast: needs compute capability 10.0",
        "reference: chosen, first one supported here; some code",
    )
    with pytest.raises(MachineError) as caught:  # asked for by name: no fallback
        backends.choose("fast")
    assert str(caught.value) == (
        "run.backend=fast cannot run on this machine; fast: needs compute capability 10.0"
    )
    assert caught.value.exit_code == 3


def test_unknown_backend():
    with pytest.raises(UserError, match=r"run.backend: unknown backend 'triton'; allowed: auto, "):
        backends.choose("triton")


def test_linears_use_the_active_backend(monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return gemm.gemm(*args, **kwargs)

    monkeypatch.setattr(backends, "_active", None)
    assert backends.active().name == backends.choose().name
    backends.activate(replace(backends.choose("reference"), gemm=counted))
    policy = policy_from_dict("p", {"base": "nvfp4", "dgrad": None, "wgrad": None}, PRESETS, "here")
    linear(torch.ones(16, 32), torch.ones(16, 32), policy=policy, name="fc", layer=0)
    assert len(calls) == 1
