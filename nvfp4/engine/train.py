"""Training, top to bottom: run folder, data, model, plan, optimizer, checkpoint, then the steps."""

import contextlib
import functools
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvfp4 import backends
from nvfp4.config import Recipe
from nvfp4.engine import parallel
from nvfp4.engine.execution import Execution, write_plans
from nvfp4.engine.gemm_error import gemm_error
from nvfp4.engine.metrics import Metrics
from nvfp4.engine.runfolder import (
    RunFolder,
    disk_full,
    environment,
    identity,
    is_disk_full,
    is_finished,
    recipe_changes,
)
from nvfp4.engine.signals import StopRequest
from nvfp4.errors import TrainingError, UserError
from nvfp4.models.configs import count_parameters

Echo = Callable[[str], None]


def train(recipe: Recipe, *, stop_after: int | None = None) -> int:
    """Train `recipe` in its run folder, or go on with what is there. Returns the exit code, 0.

    One process, or one of many under torchrun. `stop_after` ends the run after that step as SIGTERM
    would. Raises UserError in one line for what the user can change; under torchrun rank 0 prints
    it and every rank leaves with its exit code (SystemExit).
    """
    rank, processes = parallel.rank_and_size()
    try:
        accumulation = recipe.accumulation(processes)  # UserError if the batch does not divide
        if is_finished(recipe):
            if rank == 0:
                print(f"{recipe.run.dir}: all {recipe.steps} steps are trained", flush=True)
            return 0
        with warnings.catch_warnings():
            # Megatron-Core warns of optional packages that are not there (`nvfp4 doctor` tells),
            # torch of the collectives that Megatron-Core calls.
            warnings.filterwarnings("ignore", module=r"megatron\.")
            warnings.filterwarnings(
                "ignore", category=FutureWarning, module=r"torch\.distributed\."
            )
            try:
                _run(recipe, accumulation, stop_after)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                what = str(error.filename or "a file of the run")
                raise disk_full(what, Path(recipe.run.dir)) from error
        return 0
    except UserError as error:
        if processes > 1:
            parallel.print_once_and_exit(error, rank)
        raise


def _run(recipe: Recipe, accumulation: int, stop_after: int | None) -> None:
    run = recipe.run
    world = parallel.start(recipe.parallel, seed=run.seed, deterministic=run.deterministic)
    try:
        with RunFolder(Path(run.dir), main=world.main) as folder:
            _train(recipe, folder, world, accumulation, stop_after)
    finally:
        if world.size == 1 or sys.exc_info()[0] is None:  # after an error other ranks may be stuck
            parallel.stop(world)


