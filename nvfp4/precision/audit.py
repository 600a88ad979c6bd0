"""What every GEMM really executed, held against the plan.

A run whose linears are silently BF16 has a perfect loss curve. So each GEMM reports the operands it
was given, read from the tensors themselves (dtype, shape of the scales, spec carried by the
QuantizedTensor), never from the policy that asked for them; `compare` then looks for differences:

    with recording() as log:
        train_step()
    check(log, plan, expected_calls=micro_batches)

Compared are the format of each operand with block, scales, rounding, rotation and signs; shape,
number of executions, accumulation, output dtype and backend of each GEMM; an autocast that was on
around a GEMM, or that has rounded the input of an FP32 linear; and the random bits: drawn for every
operand that is rounded stochastically, and no row of them twice in a step (see fingerprints.py).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nvfp4.errors import UserError
from nvfp4.numerics.philox import RandomBits
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.precision.fingerprints import BitsRecord, fingerprint, repeated
from nvfp4.precision.operands import GEMMS, facts, label
from nvfp4.precision.plan import PlanRow, PrecisionPlan

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class AuditError(UserError):
    """What ran is not what the plan says."""


@dataclass(frozen=True, slots=True)
class GemmRecord:
    """One executed GEMM: whose, which, its operands' facts by role, (M, N, K) and output dtype.

    kernel: the code that summed up the products, recorded, not compared;
    autocast: the dtype that an autocast would have given the product, "" without one.
    """

    name: str
    gemm: str
    operands: dict[str, dict[str, Any]]
    shape: tuple[int, int, int]
    out_dtype: str
    backend: str
    accumulate: str = "fp32"
    kernel: str = ""
    autocast: str = ""


@dataclass(slots=True)
class AuditLog:
    """GEMMs, random bits, and (linear, dtype) of what linears were given, in order of execution."""

    records: list[GemmRecord] = field(default_factory=list)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    bits: list[BitsRecord] = field(default_factory=list)


_logs: list[AuditLog] = []


@contextmanager
def recording() -> Iterator[AuditLog]:
    """Collect every GEMM that runs inside."""
    log = AuditLog()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def _dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def observe(operand: object) -> dict[str, Any]:
    """Facts of an operand as it stands: a plain tensor's dtype, or a QuantizedTensor's spec.

    The spec counts only if the data agree with it: one byte per element, codes within the format,
    one scale per block, an amax where there is a second level. Otherwise the format is "invalid".
    """
    if isinstance(operand, torch.Tensor):
        return {"format": _dtype_name(operand.dtype)}
    if not isinstance(operand, QuantizedTensor):
        return {"format": f"invalid: {type(operand).__name__}"}
    spec, codes = operand.spec, operand.codes
    sound = (
        codes.dtype == torch.uint8
        and tuple(codes.shape) == tuple(operand.shape)
        and (spec.format != "e2m1" or not codes.numel() or int(codes.amax()) < 16)
        and _scales_fit(operand)
        and (operand.amax is not None) == (spec.second_level != "none")
    )
    return facts(spec, "") if sound else {"format": f"invalid: data do not fit {spec.format}"}


def _scales_fit(operand: QuantizedTensor) -> bool:
    """One scale per block, FP32 or codes of one byte as the spec says."""
    spec, scales = operand.spec, operand.block_scale
    if scales.dtype != (torch.float32 if spec.block_scale in ("fp32", "pow2") else torch.uint8):
        return False
    if spec.block == "tensor":
        return scales.numel() == 1
    blocks = zip(operand.shape, spec.block_shape, strict=True)
    return tuple(scales.shape) == tuple(-(-size // block) for size, block in blocks)


def record(
    name: str, gemm: str, operands: Mapping[str, Any], shape: tuple[int, int, int],
    out_dtype: torch.dtype, backend: str, accumulate: str = "fp32", kernel: str = "",
) -> None:  # fmt: skip
    """Called by a linear at each GEMM with the very operands it gets; free when not recording.

    out_dtype: of the tensor that came out; accumulate: the accumulation model it was given; kernel:
    what the backend says it runs for these operands.
    """
    if not _logs:
        return
    seen = {role: observe(operand) for role, operand in operands.items()}
    entry = GemmRecord(
        name, gemm, seen, shape, _dtype_name(out_dtype), backend, accumulate, kernel,
        _autocast(operands),
    )  # fmt: skip
    for log in _logs:
        log.records.append(entry)


def _autocast(operands: Mapping[str, Any]) -> str:
    """Dtype of the autocast that holds on the operands' device, "" if none is on."""
    first = next(iter(operands.values()))
    data = first.codes if isinstance(first, QuantizedTensor) else first
    if not isinstance(data, torch.Tensor) or not torch.is_autocast_enabled(data.device.type):
        return ""
    return _dtype_name(torch.get_autocast_dtype(data.device.type))


def record_input(name: str, dtype: torch.dtype) -> None:
    """Called by a linear with the dtype of its input as it was given, before any rounding."""
    for log in _logs:
        log.inputs.append((name, _dtype_name(dtype)))


def record_bits(name: str, gemm: str, role: str, bits: RandomBits | torch.Tensor) -> None:
    """Called by a linear when it has drawn random bits for an operand: uint8 (rows, columns).

    By their address, or themselves; one row for each token.
    """
    if not _logs:
        return
    if isinstance(bits, RandomBits):
        bits = bits.tensor().t() if bits.turned else bits.tensor()
    entry = BitsRecord(name, gemm, role, fingerprint(bits))
    for log in _logs:
        log.bits.append(entry)


