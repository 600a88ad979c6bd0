"""Figures of the laboratory; the commands and the notebooks draw with the same functions.

Matplotlib's Figure objects are used without pyplot: no window, no global state, the Agg renderer.
Colours are Okabe and Ito's, which the colour-blind can tell apart; the reference is always black.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4.lab.bootstrap import Array, relative_gap
from nvfp4.lab.compare import Comparison, Parity
from nvfp4.lab.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = "#1a1a1a"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
TOLERANCE = "#009E73"
SIZE = (8.0, 6.0)  # inches at 100 dpi; the PNG has twice that, 1600 x 1200 pixels

STYLE: Any = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8a8a",
    "axes.labelcolor": "#333333",
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def running_mean(values: Array, span: int) -> Array:
    """Centred mean over `span` (odd) points; fewer near the ends, but still centred. (n,) -> (n,).

    Cut-off windows would bend a falling curve at both ends; centred ones do not.
    """
    n, half = len(values), span // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(n)
    reach = np.minimum(np.minimum(index, n - 1 - index), half)
    return (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)


def smoothing_span(points: int) -> int:
    """An odd number of about a twentieth of the points; 1 (no smoothing) below 60 points."""
    return 1 if points < 60 else 2 * (points // 40) + 1


def spread_apart(heights: Sequence[float], distance: float) -> list[float]:
    """The heights, moved as little as a sweep from below needs to keep them `distance` apart."""
    moved = list(heights)
    order = sorted(range(len(moved)), key=lambda i: moved[i])
    for below, above in pairwise(order):
        moved[above] = max(moved[above], moved[below] + distance)
    return moved


def parity_figure(parity: Parity) -> "Figure":
    """Training loss above, relative gap to the reference below, over one axis of tokens.

    Faint lines are single steps, strong lines running means. Grey: the window that is judged, with
    each run's gap and interval in it. Green: gaps within the tolerance. Rings: validation.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end = max(c.end for c in parity.comparisons)
    start = max(c.window_start for c in parity.comparisons)
    scale, word = token_unit(end)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.2))
        for axes in (upper, lower):
            axes.axvspan(start / scale, end / scale, color="#000000", alpha=0.06, lw=0)
            axes.set_xlim(0, end / scale * 1.005)
        _draw_losses(upper, parity, scale)
        _draw_gaps(lower, parity, scale)
        _draw_switches(upper, lower, parity, scale)
        upper.annotate(
            "judged",
            ((start + end) / 2 / scale, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, -11),
            textcoords="offset points",
            ha="center",
            color="#777777",
            fontsize=9,
        )
        lower.set_xlabel(f"tokens ({word})" if word else "tokens")
        upper.set_title(_title(parity))
    return figure


def _draw_switches(upper: "Axes", lower: "Axes", parity: Parity, scale: float) -> None:
    """A dotted line through both panels where a run's precision changed, with what changed."""
    runs = [(parity.reference, REFERENCE), *((c.run, colour) for c, colour in _coloured(parity))]
    several: dict[tuple[float, str], str] = {}  # runs that switch alike share one line
    for run, colour in runs:
        for tokens, text in run.switches:
            several.setdefault((tokens, text), colour)
    for (tokens, text), colour in several.items():
        for axes in (upper, lower):
            axes.axvline(tokens / scale, color=colour, lw=1.2, ls=":")
        short = re.sub(r" in \d+ of \d+ linears", "", text)
        upper.annotate(
            short.replace("; ", "\n"),
            (tokens / scale, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3, -4),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            color=colour,
            fontsize=8.5,
            bbox=dict(facecolor="white", alpha=0.8, lw=0, pad=1),
        )


def save_png(figure: "Figure", path: Path) -> None:
    """Write `figure` as PNG at twice its nominal size, whole or not at all."""
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=2 * figure.dpi, facecolor="white")
    part.replace(path)


def _title(parity: Parity) -> str:
    names = [c.run.name for c in parity.comparisons]
    who = names[0] if len(names) == 1 else f"{len(names)} runs"
    return f"{who} against {parity.reference.name}"


def _coloured(parity: Parity) -> list[tuple[Comparison, str]]:
    return [(c, COLOURS[i % len(COLOURS)]) for i, c in enumerate(parity.comparisons)]


