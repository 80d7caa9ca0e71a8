"""The charts of a report or a comparison as files for a paper, SVG and PNG, in the colours of the pages.

Drawn by matplotlib, which is an extra: ``pip install 'classwise[figures]'``.
"""

# K classes

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classwise.core.errors import InputError
from classwise.reporting import charts
from classwise.reporting.comparison import Comparison, Row
from classwise.reporting.estimates import ClassEstimate
from classwise.reporting.report import ClassReport
from classwise.reporting.text import plain
from classwise.storage.files import atomic
from classwise.storage.verdicts import NATURAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, LINE = "#1a1f26", "#59636e", "#e3e7eb"
LIGHT, DARK, ACCENT = "#d4dde6", "#3d5670", "#bd3a0c"
MODELS = ("#8a939d", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
WIDTH = 6.5
"""Inches: the text of a page."""
DPI = 300
LONGEST = 24
"""Letters of a name."""


def save_figures(subject: ClassReport | Comparison, out: Path) -> list[Path]:
    """Draw everything; the files, each chart as SVG and as PNG."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with _drawing():
        drawn = _of_report(subject) if isinstance(subject, ClassReport) else _of_comparison(subject)
        for name, figure in drawn:
            for kind, settings in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": DPI})):
                written.append(out / f"{name}.{kind}")
                with atomic(written[-1]) as partial:
                    figure.savefig(partial, format=kind, bbox_inches="tight", **settings)
    return written


def require() -> None:
    """Say before any work is done that nothing could be drawn."""
    if find_spec("matplotlib") is None:
        raise InputError("figures are drawn by matplotlib: pip install 'classwise[figures]'")


@contextmanager
def _drawing() -> Iterator[None]:
    """The look. Names are text, never formulas; a letter that the font lacks is a box, not a warning."""
    require()
    from matplotlib import rc_context

    look: Any = {
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK,
        "text.parse_math": False,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": LINE,
        "xtick.color": MUTED,
        "ytick.color": INK,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "classwise",
    }
    with rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def _of_report(report: ClassReport) -> Iterator[tuple[str, Figure]]:
    yield "classes", _class_bars(report)
    classes = report.dataset.classes
    if len(classes) <= charts.MANY_CLASSES:
        for number, key in enumerate(report.confusion):
            yield f"confusion-{number}", _confusion(report, key)


def _of_comparison(comparison: Comparison) -> Iterator[tuple[str, Figure]]:
    rows, classes = comparison[comparison.strongest], comparison.dataset.classes
    if any(row.worst and row.overall.value is not None for row in rows):
        yield "average-and-worst", _scatter(rows)
    yield "classes", _grouped_bars(rows[: len(MODELS)], classes)
    around = _radar(rows[: len(MODELS)], classes)
    if around is not None:
        yield "radar", around


def _class_bars(report: ClassReport) -> Figure:
    """Natural and attacked, from the weakest class; the weakest is marked."""
    key = report.strongest
    result, natural = report[key], report[NATURAL]
    chosen = charts.select([part.value for part in result.by_class])
    labels = [*chosen.weakest, *chosen.strongest]
    figure, axes = _new(0.24 * len(labels) + 0.9)
    for place, label in enumerate(labels):
        worst = result.worst is not None and result.by_class[label].value == result.worst.value
        if key != NATURAL:
            axes.barh(place, natural.by_class[label].value or 0, height=0.72, color=LIGHT)
        axes.barh(place, result.by_class[label].value or 0, height=0.42, color=ACCENT if worst else DARK)
        _whisker(axes, result.by_class[label], place)
    overall = result.overall.value
    if overall is not None:
        axes.axvline(overall, color=INK, linewidth=0.8, linestyle=":")
        axes.text(overall, -0.9, f"whole model {overall:.1f}", ha="center", va="bottom", fontsize=8)
    _named_places(axes, [result.by_class[label].name for label in labels])
    axes.set_xlabel(
        "accuracy, %" if key == NATURAL else f"accuracy, %: natural (light) and {plain(key)}, with 95% intervals"
    )
    return figure


def _grouped_bars(rows: Sequence[Row], classes: list[str]) -> Figure:
    means = [charts.mean([row.shares[label] for row in rows]) for label in range(len(classes))]
    chosen = charts.select(means, keep=[row.worst.label for row in rows if row.worst])
    labels = [*chosen.weakest, *chosen.strongest]
    figure, axes = _new((0.1 + 0.13 * len(rows)) * len(labels) + 0.9)
    height = 0.8 / len(rows)
    for number, row in enumerate(rows):
        for place, label in enumerate(labels):
            at = place + (number - (len(rows) - 1) / 2) * height
            part = row.by_class[label]
            named = _short(row.model) if place == 0 else None
            axes.barh(at, part.value or 0, height=0.9 * height, color=MODELS[number], label=named)
            _whisker(axes, part, at)
    _named_places(axes, [classes[label] for label in labels])
    axes.set_xlabel("accuracy, %, with 95% intervals")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def _scatter(rows: Sequence[Row]) -> Figure:
    """Average against worst class; the dashed line is the front."""
    figure, axes = _new(3.6)
    known = [(number, row, row.worst) for number, row in enumerate(rows) if row.worst and row.overall.value is not None]
    at = [(row.overall.value or 0.0, worst.value) for _, row, worst in known]
    ahead = [at[place] for place in charts.front(at)]
    axes.plot([x for x, _ in ahead], [y for _, y in ahead], color=MUTED, linewidth=0.8, linestyle="--")
    for (number, row, worst), (x, y) in zip(known, at, strict=True):
        colour = MODELS[number] if number < len(MODELS) else MUTED
        across = [[x - (row.overall.low or x)], [(row.overall.high or x) - x]]
        axes.errorbar(x, y, xerr=across, yerr=[[y - worst.low], [worst.high - y]], fmt="o", color=colour, markersize=4)
        axes.annotate(_short(row.model), (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("average, %")
    axes.set_ylabel("worst class, %")
    return figure


def _radar(rows: Sequence[Row], classes: list[str]) -> Figure | None:
    values = [[value for value in row.shares if value is not None] for row in rows]
    if charts.radar(classes, [row.shares for row in rows]) is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 4.2))
    axes: Any = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * number / len(classes) for number in range(len(classes) + 1)]
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    for number, (row, shares) in enumerate(zip(rows, values, strict=True)):
        axes.plot(angles, [*shares, shares[0]], color=MODELS[number], linewidth=1.4, label=_short(row.model))
        axes.fill(angles, [*shares, shares[0]], color=MODELS[number], alpha=0.08)
    axes.set_xticks(angles[:-1], [_short(name) for name in classes])
    axes.set_ylim(0, 100)
    axes.set_yticks([25, 50, 75], ["25", "50", "75"], fontsize=7, color=MUTED)
    axes.set_rlabel_position(0)
    axes.tick_params(axis="x", pad=9)
    axes.legend(loc="upper right", bbox_to_anchor=(1.3, 1.1), fontsize=8)
    return figure


def _confusion(report: ClassReport, key: str) -> Figure:
    """Percent of the row, superclasses together."""
    classes, groups = report.dataset.classes, report.dataset.together
    order = [label for group in groups for label in group]
    rows = [[report.confusion[key][true][predicted] for predicted in order] for true in order]
    shares = [[100 * count / max(1, sum(row)) for count in row] for row in rows]
    figure, axes = _new(max(2.4, 0.3 * len(order) + 1.2))
    axes.grid(False)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    names = [_short(classes[label]) for label in order]
    axes.set_xticks(range(len(order)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(order)), names)
    if len(order) <= 20:
        for i, row in enumerate(shares):
            for j, share in enumerate(row):
                if share >= 0.05:
                    axes.text(
                        j, i, f"{share:.1f}", ha="center", va="center", fontsize=7, color="w" if share > 55 else INK
                    )
    edge = 0.0
    for group in groups[:-1]:
        edge += len(group)
        axes.axhline(edge - 0.5, color=INK, linewidth=1)
        axes.axvline(edge - 0.5, color=INK, linewidth=1)
    axes.set_xlabel(f"taken for, {plain(key)}")
    axes.set_ylabel("true class")
    figure.colorbar(image, label="% of the row")
    return figure


def _new(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.add_subplot()


def _whisker(axes: Axes, part: ClassEstimate, place: float) -> None:
    if part.low is not None and part.high is not None:
        axes.plot([part.low, part.high], [place, place], color=INK, linewidth=1)


def _named_places(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)


def _short(name: str) -> str:
    text = plain(name)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
