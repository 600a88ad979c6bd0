"""The compiled CPU kernels against the definition, with every instruction set of this machine."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4 import backends
from nvfp4.backends import cpu, cpu_library, cpu_ops
from nvfp4.errors import MachineError, UserError
from nvfp4.numerics import gemm as products
from nvfp4.numerics import hadamard
from nvfp4.numerics import quantize as definition
from nvfp4.numerics.golden import verify
from nvfp4.numerics.philox import RandomBits
from nvfp4.numerics.spec import MXFP8, NVFP4, NVFP4_2D
from nvfp4.precision.presets import PRESETS

COMPILED = cpu.unsupported_reason() is None
needs_kernels = pytest.mark.skipif(not COMPILED, reason="no compiled kernels")
SETS = {0: "baseline", 1: "AVX2", 2: "AVX-512"}
SPECS = sorted({spec for policy in PRESETS.values() for spec in policy.specs}, key=str) + [
    replace(NVFP4, scale_rule="before_2_14"),
    replace(NVFP4, range=256),
    replace(NVFP4_2D, hadamard=16),
    replace(NVFP4, hadamard=4),
    replace(NVFP4, hadamard=32),
    replace(NVFP4, hadamard=64),
    replace(NVFP4, hadamard=16, signs="none", rounding="stochastic"),
]
KINDS = ("normal", "zeros", "spread", "tiny", "huge", "not finite", "integers", "sparse")


@pytest.fixture(autouse=True)
def every_time():
    yield
    if COMPILED:
        cpu_library.library().nvfp4_choose(-1)


def sets():
    """Instruction sets that this machine has, each chosen while the caller looks at it."""
    for number in SETS:
        if cpu_library.library().nvfp4_choose(number):
            assert cpu_library.instructions() == SETS[number]
            yield SETS[number]


def matrix(kind, shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    chance = torch.rand(shape, generator=generator)
    if kind == "zeros":
        x = torch.where(chance < 0.5, 0.0, -0.0)
    elif kind == "spread":
        x = x * torch.exp2(torch.randint(-40, 40, shape, generator=generator).float())
    elif kind == "tiny":
        x = x * 1e-38
    elif kind == "huge":
        x = (x * 1e38).clamp(-3e38, 3e38)
    elif kind == "not finite":
        x[chance < 0.01] = math.nan
        x[(chance > 0.5) & (chance < 0.503)] = math.inf
        x[(chance > 0.6) & (chance < 0.603)] = -math.inf
    elif kind == "integers":
        x = (3 * x).round()
    elif kind == "sparse":
        x = x * (chance < 0.1)
    return x.to(dtype)


def extras(spec, shape, turned, feature_offset=83):
    """Random bits, signs and scale that a spec asks for."""
    tokens, features = reversed(shape) if turned else shape
    given = {}
    if spec.random:
        given["random_bits"] = RandomBits(
            seed=1, step=2, layer=3, call=0, gemm=1, operand=2,
            sample=torch.arange(tokens) * 7 + 2**31, position=torch.arange(tokens),
            feature_offset=feature_offset, num_features=features, turned=turned,
            scales=spec.random == "scales",
        )  # fmt: skip
    if spec.hadamard and spec.signs in ("layer", "step"):
        bits = torch.randint(0, 2, (spec.hadamard,), generator=torch.Generator().manual_seed(1))
        given["signs"] = 1 - 2 * bits.double()
    if spec.scale_rule == "delayed":
        given["scale"] = torch.tensor(3.7)
    return given


def same(a, b):
    """Equal values and signs of zero; NaN equals NaN."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        at = a.isnan()
        if not torch.equal(at, b.isnan()):
            return False
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.dtype.itemsize]
        a, b = a.contiguous().view(bits)[~at], b.contiguous().view(bits)[~at]
    return torch.equal(a, b)


