"""What one linear layer does, as data: a format for each operand of each of its three GEMMs.

    fprop  y  = x w^T    input (M, K), weight (N, K)             summed over K, the input features
    dgrad  dx = dy w     grad_output (M, N), weight^T (K, N)     summed over N, the output features
    wgrad  dw = dy^T x   grad_output^T (N, M), input^T (K, M)    summed over M, the tokens

An operand is a QuantSpec, or None: kept in the compute dtype. A Policy and its dictionary form
carry the same information, so a policy can be written in a recipe, stored with a run, read back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

from nvfp4.errors import UserError
from nvfp4.numerics.spec import QuantSpec

COMPUTE_DTYPES = ("bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Fprop:
    """Operands of y = x w^T, both with blocks along the input features."""

    input: QuantSpec | None = None
    weight: QuantSpec | None = None


@dataclass(frozen=True, slots=True)
class Dgrad:
    """Operands of dx = dy w, both with blocks along the output features."""

    grad_output: QuantSpec | None = None
    weight: QuantSpec | None = None


@dataclass(frozen=True, slots=True)
class Wgrad:
    """Operands of dw = dy^T x, both with blocks along the tokens."""

    grad_output: QuantSpec | None = None
    input: QuantSpec | None = None


GEMMS: dict[str, type] = {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}


@dataclass(frozen=True, slots=True)
class Policy:
    """What one linear does.

    compute_dtype is the dtype of unquantised operands and of the results y and dx ("bf16": rounded
    to BF16 once per GEMM; "fp32": not rounded). dw is always FP32.
    """

    name: str
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    fprop: Fprop = Fprop()
    dgrad: Dgrad = Dgrad()
    wgrad: Wgrad = Wgrad()

    def operands(self, gemm: str) -> dict[str, QuantSpec | None]:
        """role -> spec of one GEMM, in the order of the operand table above."""
        table = getattr(self, gemm)
        return {field.name: getattr(table, field.name) for field in fields(table)}

    @property
    def specs(self) -> list[QuantSpec]:
        """Specs of all quantised operands; empty if nothing is quantised."""
        operands = [spec for gemm in GEMMS for spec in self.operands(gemm).values()]
        return [spec for spec in operands if spec is not None]

    def stochastic(self, gemm: str) -> bool:
        """Whether a GEMM rounds an operand stochastically, so that it needs random bits."""
        specs = self.operands(gemm).values()
        return any(spec is not None and spec.rounding == "stochastic" for spec in specs)

    @property
    def token_multiple(self) -> int:
        """Tokens come in multiples of this: 16 if any operand has blocks of 16, else 1."""
        return max((16 for spec in self.specs if spec.block_shape[1] == 16), default=1)

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionary: name, compute_dtype, then gemm -> role -> spec fields or None."""
        return asdict(self)


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
    try:
        return QuantSpec(**{**(asdict(base) if base else {}), **entry})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except TypeError:
        missing = [name for name in ("format", "block") if name not in entry]
        raise UserError(
            f"{where}: the base policy does not quantise this operand, so its spec must be "
            f"complete; add {' and '.join(missing) or 'the missing fields'}"
        ) from None


def policy_from_dict(
    name: str, data: Mapping[str, Any], known: Mapping[str, Policy], where: str
) -> Policy:
    """Policy of a dictionary: that of Policy.to_dict(), or a `base` and what differs from it.

    A GEMM or an operand written as null is not quantised; spec fields replace those of the base.
    For example the paper's policy without stochastic rounding in dgrad and rotation in wgrad:

        {base: nvfp4, dgrad: {grad_output: {rounding: nearest}},
         wgrad: {grad_output: {hadamard: 0}, input: {hadamard: 0}}}

    Raises UserError at unknown keys, bases, fields and values; `where` names the place, for
    instance precision.policies.mine.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: {data!r} is no policy; write a mapping such as {{base: nvfp4}}")
    keys = ["base", "name", "compute_dtype", *GEMMS]
    for key in data:
        if key not in keys:
            raise unknown("key", key, keys, where)
    if data.get("name", name) != name:
        raise UserError(f"{where}.name is {data['name']!r}; leave it out, or write {name!r}")
    base_name = data.get("base")
    if base_name is not None and base_name not in known:
        raise unknown("policy", base_name, known, f"{where}.base")
    base = Policy("") if base_name is None else known[base_name]
    dtype = data.get("compute_dtype", base.compute_dtype)
    if dtype not in COMPUTE_DTYPES:
        raise unknown("dtype", dtype, COMPUTE_DTYPES, f"{where}.compute_dtype")
    tables = {gemm: getattr(base, gemm) for gemm in GEMMS}
    for gemm in tables.keys() & data.keys():
        tables[gemm] = _table(gemm, data[gemm], base, f"{where}.{gemm}")
    return Policy(name, dtype, **tables)


def _table(gemm: str, entry: object, base: Policy, where: str) -> Any:
    """The operand table of one GEMM of a written policy."""
    roles = base.operands(gemm)
    if entry is None:
        return GEMMS[gemm]()
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: {entry!r} is no operand table; write null or {', '.join(roles)}")
    for role in entry:
        if role not in roles:
            raise unknown("operand", role, roles, where)
    return GEMMS[gemm](
        **{
            role: _operand(entry[role], spec, f"{where}.{role}") if role in entry else spec
            for role, spec in roles.items()
        }
    )


def facts(spec: QuantSpec | None, dtype: str) -> dict[str, Any]:
    """What a spec makes of an operand, field by field; without a spec, its plain dtype."""
    if spec is None:
        return {"format": dtype}
    values = asdict(spec)
    if not spec.hadamard:
        del values["signs"]  # they mean nothing without a rotation
    return values


def label(operand: Mapping[str, Any]) -> str:
    """Facts of an operand in a few words, for example `e2m1 1x16 stochastic hadamard16`."""
    words = [operand["format"]]
    if "block" in operand:
        words.append(operand["block"])
        # NVFP4's own choices go without saying; what differs from them is said.
        if operand["block_scale"] != "e4m3":
            words.append(f"{operand['block_scale']}-scales")
        if operand["scale_rule"] != "current":
            words.append(operand["scale_rule"])
        words.append(operand["rounding"])
        if operand["hadamard"]:
            words.append(f"hadamard{operand['hadamard']}")
    return " ".join(words)
