"""The built Megatron-Core model, on a CPU that nobody pretends to be a GPU."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.process_groups_config import ProcessGroupCollection

from nvfp4.errors import UserError
from nvfp4.models.configs import MambaConfig, ModelConfig, count_parameters, list_linears
from nvfp4.models.hybrid import build
from nvfp4.models.linears import ColumnLinear, RowLinear
from nvfp4.models.registry import (
    NEMOTRON_H_8B,
    NEMOTRON_NANO_12B_V2,
    TINY,
    TRANSFORMER_1P2B,
)
from nvfp4.precision import audit
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.policy import PrecisionConfig, resolve

SMALL = ModelConfig(
    pattern="M*-M",
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    mamba=MambaConfig(num_heads=16, head_dim=8, state_dim=16, num_groups=2),
    vocab_size=64,
    seq_length=32,
)


pytestmark = pytest.mark.usefixtures("one_process")


def make(cfg, dtype="fp32", policy=None, seed=0, **arguments):
    plan = resolve(list_linears(cfg), PrecisionConfig(default=policy or dtype))
    return build(cfg, plan, dtype=dtype, seed=seed, **arguments)


def tokens(cfg, length=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(cfg.vocab_size, (2, length or cfg.seq_length), generator=generator)


@pytest.mark.parametrize(
    "cfg",
    [TINY, NEMOTRON_NANO_12B_V2, NEMOTRON_H_8B, TRANSFORMER_1P2B],
    ids=lambda cfg: cfg.name,
)
def test_listed_linears_are_those_of_the_built_model(cfg):
    with torch.device("meta"):
        model = make(cfg, "bf16")
    built = [(n, tuple(m.weight.shape), m.layer_index, m.plan_name) for n, m in model.linears()]
    built.sort(key=lambda row: row[2])
    listed = [
        (one.name, (one.out_features, one.in_features), index, one.name)
        for index, one in enumerate(list_linears(cfg))
    ]
    head = ("output_layer", (cfg.vocab_size, cfg.hidden_size), len(listed), "output_layer")
    assert built == [*listed, head]
    assert sum(p.numel() for p in model.parameters()) == count_parameters(cfg)
    kinds = {
        "mixer.in_proj": "mamba.in_proj",
        "mixer.out_proj": "mamba.out_proj",
        "self_attention.linear_qkv": "attention.qkv",
        "self_attention.linear_proj": "attention.out",
        "mlp.linear_fc1": "mlp.up",
        "mlp.linear_fc2": "mlp.down",
    }
    assert all(one.kind == kinds[one.name.split(".", 3)[3]] for one in list_linears(cfg))


def test_12b_on_the_meta_device_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = make(NEMOTRON_NANO_12B_V2, "bf16", "nvfp4")
    assert sum(p.numel() for p in model.parameters()) == 12_310_001_152


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_trains_a_step_without_cuda_or_a_compiler(dtype, monkeypatch):
    def asked():
        raise AssertionError("the model asked for the current CUDA device")

    monkeypatch.setattr(torch.cuda, "current_device", asked)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make(SMALL, dtype)
    ids = tokens(SMALL)
    loss = model(ids, None, None, labels=ids.roll(-1, 1))
    assert loss.shape == ids.shape and loss.dtype == torch.float32
    loss.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert not torch._dynamo.utils.counters["frames"], "torch.compile ran; it needs a C++ compiler"


def test_a_token_changes_no_earlier_logit():
    model = make(SMALL).eval()
    ids = tokens(SMALL)
    changed = ids.clone()
    changed[:, 20] = (ids[:, 20] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(ids, None, None), model(changed, None, None)
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] != after[:, 20:]).any(-1).all()


def test_packed_documents_and_caches_are_refused_not_ignored():
    model = make(SMALL)
    ids = tokens(SMALL)
    with pytest.raises(UserError, match="packed documents"):
        model(ids, None, None, packed_seq_params=SimpleNamespace(qkv_format="thd"))
    with pytest.raises(UserError, match="inference cache"):
        model.decoder.layers[0].mixer(torch.zeros(4, 1, 32), inference_context=object())


def test_checkpoint_keys_are_those_of_the_te_model():
    keys = {value.key for value in nested_values(make(SMALL).sharded_state_dict())}
    keys = {key for key in keys if not key.endswith("_extra_state")}
    layer = "decoder.layers.{}."
    mamba = [
        "mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight", "mixer.out_proj.weight",
        "mixer.in_proj.layer_norm_weight", "mixer.in_proj.weight", "mixer.conv1d.weight",
        "mixer.conv1d.bias",
    ]  # fmt: skip
    attention = ["linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight"]
    mlp = ["linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight"]
    expected = {layer.format(i) + name for i in (0, 3) for name in mamba}
    expected |= {layer.format(1) + "self_attention." + name for name in attention}
    expected |= {layer.format(2) + "mlp." + name for name in mlp}
    expected |= {"embedding.word_embeddings.weight", "decoder.final_norm.weight"}
    assert keys == expected | {"output_layer.weight"}


def test_checkpoint_cuts_in_proj_and_conv_into_components():
    mixer = make(SMALL).decoder.layers[0].mixer
    sharded = mixer.sharded_state_dict("m.")
    sizes = {}
    for name in ("m.in_proj.weight", "m.conv1d.weight", "m.conv1d.bias"):
        parts = sharded[name].build()
        sizes |= {part.key: part.local_shape[0] for part in parts}
    assert sizes == {
        "m.in_proj.weight.z": 128, "m.in_proj.weight.x": 128, "m.in_proj.weight.B": 32,
        "m.in_proj.weight.C": 32, "m.in_proj.weight.dt": 16,
        "m.conv1d.weight.x": 128, "m.conv1d.weight.B": 32, "m.conv1d.weight.C": 32,
        "m.conv1d.bias.x": 128, "m.conv1d.bias.B": 32, "m.conv1d.bias.C": 32,
    }  # fmt: skip


def test_a_policy_of_another_dtype_is_refused():
    with pytest.raises(UserError, match="computes in bf16, but train.dtype is fp32"):
        make(SMALL, "fp32", "nvfp4")


def test_a_shard_that_cannot_be_quantised_is_named():
    cfg = replace(SMALL, mamba=None, pattern="-", ffn_hidden_size=24)
    linears = list_linears(cfg)
    with torch.device("meta"):
        model = make(cfg, "bf16")
    policy = resolve(list_linears(SMALL), PrecisionConfig(default="nvfp4")).rows[0].policy
    with pytest.raises(UserError, match="linear_fc1 has 24 output features per tensor-parallel"):
        next(model.linears())[1].attach(policy, linears[0].name, 0)


def test_a_model_without_mamba_blocks_needs_no_mamba_section():
    model = make(replace(SMALL, mamba=None, pattern="*-"))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(model.model_config)


def test_position_decides_whether_a_transformer_knows_the_order():
    """Without RoPE an attention block sees a bag of earlier tokens; RoPE adds no parameter."""
    bag = replace(SMALL, mamba=None, pattern="*-", num_query_groups=4)
    rope = replace(bag, position="rope", rope_theta=100.0)
    ids = tokens(bag, 8)
    swapped = ids[:, [1, 0, *range(2, 8)]]
    for cfg, ordered in ((bag, False), (rope, True)):
        model = make(cfg)
        attention = model.decoder.layers[0].self_attention
        assert attention.core_attention.rope_theta == (100.0 if ordered else None)
        with torch.no_grad():
            last = (model(x, None, None)[:, -1] for x in (ids, swapped))
            assert torch.allclose(next(last), next(last), atol=1e-6) is not ordered
    assert sum(p.numel() for p in model.parameters()) == count_parameters(bag)


def test_a_tied_head_shares_the_embedding():
    cfg = replace(SMALL, tie_embeddings=True)
    model = make(cfg)
    assert model.output_layer.weight is None
    assert sum(p.numel() for p in model.parameters()) == count_parameters(cfg)
    ids = tokens(cfg)
    model(ids, None, None, labels=ids).mean().backward()
    assert model.embedding.word_embeddings.weight.grad.abs().sum(1).min() > 0


def test_checkpoint_of_the_mixer_is_the_one_megatrons_mixer_writes(monkeypatch):
    import megatron.core.ssm.mamba_mixer as megatrons

    # What MambaMixer needs of CUDA to be built: its kernels, a device, a generator.
    monkeypatch.setattr(megatrons, "HAVE_MAMBA_SSM", True)
    monkeypatch.setattr(megatrons.torch.cuda, "current_device", lambda: torch.device("cpu"))
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(megatrons, "get_cuda_rng_tracker", lambda *_: tracker)
    ours = make(SMALL).decoder.layers[0].mixer
    monkeypatch.setattr(megatrons, "ExtendedRMSNorm", lambda *_, **__: ours.norm)
    theirs = megatrons.MambaMixer(
        ours.config,
        megatrons.MambaMixerSubmodules(in_proj=ColumnLinear, out_proj=RowLinear),
        d_model=SMALL.hidden_size,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    described = []
    for mixer in (ours, theirs):
        found = {}
        for entry in nested_values(mixer.sharded_state_dict("m.")):
            for part in entry.build() if hasattr(entry, "build") else [entry]:
                if not part.key.endswith("_extra_state"):
                    found[part.key] = (part.global_shape, part.global_offset, part.replica_id)
        described.append(found)
    assert described[0] == described[1]
    assert len(described[0]) == 5 + 6 + 3 + 2  # in_proj, conv; dt_bias A_log D; norm, out_proj


def test_every_gemm_of_every_block_follows_the_plan():
    plan = resolve(
        list_linears(SMALL), PrecisionConfig(default="nvfp4", num_layers_at_start_in_bf16=1)
    )
    model = build(SMALL, plan, dtype="bf16", seed=0)
    ids = tokens(SMALL)
    with audit.recording() as log, use_context(StepContext(seed=1, step=0)):
        model(ids, None, None, labels=ids).mean().backward()
    head = [record.gemm for record in log.records if record.name == "output_layer"]
    assert head == ["fprop", "wgrad", "dgrad"] or head == ["fprop", "dgrad", "wgrad"]
    log.records = [record for record in log.records if record.name != "output_layer"]
    assert audit.compare(log, plan, 1) == []
    assert len(log.records) == 3 * len(list_linears(SMALL))


def test_bf16_weight_gradients_reach_main_grad_in_fp32():
    model = make(SMALL, "bf16")
    ids = tokens(SMALL)
    weights = {name: module.weight for name, module in model.linears()}
    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape)
    model(ids, None, None, labels=ids).mean().backward()
    for name, weight in weights.items():
        assert weight.grad_added_to_main_grad, name
        assert (weight.main_grad != weight.main_grad.bfloat16()).any(), name


def test_a_linear_that_no_policy_reaches_is_refused(monkeypatch):
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from nvfp4.models import hybrid

    original = hybrid.model_spec

    def with_megatrons_own(*arguments):
        spec = original(*arguments)
        spec.submodules.mlp_layer.submodules.mlp.submodules.linear_fc1 = ColumnParallelLinear
        return spec

    monkeypatch.setattr(hybrid, "model_spec", with_megatrons_own)
    with pytest.raises(UserError, match=r"layers\.2\.mlp\.linear_fc1 is not a linear of nvfp4"):
        make(SMALL, policy="bf16", dtype="bf16")
