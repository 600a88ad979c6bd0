"""apply_precision on plain PyTorch models: what changes, what stays, what is refused by name."""

import copy

import pytest
import torch
from torch import nn

from nvfp4.errors import UserError
from nvfp4.precision import audit
from nvfp4.precision.apply import OUTPUT_HEADS, PrecisionLinear, apply_precision
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.operands import policy_from_dict
from nvfp4.precision.policy import PrecisionConfig, Rule
from nvfp4.precision.presets import PRESETS

WIDTH = 64


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention)
        return x + self.down(self.up(self.norm2(x)).relu().square())


class Transformer(nn.Module):
    def __init__(self, blocks=4, vocabulary=50):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def test_transformer_trains_and_keeps_its_keys():
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # made before: shares parameters
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = list(model.parameters())
    printed = []
    config = PrecisionConfig(
        default="nvfp4", num_layers_at_end_in_bf16=1, rules=(Rule("fp8_block", match="*.out"),)
    )
    plan = apply_precision(model, config, echo=printed.append)

    assert printed == [plan.table()]
    assert "left alone: lm_head (exclude)" in printed[0]
    assert "left alone: modules that are not nn.Linear: Embedding x 1" in printed[0]
    assert [row.policy.name for row in plan.rows] == 3 * [
        "nvfp4",
        "fp8_block",
        "nvfp4",
        "nvfp4",
    ] + (4 * ["bf16"])
    assert type(model.lm_head) is nn.Linear and type(model.layers[0].qkv) is PrecisionLinear
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))

    tokens = torch.randint(50, (2, 33))
    losses = []
    for step in range(10):
        with audit.recording() as log, use_context(StepContext(1, step)):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        audit.check(log, plan, 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]  # one batch is learnt by heart
    twin = copy.deepcopy(model)  # policies travel with the modules
    with torch.no_grad():
        assert torch.equal(twin(tokens), model(tokens))
    reloaded = Transformer()
    reloaded.load_state_dict(model.state_dict())


def test_errors_differ_from_bf16_as_the_policy_says():
    """Applying a policy changes the numbers; going back to fp32 restores them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    x = torch.randn(4, 64)
    plain = model(x)
    apply_precision(model, "nvfp4", echo=None)
    with torch.no_grad():
        error = (model(x) - plain).norm() / plain.norm()
    assert 0.02 < error < 0.4
    apply_precision(model, "fp32", echo=None)
    with torch.no_grad():
        assert torch.allclose(model(x), plain, rtol=0, atol=1e-6)


def test_a_policy_object_and_a_single_linear():
    model = nn.Linear(64, 32)
    own = policy_from_dict("own", {"base": "nvfp4", "dgrad": None, "wgrad": None}, PRESETS, "here")
    plan = apply_precision(model, own, echo=None)
    assert model.policy is own and plan.rows[0].block == -1
    assert "policy=own" in repr(model)
    model(torch.randn(3, 64)).sum().backward()  # nothing stochastic, so no StepContext
    assert model.weight.grad.dtype == torch.float32


def test_hooks_survive():
    model, calls = nn.Sequential(nn.Linear(64, 32)), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    apply_precision(model, "fp8_block", echo=None)
    model(torch.randn(2, 64))
    assert calls == [1]


def test_exclude_is_explicit():
    model = Transformer(1, vocabulary=48)
    plan = apply_precision(model, "nvfp4", exclude=(), echo=None)
    assert "lm_head" in [row.name for row in plan.rows]
    plan = apply_precision(
        Transformer(1), "nvfp4", exclude=(*OUTPUT_HEADS, "layers.*.down"), echo=None
    )
    assert [row.name for row in plan.rows] == [f"layers.0.{name}" for name in ("qkv", "out", "up")]


class Special(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("model", "precision", "message"),
    [
        (nn.Sequential(Special(64, 64)), "nvfp4",
         "apply_precision: cannot convert 0: Special is not a plain nn.Linear; leave it alone with "
         "exclude=(*OUTPUT_HEADS, '0')"),
        (nn.ModuleDict({"mha": nn.MultiheadAttention(64, 4)}), "nvfp4",
         "cannot convert mha.out_proj: MultiheadAttention reads its weight without calling it"),
        (nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 64)]), "nvfp4",
         "cannot convert 0.self_attn.out_proj: TransformerEncoderLayer reads its weight"),
        (nn.Sequential(nn.Linear(64, 64)).half(), "nvfp4",
         "cannot convert 0: its weight is torch.float16, not bfloat16 or float32"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), "nvfp4",
         "cannot convert the model: ParametrizedLinear is not a plain nn.Linear"),
        (nn.Sequential(nn.Conv1d(4, 4, 3)), "nvfp4",
         "no nn.Linear to convert (0 excluded; other modules with weights: Conv1d x 1)"),
        (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 50)), "nvfp4",
         "1: out_features is 50, which nvfp4 cannot cut into blocks of 16"),
        (nn.Sequential(nn.Linear(64, 64)), "nvpf4", "unknown policy 'nvpf4'; did you mean nvfp4?"),
        (nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 64)) for name in "ab"}),
         PrecisionConfig(default="nvfp4", rules=(Rule("bf16", blocks="0"),)),
         "blocks are numbered in 2 places (a, b), so first, last and block rules are ambiguous"),
    ],
)  # fmt: skip
def test_refusals_come_before_any_change(model, precision, message):
    types = [type(module) for module in model.modules()]
    with pytest.raises(UserError) as caught:
        apply_precision(model, precision, echo=None)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == types
