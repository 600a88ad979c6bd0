"""What each backend can do on this machine, found out by doing it: one small linear per backend.

Everything is compared with the definition bit by bit, so "ok" and "emulated" are results.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4 import backends
from nvfp4.machine import version_of
from nvfp4.numerics import gemm as _gemm
from nvfp4.numerics import quantize as _definition
from nvfp4.numerics.philox import RandomBits
from nvfp4.numerics.spec import NVFP4, QuantSpec
from nvfp4.precision import audit
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.linear import linear
from nvfp4.precision.presets import PRESETS

FEATURES = ("quantise", "rotate", "stochastic", "fprop", "dgrad", "wgrad")
BLACKWELL = "a Blackwell GPU (sm_100, sm_103, sm_120 or sm_121)"
_TOKENS, _IN, _OUT = 32, 64, 48


@dataclass(frozen=True, slots=True)
class Feature:
    """cells: a word for each of FEATURES; reason: why the backend does not run, or ""."""

    backend: str
    cells: tuple[str, ...]
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Whether some result is not that of the definition."""
        return "WRONG" in self.cells


def _numbers(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16().to(device)


def _quantised(backend: backends.Backend, spec: QuantSpec, device: torch.device) -> list[Tensor]:
    """Codes and scales of one matrix and of its transpose, on the CPU."""
    x, found = _numbers(_TOKENS, _IN, 0, device), []
    tokens = torch.arange(_TOKENS, device=device)
    for turned in (False, True):
        given: dict[str, Any] = {}
        if spec.random:
            given["random_bits"] = RandomBits(
                seed=1, step=2, layer=3, call=0, gemm=1, operand=2, sample=tokens // 16,
                position=tokens % 16, feature_offset=0, num_features=_IN, turned=turned,
            )  # fmt: skip
        q = backend.quantize(x.t() if turned else x, spec, **given)
        found += [q.codes.cpu(), q.block_scale.cpu()]
    return found


def _trained(backend: backends.Backend, device: torch.device) -> tuple[list[Tensor], list[str]]:
    """y, dx, dw of one nvfp4 linear, on the CPU; and the code that each GEMM took."""
    x = _numbers(_TOKENS, _IN, 1, device).requires_grad_()
    weight = nn.Parameter(_numbers(_OUT, _IN, 2, device))
    with backends.using(backend), audit.recording() as log, use_context(StepContext(1, 1)):
        y = linear(x, weight, policy=PRESETS["nvfp4"], name="doctor", layer=0)
        y.backward(_numbers(_TOKENS, _OUT, 3, device))
    assert x.grad is not None and weight.grad is not None
    kernels = {record.gemm: record.kernel for record in log.records}
    found = [part.detach().cpu() for part in (y, x.grad, weight.grad)]
    return found, [kernels[gemm] for gemm in ("fprop", "dgrad", "wgrad")]


def _word(same: bool, kernel: str = "") -> str:
    if not same:
        return "WRONG"
    if not kernel:
        return "ok"
    return "native" if "native" in kernel else "emulated"


def definition() -> backends.Backend:
    """numerics/ itself."""
    return replace(
        backends.choose("reference"), quantize=_definition.quantize,
        dequantize=_definition.dequantize, transpose=_definition.transpose, gemm=_gemm.gemm,
    )  # fmt: skip


def feature(name: str) -> Feature:
    """Every feature of one backend, tried on the device that training would use."""
    reason = backends.unsupported_reason(name)
    if reason is not None:
        return Feature(name, ("-",) * len(FEATURES), reason)
    chosen, right = backends.choose(name), definition()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cpu = torch.device("cpu")
    specs = (
        NVFP4,
        replace(NVFP4, hadamard=16),
        replace(NVFP4, hadamard=16, rounding="stochastic"),
    )
    words = []
    for spec in specs:
        got, want = _quantised(chosen, spec, device), _quantised(right, spec, cpu)
        words.append(_word(all(map(torch.equal, got, want))))
    (got, kernels), (want, _) = _trained(chosen, device), _trained(right, cpu)
    for mine, defined, kernel in zip(got, want, kernels, strict=True):
        # Products of other devices are summed in another order.
        same = (
            torch.equal(mine, defined)
            if device == cpu
            else torch.allclose(mine, defined, rtol=1e-2)
        )
        words.append(_word(same, kernel))
    return Feature(name, tuple(words))


def transformer_engine() -> Feature:
    """The native path through Transformer Engine: what is missing for it."""
    missing = []
    if version_of("transformer-engine") is None:
        missing.append("the package transformer-engine")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10:
        missing.append(BLACKWELL)
    words = ("-",) * len(FEATURES) if missing else ("native",) * len(FEATURES)
    reason = f"needs {' and '.join(missing)}" if missing else "nvfp4 verify --te compares it"
    return Feature("te", words, reason)


def features(found: Callable[[Feature], None]) -> bool:
    """Reports every backend as it is tried; whether none of them is wrong."""
    right = True
    for name in backends.NAMES:
        one = feature(name)
        right &= not one.wrong
        found(one)
    found(transformer_engine())
    return right
