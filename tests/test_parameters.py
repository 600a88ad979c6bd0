"""How parameters start, whatever else was drawn, and which of them decay."""

import pytest
import torch
from megatron.core.transformer.module import Float16Module

from nvfp4.models.configs import list_linears
from nvfp4.models.hybrid import build, decays
from nvfp4.models.parameters import A_RANGE, DT_RANGE, initialise
from nvfp4.models.registry import TINY
from nvfp4.precision.policy import PrecisionConfig, resolve

pytestmark = pytest.mark.usefixtures("one_process")


def make(cfg, dtype="fp32", policy=None, seed=0, **arguments):
    plan = resolve(list_linears(cfg), PrecisionConfig(default=policy or dtype))
    return build(cfg, plan, dtype=dtype, seed=seed, **arguments)


def test_seed_alone_decides_the_initial_weights():
    first = make(TINY).state_dict()
    torch.rand(7)  # what else was drawn before must not matter
    second, other = make(TINY).state_dict(), make(TINY, seed=1).state_dict()
    weights = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(first[name], second[name]) for name in weights)
    drawn = [n for n in weights if not torch.equal(first[n], other[n])]
    still = {n.removeprefix("decoder.layers.").lstrip("0123456789.") for n in {*weights} - {*drawn}}
    assert still == {
        "norm.weight", "mixer.norm.weight", "mixer.D", "input_layernorm.weight",
        "pre_mlp_layernorm.weight", "decoder.final_norm.weight",
    }  # fmt: skip


def test_the_seed_defaults_to_torchs():
    torch.manual_seed(5)
    plan = resolve(list_linears(TINY), PrecisionConfig(default="fp32"))
    default = build(TINY, plan, dtype="fp32").output_layer.weight
    assert torch.equal(default, make(TINY, seed=5).output_layer.weight)


def test_initial_distributions():
    weights = dict(make(TINY).named_parameters())
    std, depth = TINY.init_std, len(TINY.pattern)
    for leaf, expected in (
        ("embedding.word_embeddings.weight", std),
        ("output_layer.weight", std),
        ("decoder.layers.0.mixer.in_proj.weight", std),
        ("decoder.layers.0.mixer.out_proj.weight", std / depth**0.5),
        ("decoder.layers.1.mlp.linear_fc2.weight", std / depth**0.5),
        ("decoder.layers.3.self_attention.linear_proj.weight", std / depth**0.5),
    ):
        assert weights[leaf].std().item() == pytest.approx(expected, rel=0.02), leaf
    conv = weights["decoder.layers.0.mixer.conv1d.weight"]
    assert 0.48 < conv.abs().max() <= 0.5
    first, second = (weights[f"decoder.layers.{i}.mixer.A_log"] for i in (0, 2))
    assert not torch.equal(first, second)


def test_dt_and_a_start_in_range_after_the_bf16_wrapper():
    model = make(TINY, "bf16")
    wrapped = Float16Module(model.config, model)
    slack = 2**-6  # BF16 rounds dt_bias and A_log, and exp and softplus pass that on
    for name, value in wrapped.named_parameters():
        assert value.dtype == torch.bfloat16, name
        if name.endswith("dt_bias"):
            low, high = DT_RANGE
            dt = torch.nn.functional.softplus(value.float())
            assert low * (1 - slack) <= dt.min() and dt.max() <= high * (1 + slack)
        if name.endswith("A_log"):
            low, high = A_RANGE
            a = value.float().exp()
            assert low * (1 - slack) <= a.min() and a.max() <= high * (1 + slack)


def test_weight_decay_is_decided_for_every_parameter():
    with torch.device("meta"):
        model = make(TINY, "bf16")
    decayed = {n for n, p in model.named_parameters() if decays("module.module." + n, p)}
    linears = {f"{name}.weight" for name, _ in model.linears()}
    conv = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Conv1d)}
    assert len(conv) == TINY.pattern.count("M")
    assert decayed == linears | conv | {"embedding.word_embeddings.weight"}
    with pytest.raises(ValueError, match="decoder.layers.0.mixer.gate is not classified"):
        decays("decoder.layers.0.mixer.gate", torch.zeros(3))
    with pytest.raises(ValueError, match="classified as decayed"):
        decays("output_layer.weight", torch.zeros(3))


def test_initialise_refuses_a_parameter_nobody_described():
    stranger = {"decoder.layers.0.mixer.gate": torch.nn.Parameter(torch.zeros(3))}
    with pytest.raises(ValueError, match="not classified"):
        initialise(stranger, {}, seed=0, std=0.02, depth=1, taps=4)
