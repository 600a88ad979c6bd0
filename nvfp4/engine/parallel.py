"""Processes: one, or many under torchrun; who they are, what they share, and how they end.

``nvfp4 train`` runs alone; ``torchrun ... -m nvfp4 train`` sets RANK and WORLD_SIZE and runs as
many. Both come through here, over NCCL where there is CUDA and over gloo elsewhere, so that
Megatron-Core's parallel state is always set up.
"""

import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy
import torch
import torch.distributed as dist

from nvfp4.engine import cpu
from nvfp4.errors import MachineError, UserError
from nvfp4.machine import keep_freed_memory

_SECONDS_FOR_RANK_0 = 10.0
_store: Any = None  # shared by all ranks; carries the news that a rank failed


class Layout(Protocol):
    """The recipe's ``parallel:`` section, in Megatron's names."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool


@dataclass(frozen=True)
class World:
    """This process among all: ``rank`` of ``size``; data-parallel ``dp_rank`` of ``dp_size``."""

    rank: int
    size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    owned: bool  # we started the process group, so we end it

    @property
    def main(self) -> bool:
        return self.rank == 0


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of processes, from torchrun; 0 and 1 without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def start(layout: Layout, *, seed: int, deterministic: bool) -> World:
    """Join the other processes, set up Megatron's groups and every seed.

    The number of processes must be a multiple of tensor x pipeline x context parallel, which
    Recipe.accumulation checks. Raises MachineError if a process has no GPU of its own.
    """
    on_cpu = cpu.install()
    if on_cpu:
        keep_freed_memory()
    if deterministic and not on_cpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    owned = not dist.is_initialized()
    if owned:
        device = _join(on_cpu)
    else:  # the caller's processes, such as a notebook's or a test's
        device = (
            torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        )

    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
    )
    # Only initial weights are drawn from these; stochastic rounding is addressed
    # (precision/context.py).
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if on_cpu or deterministic:
        # Free on a CPU, where it only turns an operation without a fixed order into an error.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        device=device,
        owned=owned,
    )


def stop(world: World) -> None:
    """Leave the groups and take the CPU remedies back; the process can start another run."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.use_deterministic_algorithms(False)
    cpu.uninstall()
    if world.owned:
        dist.destroy_process_group()


def any_rank(flag: bool, world: World) -> bool:
    """True on every rank if it is True on one of them."""
    if world.size == 1:
        return flag
    votes = torch.tensor([int(flag)], device=world.device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def of_any_rank(lines: list[str], world: World) -> list[str]:
    """The lines of all ranks, in order of the ranks, the same on each; one that several have
    counts once."""
    if not any_rank(bool(lines), world) or world.size == 1:
        return lines
    gathered: list[list[str]] = [[]] * world.size
    dist.all_gather_object(gathered, lines)
    return list(dict.fromkeys(line for one in gathered for line in one))


def sum_of_reports(reports: list[torch.Tensor], world: World) -> tuple[float, float]:
    """Totals of the (loss sum, token count) pairs of all micro-batches and ranks, the same on every
    rank.

    Only the last pipeline stage has reports; tensor-parallel ranks have equal ones and count once.
    """
    from megatron.core import parallel_state

    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    if reports:
        total += torch.stack(reports).sum(0)
    if world.size > 1:
        dist.all_reduce(
            total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        stages: Any = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(total, src=last, group=stages)
    loss, tokens = total.tolist()
    return loss, tokens


def print_once_and_exit(error: UserError, rank: int) -> NoReturn:
    """End every process of a torchrun job with the exit code of a user error that is printed once.

    Rank 0 prints. The others end a little later, silently, for torchrun stops every process when
    the first has ended. An error that rank 0 does not have is printed here, with the rank. Before
    the ranks have met, an error follows from the recipe alone, and rank 0 has it too.
    """
    if rank == 0:
        print(f"nvfp4 train: {error}", file=sys.stderr, flush=True)
        if _store is not None:
            _store.set("nvfp4_error", "0")
        sys.exit(error.exit_code)
    deadline = time.monotonic() + _SECONDS_FOR_RANK_0
    while time.monotonic() < deadline:
        if _store is None or _store.check(["nvfp4_error"]):
            time.sleep(2.0)
            sys.exit(error.exit_code)
        time.sleep(0.1)
    print(f"nvfp4 train: rank {rank}: {error}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def _join(on_cpu: bool) -> torch.device:
    """Start the default process group, at torchrun's meeting point or alone; returns our device.

    Raises MachineError if this machine has fewer GPUs than processes.
    """
    global _store
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _store, rank, size = next(dist.rendezvous("env://"))  # pyright: ignore
    else:
        _store, rank, size = dist.HashStore(), 0, 1  # pyright: ignore
    device = torch.device("cpu") if on_cpu else _local_gpu()
    dist.init_process_group("gloo" if on_cpu else "nccl", store=_store, rank=rank, world_size=size)
    return device


def _local_gpu() -> torch.device:
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise MachineError(
            f"process {local} of this machine has no GPU of its own: {there} found, each process "
            "needs one; lower --nproc-per-node"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