def _draw_losses(axes: "Axes", parity: Parity, scale: float) -> None:
    reference = parity.reference
    _draw_run(axes, reference, REFERENCE, 2.4, scale, reference.name)
    for comparison, colour in _coloured(parity):
        run = comparison.run
        _draw_run(axes, run, colour, 1.4, scale, f"{run.name}  {comparison.verdict}")
    axes.plot([], [], "o", ms=5, mfc="white", color="#777777", label="validation")
    axes.set_ylabel("loss (nats per token)")
    span = smoothing_span(len(reference.train))
    axes.legend(loc="upper center", title=f"mean of {span} steps" if span > 1 else None)
    losses = [reference.train.values, *(c.run.train.values for c in parity.comparisons)]
    shown = np.concatenate(losses)
    shown = shown[np.isfinite(shown)]
    low, high = (shown.min(), np.quantile(shown, 0.995)) if len(shown) else (0.0, 1.0)
    pad = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - pad, high + pad)


def _draw_run(axes: "Axes", run: Run, colour: str, width: float, scale: float, label: str) -> None:
    tokens, losses = run.train.tokens / scale, run.train.values
    axes.plot(tokens, losses, color=colour, alpha=0.18, lw=0.8)
    smooth = running_mean(losses, smoothing_span(len(losses)))
    axes.plot(tokens, smooth, color=colour, lw=width, label=label)
    _rings(axes, run.valid.tokens / scale, run.valid.values, colour)


def _draw_gaps(axes: "Axes", parity: Parity, scale: float) -> None:
    tolerance = 100 * parity.settings.tolerance
    axes.axhspan(-1e4, tolerance, color=TOLERANCE, alpha=0.07, lw=0)
    axes.axhline(tolerance, color=TOLERANCE, lw=1.2, ls=(0, (5, 3)))
    axes.axhline(0.0, color=REFERENCE, lw=1.2)
    heights = [0.0, tolerance]
    for comparison, colour in _coloured(parity):
        heights += _draw_gap(axes, comparison, colour, scale)
    low, high = min(heights), max(heights)
    pad = 0.12 * (high - low or 1.0)
    axes.set_ylim(low - pad, high + pad)
    axes.annotate(
        f"tolerance {tolerance:.2f} %",
        (0.01, tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        color="#00684d",
        fontsize=9.5,
    )
    _label_gaps(axes, parity, scale, distance=0.14 * (high - low or 1.0))
    axes.set_ylabel(f"gap to {parity.reference.name} (%)")


def _draw_gap(axes: "Axes", comparison: Comparison, colour: str, scale: float) -> list[float]:
    """One run's gap, raw and smoothed, and its interval; returns heights that must be visible."""
    train, valid = comparison.train, comparison.valid
    tokens, span = train.tokens / scale, smoothing_span(len(train))
    smooth = 100 * relative_gap(running_mean(train.x, span), running_mean(train.ref, span))
    axes.plot(tokens, 100 * relative_gap(train.x, train.ref), color=colour, alpha=0.15, lw=0.8)
    inner = slice(span // 6, len(train) - span // 6)  # the rest are means of few steps
    axes.plot(tokens[inner], smooth[inner], color=colour, lw=1.8)
    _rings(axes, valid.tokens / scale, 100 * relative_gap(valid.x, valid.ref), colour)
    settled = smooth[inner][train.tokens[inner] > 0.1 * comparison.end]
    settled = settled[np.isfinite(settled)]
    heights = [float(settled.min()), float(settled.max())] if len(settled) else []
    if comparison.interval is not None:
        low, high = 100 * comparison.interval.low, 100 * comparison.interval.high
        gap = 100 * comparison.interval.gap
        ends = (comparison.window_start / scale, comparison.end / scale)
        axes.fill_between(ends, low, high, color=colour, alpha=0.3, lw=0)
        axes.plot(ends, (gap, gap), color=colour, lw=2.6, solid_capstyle="butt")
        heights += [low, high]
    return heights


def _label_gaps(axes: "Axes", parity: Parity, scale: float, distance: float) -> None:
    """Each gap with its interval, in its colour, right of the axes."""
    known = [(c, c.interval, colour) for c, colour in _coloured(parity) if c.interval]
    places = spread_apart([100 * interval.gap for _, interval, _ in known], distance)
    for (comparison, interval, colour), place in zip(known, places, strict=True):
        axes.annotate(
            f"{interval.gap:+.2%}\n[{100 * interval.low:.2f}, {100 * interval.high:.2f}]",
            (comparison.end / scale, place),
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=9.5,
            annotation_clip=False,
        )


def _rings(axes: "Axes", tokens: Array, values: Array, colour: str) -> None:
    """Validation; of many evaluations about twenty are drawn, counted back from the last one."""
    every = slice(None, None, -max(1, round(len(tokens) / 20)))
    axes.plot(tokens[every], values[every], "o", ms=5, mfc="white", color=colour)


def token_unit(tokens: float) -> tuple[float, str]:
    """(1e6, "million") and so on, so that an axis carries short numbers."""
    for scale, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if tokens >= scale:
            return scale, word
    return 1.0, ""
