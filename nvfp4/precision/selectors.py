"""Which linears of a model a line of the recipe means: rules and switches select alike."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from nvfp4.errors import UserError
from nvfp4.precision.operands import unknown
from nvfp4.precision.plan import LinearInfo, PlanRow


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Linears that `match` (glob on the name), `kind` (glob on the kind) and `blocks` all select.

    blocks: comma-separated block indices and inclusive ranges with two dots; negative numbers count
    from the last block: "3", "0..1", "-8..", "0..1,5,-8..-1".
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    match: str | None = None
    kind: str | None = None
    blocks: Any = None  # a text or a number, read by select_blocks

    @property
    def empty(self) -> bool:
        """Whether nothing is asked of a linear."""
        return self.match is None and self.kind is None and self.blocks is None

    def __str__(self) -> str:
        given = [("match", self.match), ("kind", self.kind), ("blocks", self.blocks)]
        return " ".join(f"{key} {value!r}" for key, value in given if value is not None)


@dataclass(frozen=True)
class Rule(Selector):
    """The linears it selects use the policy `use`."""

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}
    __str__ = Selector.__str__

    use: str


@dataclass(frozen=True)
class Switch(Selector):
    """From `at` on, the selected linears (all by default) take `gemms` from the policy `to`.

    at: 0.82, a fraction of the run's steps; {tokens: N} or {step: N}. See schedule.py.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}
    __str__ = Selector.__str__

    at: Any  # read by schedule.first_step, which says in one line what is wrong with it
    gemms: tuple[str, ...]
    to: str


def select_blocks(expression: str | int, depth: int, where: str) -> frozenset[int]:
    """Block indices of an expression such as "0..1,5,-8.." for a model of `depth` blocks.

    Raises UserError if it cannot be read or leaves the model.
    """
    chosen: set[int] = set()
    for part in str(expression).replace(" ", "").split(","):
        read = re.fullmatch(r"(-?\d+)(\.\.(-?\d+)?)?", part)
        if not read:
            raise UserError(
                f"{where}: cannot read {part!r}; write indices and ranges such as '0..1,5,-8..-1'"
            )
        first = int(read[1])
        last = first if read[2] is None else -1 if read[3] is None else int(read[3])
        first, last = (index + depth if index < 0 else index for index in (first, last))
        if 0 <= last < first < depth:
            raise UserError(f"{where}: {part!r} runs backwards; write the smaller index first")
        if not 0 <= first <= last < depth:
            raise UserError(
                f"{where}: {part!r} does not fit a model of {depth} blocks (0 to {depth - 1})"
            )
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def select(
    linears: Sequence[LinearInfo | PlanRow], selector: Selector, depth: int, where: str
) -> set[str]:
    """Names of the linears a selector chooses; UserError if there are none."""
    chosen = list(linears)
    if selector.match is not None:
        chosen = [one for one in chosen if fnmatchcase(one.name, selector.match)]
        if not chosen:
            names = [one.name for one in linears]
            raise UserError(
                f"{where}: match {selector.match!r} fits no linear; the {len(names)} names run "
                f"from {names[0]} to {names[-1]}"
            )
    if selector.kind is not None:
        kinds = list(dict.fromkeys(one.kind for one in linears))
        if not any(fnmatchcase(kind, selector.kind) for kind in kinds):
            raise unknown("kind", selector.kind, kinds, f"{where}.kind")
        chosen = [one for one in chosen if fnmatchcase(one.kind, selector.kind)]
    if selector.blocks is not None:
        blocks = select_blocks(selector.blocks, depth, f"{where}.blocks")
        chosen = [one for one in chosen if one.block in blocks]
    if not chosen:
        raise UserError(
            f"{where} ({selector}) matches no linear: its selectors have none in common"
        )
    return {one.name for one in chosen}
