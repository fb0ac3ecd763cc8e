"""Takes series of numbers, gives drawings as SVG text; knows nothing of runs or pages."""

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outrider.records import Span

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito: told apart by all eyes
MOST_POINTS = 400  # a drawing has about this many columns of pixels
Series = tuple[Sequence[float], Sequence[float]]


def binned(x: Sequence[float], y: Sequence[float]) -> tuple[Series, Series]:
    """Means of at most MOST_POINTS runs of neighbouring points, and the (lowest, highest) value of each run."""
    width = -(-len(x) // MOST_POINTS) or 1
    runs = [slice(i, i + width) for i in range(0, len(x), width)]
    means = [sum(y[run]) / len(y[run]) for run in runs]
    middles = [sum(x[run]) / len(x[run]) for run in runs]
    return (middles, means), ([min(y[run]) for run in runs], [max(y[run]) for run in runs])


def lines(series: Mapping[str, Series], *, x: str, y: str, points: Sequence[str] = ()) -> str:
    """One line a series against the same axes; what a point averages is shaded. `points`: names drawn with marks as well."""
    figure, axes = _figure(x, y)
    for (name, (at, values)), colour in zip(series.items(), COLOURS * (len(series) // len(COLOURS) + 1), strict=False):
        (middles, means), (low, high) = binned(at, values)
        axes.plot(middles, means, color=colour, label=name, linewidth=1.5, marker="o" if name in points else None)
        if len(at) > len(middles):
            axes.fill_between(middles, low, high, color=colour, alpha=0.15, linewidth=0)
    if len(series) > 1:
        axes.legend(frameon=False)
    return _svg(figure)


def by_slot(measurements: Mapping[str, Sequence[float]], *, y: str) -> str:
    """Bars by slot, one colour a measurement."""
    figure, axes = _figure("slot", y)
    width = 0.8 / len(measurements)
    for i, (name, values) in enumerate(measurements.items()):
        at = [slot + (i - (len(measurements) - 1) / 2) * width for slot in range(1, len(values) + 1)]
        axes.bar(at, values, width, color=COLOURS[i % len(COLOURS)], label=name)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return _svg(figure)


def stacked(at: Sequence[float], parts: Mapping[str, Sequence[float]], *, x: str, y: str) -> str:
    """Areas on top of each other; their upper edge is the sum."""
    figure, axes = _figure(x, y)
    reduced = {name: binned(at, values)[0] for name, values in parts.items()}
    middles = next(iter(reduced.values()))[0]
    axes.stackplot(middles, [means for _, means in reduced.values()], labels=list(reduced), colors=COLOURS[: len(reduced)])
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _svg(figure)


def time_line(spans: Sequence[Span]) -> str:
    """Lanes below each other, in the order of their names; a bar a span, one colour a label."""
    names = sorted({span.lane for span in spans})
    labels = list(dict.fromkeys(span.label for span in sorted(spans, key=lambda span: span.label)))
    figure, axes = _figure("ms", "")
    figure.set_size_inches(8, 1.2 + 0.35 * len(names))
    for label, colour in zip(labels, COLOURS * (len(labels) // len(COLOURS) + 1), strict=False):
        for i, lane in enumerate(names):
            bars = [(s.begin, s.end - s.begin) for s in spans if s.lane == lane and s.label == label]
            if bars:
                axes.broken_barh(bars, (i - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.5)
        axes.bar([0.0], [0.0], color=colour, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0.0)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _svg(figure)


def levels(values: Mapping[str, float], marks: Mapping[str, float], *, x: str) -> str:
    """One bar a name, the first on top; `marks` are lines across all of them."""
    figure, axes = _figure(x, "", height=1.2 + 0.22 * len(values))
    axes.barh(list(values), list(values.values()), color=COLOURS[0])
    axes.invert_yaxis()
    for (name, at), colour in zip(marks.items(), COLOURS[1:], strict=False):
        axes.axvline(at, color=colour, label=name)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _svg(figure)


def _figure(x: str, y: str, *, height: float = 3.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element: text kept as text, and the same bytes for the same figure."""
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "outrider", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg"):]
