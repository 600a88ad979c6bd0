"""Policies as they are written in a recipe, and operands in words.

A Policy (tables.py) and its dictionary form carry the same information, so a policy can be written
in a recipe, stored with a run, read back.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from typing import Any

from nvfp4.errors import UserError
from nvfp4.numerics.spec import QuantSpec
from nvfp4.precision.tables import (
    CHOICES,
    COMPUTE_DTYPES,
    GEMMS,
    SOURCES,
    Dgrad,
    Fprop,
    Policy,
    Wgrad,
)

__all__ = [
    "CHOICES", "COMPUTE_DTYPES", "GEMMS", "Dgrad", "Fprop", "Policy", "Wgrad", "facts", "label",
    "policy_from_dict", "unknown",
]  # fmt: skip


def unknown(what: str, value: object, allowed: Iterable[str], where: str) -> UserError:
    """One line: the value, where it stands, the nearest allowed one, all allowed ones."""
    names = list(allowed)
    begun = [name for name in names if value and name.startswith(str(value))]
    close = begun or get_close_matches(str(value), names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return UserError(f"{where}: unknown {what} {value!r}; {hint}allowed: {', '.join(names)}")


def _operand(entry: object, base: QuantSpec | None, where: str) -> QuantSpec | None:
    """One operand of a written policy: null, or spec fields that replace those of the base."""
    if entry is None:
        return None
    if isinstance(entry, QuantSpec):
        return entry
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: {entry!r} is no operand; write null or a mapping of spec fields")
    known = [field.name for field in fields(QuantSpec)]
    for key in entry:
        if key not in known:
            raise unknown("field", key, known, where)
    missing = [name for name in ("format", "block") if name not in entry]
    if base is None and missing:
        raise UserError(
            f"{where}: the base policy does not quantise this operand, so its spec must be "
            f"complete; add {' and '.join(missing)}"
        )
    try:
        return QuantSpec(**{**(asdict(base) if base else {}), **entry})
    except UserError as error:
        if read := re.fullmatch(r"(\w+): '(.*)' is not one of (.*)", str(error)):
            raise unknown(read[1], read[2], read[3].split(", "), where) from None
        raise UserError(f"{where}: {error}") from None


def policy_from_dict(
    name: str, data: Mapping[str, Any], known: Mapping[str, Policy], where: str
) -> Policy:
    """Policy of a dictionary: that of Policy.to_dict(), or a `base` and what differs from it.

    A GEMM or an operand written as null is not quantised; a GEMM written as the name of a policy is
    done as that policy does it; spec fields replace those of the base. For example the paper's
    policy without stochastic rounding in dgrad and rotation in wgrad; NVFP4 with MXFP8 backward:

        {base: nvfp4, dgrad: {grad_output: {rounding: nearest}},
         wgrad: {grad_output: {hadamard: 0}, input: {hadamard: 0}}}
        {base: nvfp4, dgrad: mxfp8, wgrad: mxfp8}

    Raises UserError at unknown keys, bases, fields and values, and at contradictions; `where` names
    the place, for instance precision.policies.mine.
    """
    if not isinstance(data, Mapping) or not data:
        raise UserError(f"{where}: {data!r} is no policy; write a mapping such as {{base: nvfp4}}")
    keys = ["base", *(field.name for field in fields(Policy))]
    for key in data:
        if key not in keys:
            raise unknown("key", key, keys, where)
    if data.get("name", name) != name:
        raise UserError(f"{where}.name is {data['name']!r}; leave it out, or write {name!r}")
    base_name = data.get("base")
    if base_name is not None and base_name not in known:
        raise unknown("policy", base_name, known, f"{where}.base")
    base = Policy("") if base_name is None else known[base_name]
    values: dict[str, Any] = {}
    for key, value in data.items():
        place = f"{where}.{key}"
        if key in GEMMS:
            values[key] = _table(key, value, base, known, place)
        elif key == "by_kind":
            values[key] = _by_kind(value, place)
        elif key in CHOICES:
            if value not in CHOICES[key]:
                what = "dtype" if key == "compute_dtype" else key
                raise unknown(what, value, CHOICES[key], place)
            values[key] = value
        elif key == "split_fraction":
            if type(value) not in (int, float):
                raise UserError(f"{place}: {value!r} is no number")
            values[key] = float(value)
        elif key != "base":
            values[key] = value
    try:
        policy = replace(base, **{**values, "name": name})
    except UserError as error:
        raise UserError(f"{where}: {str(error).split(': ', 1)[1]}") from None
    for key in values:
        if values[key] != getattr(_PLAIN, key) and (need := _without_effect(policy, key)):
            raise UserError(f"{where}.{key}: {values[key]!r} has no effect: {need}")
    return policy


_PLAIN = Policy("")


def _without_effect(policy: Policy, key: str) -> str:
    """What a field lacks to change anything; empty if it does."""
    if key in ("amax_history", "amax_algorithm", "margin") and not policy.delayed():
        return "no operand has scale_rule delayed"
    if key.startswith("osci_") and policy.weight_hook == "none":
        return "weight_hook is none"
    if key == "accumulate" and all(policy.accumulation(gemm) == "fp32" for gemm in GEMMS):
        return "no GEMM has two quantised operands"
    return ""


def _table(
    gemm: str, entry: object, base: Policy, known: Mapping[str, Policy], where: str
) -> Fprop | Dgrad | Wgrad:
    """The operand table of one GEMM of a written policy."""
    if entry is None:
        return GEMMS[gemm]()
    if isinstance(entry, str):
        if entry not in known:
            raise unknown("policy", entry, known, where)
        return getattr(known[entry], gemm)
    roles = base.operands(gemm)
    if not isinstance(entry, Mapping):
        raise UserError(
            f"{where}: {entry!r} is no operand table; write null, the name of a policy, or a "
            f"mapping of {', '.join(roles)}"
        )
    table = getattr(base, gemm)
    names = [field.name for field in fields(table)]
    for key in entry:
        if key not in names:
            raise unknown("operand", key, names, where)
    changes: dict[str, Any] = {
        role: _operand(entry[role], spec, f"{where}.{role}")
        for role, spec in roles.items()
        if role in entry
    }
    if "source" in entry:
        if entry["source"] not in SOURCES:
            raise unknown("source", entry["source"], SOURCES, f"{where}.source")
        changes["source"] = entry["source"]
    return replace(table, **changes)


def _by_kind(entry: object, where: str) -> tuple[tuple[str, str], ...]:
    """Pairs of a glob on the kind and the name of a policy."""
    good = isinstance(entry, Mapping) and all(isinstance(v, str) for v in entry.values())
    if not good:
        raise UserError(f"{where}: {entry!r} is no mapping such as {{attention.*: bf16}}")
    return tuple((str(glob), name) for glob, name in entry.items())  # pyright: ignore[reportAttributeAccessIssue]


def facts(spec: QuantSpec | None, dtype: str) -> dict[str, Any]:
    """What a spec makes of an operand, field by field; without a spec, its plain dtype."""
    if spec is None:
        return {"format": dtype}
    values = asdict(spec)
    if not spec.hadamard:
        del values["signs"]  # they mean nothing without a rotation
    return values


def label(operand: Mapping[str, Any]) -> str:
    """Facts of an operand in a few words, for example `e2m1 1x16 stochastic hadamard16`.

    NVFP4's own choices go without saying, and those that a format leaves no choice in.
    """
    words = [operand["format"]]
    if "block" in operand:
        scales = operand["block_scale"]
        level = operand.get("second_level", "")
        words.append(operand["block"])
        if scales != "e4m3":
            words.append(f"{scales}-scales")
        if operand["scale_rule"] != "current":
            words.append(operand["scale_rule"])
        if level in ("row", "outer128"):
            words.append(f"{level}-amax")
        elif level == "none" and scales in ("e4m3", "ue5m3"):
            words.append("no-amax")
        if operand.get("range", 448) != 448:
            words.append(f"range{operand['range']}")
        words.append(operand["rounding"])
        if operand["hadamard"]:
            words.append(f"hadamard{operand['hadamard']}")
            if operand.get("signs", "fixed") != "fixed":
                words.append(f"{operand['signs']}-signs")
    return " ".join(words)
