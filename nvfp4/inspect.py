"""`nvfp4 inspect PATH`: what a run folder, checkpoint, .bin/.idx prefix or tensor file holds."""

from __future__ import annotations

import json
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4.errors import UserError
from nvfp4.precision.operands import label

if TYPE_CHECKING:
    from torch import Tensor

Echo = Callable[[str], None]
WHAT = "a run folder, a checkpoint (step_N), a .bin/.idx prefix, a .safetensors or a .npz file"


def inspect(path: str | Path, echo: Echo = print) -> int:
    """Describes whatever `path` is; UserError if it is nothing that can be described."""
    path = Path(path)
    if (path / ".metadata").is_file():
        _checkpoint(path, echo)
    elif (path / "recipe.yaml").is_file():
        _run(path, echo)
    elif path.suffix in (".bin", ".idx") or Path(f"{path}.idx").is_file():
        _prefix(path.with_suffix("") if path.suffix in (".bin", ".idx") else path, echo)
    elif path.suffix in (".safetensors", ".npz") and path.is_file():
        _tensors(path, echo)
    elif not path.exists():
        raise UserError(f"{path}: does not exist; inspect takes {WHAT}")
    else:
        raise UserError(f"{path}: cannot tell what this is; inspect takes {WHAT}")
    return 0


def _run(path: Path, echo: Echo) -> None:
    from nvfp4.config import load_recipe
    from nvfp4.lab.runs import load_run

    run = load_run(path)
    echo(f"{'run':<18}{path}")
    for key in ("parameters", "unigram_entropy", "data_hash", "backend", "device", "versions"):
        if key in run.env:
            echo(f"{key:<18}{_plain(run.env[key])}")
    echo(f"{'steps':<18}{run.steps[-1]}   tokens {run.train.tokens[-1]:,}")
    echo(f"{'train loss':<18}{run.train.values[0]:.4f} -> {run.train.values[-1]:.4f}")
    if len(run.valid):
        echo(f"{'validation loss':<18}{run.valid.values[0]:.4f} -> {run.valid.values[-1]:.4f}")
    latest = path / "latest"
    echo(f"{'checkpoint':<18}{latest.read_text().strip() if latest.is_file() else 'none'}")
    recipe = load_recipe(str(path / "recipe.yaml"))
    echo(f"\n{recipe.plan.table()}")
    for switch in recipe.switches:
        echo(f"\nfrom step {switch.step}: {switch.text}\n{switch.plan.summary()}")
    if (path / "audit.json").is_file():
        try:
            lines = list(audit_lines(json.loads((path / "audit.json").read_text())))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path / 'audit.json'}: damaged ({error})") from error
        for line in lines:
            echo(line)


def audit_lines(audit: dict[str, Any]) -> Iterator[str]:
    """Every audited step: GEMMs that ran alike in one line each, their shapes, then what differed.

    audit: the content of audit.json; before the schedule it was one step, without its number.
    """
    for step in audit.get("audits", [audit]):
        when = f"in step {step['step']}" if "step" in step else "in the first step"
        switch = f", after the switch {step['switch']}" if step.get("switch") else ""
        yield ""
        yield f"executed {when}{switch}"
        linears, calls, shapes = Counter(), Counter(), {}
        for row in step["gemms"]:
            operands = "; ".join(
                f"{role} {label(facts)}" for role, facts in row["operands"].items()
            )
            how = ", ".join(
                f"{word}{row[key]}"
                for key, word in (
                    ("backend", ""),
                    ("kernel", ""),
                    ("accumulate", "sum "),
                    ("autocast", "autocast "),
                )
                if row.get(key)
            )
            kind = f"{row['gemm']:<6} {operands} -> {row['output']} ({how})"
            linears[kind] += 1
            calls[kind] += row["calls"]
            if "shape" in row:
                shapes.setdefault(kind, {})[" x ".join(map(str, row["shape"]))] = None
        for kind in sorted(linears):
            yield f"  {linears[kind]:>4} linears {calls[kind]:>6} calls  {kind}"
            if kind in shapes:
                yield f"{'':<28}M x N x K {', '.join(shapes[kind])}"
        yield from (f"  {line}" for line in step["differences"] or ["as planned"])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _checkpoint(path: Path, echo: Echo) -> None:
    with warnings.catch_warnings():  # of optional packages; `nvfp4 doctor` tells
        warnings.simplefilter("ignore")
        from megatron.core.dist_checkpointing import load_tensors_metadata
        from megatron.core.dist_checkpointing.dict_utils import nested_values

    tensors = {t.key: t for t in nested_values(load_tensors_metadata(str(path)))}
    echo(f"checkpoint  {path}   {len(tensors)} tensors")
    for key in sorted(tensors):
        tensor = tensors[key]
        echo(f"  {key:<72}{str(tuple(tensor.global_shape)):<20}{tensor.dtype}")


def _prefix(prefix: Path, echo: Echo) -> None:
    from nvfp4.data.blend import describe_prefix

    for key, value in describe_prefix(prefix).items():
        echo(f"{key:<12}{value:,}" if isinstance(value, int) else f"{key:<12}{value}")


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{path}: not a readable safetensors file ({error})") from error
    else:
        import numpy as np
        import torch

        try:
            with np.load(path, allow_pickle=False) as arrays:
                for name in arrays.files:
                    array = np.atleast_1d(arrays[name])
                    if array.dtype.kind not in "biuf":
                        raise ValueError(f"{name} holds {array.dtype}, not numbers")
                    yield name, torch.from_numpy(array)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"{path}: not a readable .npz file ({error})") from error


def sqnr_db(x: Tensor, decoded: Tensor) -> float:
    """SQNR = 10 log10( sum x^2 / sum (x - decoded)^2 ), in dB; both operands in FP64."""
    exact = x.double()
    noise = (exact - decoded.double()).square().sum()
    return (10 * (exact.square().sum() / noise).log10()).item()


def underflow_pct(x: Tensor, decoded: Tensor) -> float:
    """Share of non-zero elements that decode to zero, in percent."""
    nonzero = x != 0
    return (100.0 * (nonzero & (decoded == 0)).sum() / nonzero.sum().clamp(min=1)).item()


def _tensors(path: Path, echo: Echo) -> None:
    from nvfp4.numerics.quantize import dequantize, quantize
    from nvfp4.numerics.spec import NVFP4

    echo(f"{'tensor':<44}{'shape':<20}{'dtype':<10}{'amax':>11}  NVFP4 1x16: sqnr_db underflow_pct")
    for name, x in _read_tensors(path):
        line = f"{name:<44}{str(tuple(x.shape)):<20}{str(x.dtype).removeprefix('torch.'):<10}"
        if not x.is_floating_point() or not x.numel():
            echo(line)
            continue
        finite = x.isfinite().all().item()
        line += f"{x.float().abs().max().item():>11.4g}"
        if not finite:
            line += "  not finite"
        elif x.dim() >= 2 and x.shape[-1] % 16 == 0 and x.numel() // x.shape[-1] % 16 == 0:
            flat = x.reshape(-1, x.shape[-1]).float()
            decoded = dequantize(quantize(flat, NVFP4))
            line += f"{sqnr_db(flat, decoded):>20.2f} {underflow_pct(flat, decoded):>13.2f}"
        echo(line)
