"""The Mamba-2 mixer in plain PyTorch, with the parameters and checkpoint keys of MambaMixer.

    [z, x, B, C, dt] = in_proj(u)              rows I, I, G N, G N, H
    [x, B, C] = silu(causal_conv([x, B, C]))   depthwise, K taps, the last on the current token
    y = ssd(x, dt, B, C)                       nvfp4.models.ssd
    out = out_proj(group_norm(y silu(z)))      I / G channels per group

On CUDA the mamba-ssm scan and the causal-conv1d convolution are used where installed; parameters
and definition are the same. Tensor parallel rank r holds [z_r; x_r; B_r; C_r; dt_r], each cut on
its own.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.nn import functional as F

from nvfp4.errors import UserError
from nvfp4.models.configs import MambaConfig
from nvfp4.models.norm import GatedGroupRMSNorm
from nvfp4.models.ssd import ssd


@cache
def cuda_kernels() -> dict[str, Callable[..., Any] | str]:
    """{"scan": function | reason, "conv": function | reason}: what CUDA tensors are computed with.

    A string says why the PyTorch form serves instead; `nvfp4 doctor` prints it.
    """
    found: dict[str, Callable[..., Any] | str] = {}
    try:
        from mamba_ssm.ops.triton.ssd_combined import (  # type: ignore[import-not-found]
            mamba_chunk_scan_combined,
        )

        found["scan"] = mamba_chunk_scan_combined
    except ImportError as error:
        found["scan"] = f"mamba-ssm cannot be imported ({error})"
    try:
        from causal_conv1d import causal_conv1d_fn  # type: ignore[import-not-found]

        found["conv"] = causal_conv1d_fn
    except ImportError as error:
        found["conv"] = f"causal-conv1d cannot be imported ({error})"
    return found


def causal_conv_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y_t = silu(bias + sum_k weight_k x_{t-K+1+k}), per channel, zeros before the first token.

    x (length, batch, channels), weight (channels, 1, K), bias (channels,); FP32 inside, rounded
    once to the dtype of x. Written as K shifted products: 2.5 times faster than a grouped conv1d on
    CPUs.
    """
    kernel = cuda_kernels()["conv"] if x.is_cuda else ""
    if callable(kernel):
        channels_last = x.transpose(0, 1).contiguous().transpose(1, 2)  # (batch, channels, length)
        return kernel(channels_last, weight[:, 0], bias, activation="silu").permute(2, 0, 1)
    length, taps = x.shape[0], weight.shape[-1]
    padded = F.pad(x.float(), (0, 0, 0, 0, taps - 1, 0))
    weight, y = weight.float(), bias.float()
    for k in range(taps):
        y = torch.addcmul(y, padded[k : k + length], weight[:, 0, k])
    return F.silu(y).to(x.dtype)


def scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt_bias: Tensor, chunk: int
) -> Tensor:
    """nvfp4.models.ssd.ssd, or on CUDA the mamba-ssm kernel with the given chunk if installed."""
    kernel = cuda_kernels()["scan"] if x.is_cuda else ""
    if callable(kernel):
        return kernel(x, dt, a, b, c, chunk, D=d.float(), dt_bias=dt_bias.float(), dt_softplus=True)
    return ssd(x, dt, a, b, c, d, dt_bias)