def check(x, spec, turned, given):
    want = definition.quantize(x.contiguous(), spec, **given)
    values, exact = definition.dequantize(want), definition.decode_operand(want)
    for name in sets():
        got = cpu.quantize(x, spec, **given)
        for part in ("codes", "block_scale", "amax"):
            assert same(getattr(got, part), getattr(want, part)), (name, part)
        assert got.spec == want.spec and same(got.signs, want.signs)
        assert same(cpu.dequantize(got), values) and same(cpu._operand(got), exact), name


@needs_kernels
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.format)
def test_every_spec_on_every_kind_of_numbers(spec):
    combinations = [(torch.float32, False), (torch.bfloat16, True), (torch.float32, True),
                    (torch.bfloat16, False)]  # fmt: skip
    for index, kind in enumerate(KINDS):
        for dtype, turned in combinations[index % 2 :: 2]:
            x = matrix(kind, (48, 128), dtype, index)
            if spec.hadamard not in (0, 16) and kind == "spread":
                x = x.bfloat16().to(dtype)  # FP32 sums of 80 binades depend on their order
            x = x.t().contiguous().t() if turned else x
            check(x, spec, turned, extras(spec, x.shape, turned))


@needs_kernels
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 6), columns=st.integers(1, 12), spec=st.sampled_from(SPECS),
    kind=st.sampled_from(KINDS[:2]), turned=st.booleans(), offset=st.integers(0, 64),
)  # fmt: skip
def test_shapes_and_places_of_random_bits(rows, columns, spec, kind, turned, offset):
    shape = rows * spec.multiples[0], columns * spec.multiples[1]
    x = matrix(kind, shape, torch.float32, rows)
    x = x.t().contiguous().t() if turned else x
    check(x, spec, turned, extras(spec, x.shape, turned, offset))


@needs_kernels
def test_all_bf16_numbers_as_elements():
    """Every finite BF16 number under every tensor amax of two binades."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = patterns[patterns.isfinite()].reshape(-1, 16)
    for amax in (None, torch.tensor(1.0), torch.tensor(1.9)):
        check(x, NVFP4, False, {} if amax is None else {"amax": amax})


@needs_kernels
def test_rotations_beside_rounding_boundaries():
    """Sums that FP32 would round to the wrong side."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2048, 16, generator=generator)
    x[:, 0] += 2.0 ** torch.randint(0, 20, (2048,), generator=generator)
    x[:, 1:] *= 2.0 ** torch.randint(-18, 1, (2048, 15), generator=generator)
    spec = replace(NVFP4, hadamard=16)
    check(x, spec, False, {})
    check(x.t().contiguous().view(16, 2048).t(), spec, True, {})


PAIRS = sorted(
    {
        tuple(policy.operands(gemm).values())
        for policy in PRESETS.values() for gemm in ("fprop", "dgrad", "wgrad")
    }, key=str,
)  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_every_preset(threads):
    torch.set_num_threads(threads)
    try:
        for a, b in PAIRS:
            check_product(a, b)
    finally:
        torch.set_num_threads(1)


def check_product(spec_a, spec_b):
    operands = []
    for seed, (spec, rows) in enumerate(((spec_a, 128), (spec_b, 256))):
        x = matrix("normal", (rows, 384), torch.bfloat16, seed)
        given = {} if spec is None else extras(spec, x.shape, False)
        turned = x.t().contiguous().t()
        operands.append(
            [x, turned] if spec is None
            else [definition.quantize(x, spec, **given), cpu.quantize(turned, spec, **given)]
        )  # fmt: skip
    add = matrix("normal", (128, 256), torch.float32, 9)
    for dtype, accumulator, alpha in [
        (torch.float32, None, "kernel"), (torch.bfloat16, None, "reference"),
        (torch.float32, add, "kernel"), (torch.bfloat16, add, "kernel"),
        (torch.float16, None, "kernel"),
    ]:  # fmt: skip
        more = {"out_dtype": dtype, "accumulator": accumulator, "alpha": alpha}
        want = products.gemm(operands[0][0], operands[1][0], **more)
        for a, b in product(*operands):
            assert same(cpu.gemm(a, b, **more), want), (spec_a, spec_b, more)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_large_products_with_two_threads(threads):
    torch.set_num_threads(threads)
    try:
        a, b = (matrix("normal", (rows, 2048), torch.bfloat16, rows) for rows in (64, 160))
        want = products.gemm(definition.quantize(a, NVFP4), definition.quantize(b, NVFP4))
        got = cpu.gemm(cpu.quantize(a.t().contiguous().t(), NVFP4), cpu.quantize(b, NVFP4))
        assert same(got, want)
    finally:
        torch.set_num_threads(1)


