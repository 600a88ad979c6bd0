"""Checkpoints: Megatron's sharded format, complete or absent, and never continued under other
numerics unasked.

``checkpoints/step_000020/`` holds what ``megatron.core.dist_checkpointing`` writes (any parallel
layout can read it; what policies remember, such as amax histories, is part of it), the recipe, and
``checkpoint.json``: step, consumed samples, the run's identity and the size of every file. It is
written under a temporary name, synced, and renamed; only then is ``latest`` beside the folder
replaced. A kill at any instant leaves the previous checkpoint valid. No generator state is stored:
initial weights are the only draw, and stochastic rounding is addressed by seed, step and element
(precision/context.py).
"""

import json
import os
import queue
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # noqa: F401  without it Megatron's writer processes die and its save waits for ever
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from nvfp4.config import Recipe
from nvfp4.engine.optimizer import allocate_state, load_optimizer
from nvfp4.engine.parallel import World
from nvfp4.engine.runfolder import disk_full, is_disk_full
from nvfp4.errors import UserError

RECORD = "checkpoint.json"
_FULL = 2**20  # bytes: a disk with less room than this is why a write failed
# fully_reshardable: the one format of the distributed optimizer that any other layout reads and
# that torch's AdamW survives (dp_reshardable resets its step to 1; the default,
# fully_sharded_model_space, does not load in 0.16.1).
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass
class TrainState:
    """What training changes: the wrapped model, its optimizer and schedule, how far they are.

    method: what policies remember from step to step, by name (precision/state.py).
    """

    model: DistributedDataParallel
    optimizer: ChainedOptimizer
    schedule: OptimizerParamScheduler
    step: int = 0
    samples: int = 0
    method: dict[str, Tensor] = field(default_factory=dict)


def save(folder: Path, state: TrainState, identity: dict, recipe: Recipe, world: World) -> Path:
    """Write folder/checkpoints/step_N, point folder/latest to it, keep the newest
    checkpoint.keep."""
    parent = folder / "checkpoints"
    final = parent / f"step_{state.step:06d}"
    temporary = parent / f".writing_{final.name}"
    try:
        _write(temporary, final, state, identity, recipe, world)
    except Exception as error:
        # Megatron's writers wrap what went wrong in an error of their own, which names no disk.
        full = shutil.disk_usage(folder).free < _FULL or is_disk_full(error)
        shutil.rmtree(temporary, ignore_errors=True)
        if not full:
            raise
        raise disk_full(f"checkpoint {final}", folder) from error
    return final


def _write(
    temporary: Path, final: Path, state: TrainState, identity: dict, recipe: Recipe, world: World
) -> None:
    """Write a checkpoint under its temporary name, then make it the newest one."""
    folder = final.parent.parent
    if world.main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    # For saves in the background Megatron passes the writers' results through a server process that
    # it spawns. This save waits, so a queue in this process does, and saves seconds of imports.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_sharded(state), str(temporary), content_metadata=dict(_FORMAT))
    if world.main:
        (temporary / "recipe.yaml").write_text(recipe.to_yaml())
        record = {
            "step": state.step,
            "samples": state.samples,
            "identity": identity,
            "files": {path.name: path.stat().st_size for path in sorted(temporary.iterdir())},
        }
        (temporary / RECORD).write_text(json.dumps(record, indent=1))
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)  # an incomplete one of that name
        temporary.rename(final)
        _sync(final.parent)
        _point_latest(folder, final)
        for old, _ in complete_checkpoints(folder)[: -recipe.checkpoint.keep]:
            shutil.rmtree(old.rename(old.with_name(f".removing_{old.name}")))
    dist.barrier()


