"""The same weights in transformers' NemotronHForCausalLM: the same logits and gradients."""

import pytest
import torch
from torch.nn import functional as F

from nvfp4.models.configs import MambaConfig, ModelConfig, list_linears
from nvfp4.models.hybrid import build
from nvfp4.precision.policy import PrecisionConfig, resolve

CFG = ModelConfig(
    pattern="M-M*-M*-",
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=24,  # heads x channels != hidden_size
    mamba=MambaConfig(num_heads=8, head_dim=12, state_dim=16, num_groups=2),
    vocab_size=160,
    seq_length=150,  # no multiple of any chunk
)
RENAMED = {
    "decoder.layers.": "model.layers.",
    "embedding.word_embeddings.": "model.embeddings.",
    "decoder.final_norm.": "model.norm_f.",
    "output_layer.": "lm_head.",
    "input_layernorm.": "norm.",
    "pre_mlp_layernorm.": "norm.",
    "mlp.linear_fc1.": "mixer.up_proj.",
    "mlp.linear_fc2.": "mixer.down_proj.",
    "self_attention.linear_proj.": "mixer.o_proj.",
}


def as_transformers(tensors):
    """Under transformers' names; the rows of linear_qkv are, per group, queries, key, value."""
    out = {}
    for name, value in tensors.items():
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        if "linear_qkv" in name:
            groups = CFG.num_query_groups
            queries = CFG.num_attention_heads // groups
            rows = value.view(groups, queries + 2, CFG.kv_channels, CFG.hidden_size)
            base = name.replace("self_attention.linear_qkv.weight", "mixer.")
            out[base + "q_proj.weight"] = rows[:, :queries].flatten(0, 2)
            out[base + "k_proj.weight"] = rows[:, queries].flatten(0, 1)
            out[base + "v_proj.weight"] = rows[:, queries + 1].flatten(0, 1)
        else:
            out[name] = value
    return out


def transformers_model(weights):
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        vocab_size=CFG.vocab_size,
        hidden_size=CFG.hidden_size,
        intermediate_size=CFG.ffn_hidden_size,
        hybrid_override_pattern=CFG.pattern,
        num_hidden_layers=len(CFG.pattern),
        num_attention_heads=CFG.num_attention_heads,
        num_key_value_heads=CFG.num_query_groups,
        head_dim=CFG.kv_channels,
        mamba_num_heads=CFG.mamba.num_heads,
        mamba_head_dim=CFG.mamba.head_dim,
        ssm_state_size=CFG.mamba.state_dim,
        n_groups=CFG.mamba.num_groups,
        conv_kernel=CFG.mamba.conv_width,
        chunk_size=32,
        layer_norm_epsilon=CFG.layernorm_epsilon,
        time_step_min=0.0,  # it clamps dt from below; Megatron and mamba-ssm do not
    )
    with torch.device("meta"):  # its own initialisation takes log(time_step_min)
        model = NemotronHForCausalLM(config)
    model.load_state_dict({k: v.clone() for k, v in weights.items()}, strict=True, assign=True)
    assert not [name for name, value in model.named_buffers() if value.is_meta]
    return model.train()


@pytest.fixture(scope="module")
def both(one_process):
    """Our model and theirs after one forward and backward: (ours, theirs, logits, logits)."""
    plan = resolve(list_linears(CFG), PrecisionConfig(default="fp32"))
    ours = build(CFG, plan, dtype="fp32", seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in ours.parameters():  # no gain at 1, no D at 1
            scale = 0.2 if parameter.dim() == 1 else 0.05
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    theirs = transformers_model(
        as_transformers({n: p.detach() for n, p in ours.named_parameters()})
    )
    ids = torch.randint(CFG.vocab_size, (2, CFG.seq_length), generator=generator)
    labels = ids.roll(-1, 1)
    our_logits, their_logits = ours(ids, None, None), theirs(ids).logits
    ours(ids, None, None, labels=labels).mean().backward()
    F.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
    return ours, theirs, our_logits.detach(), their_logits.detach()


def test_logits_are_equal(both):
    _, _, ours, theirs = both
    assert ours.shape == theirs.shape == (2, CFG.seq_length, CFG.vocab_size)
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 5e-6 * theirs.abs().max()


def test_gradients_of_every_tensor_are_equal(both):
    ours, theirs, _, _ = both
    ours = as_transformers({name: p.grad for name, p in ours.named_parameters()})
    theirs = {name: p.grad for name, p in theirs.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, truth in theirs.items():
        assert (ours[name] - truth).norm() < 2e-5 * truth.norm(), name
