"""Decompositions of operands, for policies whose `split` says so. T tokens, 1 = a column of T ones.

mean (Averis, arXiv 2603.10444): X = 1 mu^T + R with mu the mean over the tokens, for the input and
for grad_output, each where it is quantised. Q is the quantiser of the operand:

    fprop   y  = Q(R_x) Q(W)^T + 1 (Q(mu_x)^T Q(W)^T)
    dgrad   dx = Q(R_dy) Q(W) + 1 (Q(mu_dy)^T Q(W))
    wgrad   dw = Q(R_dy)^T Q(R_x) + T mu_dy mu_x^T

In wgrad the products of a mean with a rest, mu_dy (1^T R_x) and (R_dy^T 1) mu_x^T, are left out:
the columns of X - 1 mu^T sum to zero. That takes mu in FP32: rounded to BF16 it is off by up to
2^-9 of itself, alike for all tokens, and T such errors times the other mean are left out (2e-3 of
dw for columns whose mean is their spread, 4e-5 with the FP32 mean; R is rounded token by token, and
the sums of that are left out rightly: X has no such part). The published text gives y and says that
dy is treated alike. Ours are the choices that R, and mu but for wgrad, are rounded to the compute
dtype, that what a mean adds is summed in FP32, and that wgrad, where it is a product of two vectors
and no GEMM, takes the means unquantised: their errors would be those of all tokens alike, and not
average out (with columns whose mean is four times their spread dw came out six times worse than
without any split). If only one side of wgrad is quantised, only that side is split:
R_dy^T X + T mu_dy mu_x^T is dy^T x as well, but for the rounding of R_dy times mu_x (3e-4).

hot_channels (CHON, arXiv 2602.02047): with residuals dX = X - Q(X), dW = W - Q(W) the columns I
with the largest scores s_j = mean_i |dX_ij| + mean_i |dW_ij| correct fprop to first order:

    y = Q(X) Q(W)^T + Q([dX_I, Q(X)_I]) Q([Q(W)_I, dW_I])^T

which is one widened product; here the appended columns have a tensor scale of their own. |I| is a
share of the columns, rounded up to whole blocks, and so that the 2 |I| appended columns are whole
blocks of both operands (second_level outer128: |I| is a multiple of 64).
"""

from math import ceil, gcd, lcm

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4 import backends
from nvfp4.numerics.philox import BYTES
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.numerics.spec import QuantSpec
from nvfp4.precision.call import Call

Quantised = QuantizedTensor | Tensor


def off_mean(x: Tensor, tokens: int, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """mu (1, F) and R = X - 1 mu^T (M, F) of x (M, F); its rows beyond `tokens` stay zero.

    The mean is taken in FP32 and, unless `exact`, rounded to x's dtype before it is taken off; R is
    rounded to x's dtype.
    """
    mu = x[:tokens].sum(0, keepdim=True, dtype=torch.float32) / max(tokens, 1)
    mu = mu if exact else mu.to(x.dtype)
    rest = (x.float() - mu.float()).to(x.dtype)
    rest[tokens:] = 0
    return mu, rest


def quantised_mean(mu: Tensor, spec: QuantSpec, call: Call, gemm: str, role: str) -> Quantised:
    """Q(mu) of mu (1, F): a matrix of whole blocks whose first row is the mean, the others zero."""
    rows = spec.multiples[0]
    given: dict[str, Tensor] = {}
    if spec.random:
        bits = call.mean_bits(gemm, role, mu.shape[1], mu.device)
        bits = bits if spec.random == "elements" else bits[:, ::BYTES]
        given["random_bits"] = pad(bits, (0, 0, 0, rows - 1))
    if (signs := call.signs(gemm, spec, mu.device)) is not None:
        given["signs"] = signs
    return backends.active().quantize(pad(mu, (0, 0, 0, rows - 1)), spec, **given)


def plain(value: Quantised) -> Tensor:
    """Values of an operand in float32."""
    return (
        backends.active().dequantize(value) if isinstance(value, QuantizedTensor) else value.float()
    )


def mean_row(mean: Quantised, weight: Quantised, accumulate: str) -> Tensor:
    """Q(mu)^T Q(W)^T, what every token gets of a mean: float32 (1, N)."""
    y = backends.active().gemm(mean, weight, out_dtype=torch.float32, accumulate=accumulate)
    return y[:1]


def mean_outer(mu_dy: Tensor, mu_x: Tensor, tokens: int) -> Tensor:
    """T mu_dy mu_x^T of exact means (1, N) and (1, K): float32 (N, K)."""
    return tokens * torch.outer(mu_dy[0].float(), mu_x[0].float())


def hot_count(share: float, columns: int, specs: tuple[QuantSpec, QuantSpec]) -> int:
    """|I| for this share of K columns, at most K; 2 |I| is as spec.multiples wants."""
    block = lcm(*(max(spec.block_shape[1], 1) for spec in specs))
    appended = lcm(*(spec.multiples[1] for spec in specs))  # a power of two
    block = lcm(block, appended // gcd(appended, 2))
    return min(block * ceil(share * columns / block), columns)


def hot_channels(x: Tensor, w: Tensor, qx: Quantised, qw: Quantised, call: Call) -> Tensor:
    """The correction of fprop by its worst channels: float32 (M, N).

    x: (M, K), w: (N, K) before, qx and qw after quantisation.
    """
    policy = call.policy
    specs = policy.fprop.input, policy.fprop.weight
    assert specs[0] is not None and specs[1] is not None  # Policy has made sure
    x_hat, w_hat = plain(qx), plain(qw)
    dx, dw = x.float() - x_hat, w.float() - w_hat
    score = dx[: call.tokens].abs().sum(0) / max(call.tokens, 1) + dw.abs().mean(0)
    count = hot_count(policy.split_fraction, x.shape[1], (specs[0], specs[1]))
    chosen = score.sort(descending=True, stable=True).indices[:count].sort().values
    left = torch.cat([dx[:, chosen], x_hat[:, chosen]], dim=1).to(x.dtype)
    right = torch.cat([w_hat[:, chosen], dw[:, chosen]], dim=1).to(x.dtype)
    backend = backends.active()
    return backend.gemm(
        backend.quantize(left, specs[0]), backend.quantize(right, specs[1]),
        out_dtype=torch.float32, accumulate=policy.accumulation("fprop"),
    )  # fmt: skip