def find_newest(
    folder: Path, echo: Callable[[str], None], world: World
) -> tuple[Path, dict] | None:
    """The newest complete checkpoint and its record, the same on every rank.

    Sweeps up what killed processes left, and says which checkpoints it passes over. UserError if
    there are checkpoints and none is complete: a fresh start would write over what is left.
    """
    found, damaged = None, False
    if world.main:
        for rest in (folder / "checkpoints").glob(".*_step_*"):
            shutil.rmtree(rest, ignore_errors=True)
        found = next(reversed(complete_checkpoints(folder, echo)), None)
        damaged = found is None and any((folder / "checkpoints").glob("step_*"))
    if world.size > 1:
        news = [found, damaged]
        dist.broadcast_object_list(news, src=0)
        found, damaged = news
    if damaged:
        raise UserError(
            f"{folder / 'checkpoints'}: no checkpoint in it is complete; restore one, or delete "
            "that folder to start again from step 1"
        )
    return found


def complete_checkpoints(
    folder: Path, echo: Callable[[str], None] = lambda text: None
) -> list[tuple[Path, dict]]:
    """(path, record) of every checkpoint whose files are all there in full, oldest first."""
    complete = []
    for path in (folder / "checkpoints").glob("step_*"):
        try:
            record = json.loads((path / RECORD).read_text())
            sizes = {name: (path / name).stat().st_size for name in record["files"]}
            wrong = [name for name, size in record["files"].items() if sizes[name] != size]
            if wrong:
                raise ValueError(f"{wrong[0]} has {sizes[wrong[0]]} bytes")
            complete.append((path, record))
        except (OSError, ValueError, KeyError) as error:
            echo(f"checkpoint {path} is incomplete ({error}) and is not used")
    return sorted(complete, key=lambda found: found[1]["step"])


def load(path: Path, record: dict, state: TrainState) -> None:
    """Fill model, optimizer and schedule in place from a checkpoint written under any layout."""
    allocate_state(state.optimizer)
    wanted = _sharded(state, is_loading=True)
    loaded = dist_checkpointing.load(wanted, str(path), strict="raise_all")
    assert isinstance(loaded, dict)
    state.model.module.load_state_dict(loaded["model"])
    load_optimizer(state.optimizer, loaded["optimizer"])
    state.schedule.load_state_dict(loaded["schedule"])
    state.step, state.samples = record["step"], record["samples"]
    state.method = loaded.get("method", {})


def differences(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    """`key: old -> new` for what differs between two flat identities; linears that change alike
    share a line, and a policy that only one of them uses is not a difference of its own."""
    changes, linears = [], {}
    for key in sorted({*saved, *current}):
        change = f"{saved.get(key, 'absent')} -> {current.get(key, 'absent')}"
        if saved.get(key) == current.get(key):
            continue
        if key.startswith("precision of "):
            linears.setdefault(change, []).append(key)
        elif not key.startswith("policy ") or (key in saved and key in current):
            changes.append(f"{key}: {change}")
    for change, keys in linears.items():
        others = f" and {len(keys) - 1} other linears" if len(keys) > 1 else ""
        changes.append(f"{keys[0]}{others}: {change}")
    return changes


def check_identity(
    path: Path, record: dict, identity: dict, allow_changes: bool, echo: Callable[[str], None]
) -> None:
    """Refuse to continue a run as another one, or say what is changed if that is allowed."""
    changes = differences(record["identity"], identity)
    if not changes:
        return
    shown = "; ".join(changes[:6]) + (f"; and {len(changes) - 6} more" if len(changes) > 6 else "")
    if not allow_changes:
        raise UserError(
            f"{path} was trained under another recipe: {shown}; undo the change, choose another "
            "run.dir, or set checkpoint.allow_changes=true"
        )
    echo(f"continuing {path} under another recipe, as allowed: {shown}")


def _sharded(state: TrainState, is_loading: bool = False) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**_FORMAT, "dp_cp_group": group}
    model = state.model.module.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    optimizer = state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    rest = {"schedule": state.schedule.state_dict(), "method": state.method}  # alike on all ranks
    return {"model": model, "optimizer": optimizer, **rest}


def _point_latest(folder: Path, checkpoint: Path) -> None:
    temporary = folder / ".latest"
    temporary.write_text(f"{checkpoint.relative_to(folder)}\n")
    _sync(temporary)
    temporary.replace(folder / "latest")
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
