"""What a recipe may say: sections, keys, types, ranges, defaults, and what must fit together.

recipes/base.yaml shows the same keys with a comment each. What follows from several keys (steps,
decay length, precision plan) is computed from the finished recipe, never stored, so that no
override can leave a stale value behind. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from nvfp4.config_rules import contradictions
from nvfp4.data.config import DataConfig
from nvfp4.errors import UserError
from nvfp4.models.configs import ModelConfig, list_linears
from nvfp4.models.registry import get_model
from nvfp4.precision.policy import PrecisionConfig, PrecisionPlan, resolve
from nvfp4.precision.schedule import Switched, resolve_schedule

Count = Annotated[int, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """What every section shares: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Run(Section):
    """Which run this is, and where it lives."""

    name: str = "run"  # in a file, empty means: the name of the recipe file
    dir: str = ""  # runs/<name> if empty
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    deterministic: bool = False
    backend: Literal["auto", "reference"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _dir_follows_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("dir"):
            return {**data, "dir": f"runs/{data.get('name', 'run')}"}
        return data


class Train(Section):
    """How much is trained on, in which portions. Batch sizes count sequences."""

    steps: Count | None = None
    tokens: Count | None = None
    global_batch_size: Annotated[int, Field(ge=1, le=2**20)] = 8
    micro_batch_size: Count = 4
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    dtype: Literal["bf16", "fp32"] = "bf16"


class Optim(Section):
    name: Literal["adamw"] = "adamw"
    lr: Positive = 3e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


class Schedule(Section):
    """Warm-up, stable, decay (WSD): lr rises linearly, stays, falls to min_lr at the last step."""

    name: Literal["wsd"] = "wsd"
    warmup_steps: Natural = 10
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "minus_sqrt"
    min_lr: Annotated[float, Field(ge=0)] = 3e-5


class Parallel(Section):
    """Megatron's names. What is left of the world size is data parallel."""

    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    context_parallel_size: Count = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )


class Checkpoint(Section):
    every: Count = 100
    keep: Count = 2
    resume: Literal["auto", "never"] = "auto"
    allow_changes: bool = False


class Metrics(Section):
    every: Count = 10
    tensorboard: bool = True
    valid_every: Count = 50
    valid_batches: Count = 8
    gemm_error: Literal["never", "last"] = "never"


class Parity(Section):
    """What `nvfp4 parity` holds this run to; written down before the run."""

    against: str | None = None
    tolerance: Annotated[float, Field(ge=0)] = 0.015
    window_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    window_tokens: Count | None = None
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95


class Recipe(Section):
    """A whole run. Construct it with load_recipe, or in Python section by section."""

    run: Run = Run.model_validate({})
    model: ModelConfig = get_model("tiny")
    data: DataConfig = DataConfig()
    train: Train = Train(steps=200)
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    parity: Parity = Parity()

    @field_validator("data", mode="before")
    @classmethod
    def _paths(cls, data: Any) -> Any:
        """A source may be written as its path alone: data.train=my.txt, or a list of paths."""
        if not isinstance(data, Mapping):
            return data
        sources = {key: data[key] for key in ("train", "valid") if key in data}
        for key, value in sources.items():
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list | tuple):
                sources[key] = [{"path": i} if isinstance(i, str) else i for i in items]
        return {**data, **sources}

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.model.seq_length

    @property
    def steps(self) -> int:
        """train.steps, or the steps that train.tokens needs, the last one whole."""
        return self.train.steps or math.ceil((self.train.tokens or 0) / self.tokens_per_step)

    @property
    def decay_steps(self) -> int:
        """At least one: the last step always has schedule.min_lr."""
        return max(1, round(self.schedule.decay_fraction * self.steps))

    @cached_property
    def plan(self) -> PrecisionPlan:
        """The policy of every linear of the model's blocks, in the first step."""
        return resolve(
            list_linears(self.model),
            self.precision,
            tensor_model_parallel_size=self.parallel.tensor_model_parallel_size,
        )

    @cached_property
    def switches(self) -> tuple[Switched, ...]:
        """The plans that follow, each with the step from which it holds, in order."""
        return resolve_schedule(
            self.plan,
            self.precision,
            steps=self.steps,
            tokens_per_step=self.tokens_per_step,
            tensor_model_parallel_size=self.parallel.tensor_model_parallel_size,
        )

    @property
    def plans(self) -> tuple[PrecisionPlan, ...]:
        """Every plan of the run."""
        return (self.plan, *(switch.plan for switch in self.switches))

    def plan_at(self, step: int) -> PrecisionPlan:
        """The plan that holds in a step, counted from 1."""
        return self.plans[sum(switch.step <= step for switch in self.switches)]

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per step on each rank; UserError when the batch does not divide."""
        copies, rest = divmod(world_size, self.parallel.model_parallel_size)
        if rest or not copies:
            raise UserError(
                f"parallel: tensor x pipeline x context parallel sizes give "
                f"{self.parallel.model_parallel_size}; {world_size} processes are no multiple of it"
            )
        portion = self.train.micro_batch_size * copies
        count, rest = divmod(self.train.global_batch_size, portion)
        if rest:
            raise UserError(
                f"train.global_batch_size {self.train.global_batch_size} is no multiple of "
                f"train.micro_batch_size {self.train.micro_batch_size} x {copies} data-parallel "
                f"ranks = {portion}; change one of the two, or the number of processes"
            )
        return count

    def to_yaml(self) -> str:
        """The resolved recipe, every key written out; loading it gives an equal Recipe."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump(mode="json")))

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Recipe:
        problems = [
            InitErrorDetails(
                type=PydanticCustomError("recipe", "{text}", {"text": text}),
                loc=tuple(key.split(".")),
                input=None,
            )
            for key, text in contradictions(self)
        ]
        if problems:
            raise ValidationError.from_exception_data("Recipe", problems)
        return self
