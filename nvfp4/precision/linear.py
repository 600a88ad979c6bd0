"""The linear layer: y = x w^T + b with each operand of each GEMM as the policy says.

                 first operand                    second operand            summed over
    fprop  y     input           (M, K)           weight       (N, K)       K
    dgrad  dx    grad_output     (M, N)           weight^T     (K, N)       N
    wgrad  dw    grad_output^T   (N, M)           input^T      (K, M)       M, the tokens

M tokens, K input features, N output features. Operands are quantised in the orientation shown, so
blocks always run along the summed dimension. What is rounded where:

    x and grad_output are BF16 values (float32 input is rounded to BF16 first); so is the weight,
    rounded from its own dtype each time; every GEMM accumulates in FP32; y, with the bias added,
    and dx are rounded to BF16 once; dw stays FP32 until it is in weight.main_grad, or in the
    weight's dtype. With compute_dtype "fp32" nothing is rounded to BF16.

Weights in square blocks (16x16, 32x32, 128x128, the tensor) are quantised once, in forward; dgrad
uses the exact transpose. With source "forward" an operand of backward is made from the one that
forward multiplied, dequantised to the compute dtype; its codes are kept, not the tensor.

Tokens are padded with zero rows to whole blocks and rotations where a format needs them. In fprop
and dgrad that changes nothing: rows are independent, and zeros do not raise an amax. In wgrad the
last block holds fewer real tokens; its zeros contribute nothing to the sum, before or after
rotation.

NaN and Inf in an operand are located by nonfinite.py; what a format makes of them (FP4 has neither)
is written in numerics.quantize.

What a policy's split adds is in split.py, random addresses in call.py, and how one operand is made
in prepare.py. Nothing else asks for random bits.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from nvfp4 import backends
from nvfp4.errors import UserError
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.precision import audit, collect
from nvfp4.precision.call import Call
from nvfp4.precision.context import StepContext, next_call
from nvfp4.precision.prepare import Operand, multiply, prepare
from nvfp4.precision.state import MethodState, current_state
from nvfp4.precision.tables import GEMMS, Policy

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = {"out_features": 0, "in_features": 1}  # dimensions of the weight


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    policy: Policy,
    name: str,
    layer: int,
    bias: Tensor | None = None,
    layout: Literal["sbh", "bsh"] = "bsh",
    feature_offset: int = 0,
    in_feature_offset: int = 0,
) -> Tensor:
    """y = x w^T + b, (..., N) in x's dtype, under a policy.

    x: (..., K) bfloat16 or float32; weight: (N, K); bias: (N,). The leading dimensions of x are
    sequence, batch for "sbh" and batch, sequence for "bsh" (2-D x: one token per sample).
    name: module name, for errors and the audit; layer: number of the linear in the model, for the
    random address. feature_offset and in_feature_offset: where this tensor-parallel shard begins in
    the whole output and input features.

    If the weight has a `main_grad`, dw is added to it in FP32 inside backward,
    weight.grad_added_to_main_grad becomes True, and autograd gets zeros (Megatron's protocol).

    Raises UserError: shapes or dtypes that do not fit; random bits needed but no StepContext set.
    """
    multiples = policy.multiples
    _check(x, weight, policy, name, multiples)
    audit.record_input(name, x.dtype)
    compute = DTYPES[policy.compute_dtype]
    x_MK = x.reshape(-1, x.shape[-1]).to(compute)
    tokens, multiple = x_MK.shape[0], multiples["tokens"]
    # An empty operand has no amax; a block of zeros has, and adds nothing.
    padding = -tokens % multiple if tokens or not policy.specs else multiple
    call = Call(
        policy, name, layer, layout, tuple(x.shape[:-1]), tokens,
        _address(policy, name, layer, x.requires_grad, weight.requires_grad),
        feature_offset, in_feature_offset, _state(policy, name), torch.is_grad_enabled(),
    )  # fmt: skip
    if padding:
        x_MK = pad(x_MK, (0, 0, 0, padding))
    y_MN = _Linear.apply(x_MK, weight, bias, call)
    if padding:
        y_MN = y_MN[:tokens]
    return y_MN.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, policy: Policy, name: str, multiples: dict[str, int]) -> None:
    """Dtypes and shapes that the three GEMMs can take."""
    for what, tensor in (("input", x), ("weight", weight)):
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise UserError(
                f"linear {name!r}: {what} is {tensor.dtype}; it must be bfloat16 or float32"
            )
    if x.shape[-1] != weight.shape[1]:
        raise UserError(
            f"linear {name!r}: input has {x.shape[-1]} features, the weight takes {weight.shape[1]}"
        )
    for what, dimension in SIZES.items():
        size, multiple = weight.shape[dimension], multiples[what]
        if size % multiple:
            raise UserError(
                f"linear {name!r}: {what} is {size}, not a multiple of {multiple} as "
                f"{policy.name} needs; keep this linear in bf16"
            )


def _address(
    policy: Policy, name: str, layer: int, dgrad: bool, wgrad: bool
) -> tuple[StepContext, int] | None:
    """Context and call number of this forward; UserError if bits will be needed and it has none."""
    address = next_call(layer, name)
    runs = {"fprop": True, "dgrad": dgrad, "wgrad": wgrad}
    for gemm, run in runs.items():
        training = gemm == "fprop" or torch.is_grad_enabled()
        if address is None and run and training and (what := policy.random(gemm)):
            raise UserError(
                f"linear {name!r}: {gemm} {what} under policy {policy.name} but no StepContext is "
                f"set; run forward inside nvfp4.precision.context.use_context("
                f"StepContext(seed=..., step=...))"
            )
    return address


def _state(policy: Policy, name: str) -> MethodState | None:
    """The state in use if the policy has delayed scales; UserError if there is none."""
    if not policy.delayed():
        return None
    state = current_state()
    if state is None:
        raise UserError(
            f"linear {name!r}: policy {policy.name} takes scales from earlier steps but no "
            f"MethodState is set; run forward and backward inside nvfp4.precision.state.use_state("
            f"MethodState(plan)), and state.update() after each step"
        )
    return state


class _Linear(torch.autograd.Function):
    """fprop in forward, dgrad and wgrad in backward, on x (M, K) in the compute dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        with _exact(x):
            w = weight.to(x.dtype)
            x_operand = prepare(call, "fprop", "input", x)
            w_operand = prepare(call, "fprop", "weight", w)
            y = multiply(call, "fprop", x_operand, w_operand, x.dtype, wide=bias is not None)
            if bias is not None:
                y = y.add_(bias.to(x.dtype)).to(x.dtype)
        _save(ctx, x, weight, x_operand, w_operand, call)
        ctx.has_bias, ctx.call = bias is not None, call
        # main_grad lives on this very object; saved tensors may come back as others.
        ctx.weight = weight
        ctx.original = x if collect.active() else None
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        x, w = _restore(ctx)
        dx = dw = db = None
        runs = tuple(
            gemm for gemm, run in zip(GEMMS, (True, *ctx.needs_input_grad[:2]), strict=True) if run
        )
        with _exact(dy):
            if ctx.needs_input_grad[0]:
                dy_operand = prepare(call, "dgrad", "grad_output", dy, runs=runs)
                w_operand = _weight_for_dgrad(ctx, w, dy.dtype, runs)
                dx = multiply(call, "dgrad", dy_operand, w_operand, dy.dtype)
            if ctx.needs_input_grad[1]:
                dy_operand = prepare(call, "wgrad", "grad_output", dy, turned=True, runs=runs)
                x_operand = prepare(
                    call, "wgrad", "input", _plain(x, dy.dtype), turned=True,
                    original=ctx.original, runs=runs,
                )  # fmt: skip
                dw = multiply(call, "wgrad", dy_operand, x_operand, torch.float32)
                dw = _accumulate(ctx.weight, dw)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                db = dy.sum(0, dtype=torch.float32)
        return dx, dw, db, None


def _exact(like: Tensor) -> Any:
    """No autocast inside: it would turn the exact FP32 products of a GEMM into BF16 ones."""
    return torch.autocast(like.device.type, enabled=False)


def _plain(kept: QuantizedTensor | Tensor, dtype: torch.dtype) -> Tensor:
    """A kept operand in the compute dtype: what forward multiplied, or the tensor itself."""
    if isinstance(kept, Tensor):
        return kept.to(dtype)
    return backends.active().dequantize(kept, dtype)


def _weight_for_dgrad(
    ctx: Any, kept: QuantizedTensor | Tensor, dtype: torch.dtype, runs: tuple[str, ...]
) -> Operand:
    """weight^T (K, N): fprop's quantised weight transposed where they share it, else afresh."""
    call: Call = ctx.call
    original = ctx.weight.detach().to(dtype) if collect.active() else None
    if isinstance(kept, QuantizedTensor) and call.policy.shares_weight:
        value = backends.active().transpose(kept)
        return Operand(value, ctx.weight.detach().t() if original is None else original.t())
    weight = _plain(kept, dtype)
    return prepare(call, "dgrad", "weight", weight, turned=True, original=original, runs=runs)


def _save(
    ctx: Any, x: Tensor, weight: Tensor, x_operand: Operand, w_operand: Operand, call: Call
) -> None:
    """Keep for backward x and weight, each as far as a GEMM reads it: as forward multiplied it
    (shared square blocks, source forward) or as it is.
    """
    dgrad, wgrad = ctx.needs_input_grad[:2]
    policy = call.policy
    w_forward = policy.shares_weight or policy.source("dgrad") == "forward"
    kept = {
        "x": (wgrad, policy.source("wgrad") == "forward", x_operand.value, x),
        "w": (dgrad, w_forward, w_operand.value, weight),
    }
    tensors: list[Tensor | None] = []
    ctx.specs = {}
    for what, (needed, forward, value, tensor) in kept.items():
        # A quantiser that hands back a plain tensor is the audit's business, not a crash here.
        if needed and forward and isinstance(value, QuantizedTensor):
            tensors += [value.codes, value.block_scale, value.amax, value.signs]
            ctx.specs[what] = value.spec
        else:
            tensors.append(tensor if needed else None)
    ctx.save_for_backward(*tensors)


def _restore(ctx: Any) -> tuple[Any, Any]:
    """What _save has kept of x and the weight."""
    tensors, found = list(ctx.saved_tensors), []
    for what in ("x", "w"):
        if what in ctx.specs:
            codes, block_scale, amax, signs = tensors[:4]
            del tensors[:4]
            found.append(QuantizedTensor(codes, block_scale, amax, ctx.specs[what], signs))
        else:
            found.append(tensors.pop(0))
    return found[0], found[1]


def _accumulate(weight: Tensor, dw: Tensor) -> Tensor:
    """Gradient for autograd: dw in the weight's dtype, or zeros once dw is in main_grad.

    Zeros, not an uninitialised tensor: a shared weight's other gradients are added to it.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return dw.to(weight.dtype)
    main_grad.add_(dw)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight)
