"""The figure of an ablation: gaps with intervals on the left, GEMM errors on the right."""

from typing import TYPE_CHECKING

from nvfp4.lab.ablate_table import GEMMS, Row, Table
from nvfp4.lab.plots import COLOURS, REFERENCE, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS: dict[str, str] = dict(zip(GEMMS, ("o", "s", "D"), strict=True))
OFFSETS: dict[str, float] = dict(zip(GEMMS, (-0.2, 0.0, 0.2), strict=True))
HUES: dict[str, str] = dict(zip(GEMMS, COLOURS, strict=False))


def ablate_figure(table: Table) -> "Figure":
    """One line per variant, in the order of the table, the reference on top.

    Left: relative gap in percent, the interval as a bar, each seed as a ring. Right: mean relative
    error of each GEMM in the last step, in percent, on a logarithmic axis.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    height = 1.7 + 0.36 * len(table.rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, height), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.35, 1))
        for axes in (left, right):
            axes.tick_params(axis="y", length=0)
        left.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
        left.set_ylim(len(table.rows) - 0.4, -0.6)
        left.axvline(0.0, color=REFERENCE, lw=1.2)
        for place, row in enumerate(table.rows):
            _draw_gap(left, row, place)
            _draw_errors(right, row, place)
        what = "validation loss" if len(table.seeds) > 1 else "training loss, last window"
        left.set_xlabel(f"gap to {table.rows[0].name} (%)")
        left.set_title(f"{what}, {_seeds(table)}")
        right.set_title("GEMM error, last step")
        right.set_xlabel("relative error (%)")
        errors = [100 * error for row in table.rows for error in row.errors.values() if error > 0]
        if errors:
            right.set_xlim(min(errors) / 1.5, max(errors) * 1.5)
            right.set_xscale("log")
            right.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            right.xaxis.set_minor_locator(NullLocator())
        for gemm in GEMMS:
            right.plot([], [], MARKS[gemm], color=HUES[gemm], label=gemm, ms=5.5)
        figure.legend(loc="outside lower right", ncols=3, handletextpad=0.2)
    return figure


def _seeds(table: Table) -> str:
    count = len(table.seeds)
    interval = f"{table.confidence:.0%} interval"
    return f"{interval} over {count} seeds" if count > 1 else f"{interval}, one seed"


def _draw_gap(axes: "Axes", row: Row, place: int) -> None:
    if row.trouble:
        axes.annotate(
            row.trouble, (0.0, place), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=9.5, color=COLOURS[1],
        )  # fmt: skip
    if row.gap is None:
        return
    gap, colour = row.gap, COLOURS[0]
    if gap.low is not None and gap.high is not None:
        axes.plot([100 * gap.low, 100 * gap.high], [place, place], color=colour, lw=5, alpha=0.3,
                  solid_capstyle="butt")  # fmt: skip
    if len(gap.by_seed) > 1:
        rings = [100 * value for value in gap.by_seed]
        axes.plot(rings, [place] * len(rings), "o", ms=4.5, mfc="white", color=colour, mew=1)
    axes.plot([100 * gap.gap], [place], "|", ms=13, mew=2.6, color=colour)


def _draw_errors(axes: "Axes", row: Row, place: int) -> None:
    for gemm, value in row.errors.items():
        if value > 0:
            height = place + OFFSETS[gemm]  # side by side where errors are alike
            axes.plot([100 * value], [height], MARKS[gemm], color=HUES[gemm], ms=5.5)
