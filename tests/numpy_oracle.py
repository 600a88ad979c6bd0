"""A second implementation of the quantisers, for tests: NumPy, tables and ml_dtypes casts.

It shares no code with nvfp4.numerics, and finds codes by comparing with midpoints instead of bit
patterns. Formulas: Transformer Engine 2.20 (2.13 with rule before_2_14).
"""

import ml_dtypes
import numpy as np

f32 = np.float32
FLT_MAX = np.finfo(f32).max
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f32)


def e2m1_codes(v: np.ndarray) -> np.ndarray:
    """Nearest E2M1 code: the odd neighbour only above its lower and below its upper midpoint."""
    size = np.abs(v)
    code = np.zeros(v.shape, np.uint8)
    for index in range(1, 8):
        middle = (_E2M1[index - 1] + _E2M1[index]) / f32(2)
        code += (size >= middle) if index % 2 == 0 else (size > middle)
    code |= np.signbit(v).astype(np.uint8) << 3
    return np.where(np.isnan(v), np.uint8(7), code)


def e4m3(v: np.ndarray) -> np.ndarray:
    """float32 rounded to E4M3 (as that dtype), saturating."""
    return np.clip(v, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def to_bf16(v: np.ndarray) -> np.ndarray:
    """float32 values rounded to BF16."""
    return v.astype(ml_dtypes.bfloat16).astype(f32)


def amax_ignoring_nan(x: np.ndarray, axis=None) -> np.ndarray:
    """max |x| where NaN counts as 0."""
    return np.where(np.isnan(x), f32(0), np.abs(x)).max(axis=axis)


def nvfp4(x: np.ndarray, tile: int = 1, rule: str = "current", amax=None):
    """(codes (M, K), scale bytes (M/tile, K/16), amax) of a float32 matrix."""
    m, k = x.shape
    blocks = x.reshape(m // tile, tile, k // 16, 16)
    with np.errstate(all="ignore"):
        amax = amax_ignoring_nan(x) if amax is None else f32(amax)
        tensor_scale = min(f32(2688) / amax, FLT_MAX)
        if amax == 0 or tensor_scale == 0:
            tensor_scale = f32(1)
        b = amax_ignoring_nan(blocks, axis=(1, 3))
        if rule == "current":
            scale = e4m3(np.minimum(b * (tensor_scale * f32(1 / 6)), FLT_MAX))
        else:
            scale = e4m3(np.minimum(b / f32(6) * tensor_scale, FLT_MAX))
        encode = np.minimum(f32(1) / (scale.astype(f32) * (f32(1) / tensor_scale)), FLT_MAX)
        codes = e2m1_codes(blocks * encode[:, None, :, None])
    return codes.reshape(m, k), scale.view(np.uint8), amax


def rotation(mask: int = 0xD7E8) -> np.ndarray:
    """D H16 / 4 by Sylvester's doubling."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    signs = np.array([-1.0 if mask >> i & 1 else 1.0 for i in range(16)])
    return signs[:, None] * h / 4


def rotate(x: np.ndarray) -> np.ndarray:
    """Groups of 16 along the last dimension; FP64 sums, rounded to float32 and to BF16."""
    groups = x.astype(np.float64).reshape(-1, 16)
    return to_bf16((groups @ rotation()).astype(f32)).reshape(x.shape)


def fp8(x: np.ndarray, rows: int, pow2: bool, overflow=FLT_MAX):
    """(codes (M, K), float32 decode scales) of E4M3 blocks, 128 columns each."""
    m, k = x.shape
    scales = np.zeros((-(-m // rows), -(-k // 128)), f32)
    codes = np.zeros((m, k), np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * rows : (i + 1) * rows, j * 128 : (j + 1) * 128]
            b = np.abs(x[part]).max()
            with np.errstate(all="ignore"):
                scale = f32(1) if b == 0 or np.isinf(b) else f32(448) / b
                scale = f32(overflow) if np.isinf(scale) else scale
                if pow2:
                    scale = f32(2) ** np.floor(np.log2(np.float64(scale))).astype(f32)
                codes[part] = e4m3(x[part] * scale).view(np.uint8)
                scales[i, j] = f32(1) / scale
    return codes, scales


def pack(codes: np.ndarray) -> np.ndarray:
    """Element 2i in the low nibble of byte i."""
    return codes[:, 0::2] + codes[:, 1::2] * 16
