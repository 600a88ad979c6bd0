"""The policies that go by a name. Data only: what each operand of each GEMM becomes."""

from dataclasses import replace

from nvfp4.numerics.spec import NVFP4, NVFP4_2D, FP8_1x128, FP8_128x128
from nvfp4.precision.operands import Dgrad, Fprop, Policy, Wgrad

FP8_ROW = replace(FP8_1x128, block_scale="fp32")
FP8_TILE = replace(FP8_128x128, block_scale="fp32")
NVFP4_STOCHASTIC = replace(NVFP4, rounding="stochastic")
NVFP4_ROTATED = replace(NVFP4, hadamard=16, signs="fixed")
NVFP4_ROTATED_STOCHASTIC = replace(NVFP4_ROTATED, rounding="stochastic")

PRESETS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # No quantisation; nothing is rounded to BF16 either. For study and for exact comparisons.
        Policy("fp32", compute_dtype="fp32"),
        # Operands and results are BF16 values, weight gradients FP32.
        Policy("bf16"),
        # The paper's reference run (arXiv 2509.25149, section 3): E4M3 everywhere; activations and
        # gradients in blocks of 1x128, weights 128x128; FP32 scales taken from the tensor itself.
        # Transformer Engine's default for this family rounds the scales to powers of two instead.
        Policy(
            "fp8_block",
            fprop=Fprop(input=FP8_ROW, weight=FP8_TILE),
            dgrad=Dgrad(grad_output=FP8_ROW, weight=FP8_TILE),
            wgrad=Wgrad(grad_output=FP8_ROW, input=FP8_ROW),
        ),
        # The paper's method (arXiv 2509.25149, section 4 and appendix C): weights in 16x16 tiles,
        # so that forward and backward see the same numbers; stochastic rounding of gradients only;
        # rotation of both wgrad operands along the tokens, where it cancels.
        Policy(
            "nvfp4",
            fprop=Fprop(input=NVFP4, weight=NVFP4_2D),
            dgrad=Dgrad(grad_output=NVFP4_STOCHASTIC, weight=NVFP4_2D),
            wgrad=Wgrad(grad_output=NVFP4_ROTATED_STOCHASTIC, input=NVFP4_ROTATED),
        ),
    )
}
