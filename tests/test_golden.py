"""`nvfp4 verify`: the stored vectors are equal, and every way a folder can be wrong is told."""

import hashlib
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy_oracle import fp8, nvfp4, pack, rotate, rotation

from nvfp4.errors import UserError
from nvfp4.numerics.golden import check_file, compare, verify
from nvfp4.numerics.golden_case import Check, words

GOLDEN = Path(__file__).parent / "golden"
MISSING = {  # formats of later versions
    "fp8_current_scaling",
    "fp8_delayed_scaling",
    "mxfp4",
    "mxfp8",
    "nvfp4_4over6",
    "nvfp4_rowscaled",
}
rng = np.random.default_rng(2024)


def run(folder):
    lines = []
    return verify(folder, lines.append), lines


def test_all_stored_vectors_are_equal():
    code, lines = run(GOLDEN)
    assert code == 0, "\n".join(lines)
    assert lines[-1] == "15 files: 1098 arrays compared, 1098 equal; 0 files with differences"
    # Left out are the reference's NaN amax, and arrays whose _kernel sibling decides; nothing else.
    left_out = [line for line in lines if "not compared" in line or "instead" in line]
    assert len(left_out) == 1
    assert left_out[0].startswith(
        "nvfp4_edge.npz: 37 cases, 220 arrays compared, 220 equal; 24 decided by their _kernel "
        "arrays instead; 4 not compared (nonfinite_nan_bf16/amax_row, "
    )
    assert not any("not implemented" in line for line in lines)


def test_vectors_are_those_of_the_manifest():
    manifest = json.loads((GOLDEN / "MANIFEST.json").read_text())
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in GOLDEN.glob("*.npz")}
    assert found == {name: entry["sha256"] for name, entry in manifest.items()}


def altered(path, target, change):
    """The arrays of one case of a file, one of them changed."""
    case = target.rpartition("/")[0]
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files if name.startswith(f"{case}/")}
    arrays[target] = change(arrays[target].copy())
    return arrays


def flip_last_bit(array):
    flat = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    flat[-1] ^= 1
    return array


@pytest.mark.parametrize(
    "target",
    [
        "nvfp4_1d:bf16_48x80_heavy/q_col",
        "nvfp4_1d:bf16_48x80_heavy/s_row",
        "nvfp4_1d:fp32_80x48_lognormal/amax_col",
        "nvfp4_2d:fp32_80x48_lognormal/s_col",
        "nvfp4_rht:bf16_48x80_heavy/rht_xt_bf16",
        "nvfp4_rht:rht_matrix/mask",
        "nvfp4_edge:nonfinite_nan_bf16/q_row_kernel",
        "nvfp4_gemm:tiny_grad_32x32x32/y_fp32",
        "nvfp4_gemm:tiny_grad_32x32x32/dw_accumulated_fp32",
        "nvfp4_gemm:tiny_grad_32x32x32/dx_out_bf16",
        "nvfp4_gemm:tiny_grad_32x32x32/alpha_wgrad",
        "nvfp4_layout_dequant:48x80_col/s_swizzled",
        "nvfp4_layout_dequant:48x80_col/dequant_bf16bits",
        "nvfp4_legacy_scale_rule:pairs/e4m3_v213",
        "nvfp4_legacy_scale_rule:discriminating0_1d/s_row_v213",
        "nvfp4_stochastic_rounding:grid/p_hi_8bit",
        "nvfp4_stochastic_rounding:philox4x32_10/table",
        "fp8_block_scaling:bf16_192x80_1x128_f32/s_t_gemm_layout",
        "fp8_block_scaling:bf16_192x80_128x128_pow2/q",
    ],
)
def test_one_changed_bit_is_found_and_named(tmp_path, target):
    name, array = target.split(":")
    path = tmp_path / f"{name}.npz"
    np.savez(path, **altered(GOLDEN / path.name, array, flip_last_bit))
    code, lines = run(tmp_path)
    assert code == 1
    assert f"first difference: {array} [" in lines[1]
    assert "(1 of " in lines[1] and "differ)" in lines[1]


def test_a_dropped_row_is_a_difference_of_shape(tmp_path):
    arrays = altered(GOLDEN / "nvfp4_1d.npz", "bf16_48x80_heavy/s_row", lambda a: a[1:])
    np.savez(tmp_path / "nvfp4_1d.npz", **arrays)
    code, lines = run(tmp_path)
    assert code == 1
    assert "bf16_48x80_heavy/s_row is uint8 [47, 5], this floor gives uint8 [48, 5]" in lines[1]


