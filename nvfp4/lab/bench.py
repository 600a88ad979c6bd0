"""`nvfp4 bench`: what this machine does per second, in one table.

Every section measures its lines in turn (lab/timing.py), so ratios hold on a busy machine too; the
last column is half the distance between the quartiles over the turns. One thread, unless asked
otherwise; where `two threads` stands, the same with two.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nvfp4 import backends
from nvfp4.errors import UserError
from nvfp4.lab import bench_modes, bench_peers
from nvfp4.lab.timing import Timing
from nvfp4.machine import cpu_name, keep_freed_memory, versions

Echo = Callable[[str], None]
SECTIONS = ("machine", "quantise", "linear", "step", "peers")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes and numbers of turns; `quick` for a look, and for tests."""

    matrix: int = 4096
    slow_matrix: int = 1024
    linears: tuple[int, ...] = (1024, 2048)
    products: tuple[int, ...] = (1024, 2048)
    turns: int = 15
    step_turns: int = 7
    recipes: tuple[str, ...] = ("tiny_bf16", "tiny_fp8", "tiny_nvfp4")


QUICK = Sizes(256, 128, (128,), (128,), 3, 1, ("tiny_bf16", "tiny_nvfp4"))


@dataclass(slots=True)
class Report:
    """Lines for people, and the same numbers for programs."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def head(self, text: str, *columns: str) -> None:
        """A heading, with the names of the columns."""
        self.lines += ["", f"{text:<44}" + "".join(f"{name:>12}" for name in columns)]

    def row(self, section: str, name: str, cells: tuple[str, ...], **numbers: float | str) -> None:
        """One line."""
        self.lines.append(f"  {name:<42}" + "".join(f"{cell:>12}" for cell in cells))
        self.data.setdefault(section, []).append({"name": name, **numbers})


def _percent(spread: float) -> str:
    return f"±{100 * spread:.0f} %"


def _milliseconds(timing: Timing) -> str:
    return f"{1e3 * timing.median:.2f} ms"


def machine(report: Report, sizes: Sizes) -> None:
    """Float32 matrix products; the copy is measured with the modes."""
    report.head("float32 matrix product", "time", "GFLOP/s", "spread")
    for size, timing in bench_modes.products(sizes.products, sizes.turns):
        rate = 2 * size**3 / timing.median / 1e9
        cells = (_milliseconds(timing), f"{rate:.0f}", _percent(timing.spread))
        report.row(
            "products", f"{size} x {size} x {size}", cells,
            seconds=timing.median, gflops=rate, spread=timing.spread,
        )  # fmt: skip


def quantise(report: Report, sizes: Sizes, backend: backends.Backend) -> None:
    """Every mode against a copy of the same matrix."""
    plain = backend.name == "reference"
    parts = [(sizes.slow_matrix if plain else sizes.matrix, bench_modes.MODES)]
    parts.append((sizes.slow_matrix, bench_modes.SLOW_MODES))
    for size, modes in parts:
        title = f"quantise + dequantise, {size} x {size} float32"
        report.head(title, "time", "ns/element", "x copy", "spread")
        copy, *timings = bench_modes.quantise(backend, size, sizes.turns, modes)
        rate = 2 * 4 * size**2 / copy.median / 1e9
        cells = (_milliseconds(copy), f"{1e9 * copy.median / size**2:.2f}", f"{rate:.1f} GB/s")
        report.row(
            "quantise", "copy", (*cells, _percent(copy.spread)), size=size,
            seconds=copy.median, gb_per_second=rate, spread=copy.spread,
        )  # fmt: skip
        for timing in timings:
            ratio, spread = timing.ratio(copy)
            each = 1e9 * timing.median / size**2
            cells = (_milliseconds(timing), f"{each:.2f}", f"{ratio:.2f}", _percent(spread))
            report.row(
                "quantise", timing.name, cells, size=size,
                seconds=timing.median, ns_per_element=each, times_copy=ratio, spread=spread,
            )  # fmt: skip
    if (os.cpu_count() or 1) < 2:
        return
    report.head("two threads against one", "one", "two", "x faster", "spread")
    for name, one, two in bench_modes.two_threads(backend, parts[0][0], sizes.turns):
        ratio, spread = one.ratio(two)
        cells = (_milliseconds(one), _milliseconds(two), f"{ratio:.2f}", _percent(spread))
        report.row("two_threads", name, cells, times_faster=ratio, spread=spread)


def linear(report: Report, sizes: Sizes) -> None:
    """Emulated linears against a float32 one."""
    for size in sizes.linears:
        report.head(f"linear {size}^3, forward + backward", "time", "x fp32", "spread")
        fp32, *others = bench_modes.linears(size, sizes.turns)
        for timing in (fp32, *others):
            ratio, spread = timing.ratio(fp32)
            cells = (_milliseconds(timing), f"{ratio:.3f}", _percent(spread))
            report.row(
                "linear", timing.name, cells, size=size,
                seconds=timing.median, times_fp32=ratio, spread=spread,
            )  # fmt: skip


def peers(report: Report, sizes: Sizes, backend: backends.Backend) -> None:
    """Other libraries on the same matrix."""
    size, turns = sizes.slow_matrix, max(2, sizes.turns // 3)
    report.head(f"NVFP4 by others, {size} x {size} float32", "ns/element", "values")
    for peer in bench_peers.peers(backend, size, turns):
        each = "" if peer.seconds is None else f"{1e9 * peer.seconds / size**2:.2f}"
        said = f"   {peer.reason or peer.bits}"
        report.row(
            "peers", f"{peer.name} {peer.version}", (each, said), reason=peer.reason,
            ns_per_element=float(each or "nan"), bits=peer.bits if not peer.reason else "",
        )  # fmt: skip
    if len(report.data["peers"]) == 1:
        report.lines.append("  no other library is installed: pip install 'nvfp4[bench]'")


def bench(
    only: str = "", threads: int = 1, quick: bool = False, gpu: bool = False,
    json_file: Path | None = None, plot: Path | None = None, echo: Echo = print,
) -> int:  # fmt: skip
    """Measures and prints; 0. UserError for an unknown section."""
    if gpu:
        from nvfp4.lab import bench_gpu

        return bench_gpu.main()
    chosen = tuple(filter(None, only.split(","))) or SECTIONS
    if unknown := set(chosen) - set(SECTIONS):
        raise UserError(
            f"--only {sorted(unknown)[0]}: no such section; one of {', '.join(SECTIONS)}"
        )
    sizes = QUICK if quick else Sizes()
    keep_freed_memory()
    torch.set_num_threads(threads)
    backend = backends.choose()
    backends.activate(backend)
    report = Report()
    report.data["machine"] = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "threads": threads, "backend": backend.name,
        "reasons": backend.reasons, "versions": versions(), "load": os.getloadavg()[0],
    }  # fmt: skip
    echo(
        f"{cpu_name()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}, "
        f"backend {backend.reasons[-1]}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f} before it began"
    )
    parts: dict[str, Callable[[], None]] = {
        "machine": lambda: machine(report, sizes),
        "quantise": lambda: quantise(report, sizes, backend),
        "linear": lambda: linear(report, sizes),
        "step": lambda: step(report, sizes),
        "peers": lambda: peers(report, sizes, backend),
    }
    for name in chosen:
        print(f"measuring: {name} ...", file=sys.stderr, flush=True)
        parts[name]()
        for line in report.lines:
            echo(line)
        report.lines.clear()
    if json_file is not None:
        json_file.write_text(json.dumps(report.data, indent=1) + "\n")
        echo(f"\nwritten: {json_file}")
    if plot is not None:
        from nvfp4.lab.bench_plot import draw

        draw(report.data, plot)
        echo(f"\nwritten: {plot}")
    return 0


def step(report: Report, sizes: Sizes) -> None:
    """Whole training steps of the tiny recipes."""
    from nvfp4.lab import bench_step

    report.head("training step", "time", "tokens/s", "x first", "spread")
    first, *others = timings = bench_step.steps(sizes.recipes, sizes.step_turns)
    del others
    for timing, tokens in timings:
        ratio, spread = timing.ratio(first[0])
        rate = tokens / timing.median
        cells = (_milliseconds(timing), f"{rate:.0f}", f"{ratio:.2f}", _percent(spread))
        report.row(
            "step", timing.name, cells, seconds=timing.median, tokens_per_second=rate,
            times_first=ratio, spread=spread,
        )  # fmt: skip
