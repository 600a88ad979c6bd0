"""Facts about this machine and installation that need neither torch nor a GPU library."""

import ctypes
import importlib.metadata
import platform
from pathlib import Path

REQUIRED = (
    "torch", "megatron-core", "numpy", "datasets", "tokenizers", "tensorboard", "safetensors",
    "pydantic", "omegaconf", "matplotlib", "scipy", "psutil", "einops", "triton",
)  # fmt: skip
OPTIONAL = {
    "transformer-engine": "the Transformer Engine spec on GPUs",
    "mamba-ssm": "the fused Mamba-2 scan on GPUs",
    "causal-conv1d": "the fused causal convolution on GPUs",
    "transformers": "comparison with NemotronHForCausalLM",
}


def version_of(package: str) -> str | None:
    """Installed version of a distribution, or None. Does not import it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of Python, of this toolkit and of every package above that is installed."""
    found = {"python": platform.python_version()}
    for package in ("nvfp4", *REQUIRED, *OPTIONAL):
        if (installed := version_of(package)) is not None:
            found[package] = installed
    return found


def cpu_name() -> str:
    """The processor's model name, as the operating system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, for the process's later tensors; True if it does.

    By default glibc returns every large tensor to the system, and the next one pays for new pages:
    a fifth of an emulated 1024 x 1024 linear. Other C libraries have no such switch.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))
