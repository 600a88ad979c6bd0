"""Storage layouts: two FP4 codes per byte, and block scales in the tiles that cuBLAS reads.

Everything here only moves bytes. Codes are kept one per byte elsewhere in this floor.
"""

import torch
from torch import Tensor

from nvfp4.errors import UserError


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes per byte: element 2i in the low, 2i+1 in the high nibble of byte i.

    codes: (..., K) uint8 below 16, K even. Returns (..., K/2) uint8. UserError for odd K.
    Source: Transformer Engine NVFP4 storage; PTX `e2m1x2`.
    """
    if codes.shape[-1] % 2:
        raise UserError(f"packing needs an even last dimension, got shape {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`. packed: (..., K/2) uint8. Returns (..., K) uint8 below 16."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pad_scales(scale: Tensor, rows: int = 128, columns: int = 4) -> Tensor:
    """Zero rows and columns appended up to the next multiple of (rows, columns).

    scale: (R, C), any dtype. The default is the alignment of 1x16 scales in a cuBLAS GEMM.
    """
    r, c = scale.shape
    padded = scale.new_zeros(-(-r // rows) * rows, -(-c // columns) * columns)
    padded[:r, :c] = scale
    return padded


def swizzle(scale: Tensor) -> Tensor:
    """Scales in cuBLAS' 128x4 tiles, flat:

        offset(r, c) = (((r/128) * (C/4) + c/4) * 32 + r%32) * 16 + ((r%128)/32) * 4 + c%4

    scale: (R, C) uint8, padded to R % 128 == 0 and C % 4 == 0 (UserError otherwise).
    Returns (R * C,) uint8.
    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    r, c = scale.shape
    if r % 128 or c % 4:
        raise UserError(
            f"swizzle needs scales padded to 128 x 4, got shape {(r, c)}; see pad_scales"
        )
    return scale.reshape(r // 128, 4, 32, c // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `swizzle`; rows and columns are those of the padded scales."""
    tiles = flat.view(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def fp8_gemm_scales(scale: Tensor, tiled: bool) -> Tensor:
    """FP8 block scales as Transformer Engine's GEMM reads them, zero padded.

    1x128: scale (M, K/128) becomes its transpose (K/128, M rounded up to 4).
    128x128: scale (M/128, K/128) keeps its order, the last dimension is rounded up to 4.
    Source: Transformer Engine tests/pytorch/references/blockwise_quantizer_reference.py.
    """
    return pad_scales(scale if tiled else scale.t(), rows=1, columns=4)
