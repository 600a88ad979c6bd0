"""Data work under torch.distributed: rank 0 does it, the others wait, and all see the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from nvfp4.errors import UserError

T = TypeVar("T")


def _distributed() -> Any:
    """torch.distributed if it is initialised; without importing torch, which then cannot be."""
    torch = sys.modules.get("torch")
    if (
        torch is None
        or not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
    ):
        return None
    return torch.distributed


def rank_zero_first(work: Callable[[bool], T]) -> T:
    """work(True) on rank 0; then work(False) on the others, which find its results in the cache.

    An error on rank 0 is raised on every rank, instead of leaving the others waiting for ever.
    """
    dist = _distributed()
    if dist is None:
        return work(True)
    first = dist.get_rank() == 0
    result, error = None, None
    if first:
        try:
            result = work(True)
        except Exception as caught:  # sent to the other ranks, then raised here again
            error = caught
    told = [None if error is None else (isinstance(error, UserError), type(error), str(error))]
    dist.broadcast_object_list(told, src=0)
    if error is not None:
        raise error
    if told[0] is not None:
        expected, kind, message = told[0]
        raise kind(message) if expected else RuntimeError(f"rank 0 failed: {message}")
    return result if first else work(False)  # type: ignore[return-value]


def check_ranks_agree(value: str, what: str) -> None:
    """UserError on every rank, naming the first that differs, unless all have rank 0's value."""
    dist = _distributed()
    if dist is None:
        return
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UserError(
                f"rank {rank} sees other data than rank 0 ({what} {other}, not {values[0]}): "
                "are the files, data.cache_dir and the Python version the same on all nodes?"
            )
