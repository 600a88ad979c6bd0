"""`nvfp4 doctor`: what runs on this machine, in which way, and what would change it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from nvfp4.machine import OPTIONAL, REQUIRED, cpu_name, version_of

NATIVE_FP4 = "Blackwell (sm_100, sm_103, sm_120 or sm_121)"


def device_lines() -> list[str]:
    """One line per compute device that torch sees."""
    import torch

    threads = torch.get_num_threads()
    lines = [f"cpu      {cpu_name()}, {os.cpu_count()} cores, torch uses {threads} threads"]
    if not torch.cuda.is_available():
        return [*lines, "gpu      none: training runs on the CPU, over gloo"]
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        how = "has FP4 tensor cores" if major >= 10 else f"no FP4 tensor cores (needs {NATIVE_FP4})"
        name = torch.cuda.get_device_name(i)
        lines.append(f"gpu {i}    {name} (sm_{major}{minor}, {memory:.0f} GiB), {how}")
    return lines


def package_lines() -> tuple[list[str], bool]:
    """The table of packages, and whether every required one is installed."""
    lines, complete = [], True
    for package in REQUIRED:
        installed = version_of(package)
        complete &= installed is not None
        lines.append(f"{package:<20}{installed or 'MISSING: pip install -e .'}")
    for package, purpose in OPTIONAL.items():
        installed = version_of(package) or "not installed (optional)"
        lines.append(f"{package:<20}{installed}: {purpose}")
    return lines, complete


def backend_lines() -> tuple[list[str], bool]:
    """A line per backend, what it can do; and whether all they do is right."""
    from nvfp4.features import FEATURES, Feature, features

    lines = [f"{'':<11}" + "".join(f"{name:<12}" for name in FEATURES)]

    def write(one: Feature) -> None:
        if one.reason and set(one.cells) == {"-"}:
            lines.append(f"{one.backend:<11}no: {one.reason}")
        else:
            lines.append(f"{one.backend:<11}" + "".join(f"{word:<12}" for word in one.cells))

    return lines, features(write)


def mamba_lines() -> list[str]:
    """Which kernels the Mamba mixer uses here."""
    import torch

    from nvfp4.models.mamba2 import cuda_kernels

    if not torch.cuda.is_available():
        return ["scan and convolution   plain PyTorch (no GPU here)"]
    return [
        f"{name:<23}{'fused' if callable(found) else f'plain PyTorch: {found}'}"
        for name, found in cuda_kernels().items()
    ]


def doctor(echo: Callable[[str], None] = print) -> int:
    """Prints the report; 0 if training can run here, 3 if a required part is missing or wrong."""
    echo(f"nvfp4 {version_of('nvfp4') or '(not installed)'}   python {platform.python_version()}")
    echo("\npackages")
    lines, complete = package_lines()
    for line in lines:
        echo(f"  {line}")
    links = {
        name: (Path(__file__).parent / name).is_dir() for name in ("models", "data", "recipes")
    }
    for name, there in links.items():
        if not there:
            echo(f"  nvfp4/{name} MISSING: git config core.symlinks true && git checkout .")
    if not complete or not all(links.values()):
        echo("\nresult    no: install the missing parts first")
        return 3
    if version_of("transformer-engine") and not _cuda():
        echo(
            "  transformer-engine is installed but there is no CUDA: importing megatron.core fails;"
        )
        echo("  pip uninstall transformer-engine")
        return 3

    echo("\ndevices")
    for line in device_lines():
        echo(f"  {line}")

    from nvfp4.backends import choose

    choice = choose("auto")
    echo("\nbackends, tried on one small linear and compared with the definition bit by bit")
    lines, ok = backend_lines()
    for line in lines:
        echo(f"  {line.rstrip()}")
    echo(f"  run.backend=auto takes {choice.reasons[-1]}")
    echo("\nmamba")
    for line in mamba_lines():
        echo(f"  {line}")
    echo(f"\nresult    {'ok: nvfp4 train tiny_nvfp4' if ok else 'the numerics are wrong here'}")
    return 0 if ok else 3


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(doctor())
