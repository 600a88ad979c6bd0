"""QuantSpec: how one operand of a GEMM is quantised, as data.

Nothing here imports torch, so that a recipe can be read and checked without it.

    format         element format: e2m1 (FP4), e4m3 or e5m2 (FP8)
    block          rows x columns that share one block scale; the columns run along the contraction
    block_scale    how block scales are stored: e4m3 (NVFP4), fp32 or pow2 (FP8 blocks)
    scale_rule     order of roundings in the NVFP4 block scale: current = Transformer Engine 2.14 on
    second_level   tensor = one FP32 amax per tensor above the E4M3 block scales; none = no amax
    rounding       nearest (ties to even) or stochastic (8 random bits per element)
    hadamard       16 = rotate groups of 16 along the contraction first; 0 = no rotation
    signs          sign vector of the rotation: fixed (Transformer Engine's) or none
"""

from dataclasses import dataclass, fields

from nvfp4.errors import UserError

_ALLOWED: dict[str, tuple[object, ...]] = {
    "format": ("e2m1", "e4m3", "e5m2"),
    "block": ("1x16", "16x16", "1x128", "128x128"),
    "block_scale": ("e4m3", "fp32", "pow2"),
    "scale_rule": ("current", "before_2_14"),
    "second_level": ("tensor", "none"),
    "rounding": ("nearest", "stochastic"),
    "hadamard": (0, 16),
    "signs": ("fixed", "none"),
}

# What each format goes with: the combinations whose arithmetic is defined in this floor.
_FP8 = {"block": ("1x128", "128x128"), "block_scale": ("fp32", "pow2"), "second_level": ("none",)}
_FAMILY: dict[str, dict[str, tuple[str, ...]]] = {
    "e2m1": {"block": ("1x16", "16x16"), "block_scale": ("e4m3",), "second_level": ("tensor",)},
    "e4m3": _FP8,
    "e5m2": _FP8,
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
    rounding: str = "nearest"
    hadamard: int = 0
    signs: str = "fixed"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), _ALLOWED[field.name]
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise UserError(f"{field.name}: {value!r} is not one of {_listed(allowed)}")
        for name, allowed in _FAMILY[self.format].items():
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(
                    f"{name}: {value!r} does not go with format {self.format}, "
                    f"which takes {_listed(allowed)}"
                )
        if self.hadamard and self.tiled:
            raise UserError(
                f"hadamard: {self.hadamard} does not go with block {self.block}, whose transpose "
                "must stay exact; use hadamard 0 or a block of one row"
            )

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
