"""Which class serves each part of the hybrid model, as Megatron-Core's ModuleSpec."""

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from nvfp4.models.attention import CoreAttention
from nvfp4.models.configs import MambaConfig
from nvfp4.models.linears import ColumnLinear, RowLinear
from nvfp4.models.mamba2 import Mamba2Mixer, MambaMixerSubmodules
from nvfp4.models.norm import RMSNorm

# Transformer Engine fuses a block's norm into its first linear; with these keys a checkpoint
# written with our separate norms is one that TE's model reads, and the other way round.
TE_MAMBA_KEYS = {"norm.": "mixer.in_proj.layer_norm_"}
TE_TRANSFORMER_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class HybridStack(MambaStack):
    """Megatron's stack of blocks with our final norm; its own needs Transformer Engine."""

    def __init__(self, config: TransformerConfig, submodules: MambaStackSubmodules, **kwargs: Any):
        final_norm = kwargs.pop("post_layer_norm", True)
        super().__init__(config, submodules, post_layer_norm=False, **kwargs)
        self.post_layer_norm = final_norm
        if self.post_process and self.post_layer_norm:
            self.final_norm = RMSNorm(config, config.hidden_size)


def model_spec(mamba: MambaConfig | None, rope_theta: float | None = None) -> ModuleSpec:
    """The blocks of the model: which class serves each part, and under which checkpoint keys.

    rope_theta: base of the rotary position embedding, None without one.
    """
    bda: Any = get_bias_dropout_add  # a function where Megatron 0.16 declares a type
    mixer = ModuleSpec(
        module=Mamba2Mixer,
        params={"mamba": mamba},
        submodules=MambaMixerSubmodules(in_proj=ColumnLinear, out_proj=RowLinear),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=ModuleSpec(module=CoreAttention, params={"rope_theta": rope_theta}),
            linear_proj=RowLinear,
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=RMSNorm,
                    mixer=mixer,
                    mamba_bda=bda,
                    sharded_state_dict_keys_map=TE_MAMBA_KEYS,
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=RMSNorm,
                    self_attention=attention,
                    self_attn_bda=bda,
                    sharded_state_dict_keys_map=TE_TRANSFORMER_KEYS,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=RMSNorm,
                    mlp=mlp,
                    mlp_bda=bda,
                    sharded_state_dict_keys_map=TE_TRANSFORMER_KEYS,
                ),
            ),
        ),
    )
