"""Shapes of a hybrid model as data; recipes are checked with this file alone, so it needs no torch.

Letters used in the formulas: d hidden_size, F ffn_hidden_size, V vocab_size; Mamba-2: H num_heads,
P head_dim, N state_dim, G num_groups, K conv_width, I = H P; attention: q heads, k query groups,
c kv_channels.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from nvfp4.errors import UserError
from nvfp4.models.pattern import parse_pattern
from nvfp4.precision.policy import LinearInfo

MAX_VOCABULARY = 2**24  # far above any tokenizer; a typing error is found before it is allocated


def _require_positive(section: str, config: object, skip: tuple[str, ...] = ()) -> None:
    """Every int field must be at least 1; one line names the key and the value."""
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if field.type is int and field.name not in skip and value < 1:
            raise UserError(f"{section}.{field.name} is {value}; it must be at least 1")


def _require_multiple(key: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        raise UserError(f"{key} is {value}; it must be a multiple of {of} ({divisor})")


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """A Mamba-2 mixer: H = num_heads heads of P = head_dim channels, N = state_dim, G = num_groups.

    chunk_size is the chunk of the CUDA scan kernel; it changes speed, not the result.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int = 4
    chunk_size: int = 128

    def __post_init__(self) -> None:
        _require_positive("model.mamba", self)
        _require_multiple(
            "model.mamba.num_heads", self.num_heads, "model.mamba.num_groups", self.num_groups
        )
        if self.conv_width > 4:  # what the causal-conv1d kernel offers
            raise UserError(f"model.mamba.conv_width is {self.conv_width}; it must be 1 to 4")

    @property
    def inner(self) -> int:
        """I = H P, the channels of z and of x."""
        return self.num_heads * self.head_dim

    @property
    def split(self) -> tuple[int, int, int, int, int]:
        """Rows of in_proj in order: z, x, B, C, dt."""
        states = self.num_groups * self.state_dim
        return (self.inner, self.inner, states, states, self.num_heads)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Embedding, one pre-norm residual block per pattern character, final norm, output layer.

    Linears have no bias. position: how attention knows the order of tokens, not at all (the Mamba
    blocks do) or by RoPE with base rope_theta. Raises UserError with the key, the value and what
    would be right.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    name: str = "custom"
    pattern: str
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    mamba: MambaConfig | None = None
    vocab_size: int
    seq_length: int
    activation: Literal["squared_relu"] = "squared_relu"
    position: Literal["none", "rope"] = "none"
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    layernorm_epsilon: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        blocks = parse_pattern(self.pattern)
        _require_positive("model", self)
        _require_multiple(
            "model.num_attention_heads",
            self.num_attention_heads,
            "model.num_query_groups",
            self.num_query_groups,
        )
        if "mamba" in blocks and self.mamba is None:
            raise UserError(
                "model.pattern has M blocks but there is no model.mamba section "
                "(num_heads, head_dim, state_dim, num_groups)"
            )
        if self.vocab_size > MAX_VOCABULARY:
            raise UserError(
                f"model.vocab_size is {self.vocab_size}; it must be at most {MAX_VOCABULARY}"
            )
        if self.activation != "squared_relu":
            raise UserError(
                f"model.activation is {self.activation!r}; only 'squared_relu' is built"
            )
        self._check_position("attention" in blocks)
        for key in ("layernorm_epsilon", "init_std"):
            if not 0 < getattr(self, key) < 1:
                raise UserError(f"model.{key} is {getattr(self, key)}; it must lie between 0 and 1")

    def _check_position(self, attention: bool) -> None:
        if self.position not in ("none", "rope"):
            raise UserError(f"model.position is {self.position!r}; it must be 'none' or 'rope'")
        if not 1 < self.rope_theta < math.inf:
            raise UserError(f"model.rope_theta is {self.rope_theta}; it must be above 1 and finite")
        if self.position == "rope" and not attention:
            raise UserError("model.position is 'rope', but model.pattern has no attention (*)")
        if self.position == "rope" and self.kv_channels % 2:
            raise UserError(
                f"model.kv_channels is {self.kv_channels}; RoPE turns pairs, so it must be even"
            )

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @property
    def qkv_rows(self) -> int:
        """(q + 2 k) c: for every query group its q/k queries, then its key, then its value."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels


def _block_linears(cfg: ModelConfig, block: str) -> tuple[tuple[str, str, int, int], ...]:
    """(module name below the layer, kind, out_features, in_features) of one block."""
    d = cfg.hidden_size
    if block == "mamba":
        assert cfg.mamba is not None
        inner = cfg.mamba.inner
        return (
            ("mixer.in_proj", "mamba.in_proj", sum(cfg.mamba.split), d),
            ("mixer.out_proj", "mamba.out_proj", d, inner),
        )
    if block == "attention":
        heads = cfg.num_attention_heads * cfg.kv_channels
        return (
            ("self_attention.linear_qkv", "attention.qkv", cfg.qkv_rows, d),
            ("self_attention.linear_proj", "attention.out", d, heads),
        )
    return (
        ("mlp.linear_fc1", "mlp.up", cfg.ffn_hidden_size, d),
        ("mlp.linear_fc2", "mlp.down", d, cfg.ffn_hidden_size),
    )


def list_linears(cfg: ModelConfig) -> tuple[LinearInfo, ...]:
    """Every linear of the blocks in order of execution, with the module names of the built model.

    Shapes are those of the whole tensor, before tensor parallelism. The embedding and the output
    layer are not listed: they are never quantised. A linear's place in this tuple is the `layer` of
    its stochastic-rounding address.
    """
    return tuple(
        LinearInfo(
            name=f"decoder.layers.{index}.{name}",
            kind=kind,
            block=index,
            out_features=rows,
            in_features=columns,
        )
        for index, block in enumerate(parse_pattern(cfg.pattern))
        for name, kind, rows, columns in _block_linears(cfg, block)
    )


def _small_parameters(cfg: ModelConfig, block: str) -> int:
    """Parameters of a block outside its linears: norms; of Mamba-2 also conv, dt_bias, A_log, D."""
    if block != "mamba":
        return cfg.hidden_size
    m = cfg.mamba
    assert m is not None
    conv_channels = m.inner + 2 * m.num_groups * m.state_dim
    return cfg.hidden_size + conv_channels * (m.conv_width + 1) + 3 * m.num_heads + m.inner


def count_parameters(cfg: ModelConfig) -> int:
    """Trained values of the whole model: V d (1 or 2 times), the blocks, the final norm."""
    vocabulary = cfg.vocab_size * cfg.hidden_size * (1 if cfg.tie_embeddings else 2)
    linears = sum(info.out_features * info.in_features for info in list_linears(cfg))
    small = sum(_small_parameters(cfg, block) for block in parse_pattern(cfg.pattern))
    return vocabulary + linears + small + cfg.hidden_size


def validate_parallel(
    cfg: ModelConfig,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    sequence: bool = False,
) -> None:
    """UserError if the shapes cannot be cut by these sizes; it names both keys and both values."""
    tp, pp, cp = (
        "parallel.tensor_model_parallel_size",
        "parallel.pipeline_model_parallel_size",
        "parallel.context_parallel_size",
    )
    for key, size in ((tp, tensor), (pp, pipeline), (cp, context)):
        if size < 1:
            raise UserError(f"{key} is {size}; it must be at least 1")
    if sequence and tensor == 1:
        raise UserError(
            f"parallel.sequence_parallel is true but {tp} is 1; set one of them otherwise"
        )
    blocks = parse_pattern(cfg.pattern)
    _require_multiple("model.vocab_size", cfg.vocab_size, tp, tensor)
    _require_multiple("the number of blocks in model.pattern", len(blocks), pp, pipeline)
    if "mlp" in blocks:
        _require_multiple("model.ffn_hidden_size", cfg.ffn_hidden_size, tp, tensor)
    if "attention" in blocks:
        _require_multiple("model.num_query_groups", cfg.num_query_groups, tp, tensor)
    if cfg.mamba is not None and "mamba" in blocks:
        _require_multiple("model.mamba.num_groups", cfg.mamba.num_groups, tp, tensor)
        _require_multiple(
            "model.mamba.num_heads", cfg.mamba.num_heads, f"{tp} x {cp}", tensor * context
        )
        local = cfg.mamba.num_groups // tensor
        if local % context and context % local:
            raise UserError(
                f"{cp} is {context}; with {local} Mamba groups per tensor-parallel rank it must "
                f"divide {local} or be a multiple of it"
            )
    if context > 1:  # two chunks per rank, so that causal attention is balanced
        _require_multiple("model.seq_length", cfg.seq_length, f"2 x {cp}", 2 * context)
    if sequence:
        _require_multiple("model.seq_length", cfg.seq_length, f"{tp} x {cp}", tensor * context)
