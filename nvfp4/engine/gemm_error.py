"""metrics.gemm_error: how far the GEMMs of the last step are from unquantised ones, in
gemm_error.json."""

import contextlib
import json
from collections.abc import Iterator

import torch.distributed as dist

from nvfp4.config import Recipe
from nvfp4.engine.parallel import World
from nvfp4.engine.runfolder import RunFolder
from nvfp4.precision import collect

FILE = "gemm_error.json"


@contextlib.contextmanager
def gemm_error(recipe: Recipe, folder: RunFolder, world: World, step: int) -> Iterator[None]:
    """Around the forward and backward passes of a step; works in the last one if asked for.

    The file has the step, the mean error of each GEMM and every linear's own; see
    nvfp4.precision.collect for the formulas. Sums go over all ranks: data-parallel ranks add their
    samples, tensor-parallel ranks their shards (each held against the product of its own shard).
    """
    if recipe.metrics.gemm_error == "never" or step != recipe.steps:
        yield
        return
    with collect.observing() as errors:
        yield
    found = _over_ranks(errors, world)
    if world.main:
        text = json.dumps({"step": step, **found.summary()}, indent=1, allow_nan=False)
        folder.write(FILE, text + "\n")


def _over_ranks(errors: collect.GemmErrors, world: World) -> collect.GemmErrors:
    if world.size == 1:
        return errors
    for sums in errors.sums.values():
        sums.values = sums.values.cpu()
    gathered: list[collect.GemmErrors] = [errors] * world.size
    dist.all_gather_object(gathered, errors)
    total = collect.GemmErrors()
    for one in gathered:
        for key, sums in one.sums.items():
            total.add(key, sums)
    return total