def _train(
    recipe: Recipe,
    folder: RunFolder,
    world: parallel.World,
    accumulation: int,
    stop_after: int | None,
) -> None:
    # These import Megatron-Core, which parallel.start has prepared for this machine.
    from nvfp4.data.blend import build_datasets, prepare
    from nvfp4.engine import checkpoint
    from nvfp4.engine.batches import micro_batches
    from nvfp4.engine.optimizer import build_optimizer, build_schedule
    from nvfp4.engine.step import (
        build_model,
        evaluate,
        forward_backward,
        update,
    )

    echo: Echo = functools.partial(print, flush=True) if world.main else lambda text: None
    batch_size, settings = recipe.train.global_batch_size, recipe.metrics
    if recipe.checkpoint.resume == "never":
        folder.refuse_if_used()

    # data
    prepared = prepare(recipe.data, vocab_size=recipe.model.vocab_size, echo=echo)
    train_set, valid_set = build_datasets(
        prepared,
        seq_length=recipe.model.seq_length,
        train_samples=recipe.steps * batch_size,
        valid_samples=settings.valid_batches * batch_size,
        seed=recipe.run.seed,
        cache_dir=recipe.data.cache_dir,
    )

    # backend, model, plan, optimizer
    backend = backends.choose(recipe.run.backend)
    backends.activate(backend)
    parameters = count_parameters(recipe.model)
    _introduce(recipe, backend, world, parameters, echo)
    model, linears = build_model(recipe, world)
    optimizer = build_optimizer(recipe, model)
    state = checkpoint.TrainState(model, optimizer, build_schedule(recipe, optimizer))

    # where the run stands
    who = functools.partial(identity, recipe, prepared)
    saved, found = folder.path, checkpoint.find_newest(folder.path, echo, world)
    if found:
        saved, record = found
        checkpoint.check_identity(
            saved, record, who(record["step"]), recipe.checkpoint.allow_changes, echo
        )
        if record["step"] >= recipe.steps:
            echo(f"{saved} is at step {record['step']}, the recipe ends at {recipe.steps}: done")
            return
        checkpoint.load(saved, record, state)
        echo(f"resuming from {saved}, after step {state.step} of {recipe.steps}")
        if changes := recipe_changes(saved, recipe):
            echo(f"the recipe has changed since: {'; '.join(changes)}")
    env = environment(recipe, prepared, backend, world, parameters)
    folder.write_environment(env, echo, resumed=bool(found))
    folder.write("recipe.yaml", recipe.to_yaml())
    if world.main:
        write_plans(recipe, folder.path)
    execution = Execution(
        recipe, model, linears, folder, backend, world,
        first=state.step + 1, remembered=state.method,
    )  # fmt: skip

    # the steps
    with StopRequest() as stop, _metrics(recipe, folder, state.step, world) as metrics:
        stopping = False
        while state.step < recipe.steps and not stopping:
            began, step = time.perf_counter(), state.step + 1
            batches = micro_batches(
                train_set,
                first_sample=state.samples,
                count=accumulation,
                size=recipe.train.micro_batch_size,
                world=world,
            )
            tokens = step * recipe.tokens_per_step
            switch = execution.begin(step)
            if switch and metrics:
                metrics.note(step, f"step {step}: switch of precision: {switch}")
            last = step == recipe.steps
            row: dict[str, Any] = {"step": step, "tokens": tokens, "loss": math.nan}
            try:
                with (
                    gemm_error(recipe, folder, world, step),
                    execution.passes(),
                    execution.audited(),
                ):
                    row["loss"] = forward_backward(
                        recipe, model, batches, accumulation, step, world
                    )
                lr, grad_norm = update(optimizer, state.schedule, batch_size, step, row["loss"])
                execution.end()
                state.step, state.samples = step, state.samples + batch_size
                seconds = time.perf_counter() - began
                row |= {"grad_norm": grad_norm, "lr": lr} | ({"switch": switch} if switch else {})
                if last or step % settings.valid_every == 0:
                    with execution.passes():
                        row["valid_loss"] = evaluate(recipe, model, valid_set, step, world)
            except TrainingError as error:
                if metrics:
                    metrics.write_failure(row | error.row | {"error": str(error)})
                raise
            if metrics:
                metrics.write(row, seconds, recipe.tokens_per_step)

            stopping = parallel.any_rank(bool(stop.received), world) or step == stop_after
            if last or stopping or step % recipe.checkpoint.every == 0:
                if metrics:
                    metrics.sync()
                state.method = execution.remembered
                saved = checkpoint.save(folder.path, state, who(step), recipe, world)
    if state.step == recipe.steps:
        echo(f"finished: {recipe.steps} steps, last checkpoint {saved}")
    else:
        echo(
            f"stopped ({stop.received or 'as asked'}) after step {state.step} of {recipe.steps}, "
            f"saved in {saved}; the same command goes on from there"
        )


def _metrics(recipe: Recipe, folder: RunFolder, step: int, world: parallel.World):
    """The open logs on rank 0; nothing on the others."""
    if not world.main:
        return contextlib.nullcontext()
    return Metrics(
        folder.path,
        step=step,
        total=recipe.steps,
        every=recipe.metrics.every,
        tensorboard=recipe.metrics.tensorboard,
        stream=sys.stdout,
    )


def _introduce(
    recipe: Recipe, backend: backends.Backend, world: parallel.World, parameters: int, echo: Echo
) -> None:
    """What will be trained, in a few lines, before anything long happens."""
    micro, length = recipe.train.micro_batch_size, recipe.model.seq_length
    echo(f"{recipe.run.name}: {parameters:,} parameters, blocks {recipe.model.pattern}, "
         f"in {recipe.run.dir}")  # fmt: skip
    echo(recipe.plan.summary())
    for switch in recipe.switches:
        echo(f"from step {switch.step}: {switch.text}")
    for reason in backend.reasons:
        echo(f"backend {reason}")
    echo(
        f"{recipe.steps} steps of {recipe.train.global_batch_size} x {length} = "
        f"{recipe.tokens_per_step:,} tokens: {world.dp_size} data-parallel x "
        f"{recipe.accumulation(world.size)} micro-batches of {micro}"
    )
