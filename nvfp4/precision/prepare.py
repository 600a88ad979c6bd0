"""One operand of one GEMM, from a plain tensor to what is multiplied; then the product.

An operand is prepared in the orientation in which the table of linear.py shows it, so that blocks
run along the summed dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4 import backends
from nvfp4.numerics import scaling
from nvfp4.numerics.formats import FORMATS
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.numerics.spec import QuantSpec
from nvfp4.precision import audit, collect, nonfinite, split
from nvfp4.precision.call import Call

NO_RUNS: tuple[str, ...] = ("fprop",)


@dataclass(slots=True)
class Operand:
    """value: what is multiplied; original: the same before quantisation.

    mean: what split took off: Q(mu), in wgrad mu itself, in float32.
    """

    value: QuantizedTensor | Tensor
    original: Tensor
    mean: QuantizedTensor | Tensor | None = None

    @property
    def rows(self) -> int:
        """Size of the dimension that is not summed over."""
        return self.value.shape[0]


def prepare(
    call: Call, gemm: str, role: str, tensor: Tensor, *, turned: bool = False,
    original: Tensor | None = None, runs: tuple[str, ...] = NO_RUNS,
) -> Operand:  # fmt: skip
    """One operand of one GEMM: quantised as the policy says, or the plain tensor.

    tensor: (rows, features), rows being tokens, or output features for the weight; turned: whether
    the GEMM takes the transpose. original: what to compare with, where the tensor is not that
    (source forward). runs: GEMMs of this pass, for nonfinite.
    """
    policy = call.policy
    spec = policy.operands(gemm)[role]
    nonfinite.count(policy, call.name, gemm, role, tensor, runs)
    original = tensor if original is None else original
    mean = None
    if policy.split == "mean" and role != "weight" and policy.quantised(gemm):
        mean, rest = split.off_mean(tensor, call.tokens, exact=gemm == "wgrad")
        tensor = tensor if spec is None else rest
        if gemm != "wgrad":
            mean = None if spec is None else split.quantised_mean(mean, spec, call, gemm, role)
    if spec is None:
        value = tensor.t() if turned else tensor
    else:
        value = _quantise(call, gemm, role, tensor, spec, turned)
    return Operand(value, original.t() if turned else original, mean)


def _quantise(
    call: Call, gemm: str, role: str, tensor: Tensor, spec: QuantSpec, turned: bool
) -> QuantizedTensor:
    """Quantise a tensor, or its transpose, with the bits, signs and scale its spec asks for."""
    given: dict[str, Any] = {}
    if spec.random:
        given["random_bits"] = call.bits(gemm, role, tensor, spec, turned)
    if (signs := call.signs(gemm, spec, tensor.device)) is not None:
        given["signs"] = signs
    if spec.scale_rule == "delayed":
        given["scale"] = _delayed_scale(call, role, tensor, spec)
    return backends.active().quantize(tensor.t() if turned else tensor, spec, **given)


def _delayed_scale(call: Call, role: str, tensor: Tensor, spec: QuantSpec) -> Tensor:
    """Encode scale of a delayed operand by the state's amax, equation (1) there; float32 ()."""
    assert call.state is not None  # linear() has made sure
    amax = scaling.block_amax(tensor.float()[None, :, None, :]).max()
    amax = call.state.observe(call.name, role, amax, call.training)
    largest = FORMATS[spec.format].max_value * 2.0**-call.policy.margin
    return scaling.fp8_encode_scale(amax, largest, spec.block_scale == "pow2", scaling.FLT_MAX)


def multiply(
    call: Call, gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, *, wide: bool = False
) -> Tensor:
    """a b^T with what the policy's split adds, in out_dtype (wide: float32, rounded elsewhere).

    Reported to the audit and to collect with the operands as they are; what split adds belongs to
    the same GEMM and is not reported by itself.
    """
    backend, policy = backends.active(), call.policy
    accumulate = policy.accumulation(gemm)
    hot = policy.split == "hot_channels" and gemm == "fprop"
    more = hot or a.mean is not None  # to be added before the result is rounded
    dtype = torch.float32 if wide or more else out_dtype
    y = backend.gemm(a.value, b.value, out_dtype=dtype, accumulate=accumulate)
    if hot:
        y += split.hot_channels(a.original, b.original, a.value, b.value, call)
    if isinstance(a.mean, Tensor) and isinstance(b.mean, Tensor):  # wgrad
        y += split.mean_outer(a.mean, b.mean, call.tokens)
    elif a.mean is not None:
        y += split.mean_row(a.mean, b.value, accumulate)
    if more and not wide:
        y = y.to(out_dtype)
    operands = dict(zip(policy.operands(gemm), (a.value, b.value), strict=True))
    shape = (a.rows, b.rows, a.value.shape[1])
    kernel = backend.kernel(a.value, b.value, accumulate)
    audit.record(call.name, gemm, operands, shape, y.dtype, backend.name, accumulate, kernel)
    if collect.active():
        collect.observe(
            call.name, gemm, operands=(a.value, b.value), originals=(a.original, b.original), y=y,
            split=a.mean is not None or b.mean is not None,
        )  # fmt: skip
    return y
