"""The figure of `nvfp4 bench --plot`: what every mode costs, in copies of the matrix."""

from pathlib import Path
from typing import Any

from nvfp4.errors import UserError
from nvfp4.lab.plots import COLOURS, REFERENCE, STYLE


def draw(data: dict[str, Any], path: Path) -> None:
    """One bar for each mode and one for each emulated linear. UserError if neither was measured."""
    modes = [row for row in data.get("quantise", []) if "times_copy" in row]
    largest = max((row["size"] for row in modes), default=0)
    modes = [row for row in modes if row["size"] == largest]
    linears = [row for row in data.get("linear", []) if row["times_fp32"] != 1]
    if not modes:
        raise UserError("--plot: nothing to draw; add quantise to --only")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 0.32 * (len(modes) + len(linears)) + 1.9), dpi=200)
        parts = [(modes, "name", "times_copy", "quantise + dequantise, in copies of the matrix")]
        if linears:
            parts.append((linears, "name", "times_fp32", "emulated linear, in float32 linears"))
        heights = [len(part[0]) + 1 for part in parts]
        axes = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
        for ax, (rows, key, value, title) in zip(axes, parts, strict=True):
            names = [row[key] if rows is modes else f"{row[key]}, {row['size']}^3" for row in rows]
            values = [row[value] for row in rows]
            spread = [row[value] * row["spread"] for row in rows]
            ax.barh(names, values, xerr=spread, color=COLOURS[0], height=0.66, ecolor=REFERENCE)
            ax.axvline(1.0, color=REFERENCE, linewidth=1.2)
            for place, number in enumerate(values):
                ax.text(number + spread[place], place, f"  {number:.2f}", va="center")
            ax.invert_yaxis()
            ax.set_xlim(0, 1.18 * max(values))
            ax.set_title(title)
            ax.grid(visible=False, axis="y")
        machine = data["machine"]
        figure.text(
            0.01, 0.005, f"{machine['cpu']}, {machine['threads']} thread, backend "
            f"{machine['backend']}; bars: median, whiskers: half the quartile distance",
            fontsize=8, color="#555555",
        )  # fmt: skip
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        figure.savefig(path)
