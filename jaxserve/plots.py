"""Plots in one style, as PNG and SVG: a thin layer over matplotlib, which is needed for plots alone. What is plotted is its callers' business."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")
"""One a series, in this order; told apart in grey and by most colour-blind eyes."""

_LEGEND_CHARACTERS_PER_INCH = 13
"""About, at the style's size: how many labels stand beside one another."""

_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#94a3b8",
    "axes.grid": True,
    "axes.labelcolor": "#334155",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.dpi": 120,
    "font.size": 9.5,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text stays text: sharp, small, searchable
    "svg.hashsalt": "jaxserve",  # equal figures give equal bytes
    "text.parse_math": False,  # a $ in a name is a $
    "xtick.color": "#475569",
    "ytick.color": "#475569",
}


@dataclasses.dataclass(frozen=True)
class Series:
    """One line or cloud of points.

    Args:
        label: In the legend; empty for none.
        x: Ascending for lines.
        y: As many.
        low: Lower ends of a band around ``y``, as many; with ``high``, or neither.
        high: Its upper ends.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def require_matplotlib() -> None:
    """To be called before long work that ends in a plot.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise ConfigError('plots need matplotlib: pip install "jaxserve[plots]"') from None


@contextmanager
def figure(columns: int = 1, *, width: float = 5.0, height: float = 3.2) -> Generator[tuple[Figure, list[Axes]]]:
    """Yields a figure in our style with ``columns`` plots side by side.

    Args:
        width: Of one plot, in inches; also ``height``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "axes.prop_cycle": cycler(color=COLORS)}
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=(width * columns, height), layout="constrained")
        yield drawn, list(drawn.subplots(1, columns, squeeze=False)[0])


def lines(
    axes: Axes, series: Sequence[Series], *, title: str, x: str, y: str, markers: bool = False, step: bool = False, log: Literal["", "x", "y", "xy"] = ""
) -> None:
    """Draws lines, with a band where a series has one.

    Args:
        x: The axis' label and unit; also ``y``.
        markers: Show the points too.
        step: Hold each value until the next point.
        log: Axes in logarithms.
    """
    for one in series:
        style: Any = "steps-post" if step else "default"
        (drawn,) = axes.plot(one.x, one.y, label=one.label or None, marker="o" if markers else None, drawstyle=style)
        if one.low:
            axes.fill_between(one.x, one.low, one.high, alpha=0.15, color=drawn.get_color(), linewidth=0)
    _finish(axes, title, x, y, log)


def scatter(axes: Axes, series: Sequence[Series], *, title: str, x: str, y: str, log: Literal["", "x", "y", "xy"] = "") -> None:
    """Draws points; many of them shine through one another."""
    for one in series:
        axes.scatter(one.x, one.y, s=14, alpha=max(0.15, min(0.8, 60 / max(1, len(one.x)))), label=one.label or None, linewidths=0)
    _finish(axes, title, x, y, log)


def bars(axes: Axes, labels: Sequence[str], series: Sequence[Series], *, title: str, y: str) -> None:
    """Draws groups of bars, one group a label, one bar in each a series; ``low`` and ``high`` become error bars."""
    width = 0.8 / max(1, len(series))
    for index, one in enumerate(series):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(labels))]
        errors = (
            [[value - low for value, low in zip(one.y, one.low, strict=True)], [high - value for value, high in zip(one.y, one.high, strict=True)]]
            if one.low
            else None
        )
        axes.bar(places, one.y, width * 0.92, yerr=errors, label=one.label or None, error_kw={"elinewidth": 1, "ecolor": "#334155", "capsize": 2})
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(visible=False, axis="x")
    _finish(axes, title, "", y, "")
    if any(one.label for one in series):
        longest = max(len(one.label) for one in series) + 5  # with its patch of colour
        fitting = int(axes.get_window_extent().width / axes.figure.dpi * _LEGEND_CHARACTERS_PER_INCH / longest)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=max(1, min(len(series), fitting)))


def stacked_bars(
    axes: Axes, labels: Sequence[str], series: Sequence[Series], *, title: str, x: str, limits: Sequence[float] = (), limit_label: str = ""
) -> None:
    """Draws lying bars, first label on top, the series one after the other in each.

    Args:
        x: The axis' label and unit.
        limits: A mark on each bar, as many as labels.
        limit_label: What the marks are.
    """
    places = [-float(index) for index in range(len(labels))]
    starts = [0.0] * len(labels)
    for one in series:
        axes.barh(places, one.y, 0.66, left=starts, label=one.label or None)
        starts = [start + value for start, value in zip(starts, one.y, strict=True)]
    if limits:
        axes.vlines(limits, [place - 0.42 for place in places], [place + 0.42 for place in places], color="#dc2626", linewidth=2, label=limit_label)
    axes.set_yticks(places, labels)
    axes.grid(visible=False, axis="y")
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=5, fontsize=8.5)


def distribution(axes: Axes, values: Sequence[float], marks: Sequence[tuple[str, float]], *, title: str, x: str) -> None:
    """Draws the cumulative distribution of values, which needs no choice of bins, with some of them marked.

    Args:
        values: At least one.
        marks: (label, value), such as percentiles.
    """
    ordered = sorted(values)
    axes.plot(ordered, [(rank + 1) / len(ordered) * 100 for rank in range(len(ordered))], drawstyle="steps-post")
    for color, (label, value) in zip(COLORS[1:], marks, strict=False):
        axes.axvline(value, color=color, linewidth=1, linestyle="--", label=f"{label} {value:.4g}")
    _finish(axes, title, x, "% at or below", "")
    axes.set_ylim(0, 101)
    axes.set_xlim(left=max(0.0, ordered[0] - (ordered[-1] - ordered[0]) * 0.05))


def to_svg(drawn: Figure) -> str:
    """The figure as an ``<svg>`` element to stand in a page."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def to_png_uri(drawn: Figure) -> str:
    """The figure as a ``data:`` address: for plots of so many points that drawing instructions would be larger than pixels."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def save(drawn: Figure, file: Path) -> None:
    """Writes a figure; the name's ending, ``.png`` or ``.svg``, says how.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        if file.suffix == ".svg":
            file.write_text(to_svg(drawn), encoding="utf-8")
        else:
            drawn.savefig(file, format="png", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def _finish(axes: Axes, title: str, x: str, y: str, log: str) -> None:
    axes.set_title(title, wrap=True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
