"""AdamW and its schedule, as Megatron-Core builds them: FP32 master weights, no decay where decay
has no meaning.

AdamW at step k (1-based), for each parameter theta with gradient g clipped to a global norm:

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    theta = theta (1 - lr(k) w) - lr(k) (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps)

with w = optim.weight_decay for parameters of which ``models.hybrid.decays`` says so, and 0 for
A_log, D, dt_bias, norm gains and biases. lr(k) is warmup-stable-decay: linear to optim.lr over
schedule.warmup_steps, constant, then down to schedule.min_lr in the last schedule.decay_fraction of
the steps, reached exactly at the last step.
"""

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from nvfp4.config import Recipe
from nvfp4.models.hybrid import decays

# What a param group takes from the recipe of today, never from a checkpoint.
_FROM_RECIPE = ("lr", "max_lr", "min_lr", "betas", "eps")


def build_optimizer(recipe: Recipe, model: DistributedDataParallel) -> ChainedOptimizer:
    """The optimizer of a model wrapped in Megatron's DistributedDataParallel.

    With train.dtype bf16 the model's parameters are BF16 and the optimizer keeps FP32 masters,
    which it rounds once to BF16 after each step. parallel.distributed_optimizer shards masters and
    moments over the data-parallel ranks.
    """
    bf16 = recipe.train.dtype == "bf16"
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.optim.lr,
        min_lr=recipe.schedule.min_lr,
        weight_decay=recipe.optim.weight_decay,
        adam_beta1=recipe.optim.betas[0],
        adam_beta2=recipe.optim.betas[1],
        adam_eps=recipe.optim.eps,
        clip_grad=recipe.train.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=recipe.parallel.distributed_optimizer,
    )
    undecayed = ParamKey(
        with_name_predicate=ParamWithNamePredicate(
            name="no_weight_decay", fn=lambda parameter, name: not decays(name, parameter)
        )
    )
    no_decay = ParamGroupOverride(wd_mult=0.0)  # type: ignore[typeddict-item]
    optimizer = get_megatron_optimizer(config, [model], config_overrides={undecayed: no_decay})
    assert isinstance(optimizer, ChainedOptimizer)
    for inner in optimizer.chained_optimizers:
        if isinstance(inner, DistributedOptimizer):
            _give_each_parameter_its_step(inner)
    return optimizer


def build_schedule(recipe: Recipe, optimizer: ChainedOptimizer) -> OptimizerParamScheduler:
    """Warmup-stable-decay over recipe.steps global batches; Megatron's "steps" are samples here."""
    batch = recipe.train.global_batch_size
    schedule = recipe.schedule
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.optim.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_steps * batch,
        lr_decay_steps=recipe.steps * batch,
        lr_decay_style="WSD",
        wsd_decay_steps=recipe.decay_steps * batch,
        lr_wsd_decay_style=schedule.decay_style,
        start_wd=recipe.optim.weight_decay,
        end_wd=recipe.optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run follows its recipe; only its position comes from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def load_optimizer(optimizer: ChainedOptimizer, state: dict) -> None:
    """Load moments, masters and step; hyperparameters stay those of the recipe.

    A state without "optimizer" is that of Megatron's FP32Optimizer. Megatron-Core 0.19 finds a
    group by its hyperparameters, so those of the saved groups are replaced before.
    """
    groups = {group["wd_mult"]: group for group in optimizer.param_groups}
    for saved in state.get("optimizer", state)["param_groups"]:
        saved.update({key: groups[saved["wd_mult"]][key] for key in _FROM_RECIPE})
    optimizer.load_state_dict(state)


def allocate_state(optimizer: ChainedOptimizer) -> None:
    """Give an optimizer that has not stepped the state tensors that a checkpoint is read into.

    The distributed optimizer asserts that they exist; a step with zero gradients makes them, and
    would decay the masters, which the checkpoint then overwrites.
    """
    for inner in optimizer.chained_optimizers:
        if isinstance(inner, DistributedOptimizer) and not inner.optimizer.state:
            inner._init_optimizer_states_with_dummy_values()


def _give_each_parameter_its_step(optimizer: DistributedOptimizer) -> None:
    """Two repairs of the distributed optimizer where torch's AdamW stands in for Transformer
    Engine's FusedAdam.

    FusedAdam counts steps per group, AdamW per parameter, in a tensor of the parameter's state
    (Megatron-Core 0.16 to 0.19). 1. The fully_reshardable load fills every state tensor from the
    checkpoint, which holds no step: KeyError. 2. load_state_dict gives all parameters one and the
    same step tensor, so that each of n parameters advances it by one and the bias correction is
    that of step n k. Needed on every CPU, and on a GPU without Transformer Engine.
    """
    if not isinstance(optimizer.optimizer, torch.optim.AdamW):
        return
    set_states = optimizer._set_main_param_and_optimizer_states
    load_state_dict = optimizer.load_state_dict

    def set_states_and_keep_step(model_param, tensors):
        group, place = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][place]]
        set_states(model_param, {"step": state["step"].clone(), **tensors})

    def load_and_separate_steps(state_dict):
        load_state_dict(state_dict)
        for state in optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()

    optimizer._set_main_param_and_optimizer_states = set_states_and_keep_step
    optimizer.load_state_dict = load_and_separate_steps
