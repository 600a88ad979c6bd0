"""The policies that go by a name. Data only: what each operand of each GEMM becomes.

Beside each: where it comes from, and what was taken where the public description leaves a choice.
"""

from dataclasses import replace

from nvfp4.numerics.spec import (
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    FP8_1x128,
    FP8_128x128,
    QuantSpec,
)
from nvfp4.precision.tables import Dgrad, Fprop, Policy, Wgrad

FP8_ROW = replace(FP8_1x128, block_scale="fp32")
FP8_TILE = replace(FP8_128x128, block_scale="fp32")
FP8_GRADIENT = replace(FP8_TENSOR, format="e5m2")
FP8_DELAYED = replace(FP8_TENSOR, scale_rule="delayed")
FP8_DELAYED_GRADIENT = replace(FP8_DELAYED, format="e5m2")
NVFP4_STOCHASTIC = replace(NVFP4, rounding="stochastic")
NVFP4_ROTATED = replace(NVFP4, hadamard=16, signs="fixed")
NVFP4_ROTATED_STOCHASTIC = replace(NVFP4_ROTATED, rounding="stochastic")


def _uniform(name: str, forward: QuantSpec, gradient: QuantSpec) -> Policy:
    """One spec for inputs and weights wherever they are, one for gradients."""
    return Policy(
        name,
        fprop=Fprop(input=forward, weight=forward),
        dgrad=Dgrad(grad_output=gradient, weight=forward),
        wgrad=Wgrad(grad_output=gradient, input=forward),
    )


def _paper(name: str, activation: QuantSpec, weight: QuantSpec, size: int) -> Policy:
    """The paper's distribution of roles over a 1-D and a square block, rotated by `size` in wgrad.

    Weights in square tiles, so that forward and backward see the same numbers; stochastic rounding
    of gradients only; rotation of both wgrad operands along the tokens, where it cancels. The sign
    vector is one and the same for all layers and steps (appendix E.4.2). size 0: no rotation.
    """
    noisy = replace(activation, rounding="stochastic")
    return Policy(
        name,
        fprop=Fprop(input=activation, weight=weight),
        dgrad=Dgrad(grad_output=noisy, weight=weight),
        wgrad=Wgrad(
            grad_output=replace(noisy, hadamard=size), input=replace(activation, hadamard=size)
        ),
    )


# The paper's method (arXiv 2509.25149, section 4 and appendix C). A block scale that E4M3 rounds
# down clips the largest value of its block, so stochastic rounding is biased towards zero, for
# normal numbers by 0.4 %, as in Transformer Engine; scale_rule headroom takes that away.
_NVFP4 = _paper("nvfp4", NVFP4, NVFP4_2D, 16)

_ROUNDED_UP = replace(MXFP4, scale_rule="rceil")

# Four Over Six (arXiv 2512.02010): each block to 6 or to 4, tensor scale for a ceiling of 256. The
# error is squared, as in the paper (Transformer Engine's default is absolute). Weights and forward
# activations; not the rotated wgrad input, not gradients: neither is defined in the sources.
_FOUR_OVER_SIX = replace(NVFP4, scale_rule="four_over_six_mse", range=256)
_FOUR_OVER_SIX_2D = replace(_FOUR_OVER_SIX, block="16x16")

# Quartet II (arXiv 2601.22813): unbiased backward operands. "step": signs redrawn every backward.
_EDEN = replace(NVFP4, scale_rule="eden", hadamard=128, signs="step")

# TetraJet-v2 (arXiv 2510.27527): an outer FP32 scale per 128 values instead of the tensor's.
_OUTER = replace(NVFP4, second_level="outer128")
_OUTER_NOISY = replace(_OUTER, rounding="stochastic", hadamard=16, signs="step")

# Tseng et al. (arXiv 2502.20586): elements times 3/4 so that none clips, stochastic, rotated by 64.
_TSENG = replace(MXFP4, scale_rule="floor_3_4", rounding="stochastic", hadamard=64, signs="step")

_UE5M3 = replace(NVFP4, block_scale="ue5m3")
_MEAN = _paper("averis", NVFP4, NVFP4_2D, 0)

