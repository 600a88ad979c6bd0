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

16x16 and 128x128 weights are quantised once, in forward; dgrad uses the exact transpose.

Tokens are padded with zero rows to a multiple of 16 where blocks of 16 need it. In fprop and dgrad
that changes nothing: rows are independent, and zeros do not raise an amax. In wgrad the last block
holds fewer real tokens than 16; its zeros contribute nothing to the sum, before or after rotation.

This is the only place that asks for random bits; see context.py for their address.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from nvfp4 import backends
from nvfp4.errors import UserError
from nvfp4.numerics.philox import random_bits
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.precision import audit, collect
from nvfp4.precision.context import StepContext, next_call, token_addresses
from nvfp4.precision.operands import Policy

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GEMM_NUMBERS = {"fprop": 0, "dgrad": 1, "wgrad": 2}
OPERAND_NUMBERS = {"input": 0, "weight": 1, "grad_output": 2}


@dataclass(frozen=True, slots=True)
class _Call:
    """One forward of one linear: everything its backward needs that is not a tensor.

    leading: (sequence or batch sizes) of the tokens before flattening, as layout says;
    tokens: M without padding; address: context and call number, None if no bits are needed;
    offsets: index in the unsharded tensor of the first feature, by role of the operand.
    """

    policy: Policy
    name: str
    layer: int
    layout: str
    leading: tuple[int, ...]
    tokens: int
    address: tuple[StepContext, int] | None
    out_offset: int
    in_offset: int


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
    _check(x, weight, policy, name)
    compute = DTYPES[policy.compute_dtype]
    x_MK = x.reshape(-1, x.shape[-1]).to(compute)
    tokens, multiple = x_MK.shape[0], policy.token_multiple
    # An empty operand has no amax; a block of zeros has, and adds nothing.
    padding = -tokens % multiple if tokens or not policy.specs else multiple
    call = _Call(
        policy, name, layer, layout, tuple(x.shape[:-1]), tokens,
        _address(policy, name, layer, x.requires_grad, weight.requires_grad),
        feature_offset, in_feature_offset,
    )  # fmt: skip
    if padding:
        x_MK = pad(x_MK, (0, 0, 0, padding))
    y_MN = _Linear.apply(x_MK, weight, bias, call)
    if padding:
        y_MN = y_MN[:tokens]
    return y_MN.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, policy: Policy, name: str) -> None:
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
    multiple = policy.token_multiple
    for what, size in zip(("out_features", "in_features"), weight.shape, strict=True):
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
        if address is None and run and training and policy.stochastic(gemm):
            raise UserError(
                f"linear {name!r}: {gemm} rounds stochastically under policy {policy.name} but no "
                f"StepContext is set; run forward inside nvfp4.precision.context.use_context("
                f"StepContext(seed=..., step=...))"
            )
    return address


class _Linear(torch.autograd.Function):
    """fprop in forward, dgrad and wgrad in backward, on x (M, K) in the compute dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        with _exact(x):
            w = weight.to(x.dtype)
            x_operand = _operand(call, "fprop", "input", x)
            w_operand = _operand(call, "fprop", "weight", w)
            if bias is None:
                y = _gemm(call, "fprop", x_operand, w_operand, x.dtype, (x, w))
            else:
                y = _gemm(call, "fprop", x_operand, w_operand, torch.float32, (x, w))
                y = y.add_(bias.to(x.dtype)).to(x.dtype)
        _save(ctx, x, weight, w_operand, call)
        ctx.has_bias, ctx.call = bias is not None, call
        # main_grad lives on this very object; saved tensors may come back as others.
        ctx.weight = weight
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        x, weight, w_operand = _restore(ctx)
        dx = dw = db = None
        with _exact(dy):
            if ctx.needs_input_grad[0]:
                dy_operand = _operand(call, "dgrad", "grad_output", dy)
                w_operand = _weight_for_dgrad(call, weight, w_operand, dy.dtype)
                w = ctx.weight.detach().to(dy.dtype).t() if collect.active() else dy
                dx = _gemm(call, "dgrad", dy_operand, w_operand, dy.dtype, (dy, w))
            if ctx.needs_input_grad[1]:
                dy_operand = _operand(call, "wgrad", "grad_output", dy, transposed=True)
                x_operand = _operand(call, "wgrad", "input", x, transposed=True)
                dw = _gemm(call, "wgrad", dy_operand, x_operand, torch.float32, (dy.t(), x.t()))
                dw = _accumulate(ctx.weight, dw)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                db = dy.sum(0, dtype=torch.float32)
        return dx, dw, db, None


def _exact(like: Tensor) -> Any:
    """No autocast inside: it would turn the exact FP32 products of a GEMM into BF16 ones."""
    return torch.autocast(like.device.type, enabled=False)


def _operand(
    call: _Call, gemm: str, role: str, tensor: Tensor, transposed: bool = False
) -> QuantizedTensor | Tensor:
    """One operand of one GEMM: quantised as the policy says, or the plain tensor.

    tensor: (rows, features), rows being tokens, or output features for the weight. The random bits
    have that orientation too; both are transposed for an operand that the table shows transposed.
    """
    spec = call.policy.operands(gemm)[role]
    bits = None
    if spec is not None and spec.rounding == "stochastic":
        bits = _random_bits(call, gemm, role, tensor)
        audit.record_bits(call.name, gemm, role, bits)
    if spec is None:
        return tensor.t() if transposed else tensor
    if transposed:  # one copy now is cheaper than strided reads in every step of quantize
        tensor, bits = tensor.t().contiguous(), None if bits is None else bits.t().contiguous()
    return backends.active().quantize(tensor, spec, random_bits=bits)


def _weight_for_dgrad(
    call: _Call, weight: Tensor, fprop_operand: QuantizedTensor | None, dtype: torch.dtype
) -> QuantizedTensor | Tensor:
    """weight^T (K, N): fprop's quantised weight transposed where there is one, else afresh."""
    if fprop_operand is not None:
        return backends.active().transpose(fprop_operand)
    return _operand(call, "dgrad", "weight", weight.to(dtype), transposed=True)


