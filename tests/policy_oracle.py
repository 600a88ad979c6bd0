"""The three GEMMs of a policy in FP64, straight from its operand table: a second linear.

Operands are quantised here by the floor below, with random bits addressed here, and multiplied as
FP64 numbers. Splits, sources and delayed scales are written out once more, in their formulas.
"""

import torch
from torch.nn.functional import pad

from nvfp4.numerics import hadamard
from nvfp4.numerics.philox import random_bits
from nvfp4.numerics.quantize import dequantize, quantize

SEED, STEP, LAYER = 7, 3, 5
GEMM = {"fprop": 0, "dgrad": 1, "wgrad": 2}
ROLE = {"input": 0, "weight": 1, "grad_output": 2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def address(gemm, operand, sample, position, features, step=STEP):
    return random_bits(
        seed=SEED, step=step, layer=LAYER, call=0, gemm=gemm, operand=operand, sample=sample,
        position=position, num_features=features, feature_offset=0,
    )  # fmt: skip


def element_bits(shape, gemm, role, sequence):
    """Bytes of all elements of a (rows, features) tensor; one sample per `sequence` tokens."""
    index = torch.arange(shape[0])
    sample, position = (index // sequence, index % sequence)
    if role == "weight":
        sample, position = torch.zeros_like(index), index
    return address(GEMM[gemm], ROLE[role], sample, position, shape[1])


def mean_bits(features, gemm, role):
    one = torch.tensor([ROLE[role]])
    return address(GEMM[gemm], 3, one, torch.tensor([0]), features)


def extras(spec, bits, gemm, tensor):
    """Arguments of quantize beside tensor and spec; bits: of every element, in its orientation."""
    given = {}
    if spec.random == "elements":
        given["random_bits"] = bits.contiguous()
    if spec.random == "scales":
        given["random_bits"] = bits[:, ::16].contiguous()
    if spec.hadamard and spec.signs in ("layer", "step"):
        layer = spec.signs == "layer"
        drawn = address(
            3, GEMM[gemm], torch.tensor([0]), torch.tensor([int(layer)]), spec.hadamard,
            step=0 if layer else STEP,
        )[0]  # fmt: skip
        given["signs"] = hadamard.sign_vector(spec.hadamard, spec.signs, drawn)
    if spec.scale_rule == "delayed":
        given["scale"] = LARGEST[spec.format] / tensor.float().abs().max()
    return given


def three_gemms(policy, x, w, dy, sequence):
    """y, dx, dw as FP64. x: (M, K), w: (N, K), dy: (M, N), M in samples of `sequence` tokens.

    Rotated operands stay rotated: it cancels, and nothing here undoes it.
    """

    def decoded(gemm, role, tensor, turned=False):
        spec = policy.operands(gemm)[role]
        if spec is None:
            return (tensor.t() if turned else tensor).double()
        bits = element_bits(tensor.shape, gemm, role, sequence)
        if turned:
            tensor, bits = tensor.t().contiguous(), bits.t()
        return dequantize(quantize(tensor, spec, **extras(spec, bits, gemm, tensor))).double()

    def source(gemm, role, tensor):
        if policy.source(gemm) == "original" or policy.operands("fprop")[role] is None:
            return tensor
        return decoded("fprop", role, tensor).to(tensor.dtype)

    def split(gemm, role, tensor, turned=False):
        """The operand, and its mean (1, features) as it is multiplied, None without one."""
        spec = policy.operands(gemm)[role]
        if policy.split != "mean" or spec is None:
            return decoded(gemm, role, tensor, turned), None
        mean = tensor.float().mean(0, keepdim=True)
        mean = mean if gemm == "wgrad" else mean.to(tensor.dtype)
        rest = (tensor.float() - mean.float()).to(tensor.dtype)
        if gemm == "wgrad":
            return decoded(gemm, role, rest, turned), mean.double()
        features = mean.shape[1]
        given = extras(spec, pad(mean_bits(features, gemm, role), (0, 0, 0, 15)), gemm, mean)
        mean = dequantize(quantize(pad(mean, (0, 0, 0, 15)), spec, **given))[:1].double()
        return decoded(gemm, role, rest, turned), mean

    a, mean = split("fprop", "input", x)
    b = decoded("fprop", "weight", w)
    y = a @ b.t()
    if mean is not None:
        y = y + mean @ b.t()
    if policy.split == "hot_channels":
        y = y + hot(policy, x, w, a, b)

    a, mean = split("dgrad", "grad_output", dy)
    b = decoded("dgrad", "weight", source("dgrad", "weight", w), turned=True)
    dx = a @ b.t()
    if mean is not None:
        dx = dx + mean @ b.t()

    a, mean_dy = split("wgrad", "grad_output", dy, turned=True)
    b, mean_x = split("wgrad", "input", source("wgrad", "input", x), turned=True)
    dw = a @ b.t()
    if mean_dy is not None and mean_x is not None:
        dw = dw + x.shape[0] * mean_dy.t() @ mean_x
    return y, dx, dw


def hot(policy, x, w, x_hat, w_hat):
    """First-order correction of the channels with the largest residuals, themselves quantised."""
    dx, dw = x.double() - x_hat, w.double() - w_hat
    score = dx.float().abs().mean(0) + dw.float().abs().mean(0)
    count = 16 * -(-int(policy.split_fraction * x.shape[1]) // 16)
    chosen = score.topk(count).indices.sort().values
    left = torch.cat([dx[:, chosen], x_hat[:, chosen]], 1).to(x.dtype)
    right = torch.cat([w_hat[:, chosen], dw[:, chosen]], 1).to(x.dtype)
    specs = policy.fprop.input, policy.fprop.weight
    left, right = (
        dequantize(quantize(t, spec)).double() for t, spec in zip((left, right), specs, strict=True)
    )
    return left @ right.t()
