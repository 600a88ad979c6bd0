"""Which samples a step reads, and on which rank: a function of the step alone, so there is nothing
to restore.

Step k (from 1) reads samples (k-1) G .. k G - 1 of the training order, G = train.global_batch_size.
With D data-parallel ranks and micro-batches of B, micro-batch m of rank r holds samples m B D + r B
.. + B - 1 of the step: the order of Megatron's own sampler. Another D or B deals the same samples
out differently.
"""

import inspect
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from nvfp4.engine.parallel import World

Batch = dict[str, torch.Tensor]


def micro_batches(
    dataset, *, first_sample: int, count: int, size: int, world: World
) -> Iterator[tuple[int, Batch]]:
    """(index in the global batch, batch) of the ``count`` micro-batches of ``size`` samples of this
    rank.

    A batch has tokens, labels, position_ids (size, length) int64 and loss_mask float32, on this
    rank's device; under context parallelism the rank's two pieces of every sequence.
    """
    for micro in range(count):
        offset = (micro * world.dp_size + world.dp_rank) * size
        samples = [dataset[first_sample + offset + i] for i in range(size)]
        batch = {
            key: torch.stack([torch.as_tensor(sample[key]) for sample in samples]).to(world.device)
            for key in ("tokens", "labels", "loss_mask", "position_ids")
        }
        yield offset, _context_parallel_part(batch)


def position_offset(seq_length: int) -> int | tuple[int, int]:
    """Where in the sequence the tokens of this rank start: context-parallel rank r of n holds
    pieces r and 2n-1-r."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return 0
    rank, piece = parallel_state.get_context_parallel_rank(), seq_length // (2 * ranks)
    return rank * piece, (2 * ranks - 1 - rank) * piece


def _context_parallel_part(batch: Batch) -> Batch:
    if parallel_state.get_context_parallel_world_size() == 1:
        return batch
    # Megatron-Core 0.18 added a required flag for its other, hybrid context parallelism.
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    flag = {"is_hybrid_cp": False} if "is_hybrid_cp" in known else {}
    return get_batch_on_this_cp_rank(batch, **flag)  # type: ignore[arg-type]
