"""QuantSpec: how one operand of a GEMM is quantised, as data.

Nothing here imports torch, so that a recipe can be read and checked without it.

    format         element format: e2m1 (FP4), e4m3 or e5m2 (FP8)
    block          rows x columns that share one block scale, the columns along the contraction;
                   tensor = one scale for all
    block_scale    how block scales are stored: e4m3 (NVFP4), ue5m3, e8m0 (MX), fp32 or pow2 (FP8)
    scale_rule     how a block scale follows from the largest magnitude of its block: SCALE_RULES
    second_level   above block scales of limited range, one FP32 amax per tensor, row of the operand
                   or outer block of 1x128 (outer128); none = no amax
    range          largest block scale that the second level aims at: 448, or 256 to leave room
    rounding       of the elements: nearest (ties to even) or stochastic (8 random bits each)
    hadamard       rotate groups of that many along the contraction first: 4 to 128; 0 = no rotation
    signs          sign vector of the rotation: fixed (Transformer Engine's), layer (one for each
                   linear), step (fresh in every pass), none (all +)
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import lcm

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


# What each kind of block scale goes with: the combinations whose arithmetic is defined here.
_FAMILY: dict[str, dict[str, tuple[object, ...]]] = {
    "e4m3": {
        "format": ("e2m1",),
        "block": ("1x16", "16x16"),
        "second_level": ("tensor", "row", "outer128"),
    },
    "ue5m3": {"format": ("e2m1",), "block": ("1x16", "16x16", "1x32"), "second_level": ("tensor",)},
    "e8m0": {"block": ("1x32", "32x32"), "second_level": ("none",)},
    "fp32": {
        "format": ("e4m3", "e5m2"),
        "block": ("1x128", "128x128", "tensor"),
        "second_level": ("none",),
    },
}
_FAMILY["pow2"] = _FAMILY["fp32"]


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
        family = {**_FAMILY[self.block_scale], "scale_rule": SCALE_RULES[self.block_scale]}
        for name, allowed in family.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(
                    f"{name}: {value!r} does not go with block_scale {self.block_scale}, "
                    f"which takes {_listed(allowed)}"
                )
        for wrong, text in self._contradictions():
            if wrong:
                raise UserError(text)

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        rule, rotated = self.scale_rule, self.hadamard > 0
        four_over_six, eden = rule.startswith("four_over_six"), rule == "eden"
        one_row = self.block != "tensor" and self.block_shape[0] == 1
        yield (
            four_over_six and (rotated or self.rounding == "stochastic"),
            f"scale_rule: {rule} goes neither with hadamard nor with rounding stochastic: the "
            "error it compares is that of nearest rounding of the operand itself",
        )
        yield (
            eden and not (one_row and self.hadamard >= 16 and self.second_level == "tensor"),
            "scale_rule: eden corrects rotated groups of whole blocks; it needs block 1x16, "
            "hadamard 16 or more and second_level tensor",
        )
        yield (
            eden and self.rounding == "stochastic",
            "rounding: eden rounds its scales stochastically, the elements to nearest",
        )
        yield (
            self.second_level != "tensor" and self.block == "16x16",
            f"second_level: {self.second_level} does not go with block 16x16, which crosses rows",
        )
        yield (
            rule == "delayed" and self.block != "tensor",
            f"scale_rule: delayed is a scale of the whole tensor; it goes with block tensor, "
            f"not {self.block}",
        )
        yield (
            self.range != 448 and (self.block_scale != "e4m3" or eden),
            f"range: {self.range} goes with block_scale e4m3 and the scale rules other than eden",
        )
        yield (
            rule == "floor_3_4" and self.format != "e2m1",
            f"scale_rule: floor_3_4 is made for the top of e2m1, not for {self.format}",
        )

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, columns) of one block, e.g. (1, 16); (0, 0) for one scale per tensor."""
        if self.block == "tensor":
            return 0, 0
        rows, columns = self.block.split("x")
        return int(rows), int(columns)

    @property
    def tiled(self) -> bool:
        """True for square blocks without rotation: the transpose has the same codes and scales."""
        rows, columns = self.block_shape
        return rows == columns and not self.hadamard

    @property
    def random(self) -> str | None:
        """What needs random bits: "elements" (M, K), "scales" one byte per block, or nothing."""
        if self.rounding == "stochastic":
            return "elements"
        return "scales" if self.scale_rule == "eden" else None

    @property
    def multiples(self) -> tuple[int, int]:
        """(rows, columns) of which an operand's shape must be multiples.

        NVFP4 wants 16 in both directions (Transformer Engine). FP8 and MX blocks may end in part: a
        short block has the scale of the elements it has (tensor cores want MX in whole blocks).
        """
        padded = self.format != "e2m1" or self.block_scale == "e8m0"
        rows, columns = (1, 1) if padded else (16, self.block_shape[1])
        if self.second_level == "outer128":
            columns = 128
        return rows, lcm(columns, self.hadamard or 1)


NVFP4 = QuantSpec()
NVFP4_2D = QuantSpec(block="16x16")
FP8_1x128 = QuantSpec("e4m3", "1x128", "pow2", second_level="none")
FP8_128x128 = QuantSpec("e4m3", "128x128", "pow2", second_level="none")
FP8_TENSOR = QuantSpec("e4m3", "tensor", "fp32", second_level="none")
MXFP8 = QuantSpec("e4m3", "1x32", "e8m0", "rceil", "none")
MXFP4 = QuantSpec("e2m1", "1x32", "e8m0", "floor", "none")