@needs_kernels
def test_arguments_are_refused_as_by_the_definition():
    x = torch.randn(16, 64)
    noisy = replace(NVFP4, rounding="stochastic")
    wrong = [
        (x, noisy, {}), (x[:, :30], NVFP4, {}), (x.double(), NVFP4, {}), (x[0], NVFP4, {}),
        (x, NVFP4, {"amax": torch.ones(2)}), (x, NVFP4, {"random_bits": torch.zeros(16, 64)}),
        (x, noisy, {"random_bits": torch.zeros(16, 63, dtype=torch.uint8)}),
    ]  # fmt: skip
    for tensor, spec, arguments in wrong:
        with pytest.raises(UserError) as caught:
            cpu.quantize(tensor, spec, **arguments)
        with pytest.raises(UserError) as defined:
            definition.quantize(tensor, spec, **arguments)
        assert str(caught.value) == str(defined.value)


@needs_kernels
@pytest.mark.parametrize("change", [{"sample": 2**32}, {"position": -1}, {"step": 2**32}])
def test_addresses_that_do_not_fit(change):
    x, spec = torch.randn(16, 64), replace(NVFP4, rounding="stochastic")
    bits = extras(spec, x.shape, False)["random_bits"]
    for name, value in change.items():
        at = getattr(bits, name)
        bits = replace(bits, **{name: value if isinstance(at, int) else torch.full_like(at, value)})
    with pytest.raises(UserError, match=r"random address: .*32 bits"):
        cpu.quantize(x, spec, random_bits=bits)


@needs_kernels
def test_pointers_are_never_of_another_kind_of_tensor():
    y = torch.ones(4, 4)
    for wrong in (y.bfloat16(), torch.ones(8, 8)[::2, ::2], y.to("meta")):
        with pytest.raises(TypeError, match="contiguous CPU tensor"):
            cpu_library.finish(wrong, [1.0], None)
    with pytest.raises(UserError, match="meta; run.backend: reference"):
        cpu.quantize(torch.ones(16, 16, device="meta"), NVFP4)
    with pytest.raises(TypeError, match="rows on the CPU"):
        cpu_library.block_amax(torch.ones(16, 32)[:, ::2], 1, 16, 0, False, None)


@needs_kernels
def test_finite():
    for dtype, value, at in product(
        (torch.float32, torch.bfloat16), (math.nan, -math.nan, math.inf, -math.inf), (0, 9, 18, 36)
    ):
        x = torch.full((37,), torch.finfo(dtype).max, dtype=dtype)
        assert all(cpu_library.finite(x) for _ in sets())
        x[at] = value
        assert not any(cpu_library.finite(x) for _ in sets())
        assert not cpu.finite(x[None, ::3]) and not cpu.finite(x.view(1, -1).t())


def test_what_the_definition_still_computes():
    assert cpu.by_definition(NVFP4) == ""
    left = {cpu.by_definition(spec) for spec in SPECS}
    assert left == {"", "eden", "choice of four or six", "rotation by 32"}


def test_a_library_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(cpu_library, "_sources", lambda: "0" * 64)
    cpu_library.library.cache_clear()
    try:
        if COMPILED:
            with pytest.raises(MachineError, match="other sources; install nvfp4 again"):
                cpu_library.library()
        monkeypatch.setattr(cpu_library, "library_file", lambda: None)
        reason = cpu.unsupported_reason()
        assert reason.startswith("its kernels were not compiled; install a C++ compiler")
        monkeypatch.setattr(cpu_library, "library_file", lambda: Path(__file__))
        assert "test_cpu_kernels.py cannot be opened" in cpu.unsupported_reason()
    finally:
        cpu_library.library.cache_clear()


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_where_there_is_a_compiler_there_are_kernels():
    assert COMPILED, cpu.unsupported_reason()