def _differences(expected: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    """Fields in which an operand differs from the plan, or an empty string."""
    keys = [key for key in {**expected, **seen} if expected.get(key) != seen.get(key)]
    if not keys:
        return ""
    if "format" in keys or label(expected) != label(seen):
        return f"was {label(seen)}, the plan says {label(expected)}"
    return ", ".join(
        f"{key} was {seen.get(key)}, the plan says {expected.get(key)}" for key in keys
    )


def compare(
    log: AuditLog,
    plan: PrecisionPlan,
    expected_calls: int | Mapping[str, int] | None = None,
    *,
    names: Collection[str] | None = None,
    backend: str | None = None,
) -> list[str]:
    """Lines that say where execution and plan differ; empty if nowhere.

    expected_calls: executions of each GEMM of each linear: one number, one per GEMM (recompute runs
    fprop twice), or None for "at least once". names: linears of this rank; all by default.
    backend: the one that was chosen; any by default.
    A GEMM of a linear outside the plan may be anything but quantised.
    """
    counts = Counter((entry.name, entry.gemm) for entry in log.records)
    rows = {row.name: row for row in plan.rows if names is None or row.name in names}
    lines = []
    for name in rows:
        for gemm in GEMMS:
            calls = counts[name, gemm]
            wanted = expected_calls[gemm] if isinstance(expected_calls, Mapping) else expected_calls
            if calls != wanted if wanted is not None else calls == 0:
                lines.append(f"{name} {gemm}: ran {calls} times, expected {wanted or 'at least 1'}")
    for entry in log.records:
        if backend is not None and entry.backend != backend:
            lines.append(f"{entry.name} {entry.gemm}: ran on {entry.backend}, not on {backend}")
        if entry.autocast:
            lines.append(f"{entry.name} {entry.gemm}: an autocast to {entry.autocast} was on")
        if entry.name in rows:
            lines += _against(entry, rows[entry.name])
        elif any("block" in seen for seen in entry.operands.values()):
            lines.append(f"{entry.name} {entry.gemm}: quantised, but the plan does not have it")
    for name, dtype in log.inputs:  # FP32 may come into BF16 linears: they round it themselves
        if name in rows and rows[name].policy.compute_dtype == "fp32" and dtype != "fp32":
            lines.append(f"{name}: was given {dtype}, the plan computes in fp32; is autocast on?")
    recomputed = isinstance(expected_calls, Mapping) and len(set(expected_calls.values())) > 1
    lines += _without_bits(log, rows)
    lines += repeated(log.bits, recomputed=recomputed)
    return list(dict.fromkeys(lines))


def _against(entry: GemmRecord, row: PlanRow) -> Iterator[str]:
    """Where one executed GEMM differs from its row of the plan."""
    policy, where = row.policy, f"{entry.name} {entry.gemm}"
    for role, spec in policy.operands(entry.gemm).items():
        seen = entry.operands.get(role, {"format": "absent"})
        if line := _differences(facts(spec, policy.compute_dtype), seen):
            yield f"{where}: {role} {line}"
    out, into = _weight_shape(entry)
    if (
        row.out_features % out
        or row.in_features % into
        or (out != row.out_features and into != row.in_features)
    ):
        whole = f"{row.out_features} x {row.in_features}"
        yield f"{where}: weight was {out} x {into}, the plan says {whole} or a shard of it"
    # fprop stays FP32 where a bias is still to be added; dw is FP32 always
    allowed = {"fp32"} if entry.gemm == "wgrad" else {"fp32", policy.compute_dtype}
    if entry.out_dtype not in allowed:
        yield f"{where}: result in {entry.out_dtype}"
    planned = policy.accumulation(entry.gemm)
    if entry.accumulate != planned:
        yield f"{where}: accumulation was {entry.accumulate}, the plan says {planned}"


def _weight_shape(entry: GemmRecord) -> tuple[int, int]:
    """(output, input) features of the weight in a GEMM (M, N, K), see the table in linear.py."""
    m, n, k = entry.shape
    return {"fprop": (n, k), "dgrad": (k, n), "wgrad": (m, n)}[entry.gemm]


def _drawn_for(seen: Mapping[str, Any]) -> bool:
    """Whether an operand needs random bits: for its elements, or for its scales (MS-EDEN)."""
    return seen.get("rounding") == "stochastic" or seen.get("scale_rule") == "eden"


def _without_bits(log: AuditLog, rows: Mapping[str, PlanRow]) -> Iterator[str]:
    """Operands that were rounded stochastically more often than random bits were drawn for them.

    dgrad may use the very weight that fprop has rounded, so its bits are fprop's.
    """
    drawn = Counter(record.key for record in log.bits)
    needed: Counter[tuple[str, str, str]] = Counter()
    for entry in log.records:
        for role, seen in entry.operands.items():
            if entry.name in rows and _drawn_for(seen):
                needed[entry.name, entry.gemm, role] += 1
    for (name, gemm, role), count in needed.items():
        have = drawn[name, gemm, role]
        if role == "weight" and gemm == "dgrad":
            have += drawn[name, "fprop", role]
        if have < count:
            yield (
                f"{name} {gemm}: {role} was rounded stochastically {count} times, random bits were "
                f"drawn {have} times"
            )


def check(
    log: AuditLog,
    plan: PrecisionPlan,
    expected_calls: int | Mapping[str, int] | None = None,
    *,
    names: Collection[str] | None = None,
    backend: str | None = None,
) -> None:
    """Raise AuditError with the first differences, if there are any; arguments as in compare."""
    complain(compare(log, plan, expected_calls, names=names, backend=backend))


def complain(lines: list[str]) -> None:
    """Raise AuditError with the first of the lines of compare, if there are any."""
    if lines:
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise AuditError(f"execution differs from the precision plan: {'; '.join(lines[:3])}{more}")