PRESETS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # No quantisation; nothing is rounded to BF16 either. For study and for exact comparisons.
        Policy("fp32", compute_dtype="fp32"),
        # Operands and results are BF16 values, weight gradients FP32.
        Policy("bf16"),
        # Per-tensor FP8, hybrid: E4M3 forward, E5M2 gradients (Transformer Engine
        # Float8CurrentScaling, whose scales are FP32 unless a variable makes them powers of two).
        _uniform("fp8_current", FP8_TENSOR, FP8_GRADIENT),
        # The same with scales from the last 1024 steps (Transformer Engine DelayedScaling).
        _uniform("fp8_delayed", FP8_DELAYED, FP8_DELAYED_GRADIENT),
        # The paper's reference run (arXiv 2509.25149, section 3): E4M3 everywhere; activations and
        # gradients in blocks of 1x128, weights 128x128; FP32 scales taken from the tensor itself.
        # Transformer Engine's default for this family rounds the scales to powers of two instead.
        Policy(
            "fp8_block",
            fprop=Fprop(input=FP8_ROW, weight=FP8_TILE),
            dgrad=Dgrad(grad_output=FP8_ROW, weight=FP8_TILE),
            wgrad=Wgrad(grad_output=FP8_ROW, input=FP8_ROW),
        ),
        # E4M3 everywhere in blocks of 32, weights quantised per direction, scales rounded up
        # (Transformer Engine MXFP8BlockScaling).
        _uniform("mxfp8", MXFP8, MXFP8),
        # The format as OCP MX v1.0 defines it and nothing else: scale rule floor, nearest-even.
        _uniform("mxfp4_ocp", MXFP4, MXFP4),
        # The MXFP4 run of arXiv 2509.25149 figure 6: the method of NVFP4 with a rotation of 32 and
        # scales rounded up (appendix B). Weights 32x32: the text does not say, the method does.
        _paper("mxfp4_paper", _ROUNDED_UP, replace(_ROUNDED_UP, block="32x32"), 32),
        _NVFP4,
        # Every operand 1x16 and nearest-even: the variant that diverges (arXiv 2509.25149, 4).
        _uniform("nvfp4_naive", NVFP4, NVFP4),
        # Weights 1x16 in both directions (Transformer Engine's disable_2d_quantization); dgrad
        # quantises the original weight.
        _paper("nvfp4_1d", NVFP4, NVFP4, 16),
        # One amax per token in fprop, so that tokens do not mix (Transformer Engine
        # row_scaled_activation). There it is forward only; the backward here is the paper's.
        replace(
            _NVFP4,
            name="nvfp4_row_scaled",
            fprop=Fprop(input=replace(NVFP4, second_level="row"), weight=NVFP4_2D),
        ),
        replace(
            _NVFP4,
            name="four_over_six",
            fprop=Fprop(input=_FOUR_OVER_SIX, weight=_FOUR_OVER_SIX_2D),
            dgrad=replace(_NVFP4.dgrad, weight=_FOUR_OVER_SIX_2D),
        ),
        # Nemotron 3 (arXiv 2512.20856 section 2.4; 2604.12374 table 3): attention projections in
        # BF16; Mamba's output projection in MXFP8, since NVFP4 flushes too much of it to zero. The
        # last 15 % of the layers in BF16 are the recipe's num_layers_at_end_in_bf16.
        replace(
            _NVFP4,
            name="nemotron3",
            by_kind=(("attention.*", "bf16"), ("mamba.out_proj", "mxfp8")),
        ),
        # Forward nearest-even 1x16; four-over-six is optional there and left out. Backward: all
        # four operands rotated and MS-EDEN, weight and input made from what forward multiplied.
        Policy(
            "quartet2",
            fprop=Fprop(input=NVFP4, weight=NVFP4),
            dgrad=Dgrad(grad_output=_EDEN, weight=_EDEN, source="forward"),
            wgrad=Wgrad(grad_output=_EDEN, input=_EDEN, source="forward"),
        ),
        # Averis (arXiv 2603.10444): token means apart, in the place of the rotation; 2-D weights
        # and stochastic gradients as in the paper's method. split.py: how the parts are quantised.
        replace(_MEAN, split="mean"),
        # UE5M3 block scales, no rotation, no BF16 blocks (arXiv 2609.02846). The amax is that of
        # every pass; there it is refreshed every 50 steps.
        _paper("ue5m3", _UE5M3, replace(_UE5M3, block="16x16"), 0),
        # Backward only, forward in BF16. Signs: fresh per step, as the unbiasedness argument needs.
        Policy(
            "mxfp4_tseng",
            dgrad=Dgrad(grad_output=_TSENG, weight=_TSENG),
            wgrad=Wgrad(grad_output=_TSENG, input=_TSENG),
        ),
        # With OsciReset, without OutControl. Signs: per step, the text says random.
        Policy(
            "tetrajet2",
            weight_hook="osci_reset",
            fprop=Fprop(input=_OUTER, weight=_OUTER),
            dgrad=Dgrad(grad_output=_OUTER_NOISY, weight=_OUTER_NOISY, source="forward"),
            wgrad=Wgrad(grad_output=_OUTER_NOISY, input=_OUTER_NOISY, source="forward"),
        ),
        # CHON's hot-channel patch (arXiv 2602.02047) on the paper's method: fprop only, where its
        # score is defined; 1/16 of the channels makes 1/8 more columns, near the 9 to 13 % there.
        replace(_NVFP4, name="chon", split="hot_channels", split_fraction=0.0625),
    )
}  # fmt: skip
