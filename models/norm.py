"""RMS norms, computed in FP32 and rounded once to the dtype of their input."""

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """y = w x / sqrt(mean(x^2) + eps) over the last dimension.

    x (..., hidden_size) in any float dtype, y the same; w holds one gain per feature in
    params_dtype and enters in FP32. Built as Megatron builds a norm: (config, hidden_size, eps).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_):
        super().__init__()
        self.eps = config.layernorm_epsilon if eps is None else eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters so marked over the sequence-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class GatedGroupRMSNorm(nn.Module):
    """y = w g / sqrt(mean_group(g^2) + eps) with the gate first: g = x silu(z).

    x, z (..., channels); the mean runs over each of `groups` blocks of channels / groups. This is
    Mamba-2's norm with norm_before_gate false (mamba_ssm layernorm_gated). channels, groups and w
    are those of one tensor-parallel rank.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        eps: float,
        dtype: torch.dtype,
        tp_group: torch.distributed.ProcessGroup,
    ):
        super().__init__()
        self.groups, self.eps, self.tp_group = groups, eps, tp_group
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        gated = (x.float() * F.silu(z.float())).unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], None, self.eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """The gain is cut over the tensor-parallel ranks along its only dimension."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
