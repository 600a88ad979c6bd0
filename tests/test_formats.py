"""Encoding and decoding of E2M1, E4M3 and E5M2: every code, every BF16 number, every tie."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from nvfp4.errors import UserError
from nvfp4.numerics import layout
from nvfp4.numerics.formats import E2M1, E4M3, E5M2, FORMATS, decode, encode

DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
INFOS = {name: getattr(gfloat.formats, f"format_info_ocp_{name}") for name in FORMATS}
each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


def all_codes(fmt):
    return torch.arange(2**fmt.bits, dtype=torch.int32).to(torch.uint8)


def encoded(values, fmt):
    return encode(torch.from_numpy(np.ascontiguousarray(values, np.float32)), fmt).numpy()


def two_oracles(values, fmt):
    """Codes by ml_dtypes and by gfloat; saturation and NaN are ours, so that both agree on them."""
    finite = np.where(np.isnan(values), 0.0, values).astype(np.float32)
    clipped = np.clip(finite, -fmt.max_value, fmt.max_value)
    first = clipped.astype(DTYPES[fmt.name]).view(np.uint8)
    info = INFOS[fmt.name]
    with np.errstate(over="ignore"):
        second = gfloat.encode_ndarray(info, gfloat.round_ndarray(info, finite, sat=True))
    nan = np.isnan(values)
    return (np.where(nan, fmt.nan_code, codes) for codes in (first, second))


def test_largest_values_and_widths():
    found = {name: (fmt.bits, fmt.max_value) for name, fmt in FORMATS.items()}
    assert found == {"e2m1": (4, 6.0), "e4m3": (8, 448.0), "e5m2": (8, 57344.0)}
    assert E2M1.values()[:8] == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for fmt in FORMATS.values():
        assert max(v for v in fmt.values() if np.isfinite(v)) == fmt.max_value


@each_format
def test_every_code_decodes_as_in_both_oracles(fmt):
    codes = all_codes(fmt)
    ours = decode(codes, fmt).numpy()
    first = codes.numpy().view(DTYPES[fmt.name]).astype(np.float32)
    second = [gfloat.decode_float(INFOS[fmt.name], int(code)).fval for code in codes]
    np.testing.assert_array_equal(ours, first)
    np.testing.assert_array_equal(ours, np.array(second, np.float32))
    assert (np.signbit(ours) == np.signbit(first))[~np.isnan(ours)].all()


@each_format
def test_every_code_survives_decode_and_encode(fmt):
    codes = all_codes(fmt)
    values = decode(codes, fmt)
    again = encode(values, fmt)
    finite = values.isfinite()
    assert torch.equal(again[finite], codes[finite])
    assert (again[values.isnan()] == fmt.nan_code).all()


@each_format
def test_all_65536_bf16_inputs_against_both_oracles(fmt):
    bits = np.arange(65536, dtype=np.uint16)
    values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    ours = encoded(values, fmt)
    for oracle in two_oracles(values, fmt):
        np.testing.assert_array_equal(ours, oracle)


@each_format
def test_every_midpoint_and_its_neighbours_against_both_oracles(fmt):
    grid = np.unique([v for v in fmt.values() if np.isfinite(v)]).astype(np.float32)
    middle = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)  # exact
    edges = np.array([fmt.max_value * 1.5, 3.4e38, np.inf, 1e-45, 1e-38], np.float32)
    points = np.concatenate([grid, middle, edges, -edges])
    infinity = np.float32(np.inf)
    points = np.concatenate(
        [points, np.nextafter(points, infinity), np.nextafter(points, -infinity)]
    )
    ours = encoded(points, fmt)
    for oracle in two_oracles(points, fmt):
        np.testing.assert_array_equal(ours, oracle)


@pytest.mark.parametrize(
    ("fmt", "value", "expected"),
    [
        (E2M1, 0.25, 0.0),
        (E2M1, 0.25000006, 0.5),
        (E2M1, 0.75, 1.0),
        (E2M1, 2.5, 2.0),
        (E2M1, 5.0, 4.0),
        (E2M1, 5.0000005, 6.0),
        (E4M3, 126.24, 128.0),  # the carry into the exponent
        (E4M3, 126.9, 128.0),
        (E4M3, 1.0625001, 1.125),  # just above a tie: one rounding, not two
        (E4M3, 1.0625, 1.0),
        (E4M3, 2.0**-10, 0.0),
        (E4M3, 449.0, 448.0),
        (E4M3, 464.0, 448.0),
        (E4M3, 465.0, 448.0),
        (E4M3, 1e4, 448.0),
        (E5M2, 65536.0, 57344.0),
    ],
)
def test_values_that_other_encoders_got_wrong(fmt, value, expected):
    for sign in (1.0, -1.0):
        code = encode(torch.tensor([sign * value]), fmt)
        assert decode(code, fmt).item() == sign * expected


@each_format
def test_signed_zero_nan_and_infinity(fmt):
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    sign = 1 << (fmt.bits - 1)
    largest = fmt.values().index(fmt.max_value)
    assert encoded(nan, fmt).tolist() == [fmt.nan_code] * 4
    assert encoded([0.0, -0.0, -1e-45], fmt).tolist() == [0, sign, sign]
    assert encoded([np.inf, -np.inf], fmt).tolist() == [largest, sign | largest]


def test_encode_takes_any_shape_and_strides():
    x = torch.linspace(-7, 7, 96).reshape(2, 6, 8)
    straight = encode(x.contiguous(), E2M1)
    assert torch.equal(encode(x.permute(2, 0, 1), E2M1), straight.permute(2, 0, 1))
    assert encode(x[:0], E2M1).shape == (0, 6, 8)
    assert torch.equal(
        decode(straight.permute(2, 0, 1), E2M1), decode(straight, E2M1).permute(2, 0, 1)
    )


def test_packing_puts_even_elements_in_low_nibbles():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert layout.pack(codes).tolist() == [[0x21, 0x0F]]
    every = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert torch.equal(layout.unpack(layout.pack(every)), every)
    assert layout.pack(every).unique().numel() == 256
    with pytest.raises(UserError, match=r"even last dimension.*\(2, 3\)"):
        layout.pack(torch.zeros(2, 3, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (384, 8)])
def test_swizzle_is_the_documented_offset(shape):
    rows, columns = shape
    scale = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    flat = layout.swizzle(scale)
    for r in range(0, rows, 7):
        for c in range(columns):
            tile = (r // 128) * (columns // 4) + c // 4
            offset = (tile * 32 + r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert flat[offset] == scale[r, c]
    assert torch.equal(layout.unswizzle(flat, rows, columns), scale)


def test_padding_and_its_errors():
    scale = torch.ones(130, 5, dtype=torch.uint8)
    padded = layout.pad_scales(scale)
    assert padded.shape == (256, 8) and padded.sum() == 650 and padded[:130, :5].all()
    with pytest.raises(UserError, match=r"padded to 128 x 4, got shape \(130, 5\)"):
        layout.swizzle(scale)
    fp8 = torch.arange(1.0, 11.0).view(5, 2)
    assert torch.equal(layout.fp8_gemm_scales(fp8, tiled=False)[:, :5], fp8.t())
    assert layout.fp8_gemm_scales(fp8, tiled=False).shape == (2, 8)
    assert layout.fp8_gemm_scales(fp8, tiled=True).shape == (5, 4)