@dataclass
class MambaMixerSubmodules:
    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class Mamba2Mixer(MegatronModule):
    """u (length, batch, hidden_size) -> (out of the same shape, None), as a MambaLayer expects.

    Sizes come from `mamba`, of the whole mixer; the values of parameters are left to
    nvfp4.models.parameters. Packed sequences are refused, because the state would run from one
    document into the next, and so are inference caches.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        *,
        mamba: MambaConfig,
        pg_collection: ProcessGroupCollection,
        **_,
    ):
        super().__init__(config)
        tp = pg_collection.tp.size()
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.head_dim, self.state_dim = mamba.head_dim, mamba.state_dim
        self.chunk = mamba.chunk_size
        # of this tensor-parallel rank
        self.heads, self.groups = mamba.num_heads // tp, mamba.num_groups // tp
        self.inner = mamba.inner // tp
        shared: dict[str, Any] = dict(
            config=config, bias=False, is_expert=False, tp_group=self.tp_group
        )
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            sum(mamba.split),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **shared,
        )
        channels = self.inner + 2 * self.groups * self.state_dim
        # A Conv1d for its parameter names and shapes; its forward is not called.
        self.conv1d = nn.Conv1d(
            channels,
            channels,
            mamba.conv_width,
            groups=channels,
            padding=mamba.conv_width - 1,
            dtype=config.params_dtype,
        )
        self.dt_bias = nn.Parameter(torch.empty(self.heads, dtype=config.params_dtype))
        # FP32 as Megatron builds them; Float16Module rounds both to BF16 (forward computes in FP32)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.norm = GatedGroupRMSNorm(
            self.inner, self.groups, config.layernorm_epsilon, config.params_dtype, self.tp_group
        )
        per_head = (self.dt_bias, self.A_log, self.D)
        for parameter in (*self.conv1d.parameters(), *per_head, self.norm.weight):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.out_proj = build_module(
            submodules.out_proj,
            mamba.inner,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **shared,
        )
        # not a module: it holds references to the parameters above and cuts them by head
        self.cp = self._context_parallel() if self.cp_group.size() > 1 else None

    @property
    def in_proj_split(self) -> list[int]:
        """This rank's rows of in_proj: z, x, B, C, dt."""
        states = self.groups * self.state_dim
        return [self.inner, self.inner, states, states, self.heads]

    @property
    def conv_split(self) -> list[int]:
        """This rank's channels of the convolution: x, B, C."""
        return self.in_proj_split[1:4]

    def _context_parallel(self):
        """Megatron's all-to-all from sequence shards to head shards and back."""
        from megatron.core.ssm.mamba_context_parallel import MambaContextParallel

        conv: dict[str, Any] = dict(conv1d_cp1=self.conv1d)
        if "conv1d_cp1" not in inspect.signature(MambaContextParallel).parameters:  # since 0.19
            conv = dict(
                conv1d_weight_cp1=self.conv1d.weight,
                conv1d_bias_cp1=self.conv1d.bias,
                conv1d_padding=self.conv1d.padding[0],
            )
        return MambaContextParallel(
            cp_group=self.cp_group,
            d_inner_local_tp=self.inner,
            nheads_local_tp=self.heads,
            ngroups_local_tp=self.groups,
            d_state=self.state_dim,
            dt_bias_cp1=self.dt_bias,
            A_log_cp1=self.A_log,
            D_cp1=self.D,
            D_has_hdim=False,
            **conv,
        )

    def forward(
        self,
        hidden_states: Tensor,
        inference_context=None,
        *,
        inference_params=None,
        packed_seq_params=None,
    ) -> tuple[Tensor, Tensor | None]:
        if packed_seq_params is not None:
            raise UserError(
                "the Mamba-2 scan runs over the whole sequence and cannot reset its state between "
                "packed documents; pass no packing"
            )
        if inference_context is not None or inference_params is not None:
            raise UserError("Mamba2Mixer has no inference cache; run the whole sequence")
        projected, _ = self.in_proj(hidden_states)
        heads, groups, inner = self.heads, self.groups, self.inner
        conv_weight, conv_bias = self.conv1d.weight, self.conv1d.bias
        assert conv_bias is not None
        a_log, d, dt_bias = self.A_log, self.D, self.dt_bias
        if self.cp is not None:  # whole sequence, this rank's share of the heads
            projected = self.cp.pre_conv_ssm(projected)
            heads, groups = self.cp.nheads_local_tpcp, self.cp.ngroups_local_tpcp
            inner = self.cp.d_inner_local_tpcp
            conv_weight, conv_bias = self.cp.get_conv1d_weight(), self.cp.get_conv1d_bias()
            a_log, d, dt_bias = self.cp.get_A_log(), self.cp.get_D(), self.cp.get_dt_bias()
        states = groups * self.state_dim
        z, xbc, dt = projected.split([inner, inner + 2 * states, heads], -1)
        xbc = causal_conv_silu(xbc, conv_weight, conv_bias).transpose(0, 1)
        x, b, c = xbc.split([inner, states, states], -1)
        y = scan(
            x.unflatten(-1, (heads, self.head_dim)),
            dt.transpose(0, 1),
            -a_log.float().exp(),
            b.unflatten(-1, (groups, self.state_dim)),
            c.unflatten(-1, (groups, self.state_dim)),
            d,
            dt_bias,
            self.chunk,
        )
        y = y.flatten(2).transpose(0, 1)
        if self.cp is not None:  # back to this rank's part of the sequence, all heads
            y, z = self.cp.post_conv_ssm(y.contiguous()), self.cp.post_conv_ssm(z.contiguous())
        return self.out_proj(self.norm(y, z))

    def sharded_state_dict(self, prefix="", sharded_offsets: Any = (), metadata=None) -> dict:
        """MambaMixer's keys: in_proj.weight.{z,x,B,C,dt}, conv1d.{weight,bias}.{x,B,C}, the rest.

        Cut into components a checkpoint can be read under another tensor-parallel size, which the
        rows [z_r; x_r; B_r; C_r; dt_r] of one rank could not.
        """
        from megatron.core.ssm.mamba_mixer import _split_tensor_factory

        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups: dict[str, Any] = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        own: dict = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        rows = {"A_log": 0, "dt_bias": 0, "D": 0}
        sharded = make_sharded_tensors_for_checkpoint(own, prefix, rows, sharded_offsets, **groups)
        conv = self.conv1d.state_dict(prefix="", keep_vars=True)
        sharded |= make_sharded_tensors_for_checkpoint(
            conv, f"{prefix}conv1d.", {"weight": 0, "bias": 0}, sharded_offsets, **groups
        )
        for name in ("in_proj", "norm", "out_proj"):
            sharded |= sharded_state_dict_default(
                getattr(self, name),
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=self.tp_group,
            )
        for name, sizes, parts in (
            ("in_proj.weight", self.in_proj_split, ["z", "x", "B", "C", "dt"]),
            ("conv1d.weight", self.conv_split, ["x", "B", "C"]),
            ("conv1d.bias", self.conv_split, ["x", "B", "C"]),
        ):
            sharded[prefix + name] = _split_tensor_factory(sharded[prefix + name], sizes, parts, 0)
        return sharded
