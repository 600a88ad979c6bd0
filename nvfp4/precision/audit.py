"""What every GEMM really executed, held against the plan.

A run whose linears are silently BF16 has a perfect loss curve. So each GEMM reports the operands it
was given, read from the tensors themselves (dtype, shape of the scales, spec carried by the
QuantizedTensor), never from the policy that asked for them; `compare` then looks for differences:

    with recording() as log:
        train_step()
    check(log, plan, expected_calls=micro_batches)
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nvfp4.errors import UserError
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.precision.operands import GEMMS, facts, label
from nvfp4.precision.plan import PrecisionPlan

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class AuditError(UserError):
    """What ran is not what the plan says."""


@dataclass(frozen=True, slots=True)
class GemmRecord:
    """One executed GEMM: whose, which, its operands' facts by role, (M, N, K) and output dtype."""

    name: str
    gemm: str
    operands: dict[str, dict[str, Any]]
    shape: tuple[int, int, int]
    out_dtype: str
    backend: str


@dataclass(slots=True)
class AuditLog:
    """GEMMs in order of execution."""

    records: list[GemmRecord] = field(default_factory=list)


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


def observe(operand: object) -> dict[str, Any]:
    """Facts of an operand as it stands: a plain tensor's dtype, or a QuantizedTensor's spec.

    The spec counts only if the data agree with it: one byte per element, codes within the format,
    one scale per block, an amax where there is a tensor scale. Otherwise the format is "invalid".
    """
    if isinstance(operand, torch.Tensor):
        return {"format": DTYPE_NAMES.get(operand.dtype, str(operand.dtype).removeprefix("torch."))}
    if not isinstance(operand, QuantizedTensor):
        return {"format": f"invalid: {type(operand).__name__}"}
    spec, codes, scales = operand.spec, operand.codes, operand.block_scale
    scale_dtype = torch.uint8 if spec.block_scale == "e4m3" else torch.float32
    blocks = tuple(
        -(-size // block) for size, block in zip(operand.shape, spec.block_shape, strict=True)
    )
    sound = (
        codes.dtype == torch.uint8
        and tuple(codes.shape) == tuple(operand.shape)
        and (spec.format != "e2m1" or int(codes.amax()) < 16)
        and scales.dtype == scale_dtype
        and tuple(scales.shape) == blocks
        and (operand.amax is not None) == (spec.second_level == "tensor")
    )
    return facts(spec, "") if sound else {"format": f"invalid: data do not fit {spec.format}"}


def record(
    name: str, gemm: str, operands: Mapping[str, Any], shape: tuple[int, int, int],
    out_dtype: torch.dtype, backend: str, accumulate: str = "fp32",
) -> None:  # fmt: skip
    """Called by a linear at each GEMM with the very operands it gets; free when not recording."""
    if not _logs:
        return
    seen = {role: observe(operand) for role, operand in operands.items()}
    entry = GemmRecord(name, gemm, seen, shape, DTYPE_NAMES[out_dtype], backend)
    for log in _logs:
        log.records.append(entry)


def record_bits(name: str, gemm: str, role: str, bits: torch.Tensor) -> None:
    """Called by a linear with the random bits of an operand; free when not recording."""


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
) -> list[str]:
    """Lines that say where execution and plan differ; empty if nowhere.

    expected_calls: executions of each GEMM of each linear: one number, one per GEMM (recompute runs
    fprop twice), or None for "at least once". names: linears of this rank; all by default.
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
        if entry.name in rows:
            policy = rows[entry.name].policy
            for role, spec in policy.operands(entry.gemm).items():
                seen = entry.operands.get(role, {"format": "absent"})
                if line := _differences(facts(spec, policy.compute_dtype), seen):
                    lines.append(f"{entry.name} {entry.gemm}: {role} {line}")
            # fprop stays FP32 where a bias is still to be added; dw is FP32 always
            allowed = {"fp32"} if entry.gemm == "wgrad" else {"fp32", policy.compute_dtype}
            if entry.out_dtype not in allowed:
                lines.append(f"{entry.name} {entry.gemm}: result in {entry.out_dtype}")
        elif any("block" in seen for seen in entry.operands.values()):
            lines.append(f"{entry.name} {entry.gemm}: quantised, but the plan does not have it")
    return list(dict.fromkeys(lines))


def check(
    log: AuditLog,
    plan: PrecisionPlan,
    expected_calls: int | Mapping[str, int] | None = None,
    *,
    names: Collection[str] | None = None,
) -> None:
    """Raise AuditError with the first differences, if there are any; arguments as in compare."""
    lines = compare(log, plan, expected_calls, names=names)
    if lines:
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise AuditError(f"execution differs from the precision plan: {'; '.join(lines[:3])}{more}")
