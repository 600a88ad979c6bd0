"""Megatron's parallel linears with nvfp4.precision.linear in the place of their GEMMs.

Weights, initialisation attributes, main_grad, sharding and checkpoints stay Megatron's; only
`_forward_impl` is ours. It does the communication Megatron's autograd function would have done, and
leaves fprop, dgrad and wgrad to the policy.
"""

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from nvfp4.errors import UserError
from nvfp4.precision.linear import linear
from nvfp4.precision.policy import Policy


class PlannedLinear:
    """What both linears add to Megatron's: a policy, its name in the plan, GEMMs by that policy."""

    policy: Policy
    plan_name: str  # the global name: layer numbers do not restart on a pipeline stage
    layer_index: int  # the `layer` of the stochastic-rounding address
    feature_offset: int  # first output and input feature of this tensor-parallel rank in the whole
    in_feature_offset: int  # layer: part of the stochastic-rounding address

    # Megatron's sizes of the whole layer; each child also has one of them per rank
    output_size: int
    input_size: int

    @property
    def shard_shape(self) -> tuple[int, int]:
        """(output, input) features of this tensor-parallel rank."""
        return (
            getattr(self, "output_size_per_partition", self.output_size),
            getattr(self, "input_size_per_partition", self.input_size),
        )

    def attach(
        self,
        policy: Policy,
        name: str,
        index: int,
        feature_offset: int = 0,
        in_feature_offset: int = 0,
    ) -> None:
        """Say how this linear computes; UserError if this rank's shard cannot be quantised so."""
        for side, size in zip(("out", "in"), self.shard_shape, strict=True):
            multiple = policy.multiples[f"{side}_features"]
            if size % multiple:
                raise UserError(
                    f"{name} has {size} {side}put features per tensor-parallel rank, not a "
                    f"multiple of {multiple} as policy {policy.name} needs; lower "
                    "parallel.tensor_model_parallel_size or keep it in bf16 by a precision rule"
                )
        self.policy, self.plan_name = policy, name
        self.layer_index = index
        self.feature_offset, self.in_feature_offset = feature_offset, in_feature_offset

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group=None,
        **_,
    ) -> Tensor:
        """input (length, batch, in) -> (length, batch, out) of this rank.

        Backward: the gather becomes a reduce-scatter, the copy an all-reduce of the input gradient.
        """
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return linear(
            input,
            weight,
            policy=self.policy,
            name=self.plan_name,
            layer=self.layer_index,
            bias=bias,
            layout="sbh",
            feature_offset=self.feature_offset,
            in_feature_offset=self.in_feature_offset,
        )


class ColumnLinear(PlannedLinear, ColumnParallelLinear):
    """Output features are cut over the tensor-parallel ranks."""


class RowLinear(PlannedLinear, RowParallelLinear):
    """Input features are cut over the tensor-parallel ranks; outputs are summed in their dtype."""
