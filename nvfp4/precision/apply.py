"""apply_precision: the policies of this floor for the linears of any PyTorch model.

    plan = apply_precision(model, "nvfp4")
    for step, batch in enumerate(batches):
        with use_context(StepContext(seed=1234, step=step)):
            loss = loss_of(model(batch))
        loss.backward()

Modules stay the same objects: their class becomes PrecisionLinear. Parameters, state_dict keys,
hooks, and references that an optimizer holds are untouched. Give tokens as (batch, sequence,
features): the first dimension is the sample of the random address.

Policies with delayed scaling remember; run them inside state.use_state(MethodState(plan)).
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from nvfp4.errors import UserError
from nvfp4.precision.linear import linear
from nvfp4.precision.policy import LinearInfo, Policy, PrecisionConfig, PrecisionPlan, resolve
from nvfp4.precision.presets import PRESETS

# Output heads are not quantised in the paper (arXiv 2509.25149, section 4) nor in any run we know.
OUTPUT_HEADS = ("lm_head", "*.lm_head", "output_layer", "*.output_layer")

# Modules that read the weights of linears inside them without calling those linears.
BYPASSING = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class PrecisionLinear(nn.Linear):
    """nn.Linear whose three GEMMs follow `policy`; made by apply_precision only."""

    policy: Policy
    plan_name: str
    layer_index: int

    def forward(self, input: Tensor) -> Tensor:
        """y = x w^T + b, (..., in_features) -> (..., out_features)."""
        return linear(
            input,
            self.weight,
            policy=self.policy,
            name=self.plan_name,
            layer=self.layer_index,
            bias=self.bias,
        )

    def extra_repr(self) -> str:
        """nn.Linear's, and the policy."""
        return f"{super().extra_repr()}, policy={self.policy.name}"


def _block(name: str) -> int:
    """First number in a module name, `model.layers.3.mlp.up` -> 3; -1 without one."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else -1


def _refusal(model: nn.Module, name: str, module: nn.Linear) -> str | None:
    """Why a linear cannot be converted, or None."""
    parts = name.split(".") if name else []
    for end in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:end]))
        if isinstance(parent, BYPASSING):
            return f"{type(parent).__name__} reads its weight without calling it"
    if type(module) not in (nn.Linear, PrecisionLinear):
        return f"{type(module).__name__} is not a plain nn.Linear"
    if module.weight.dtype not in (torch.bfloat16, torch.float32):
        return f"its weight is {module.weight.dtype}, not bfloat16 or float32"
    return None


def _check_stacks(names: Sequence[str], precision: PrecisionConfig) -> None:
    """Block numbers must be those of one stack of blocks, if the configuration counts blocks."""
    counts = precision.num_layers_at_start_in_bf16 or precision.num_layers_at_end_in_bf16
    if not counts and all(rule.blocks is None for rule in precision.rules):
        return
    stacks = {re.split(r"(?:^|\.)\d+(?:\.|$)", name)[0] for name in names if _block(name) >= 0}
    if len(stacks) > 1:
        raise UserError(
            f"apply_precision: blocks are numbered in {len(stacks)} places "
            f"({', '.join(sorted(stacks))}), so first, last and block rules are ambiguous; use "
            f"rules with match"
        )


def _others(model: nn.Module) -> str:
    """Modules beside nn.Linear that hold matrices, by class, for instance `Embedding x 2`."""
    counts = Counter(
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )
    return ", ".join(f"{name} x {count}" for name, count in sorted(counts.items()))


def apply_precision(
    model: nn.Module,
    precision: str | PrecisionConfig | Policy,
    *,
    exclude: Sequence[str] = OUTPUT_HEADS,
    echo: Callable[[str], object] | None = print,
) -> PrecisionPlan:
    """Give every nn.Linear of a model its policy, print the plan, return it.

    precision: name of a preset, a Policy, or a PrecisionConfig with rules; the kind of every linear
    is "linear", its block the first number in its name (-1 if there is none).
    exclude: globs on module names; what they match stays as it is. The default is OUTPUT_HEADS, the
    output head by its usual names; pass () to convert every linear. Both are printed with the plan.
    echo: where the plan goes; None for nowhere.

    Raises UserError, before anything is changed: no nn.Linear; a linear that would not run through
    its policy (subclasses, nn.MultiheadAttention, float16 or packed weights), by name; whatever
    resolve refuses. Calling it again replaces the policies.
    """
    found = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    left = [name for name in found if any(fnmatchcase(name, glob) for glob in exclude)]
    chosen = {name: module for name, module in found.items() if name not in left}
    if not chosen:
        others = _others(model) or "none"
        raise UserError(
            f"apply_precision: no nn.Linear to convert ({len(left)} excluded; other modules with "
            f"weights: {others})"
        )
    for name, module in chosen.items():
        if reason := _refusal(model, name, module):
            raise UserError(
                f"apply_precision: cannot convert {name or 'the model'}: {reason}; leave it alone "
                f"with exclude=(*OUTPUT_HEADS, {name!r})"
            )
    presets = PRESETS
    if isinstance(precision, Policy):
        presets = {**PRESETS, precision.name: precision}
        precision = PrecisionConfig(default=precision.name)
    elif isinstance(precision, str):
        precision = PrecisionConfig(default=precision)
    if precision.schedule:
        raise UserError(
            "apply_precision knows no steps, so precision.schedule has no effect here; leave it "
            "out, and call apply_precision again between the two steps where policies change"
        )
    _check_stacks(list(chosen), precision)
    plan = resolve(
        [
            LinearInfo(name, "linear", _block(name), module.out_features, module.in_features)
            for name, module in chosen.items()
        ],
        precision,
        presets=presets,
    )
    untouched = [f"left alone: {name} (exclude)" for name in left]
    if others := _others(model):
        untouched.append(f"left alone: modules that are not nn.Linear: {others}")
    hooks = [one.weight_hook for one in plan.policies.values() if one.weight_hook != "none"]
    if hooks:
        untouched.append(f"left to you: {hooks[0]} (oscillation.py), which the engine does")
    plan = replace(plan, untouched=tuple(untouched))
    for index, row in enumerate(plan.rows):
        module = chosen[row.name]
        module.__class__ = PrecisionLinear
        assert isinstance(module, PrecisionLinear)
        module.policy, module.plan_name, module.layer_index = row.policy, row.name, index
    if echo is not None:
        echo(plan.table())
    return plan
