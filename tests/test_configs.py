"""Shapes of the models without torch: patterns, validation, the list of linears, the counts."""

from dataclasses import replace

import pytest

from nvfp4.errors import UserError
from nvfp4.models.configs import MambaConfig, count_parameters, list_linears, validate_parallel
from nvfp4.models.pattern import parse_pattern
from nvfp4.models.registry import (
    NEMOTRON_H_8B,
    NEMOTRON_NANO_12B_V2,
    TINY,
    TRANSFORMER_1P2B,
    get_model,
)


def test_pattern_names_every_block():
    assert parse_pattern("M-*M") == ("mamba", "mlp", "attention", "mamba")


@pytest.mark.parametrize("char", list("EGD+|/x "))
def test_pattern_refuses_by_name(char):
    with pytest.raises(UserError) as error:
        parse_pattern(f"M*{char}-")
    assert f"model.pattern[2] is {char!r}" in str(error.value)
    assert "M (Mamba-2), * (attention) and - (MLP)" in str(error.value)
    assert "\n" not in str(error.value)


def test_pattern_says_that_experts_are_not_built():
    with pytest.raises(UserError, match="a mixture-of-experts block"):
        parse_pattern("ME")


def test_empty_pattern_is_refused():
    with pytest.raises(UserError, match="model.pattern is empty"):
        parse_pattern("")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "model.hidden_size is 0"),
        ({"num_query_groups": 3}, "model.num_attention_heads is 4; it must be a multiple of"),
        ({"activation": "gelu"}, "model.activation is 'gelu'"),
        ({"init_std": 0.0}, "model.init_std is 0.0"),
        ({"position": "alibi"}, "model.position is 'alibi'; it must be 'none' or 'rope'"),
        ({"rope_theta": 1.0}, "model.rope_theta is 1.0; it must be above 1 and finite"),
        ({"position": "rope", "kv_channels": 33}, "model.kv_channels is 33; RoPE turns pairs"),
        ({"position": "rope", "pattern": "M-"}, "model.position is 'rope', but model.pattern has"),
        ({"layernorm_epsilon": -1e-5}, "model.layernorm_epsilon is -1e-05"),
        ({"mamba": None}, "model.pattern has M blocks but there is no model.mamba section"),
    ],
)
def test_wrong_shapes_are_refused(changes, words):
    with pytest.raises(UserError, match="^" + words.replace("(", r"\(")):
        replace(TINY, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_groups": 3}, "model.mamba.num_heads is 16; it must be a multiple of"),
        ({"state_dim": -1}, "model.mamba.state_dim is -1"),
        ({"conv_width": 5}, "model.mamba.conv_width is 5"),
    ],
)
def test_wrong_mamba_shapes_are_refused(changes, words):
    with pytest.raises(UserError, match="^" + words):
        replace(TINY.mamba, **changes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 3}, "model.vocab_size is 1024; .*tensor_model_parallel_size"),
        ({"tensor": 4}, "model.num_query_groups is 2; .*tensor_model_parallel_size"),
        ({"pipeline": 5}, "blocks in model.pattern is 12; .*pipeline_model_parallel_size"),
        ({"context": 32}, "model.mamba.num_heads is 16; .*context_parallel_size"),
        ({"tensor": 0}, "parallel.tensor_model_parallel_size is 0"),
        ({"sequence": True}, "parallel.sequence_parallel is true"),
    ],
)
def test_shapes_that_cannot_be_cut_are_refused(sizes, words):
    with pytest.raises(UserError, match=words):
        validate_parallel(TINY, **sizes)


def test_sequences_must_split_over_context_parallel_ranks():
    with pytest.raises(UserError, match="model.seq_length is 258; .*2 x parallel.context"):
        validate_parallel(replace(TINY, seq_length=258), context=2)


def test_group_counts_and_context_parallel_must_divide():
    odd = replace(TINY, mamba=MambaConfig(num_heads=12, head_dim=16, state_dim=32, num_groups=2))
    with pytest.raises(UserError, match="with 2 Mamba groups per tensor-parallel rank"):
        validate_parallel(odd, context=3)


