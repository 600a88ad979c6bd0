"""QuantSpec: how one operand of a GEMM is quantised, as data.

Nothing here imports torch, so that a recipe can be read and checked without it.

    format         element format: e2m1 (FP4), e4m3 or e5m2 (FP8)
    block          rows x columns that share one block scale, the columns along the contraction;
                   tensor = one scale for all
    block_scale    how block scales are stored: e4m3 (NVFP4), ue5m3, e8m0 (MX), fp32 or pow2 (FP8)
    scale_rule     how a block scale follows from the largest magnitude of its block, see SCALE_RULES
    second_level   above block scales of limited range, one FP32 amax per tensor, row of the operand
                   or outer block of 1x128 (outer128); none = no amax
    range          largest block scale that the second level aims at: 448, or 256 to leave room
    rounding       of the elements: nearest (ties to even) or stochastic (8 random bits each)
    hadamard       rotate groups of that many along the contraction first: 4 to 128; 0 = no rotation
    signs          sign vector of the rotation: fixed (Transformer Engine's), layer (one per linear),
                   step (fresh in every pass), none (all +)
"""

from dataclasses import dataclass, fields

from nvfp4.errors import UserError

# block_scale -> rules. b is the largest magnitude in the block; formulas in scaling.py.
SCALE_RULES: dict[str, tuple[str, ...]] = {
    "e4m3": (
        "current",  # Transformer Engine 2.14 and later
        "before_2_14",  # Transformer Engine 2.8 to 2.13
        "headroom",  # b times 17/16, so that rounding the scale down clips nothing
        "eden",  # MS-EDEN: element scale corrected per rotated group, itself rounded stochastically
        "four_over_six_mae",  # b to 6 or to 4, whichever has the smaller sum of errors
        "four_over_six_mse",  # ... of squared errors
        "four_over_six_mae_fast",  # errors as Transformer Engine's fast mode computes them
        "four_over_six_mse_fast",
    ),
    "ue5m3": ("current",),
    "e8m0": (
        "rceil",  # power of two at or above b / largest element: nothing clips
        "floor",  # OCP MX v1.0: exponent of b minus that of the largest element
        "ceil",  # exponent of b, rounded up, minus that of the largest element
        "even",  # floor of b rounded to the mantissa of the element format
        "floor_3_4",  # floor, elements times 3/4, products times 16/9 (arXiv 2502.20586)
    ),
    "fp32": ("current", "delayed"),
    "pow2": ("current", "delayed"),
}

_ALLOWED: dict[str, tuple[object, ...]] = {
    "format": ("e2m1", "e4m3", "e5m2"),
    "block": ("1x16", "16x16", "1x32", "32x32", "1x128", "128x128", "tensor"),
    "block_scale": tuple(SCALE_RULES),
    "scale_rule": tuple(dict.fromkeys(rule for rules in SCALE_RULES.values() for rule in rules)),
    "second_level": ("tensor", "row", "outer128", "none"),
    "range": (448, 256),
    "rounding": ("nearest", "stochastic"),
    "hadamard": (0, 4, 8, 16, 32, 64, 128),
    "signs": ("fixed", "layer", "step", "none"),
}


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values)


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """One operand's quantisation (see the module text for the fields).

    The defaults are NVFP4 with 1x16 blocks as of Transformer Engine 2.14.
    Raises UserError naming the field, its value and the values it may have.
    """

    format: str = "e2m1"
    block: str = "1x16"
    block_scale: str = "e4m3"
    scale_rule: str = "current"
    second_level: str = "tensor"
    range: int = 448
    rounding: str = "nearest"
    hadamard: int = 0
    signs: str = "fixed"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), _ALLOWED[field.name]
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise UserError(f"{field.name}: {value!r} is not one of {_listed(allowed)}")

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, columns) of one block, e.g. (1, 16)."""
        rows, columns = self.block.split("x")
        return int(rows), int(columns)

    @property
    def tiled(self) -> bool:
        """True for square blocks: the transposed tensor has the same codes and scales."""
        rows, columns = self.block_shape
        return rows == columns


NVFP4 = QuantSpec()
NVFP4_2D = QuantSpec(block="16x16")
FP8_1x128 = QuantSpec("e4m3", "1x128", "pow2", second_level="none")
FP8_128x128 = QuantSpec("e4m3", "128x128", "pow2", second_level="none")