def _gemm(
    call: _Call, gemm: str, a: QuantizedTensor | Tensor, b: QuantizedTensor | Tensor,
    out_dtype: torch.dtype, originals: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """a b^T in out_dtype, reported to the audit with the operands as they are."""
    backend = backends.active()
    roles = call.policy.operands(gemm)
    y = backend.gemm(a, b, out_dtype=out_dtype)
    operands = dict(zip(roles, (a, b), strict=True))
    shape = (a.shape[0], b.shape[0], a.shape[1])
    audit.record(call.name, gemm, operands, shape, y.dtype, backend.name)
    if collect.active():
        collect.observe(call.name, gemm, operands=(a, b), originals=originals, y=y)
    return y


def _shares_weight(policy: Policy) -> bool:
    """Whether dgrad takes the transpose of fprop's weight: the same spec, in square blocks."""
    spec = policy.fprop.weight
    return spec is not None and spec.tiled and spec == policy.dgrad.weight


def _save(
    ctx: Any, x: Tensor, weight: Tensor, w_operand: QuantizedTensor | Tensor, call: _Call
) -> None:
    """Keep for backward: x if there is a wgrad; for dgrad the quantised weight, else the weight."""
    dgrad, wgrad = ctx.needs_input_grad[:2]
    codes: tuple[Tensor | None, ...] = ()
    # A quantiser that hands back a plain tensor is the audit's business, not a crash here.
    if dgrad and _shares_weight(call.policy) and isinstance(w_operand, QuantizedTensor):
        codes = (w_operand.codes, w_operand.block_scale, w_operand.amax)
        ctx.shared_spec = w_operand.spec
    ctx.save_for_backward(x if wgrad else None, weight if dgrad and not codes else None, *codes)


def _restore(ctx: Any) -> tuple[Tensor, Tensor, QuantizedTensor | None]:
    """x, the weight, and fprop's quantised weight, as far as they were kept."""
    x, weight, *codes = ctx.saved_tensors
    return x, weight, QuantizedTensor(*codes, spec=ctx.shared_spec) if codes else None


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


def _random_bits(call: _Call, gemm: str, role: str, tensor: Tensor) -> Tensor:
    """Eight random bits for every element of an operand (rows, features), by its address."""
    assert call.address is not None  # _address has made sure
    context, number = call.address
    rows, features = tensor.shape
    if role == "weight":
        position = torch.arange(call.out_offset, call.out_offset + rows, device=tensor.device)
        sample = torch.zeros_like(position)
    else:
        sample, position = token_addresses(context, call.leading, call.layout, rows, tensor.device)
    return random_bits(
        seed=context.seed, step=context.step, layer=call.layer, call=number,
        gemm=GEMM_NUMBERS[gemm], operand=OPERAND_NUMBERS[role],
        sample=sample, position=position, num_features=features,
        feature_offset=call.out_offset if role == "grad_output" else call.in_offset,
    )  # fmt: skip
