"""What must fit together between the sections of a recipe. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nvfp4.errors import UserError
from nvfp4.models.configs import validate_parallel

if TYPE_CHECKING:
    from nvfp4.config_schema import Recipe
    from nvfp4.precision.operands import Policy


def contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, sentence) for all that is wrong between sections."""
    train, schedule, parallel, model = recipe.train, recipe.schedule, recipe.parallel, recipe.model
    if train.steps and train.tokens:
        yield (
            "train.tokens",
            (
                f"train.steps is set too ({train.steps}); one of them says how long the run is; "
                "set the other one to null"
            ),
        )
    if not train.steps and not train.tokens:
        yield "train.steps", "neither train.steps nor train.tokens is set; set exactly one of them"
        return
    if recipe.train.global_batch_size % train.micro_batch_size:
        yield (
            "train.micro_batch_size",
            (
                f"train.global_batch_size {train.global_batch_size} is no multiple of it "
                f"({train.micro_batch_size})"
            ),
        )
    if schedule.warmup_steps + recipe.decay_steps > recipe.steps:
        yield (
            "schedule.warmup_steps",
            (
                f"{schedule.warmup_steps} warm-up and {recipe.decay_steps} decay steps do not fit "
                f"into {recipe.steps} steps; lower schedule.warmup_steps or schedule.decay_fraction"
            ),
        )
    if schedule.min_lr > recipe.optim.lr:
        yield "schedule.min_lr", f"{schedule.min_lr:g} is above optim.lr {recipe.optim.lr:g}"
    if (recipe.parity.window_tokens or 0) > recipe.steps * recipe.tokens_per_step:
        yield (
            "parity.window_tokens",
            (
                f"{recipe.parity.window_tokens:,} tokens are more than the whole run has "
                f"({recipe.steps * recipe.tokens_per_step:,})"
            ),
        )
    complaint = complaint_of(
        lambda: validate_parallel(
            model,
            tensor=parallel.tensor_model_parallel_size,
            pipeline=parallel.pipeline_model_parallel_size,
            context=parallel.context_parallel_size,
            sequence=parallel.sequence_parallel,
        )
    )
    if complaint:
        named = re.search(r"parallel\.\w+", complaint)
        yield named[0] if named else "parallel", complaint
    elif complaint := complaint_of(lambda: recipe.plans):
        yield "precision", complaint
    else:
        yield from blocks_of_tokens(recipe)
        yield from sharded_weights(recipe)
        for name, policy in policies(recipe).items():
            if policy.compute_dtype != train.dtype:
                yield (
                    "train.dtype",
                    (
                        f"is {train.dtype}, but policy {name} computes in {policy.compute_dtype}; "
                        f"set train.dtype={policy.compute_dtype}, or change precision.default"
                    ),
                )


def policies(recipe: Recipe) -> dict[str, Policy]:
    """The policies of all plans of a run, by name."""
    return {name: one for plan in recipe.plans for name, one in plan.policies.items()}


def sharded_weights(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """A weight hook needs whole master weights on every process."""
    parallel = recipe.parallel
    sizes = {
        "parallel.tensor_model_parallel_size": (parallel.tensor_model_parallel_size, 1),
        "parallel.pipeline_model_parallel_size": (parallel.pipeline_model_parallel_size, 1),
        "parallel.distributed_optimizer": (parallel.distributed_optimizer, False),
    }
    hooked = [one for one in policies(recipe).values() if one.weight_hook != "none"]
    for key, (value, whole) in sizes.items():
        if hooked and value != whole:
            yield (
                key,
                (
                    f"is {value}, but weight_hook {hooked[0].weight_hook} of policy "
                    f"{hooked[0].name} needs whole weights; set it to {str(whole).lower()}"
                ),
            )


def complaint_of(check: Callable[[], object]) -> str | None:
    """What a check of a lower floor says, if it refuses."""
    try:
        check()
    except UserError as error:
        return str(error)
    return None


def blocks_of_tokens(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """wgrad sums over the tokens of a micro-batch, which must be whole blocks."""
    batch, length = recipe.train.micro_batch_size, recipe.model.seq_length
    tokens, rest = divmod(batch * length, recipe.parallel.context_parallel_size)
    for name, policy in policies(recipe).items():
        multiple = policy.multiples["tokens"]
        if rest or tokens % multiple:
            yield (
                "model.seq_length",
                (
                    f"train.micro_batch_size {batch} x {length} / parallel.context_parallel_size "
                    f"{recipe.parallel.context_parallel_size} tokens are no multiple of "
                    f"{multiple}, the block of {name} in wgrad"
                ),
            )