def test_the_layouts_of_the_12b_recipe_are_accepted():
    validate_parallel(NEMOTRON_NANO_12B_V2, tensor=4, sequence=True)
    validate_parallel(NEMOTRON_NANO_12B_V2, tensor=8, pipeline=2, context=4, sequence=True)


def test_12b_linears_are_those_of_the_published_shape():
    linears = list_linears(NEMOTRON_NANO_12B_V2)
    assert len(linears) == 124
    shapes = {one.kind: (one.out_features, one.in_features) for one in linears}
    assert shapes == {
        "mamba.in_proj": (22656, 5120),
        "mamba.out_proj": (5120, 10240),
        "attention.qkv": (7168, 5120),
        "attention.out": (5120, 5120),
        "mlp.up": (20480, 5120),
        "mlp.down": (5120, 20480),
    }
    kinds = [one.kind for one in linears]
    assert [kinds.count(k) for k in ("mamba.in_proj", "attention.qkv", "mlp.up")] == [28, 6, 28]
    assert linears[0].name == "decoder.layers.0.mixer.in_proj"
    assert linears[14].name == "decoder.layers.7.self_attention.linear_qkv"
    assert [one.block for one in linears] == [i for i in range(62) for _ in range(2)]


def test_8b_and_1p2b_linears_are_those_of_the_published_shapes():
    shapes = {
        cfg.name: {one.kind: (one.out_features, one.in_features) for one in list_linears(cfg)}
        for cfg in (NEMOTRON_H_8B, TRANSFORMER_1P2B)
    }
    assert shapes["nemotron_h_8b"] == {
        "mamba.in_proj": (18560, 4096),
        "mamba.out_proj": (4096, 8192),
        "attention.qkv": (5120, 4096),
        "attention.out": (4096, 4096),
        "mlp.up": (21504, 4096),
        "mlp.down": (4096, 21504),
    }
    assert shapes["transformer_1p2b"] == {
        "attention.qkv": (4096, 2048),
        "attention.out": (2048, 2048),
        "mlp.up": (6144, 2048),
        "mlp.down": (2048, 6144),
    }
    blocks = parse_pattern(NEMOTRON_H_8B.pattern)
    assert [blocks.count(kind) for kind in ("mamba", "mlp", "attention")] == [24, 24, 4]
    assert [i for i, kind in enumerate(blocks) if kind == "attention"] == [7, 18, 29, 40]


@pytest.mark.parametrize(
    ("cfg", "parameters"),
    [
        (NEMOTRON_NANO_12B_V2, 12_310_001_152),
        (NEMOTRON_H_8B, 8_084_075_520),
        (TRANSFORMER_1P2B, 1_291_929_600),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_models_have_exactly_the_published_number_of_parameters(cfg, parameters):
    assert count_parameters(cfg) == parameters


def test_the_released_8b_has_twice_the_key_value_heads():
    released = replace(NEMOTRON_H_8B, num_query_groups=8)
    assert count_parameters(released) == 8_100_852_736


def test_tying_the_head_saves_one_vocabulary_matrix():
    tied = replace(TINY, tie_embeddings=True)
    assert count_parameters(TINY) - count_parameters(tied) == 1024 * 128


def test_tiny_fits_the_needs_of_quantised_training():
    assert count_parameters(TINY) >= 1_000_000
    assert TINY.pattern.count("*") >= 2 and TINY.pattern.count("M") >= 3
    assert TINY.hidden_size % 64 == TINY.ffn_hidden_size % 64 == TINY.mamba.inner % 64 == 0
    assert all(one.out_features % 16 == 0 for one in list_linears(TINY))


def test_unknown_models_get_a_suggestion():
    with pytest.raises(UserError, match="did you mean 'nemotron_nano_12b_v2'"):
        get_model("nemotron_nano_12b")
