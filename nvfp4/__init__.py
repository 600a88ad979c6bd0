"""NVFP4 pretraining of hybrid Mamba-2/attention language models.

    from nvfp4 import NVFP4, quantize, dequantize, gemm     # the numerics
    from nvfp4 import apply_precision                       # any torch model, in NVFP4
    from nvfp4 import load_recipe, train, parity            # whole runs

Names are imported when they are first used: `import nvfp4` costs nothing and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nvfp4.config import Recipe, list_recipes, load_recipe
    from nvfp4.engine.train import train
    from nvfp4.errors import MachineError, UserError
    from nvfp4.lab.parity import parity
    from nvfp4.numerics.gemm import gemm
    from nvfp4.numerics.quantize import QuantizedTensor, dequantize, quantize
    from nvfp4.numerics.spec import NVFP4, NVFP4_2D, FP8_1x128, FP8_128x128, QuantSpec
    from nvfp4.precision.apply import apply_precision
    from nvfp4.precision.context import StepContext, use_context
    from nvfp4.precision.policy import Policy, PrecisionConfig

__all__ = [
    "NVFP4", "NVFP4_2D", "FP8_1x128", "FP8_128x128", "MachineError", "Policy", "PrecisionConfig",
    "QuantSpec", "QuantizedTensor", "Recipe", "StepContext", "UserError", "apply_precision",
    "dequantize", "gemm", "list_recipes", "load_recipe", "parity", "quantize", "train",
    "use_context",
]  # fmt: skip

_HOME = {
    "nvfp4.config": ("Recipe", "list_recipes", "load_recipe"),
    "nvfp4.engine.train": ("train",),
    "nvfp4.errors": ("MachineError", "UserError"),
    "nvfp4.lab.parity": ("parity",),
    "nvfp4.numerics.gemm": ("gemm",),
    "nvfp4.numerics.quantize": ("QuantizedTensor", "dequantize", "quantize"),
    "nvfp4.numerics.spec": ("NVFP4", "NVFP4_2D", "FP8_1x128", "FP8_128x128", "QuantSpec"),
    "nvfp4.precision.apply": ("apply_precision",),
    "nvfp4.precision.context": ("StepContext", "use_context"),
    "nvfp4.precision.policy": ("Policy", "PrecisionConfig"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'nvfp4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