def test_installation_without_a_compiler(tmp_path):
    """build_ext goes on when no compiler works, and leaves no library."""
    source = Path(__file__).parents[1]
    for name in ("setup.py", "pyproject.toml", "README.md", "nvfp4", "models", "data", "recipes"):
        os.symlink(source / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "out"], cwd=tmp_path,
        env=os.environ | {"CC": "/bin/false", "CXX": "/bin/false"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("out/**/*.so"))


def test_kernels_read_nothing_beside_the_matrix():
    """Sizes that are no multiple of a vector, at the very end of a page that may not be read."""
    if not COMPILED:
        pytest.skip("no compiled kernels")
    from ctypes import CDLL, c_int, c_size_t, c_void_p
    from mmap import PAGESIZE, mmap

    area = mmap(-1, 5 * PAGESIZE)
    start = torch.frombuffer(area, dtype=torch.uint8)
    protect = CDLL(None).mprotect
    protect.argtypes = [c_void_p, c_size_t, c_int]
    assert protect(start.data_ptr() + 4 * PAGESIZE, PAGESIZE, 0) == 0
    for dtype, (rows, columns), turned in product(
        (torch.float32, torch.bfloat16), [(5, 19), (1, 45), (16, 16), (3, 113)], (False, True)
    ):
        size = rows * columns * dtype.itemsize
        x = start[4 * PAGESIZE - size : 4 * PAGESIZE].view(dtype).view(rows, columns)
        x.copy_(matrix("normal", (rows, columns), dtype))
        if turned:
            x = x.view(columns, rows).t()
        for spec in (NVFP4, replace(NVFP4, hadamard=16), MXFP8):
            if not any(size % of for size, of in zip(x.shape, spec.multiples, strict=True)):
                check(x, spec, turned, {})
    assert protect(start.data_ptr() + 4 * PAGESIZE, PAGESIZE, 3) == 0


@needs_kernels
def test_golden_vectors():
    lines = []
    assert verify(Path(__file__).parent / "golden", lines.append, backends.choose("cpu")) == 0
    assert lines[-1] == "15 files: 1098 arrays compared, 1098 equal; 0 files with differences"


@needs_kernels
def test_operators_are_what_their_schemas_say():
    """Names, mutations, and the shapes that fake tensors get."""
    x, empty = matrix("normal", (32, 64), torch.float32), [None, [0, 0, 0, 0], None, None]
    rotation, none = (16, False, hadamard.sign_vector(16, "fixed") / 4), (0, False, None)
    codes, scales, amax = cpu_ops.quantize(
        x, None, 1, 16, *rotation, "e2m1", "e4m3", 0, 2688.0, 6.0, *empty
    )
    calls = [
        (
            cpu_ops.quantize,
            (x, amax, 1, 16, 0, False, None, "e2m1", "e4m3", 0, 2688.0, 6.0, *empty),
        ),
        (cpu_ops.block_amax, (x, 1, 16, *rotation)),
        (cpu_ops.block_amax, (x, 16, 16, *none)),
        (cpu_ops.encode, (x, torch.ones(32, 4), 1, 16, "e4m3", *empty)),
        (cpu_ops.decode, (codes, scales, 1, 16, "e2m1", "e4m3", amax, 2688.0)),
        (cpu_ops.finish, (x, [2.0, 3.0], x.clone())),
        (cpu_ops.finish_bf16, (x, [2.0], None)),
        (cpu_ops.promote, (x, torch.ones(32), torch.ones(64), True, x.clone())),
    ]
    for operator, arguments in calls:
        utils = ("test_schema", "test_faketensor")
        assert set(torch.library.opcheck(operator, arguments, test_utils=utils).values()) == {
            "SUCCESS"
        }
