"""One optimizer step through Megatron-Core: the wrapped model, forward and backward, update,
evaluation.

Imports Megatron-Core at the top, so nvfp4.engine.parallel.start comes before the first import of
this module.
"""

import functools
import math
from collections.abc import Iterator

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from nvfp4.config import Recipe
from nvfp4.engine import cpu, parallel
from nvfp4.engine.batches import Batch, micro_batches, position_offset
from nvfp4.errors import TrainingError
from nvfp4.models.hybrid import build
from nvfp4.precision.context import StepContext, use_context


def build_model(
    recipe: Recipe, world: parallel.World
) -> tuple[DistributedDataParallel, frozenset[str]]:
    """The model in Megatron's wrappers, and the linears that the plan has for this rank.

    bf16: Float16Module makes every parameter BF16; the optimizer keeps FP32 masters. In either
    dtype gradients are summed in FP32 over micro-batches and ranks, then divided by the number of
    valid tokens of the global batch.
    """
    model = build(
        recipe.model,
        recipe.plan,
        dtype=recipe.train.dtype,
        parallel=recipe.parallel,
        seed=recipe.run.seed,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        deallocate_pipeline_outputs=recipe.parallel.pipeline_model_parallel_size > 1,
    ).to(world.device)
    linears = model.planned
    config = model.config
    if recipe.train.dtype == "bf16":
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=recipe.parallel.distributed_optimizer,
    )
    return DistributedDataParallel(config, ddp, model), linears


def forward_backward(
    recipe: Recipe,
    model: DistributedDataParallel,
    batches: Iterator[tuple[int, Batch]],
    count: int,
    step: int,
    world: parallel.World,
    *,
    forward_only: bool = False,
) -> float:
    """Run `count` micro-batches through Megatron's schedule; the mean loss in nats per valid token.

    loss = (sum of losses over valid tokens) / (number of valid tokens), over all micro-batches and
    ranks, summed in float64: how the batch is cut shows in the last digits only. The same on every
    rank. TrainingError if it is not finite.
    """

    def sum_of_losses(mask: torch.Tensor, losses: torch.Tensor):
        counted = losses.detach().double() * mask
        report = torch.stack([counted.sum(), mask.double().sum()])
        return (losses.float() * mask).sum(), mask.sum().int(), report

    def forward(iterator: Iterator[tuple[int, Batch]], model: torch.nn.Module):
        offset, batch = next(iterator)
        here = StepContext(recipe.run.seed, step, offset, position_offset(recipe.model.seq_length))
        with use_context(here), cpu.out_of_the_way():
            output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, functools.partial(sum_of_losses, batch["loss_mask"])

    if not forward_only:
        model.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches,
        model=[model],
        num_microbatches=count,
        seq_length=recipe.model.seq_length,
        micro_batch_size=recipe.train.micro_batch_size,
        forward_only=forward_only,
    )
    loss, tokens = parallel.sum_of_reports(reports, world)
    if not tokens or not math.isfinite(loss):
        mean = loss / tokens if tokens else math.nan
        which = "validation loss" if forward_only else "loss"
        what = f"the {which} is {mean}" if tokens else "no token of the batch counts"
        raise TrainingError(
            f"step {step}: {what}", **{which.replace("validation ", "valid_"): mean}
        )
    return loss / tokens


def update(
    optimizer: ChainedOptimizer,
    schedule: OptimizerParamScheduler,
    batch_size: int,
    step: int,
    loss: float,
) -> tuple[float, float]:
    """Clip and apply the gradients. Returns the learning rate used and the norm before clipping.

    The schedule moves first: step 1 already trains, and the last step has exactly schedule.min_lr.
    """
    schedule.step(increment=batch_size)
    lr = optimizer.param_groups[0]["lr"]
    _, grad_norm, _ = optimizer.step()
    optimizer.zero_grad()  # in fp32 .grad is main_grad itself; backward must find None there
    if grad_norm is None or not math.isfinite(grad_norm):
        norm = math.nan if grad_norm is None else float(grad_norm)
        what = f"the gradient norm is {grad_norm}"
        raise TrainingError(f"step {step}: {what}", loss=loss, grad_norm=norm)
    return float(lr), float(grad_norm)


@torch.no_grad()
def evaluate(
    recipe: Recipe, model: DistributedDataParallel, valid_set, step: int, world: parallel.World
) -> float:
    """Mean loss over the first metrics.valid_batches global batches of `valid_set`, each sample
    once."""
    count = recipe.metrics.valid_batches * recipe.accumulation(world.size)
    size = recipe.train.micro_batch_size
    batches = micro_batches(valid_set, first_sample=0, count=count, size=size, world=world)
    model.eval()
    loss = forward_backward(recipe, model, batches, count, step, world, forward_only=True)
    model.train()
    return loss
