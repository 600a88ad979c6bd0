"""The hybrid model as a Megatron-Core model: its configuration, its class, and `build`.

Blocks, residuals, embedding, loss, pipeline stages and checkpoints are Megatron's; norms, mixer,
core attention and linears are ours and need no CUDA, so the model runs on a CPU without any patch.
"""

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.models.mamba import MambaModel
from megatron.core.transformer import TransformerConfig
from torch import nn

from nvfp4.errors import UserError
from nvfp4.models.configs import ModelConfig, list_linears, validate_parallel
from nvfp4.models.linears import ColumnLinear, PlannedLinear
from nvfp4.models.mamba2 import Mamba2Mixer
from nvfp4.models.mlp import squared_relu
from nvfp4.models.parameters import decays, initialise
from nvfp4.models.spec import HybridStack, model_spec
from nvfp4.precision.policy import PrecisionPlan
from nvfp4.precision.presets import PRESETS

__all__ = ["HybridModel", "ParallelSizes", "build", "decays", "transformer_config"]


class ParallelSizes(Protocol):
    """What build reads of a recipe's `parallel` section (Megatron's names)."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    """An init method that does nothing: `initialise` fills every parameter after construction."""
    return tensor


def transformer_config(
    cfg: ModelConfig, *, dtype: str, parallel: ParallelSizes | None = None, **overrides: Any
) -> TransformerConfig:
    """cfg in Megatron's words. overrides are TransformerConfig fields and win."""
    params_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    mamba: dict[str, Any] = {}
    if cfg.mamba is not None:
        mamba = dict(
            mamba_num_heads=cfg.mamba.num_heads,
            mamba_head_dim=cfg.mamba.head_dim,
            mamba_state_dim=cfg.mamba.state_dim,
            mamba_num_groups=cfg.mamba.num_groups,
        )
    sizes: dict[str, Any] = {}
    if parallel is not None:
        sizes = {key: getattr(parallel, key) for key in ParallelSizes.__annotations__}
    fields: dict[str, Any] = dict(
        num_layers=cfg.num_layers,
        hidden_size=cfg.hidden_size,
        ffn_hidden_size=cfg.ffn_hidden_size,
        num_attention_heads=cfg.num_attention_heads,
        num_query_groups=cfg.num_query_groups,
        kv_channels=cfg.kv_channels,
        layernorm_epsilon=cfg.layernorm_epsilon,
        normalization="RMSNorm",
        activation_func=squared_relu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        is_hybrid_model=True,
        bf16=dtype == "bf16",
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        use_cpu_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        # fusions that exist on CUDA only; none of them changes what is computed
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    return TransformerConfig(**fields | mamba | sizes | overrides)


class HybridModel(MambaModel):
    """Megatron's MambaModel with our output layer, so that the head's GEMMs are ours too."""

    decoder: HybridStack
    model_config: ModelConfig
    plan: PrecisionPlan
    planned: frozenset[str]  # the linears that the plan has for this stage

    def setup_embeddings_and_output_layer(self) -> None:
        # Called by Megatron's constructor right after it made its own head, before it marks the
        # weights for tying and gradient reduction.
        if self.post_process:
            self.output_layer = ColumnLinear(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=_leave,
                bias=False,
                gather_output=not self.parallel_output,
                skip_weight_param_allocation=self.pre_process
                and self.share_embeddings_and_output_weights,
                tp_group=self.pg_collection.tp,
            )
        super().setup_embeddings_and_output_layer()

    def global_name(self, name: str) -> str:
        """A local module or parameter name with the layer number of the whole model.

        On a later pipeline stage `decoder.layers.0` is not the first block.
        """
        head, layers, rest = name.partition("decoder.layers.")
        if not layers:
            return name
        local, dot, leaf = rest.partition(".")
        block: Any = self.decoder.layers[int(local)]
        return f"{head}{layers}{block.layer_number - 1}{dot}{leaf}"

    def attach(self, plan: PrecisionPlan) -> None:
        """Let every linear compute by a plan from now on; called between two steps."""
        _attach_plan(self, self.model_config, plan, "bf16" if self.config.bf16 else "fp32")

    def linears(self) -> Iterator[tuple[str, PlannedLinear]]:
        """Every linear of this stage under its global name, output_layer included."""
        for name, module in self.named_modules():
            if isinstance(module, PlannedLinear):
                yield self.global_name(name), module


def _planned(model: HybridModel, cfg: ModelConfig) -> frozenset[str]:
    """Global names that the plan has for the blocks of this stage, whatever was built for them."""
    blocks = {int(layer.layer_number) - 1 for layer in model.decoder.layers}  # type: ignore[arg-type]
    return frozenset(info.name for info in list_linears(cfg) if info.block in blocks)


def _attach_plan(model: HybridModel, cfg: ModelConfig, plan: PrecisionPlan, dtype: str) -> None:
    index = {info.name: i for i, info in enumerate(list_linears(cfg))}
    rank = model.pg_collection.tp.rank()
    model.planned = _planned(model, cfg)
    if foreign := model.planned - {name for name, _ in model.linears()}:
        name = min(foreign)
        raise UserError(
            f"{name} is not a linear of nvfp4.models.linears, so its policy "
            f"{plan.policy_of(name).name} would not act; build it from ColumnLinear or RowLinear"
        )
    for name, module in model.linears():
        head = name == "output_layer"
        policy = PRESETS[dtype] if head else plan.policy_of(name)
        if policy.compute_dtype != dtype:
            raise UserError(
                f"{name} has precision policy {policy.name}, which computes in "
                f"{policy.compute_dtype}, but train.dtype is {dtype}; make them the same"
            )
        rows, columns = module.shard_shape
        cut_rows = isinstance(module, ColumnLinear)
        module.attach(
            policy,
            name,
            len(index) if head else index[name],
            feature_offset=rank * rows if cut_rows else 0,
            in_feature_offset=0 if cut_rows else rank * columns,
        )
    model.plan = plan


def _components(model: HybridModel) -> dict[str, list[int]]:
    """Global name -> sizes of the pieces of this rank's shard, for tensors made of several."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Mamba2Mixer):
            prefix = model.global_name(name)
            found[f"{prefix}.in_proj.weight"] = module.in_proj_split
            found[f"{prefix}.conv1d.weight"] = module.conv_split
            found[f"{prefix}.conv1d.bias"] = module.conv_split
    return found


def _parameters_to_fill(model: HybridModel) -> dict[str, nn.Parameter]:
    """Parameters by global name; a tied head on its own pipeline stage starts as the embedding."""
    named = {model.global_name(name): param for name, param in model.named_parameters()}
    if model.share_embeddings_and_output_weights and "output_layer.weight" in named:
        named["embedding.word_embeddings.weight"] = named.pop("output_layer.weight")
    return named


def build(
    cfg: ModelConfig,
    plan: PrecisionPlan,
    *,
    dtype: Literal["bf16", "fp32"] = "bf16",
    parallel: ParallelSizes | None = None,
    seed: int | None = None,
    **overrides: Any,
) -> HybridModel:
    """This rank's part of the model, initialised, every linear with its policy.

    parallel_state must be initialised with the sizes of `parallel` (default: 1 everywhere). seed
    (default: the one given to torch.manual_seed) fixes every initial value whatever the layout.
    overrides are TransformerConfig fields. forward(input_ids, position_ids, attention_mask=None,
    labels=None): (batch, length) tokens -> logits (batch, length, vocab_size / tp), or with labels
    the loss per token (batch, length) in FP32.

    Parameters are on the CPU in `dtype`, except A_log and D, which are FP32 until Float16Module
    rounds them. Under `torch.device("meta")` nothing is allocated. UserError for shapes that the
    parallel sizes or a policy cannot cut.
    """
    if parallel is not None:
        validate_parallel(
            cfg,
            tensor=parallel.tensor_model_parallel_size,
            pipeline=parallel.pipeline_model_parallel_size,
            context=parallel.context_parallel_size,
            sequence=parallel.sequence_parallel,
        )
    model = HybridModel(
        transformer_config(cfg, dtype=dtype, parallel=parallel, **overrides),
        model_spec(cfg.mamba),
        vocab_size=cfg.vocab_size,
        max_sequence_length=cfg.seq_length,
        hybrid_override_pattern=cfg.pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=cfg.tie_embeddings,
    )
    model.model_config = cfg
    model.attach(plan)
    initialise(
        _parameters_to_fill(model),
        _components(model),
        seed=torch.initial_seed() if seed is None else seed,
        std=cfg.init_std,
        depth=cfg.num_layers,
        taps=cfg.mamba.conv_width if cfg.mamba else 1,
        rank=model.pg_collection.tp.rank(),
        ranks=model.pg_collection.tp.size(),
    )
    return model