# ------------------------------------------------------------------ vectors of other shapes


def bf16_bits(x):
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def bf16_matrix(m, k, scale=1.0, spread=2.0):
    x = rng.normal(size=(m, k)) * np.exp2(spread * rng.normal(size=(m, k // 16)).repeat(16, 1))
    return (x * scale).astype(ml_dtypes.bfloat16).astype(np.float32)


def forms(prefix, x, columns, tile=1, suffix="", rule="current"):
    """q, s, amax of x and of `columns` (its transpose, perhaps rotated)."""
    arrays = {}
    for form, values in (("row", x), ("col", columns)):
        codes, scale, amax = nvfp4(values, tile, rule)
        arrays[f"{prefix}q_{form}{suffix}"] = pack(codes)
        arrays[f"{prefix}s_{form}{suffix}"] = scale.repeat(tile, 0)
        arrays[f"{prefix}amax_{form}"] = np.array([amax], np.float32)
    return arrays


def made_1d():
    x = bf16_matrix(80, 112, 1e-20)
    y = rng.normal(size=(32, 16)).astype(np.float32)
    given = forms("", y, y.T)
    for form, values in (("row", y), ("col", y.T)):
        amax = np.float32(11.5)
        codes, scale, _ = nvfp4(values, amax=amax)
        given |= {f"q_{form}": pack(codes), f"s_{form}": scale, f"amax_{form}": amax.reshape(1)}
    return {"seed9": {"x_bf16": bf16_bits(x), **forms("", x, x.T)}, "external": {"x": y, **given}}


def made_2d():
    x = bf16_matrix(16, 144)
    return {"bf16_16x144": {"x_bf16": bf16_bits(x), **forms("", x, x.T, tile=16)}}


def made_rht():
    x = bf16_matrix(96, 32, 1e4)
    turned = rotate(x.T)
    arrays = {"x_bf16": bf16_bits(x), "rht_xt_bf16": bf16_bits(turned), **forms("", x, turned)}
    plain = {"x_bf16": bf16_bits(x), **forms("", x, x.T)}
    matrix = rotation(0).astype(np.float32)
    return {
        "one": arrays,
        "no_rht": plain,
        "nosign_matrix": {"H": matrix, "sign": matrix[:, 0] * 4, "mask": np.array([0])},
    }


def made_legacy():
    x = bf16_matrix(64, 64, 1e3)
    old = forms("", x, x.T, suffix="_v213", rule="before_2_14")
    new = forms("", x, x.T, suffix="_v218")
    amax = old.pop("amax_row")
    del old["amax_col"], new["amax_row"], new["amax_col"]
    return {"big_1d": {"x_bf16": bf16_bits(x), "amax": amax, **old, **new}}


def made_fp8():
    x = rng.normal(size=(128, 128)).astype(np.float32)
    cases = {}
    for rows, block in ((1, "1x128"), (128, "128x128")):
        for scale in ("pow2", "f32"):
            codes, scales = fp8(x, rows, scale == "pow2")
            turned, turned_scales = fp8(np.ascontiguousarray(x.T), rows, scale == "pow2")
            arrays = {"x": x, "q": codes, "s": scales, "q_t": turned, "s_t": turned_scales}
            cases[f"fp32_128x128_{block}_{scale}"] = arrays
    return cases


MAKERS = {
    "nvfp4_1d_more": made_1d,
    "nvfp4_2d": made_2d,
    "nvfp4_rht-seed7": made_rht,
    "nvfp4_legacy_scale_rule": made_legacy,
    "fp8_block_scaling": made_fp8,
}


@pytest.mark.parametrize("name", MAKERS)
def test_vectors_of_other_shapes_seeds_and_magnitudes(tmp_path, name):
    cases = MAKERS[name]()
    arrays = {f"{case}/{array}": v for case, part in cases.items() for array, v in part.items()}
    path = tmp_path / f"{name}.npz"
    np.savez(path, **arrays)
    report = check_file(path)
    assert report.ok and report.compared == report.equal > 0, list(report.lines())
    assert report.cases == len(cases) and not report.skipped
    for target in arrays:
        if "/x" in target or target.startswith("external/amax"):
            continue
        np.savez(path, **altered(path, target, flip_last_bit))
        report = check_file(path)
        assert not report.ok and report.difference.startswith(target), target
        np.savez(path, **arrays)


def test_a_file_without_cases_and_with_unknown_name(tmp_path):
    x = bf16_matrix(32, 48)
    np.savez(tmp_path / "mine.npz", x_bf16=bf16_bits(x), note=np.arange(3), **forms("", x, x.T))
    code, lines = run(tmp_path)
    assert code == 0
    assert lines[0] == "mine.npz: 1 cases, 6 arrays compared, 6 equal; 1 not compared (note)"


def test_the_references_unsigned_zero_is_accepted_without_a_kernel_array_and_only_there(tmp_path):
    x = bf16_matrix(32, 48)
    x[3, :5] = -0.0
    x[4, 0] = -1e-30  # not a zero: its code keeps the sign in the reference too
    arrays = {"x": x, **forms("", x, x.T)}
    codes, _, _ = nvfp4(x)
    assert (codes[3, :5] == 8).all() and codes[4, 0] == 8
    unsigned = codes.copy()
    unsigned[3, :5] = 0
    path = tmp_path / "nvfp4_1d.npz"
    arrays["q_row"] = pack(unsigned)
    np.savez(path, **arrays)
    assert check_file(path).ok
    np.savez(path, **arrays, q_row_kernel=pack(unsigned))
    assert "q_row_kernel [3, 0]" in check_file(path).difference
    unsigned[4, 0] = 0
    arrays["q_row"] = pack(unsigned)
    np.savez(path, **arrays)
    assert not check_file(path).ok


def test_formats_of_later_versions_do_not_count(tmp_path):
    shutil.copy(GOLDEN / "mxfp8.npz", tmp_path / "mxfp6.npz")
    code, lines = run(tmp_path)
    assert code == 0
    assert lines[0] == "mxfp6.npz: not implemented: mxfp6 (12 cases)"


# ------------------------------------------------------------------ folders that cannot be used


def truncated(path):
    path.write_bytes((GOLDEN / "nvfp4_2d.npz").read_bytes()[:20000])


def text(path):
    path.write_text("version https://git-lfs.github.com/spec/v1")


def damaged(path):
    content = bytearray((GOLDEN / "nvfp4_2d.npz").read_bytes())
    content[3000:3100] = bytes(100)
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def strange(path):
    np.savez(path, weights=np.ones(3))


def pickled(path):
    np.savez(path, x=np.array([{}], dtype=object))


@pytest.mark.parametrize("make", [truncated, text, damaged, empty, strange, pickled])
def test_an_unusable_file_is_one_line_and_exit_1(tmp_path, make):
    shutil.copy(GOLDEN / "fp8_block_scaling.npz", tmp_path)
    make(tmp_path / "nvfp4_2d.npz")
    code, lines = run(tmp_path)
    assert code == 1
    assert "no array in it has" in lines[1] if make is strange else "cannot be read" in lines[1]
    assert len(lines) == 3 and not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.ones((16, 24), np.float32), "q_row": np.zeros((16, 12), np.uint8)}, "multiples"),
        ({"w": np.ones((16, 16), np.float32), "y_fp32": np.ones((16, 16), np.float32)}, "input x"),
        ({"q": np.zeros((4, 8), np.uint8), "s_compact": np.zeros(4), "amax": np.ones(1)}, "case c"),
        ({"dx_fp32": np.ones(3), "dy": np.ones((16, 16), np.float32)}, "input w is missing"),
    ],
)
def test_a_case_that_does_not_make_sense_is_one_line(tmp_path, arrays, text):
    np.savez(tmp_path / "nvfp4_1d.npz", **{f"c/{name}": value for name, value in arrays.items()})
    code, lines = run(tmp_path)
    assert code == 1
    assert "case c cannot be evaluated" in lines[0] and text in lines[0]


def test_a_missing_or_empty_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        verify(tmp_path / "nothing")
    with pytest.raises(UserError, match="no .npz file in it"):
        verify(tmp_path)


def test_words_of_names():
    assert words("NVFP4_no-rht_1dw/amax1e-30") == ["nvfp4", "norht", "1dw", "amax1e", "30"]
    assert words("row_scaled_no_sign") == ["rowscaled", "nosign"]


def test_every_bf16_nan_counts_as_one():
    """Which NaN a cast to BF16 gives depends on the processor; a number there is an error."""
    ours = torch.tensor([float("nan"), 1.0]).bfloat16()
    for pattern in (0x7FC0, 0xFFFF, 0x7F81):
        assert compare(Check("x", "x", ours), np.array([pattern, 0x3F80], np.uint16)) == ""
    assert "[0]" in compare(Check("x", "x", ours), np.array([0x7F80, 0x3F80], np.uint16))
