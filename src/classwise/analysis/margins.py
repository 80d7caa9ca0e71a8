"""Margins: the smallest radius found at which an attack breaks each image, and robustness curves of the classes.

FAB searches for the nearest misclassified image directly. For any other attack the radius is **bisected** for each
image: from the report's eps it is doubled until the attack succeeds, up to the range of pixels, then the interval
between failure and success is halved until the radius is known to half a percent. With ``radii`` only these are tried.

Each radius is the distance to an image in [0, 1] that a float32 pass of the model misclassifies, so it is an upper
bound of the true smallest radius; the smaller of two results is the better one. On digits, the mean of FAB is 17% below
that of bisected PGD for a TRADES model and 4% for a standard one, so FAB is the default. A misclassified natural image
has the radius 0; an image that no radius broke has none and counts as surviving all radii.

The **robustness curve** of a class is the share of its images that survive a radius, also an upper bound, up to the
largest radius that was found or tried. The area under it is the mean radius of the class. The area between the curves
of the best and the worst class has a seeded bootstrap interval over the images of these two classes; ``corrected``
subtracts the bias from selecting the largest difference, estimated by resampling every class and selecting again.
"""

# N examples, K classes, R radii

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from classwise.analysis.bootstrap import resampled_means
from classwise.analysis.model_outputs import BATCH, attack_of, exact_logits, selected_examples
from classwise.analysis.plots import shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.run import Run
from classwise.attacks import FAB
from classwise.config.spec import Numbers
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.types import Attack
from classwise.data.batches import ordered
from classwise.reporting.estimates import Estimate, estimate
from classwise.reporting.figures import DASHES, INK, SERIES_COLORS, Figure, Series, bars, lines
from classwise.reporting.formatting import class_name

Floats = NDArray[np.float64]
PRECISION = 0.005
"""Relative precision of bisection."""
HALVINGS = 20
"""Maximum number of bisection steps."""
GRID = 101
"""Number of radii of a curve."""
MOST_CURVES = 16
"""Maximum number of classes that are all drawn; of more, the weakest and the strongest ``ENDS``."""
ENDS = 4
QUARTILES = ("quartile_1_radius", "median_radius", "quartile_3_radius")

AttackAtRadii = Callable[[Tensor], Tensor]
"""Maps radii (N,) to attacked images."""


def margins(
    run: Run | str | Path,
    *,
    attack: str | None = None,
    per_class: int | None = 20,
    radii: Numbers | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Smallest radius at which ``attack`` breaks each of the first ``per_class`` images of each class.

    The default attack is FAB, with more than ten classes against the nine likeliest targets; with ``radii``, PGD.
    ``radii``: the only radii to try, in the units of eps.
    """
    run = Run.open(run)
    run.require_classes(2)
    threat, classes = run.report.threat, run.classes
    if attack is None:
        attack = "pgd" if radii else "fab" if len(classes) <= 10 else "fab:target=all,num_targets=9"
    search = attack_of(run, attack)
    if isinstance(search, FAB) and radii is not None:
        raise InputError("fab searches for the nearest image itself; radii need another attack")
    largest = 1.0 if threat.norm == "Linf" else float(np.sqrt(run.images.images[0].size))
    if radii is not None and not (radii and all(0 < radius <= largest for radius in radii)):
        raise InputError(f"radii = {list(radii)}; expected numbers above 0 and at most {largest:g}")
    index = selected_examples(run, per_class)
    found = []
    progress.start(f"radii of {run.name}", len(index))
    for x, y, places in ordered(run.images, index, BATCH, device_of(run.model)):
        found.append(_smallest_radii(run, search, x, y, places, radii, largest))
        progress.advance(len(x))
    progress.finish()
    label, radius = run.images.labels[index], np.concatenate(found)
    most = float(max(radii or [threat.eps, *radius[np.isfinite(radius)]]))
    by_class = [radius[label == number] for number in range(len(classes))]
    rows = [_class_row(number, classes[number], own, most, threat.eps) for number, own in enumerate(by_class)]
    area = _area([np.minimum(own, most) for own in by_class], classes, seed)
    images = pd.DataFrame({"index": index, "label": label, "class": np.array(classes, dtype=object)[label]})
    images["radius"] = np.where(np.isfinite(radius), radius.round(8), np.nan)
    searched = "nearest" if isinstance(search, FAB) else "bisection" if radii is None else "grid"
    finding = _finding(rows, area, threat.norm, attack)
    about = {"model": run.name, "dataset": run.report.dataset.name, "classes": classes, "attack": attack}
    return AnalysisResult(
        name="margins",
        finding=finding,
        about={**about, "search": searched, "norm": threat.norm, "eps": threat.eps, "seed": seed},
        frames={
            "images": images,
            "classes": frame_of(rows).sort_values("mean_radius", kind="stable", ignore_index=True),
            "area": frame_of([] if area is None else [area]),
        },
        draw=lambda: [_curves(run, rows, by_class, most, finding), _medians(run, rows)],
    )


def survival(radius: Floats, grid: Floats) -> list[float]:
    """Return (R,) the percentage of images that survive each radius, from the smallest radii that break them.

    >>> survival(np.array([0.0, 0.1, 0.3, np.inf]), np.array([0.0, 0.1, 0.2]))
    [75.0, 50.0, 50.0]
    """
    return [round(100 * float(share), 4) for share in (radius[:, None] > grid).mean(0)]


def bisected(
    attack: AttackAtRadii, distance: Callable[[Tensor], Floats], n: int, start: float, largest: float
) -> Floats:
    """Return (N,) the smallest distances found; infinity where no radius up to the largest breaks the image.

    ``distance`` maps attacked images to their distances, infinity for correctly classified ones.
    """
    found, failed, radius = np.full(n, np.inf), np.zeros(n), np.full(n, start)
    halvings = np.zeros(n, dtype=np.int64)
    searching = np.ones(n, dtype=bool)
    while searching.any():
        reached = distance(attack(torch.from_numpy(radius)))
        found = np.where(searching, np.minimum(found, reached), found)
        failed = np.where(searching & np.isinf(reached), radius, failed)
        # An attack may fail at a radius above one at which it succeeds; the smaller radii are then searched again.
        failed = np.where(failed < found, failed, 0.0)
        bracketed = np.isfinite(found)
        halvings += bracketed
        searching = np.where(
            bracketed, (found - failed > PRECISION * found) & (halvings <= HALVINGS), searching & (failed < largest)
        )
        radius = np.where(bracketed, failed + (found - failed) / 2, np.minimum(2 * failed, largest))
    return found


def _smallest_radii(
    run: Run,
    search: Attack,
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    radii: tuple[float, ...] | None,
    largest: float,
) -> Floats:
    """Return (N,) the smallest radii of one batch."""
    model, threat = run.model, run.report.threat

    def distance(images: Tensor) -> Floats:
        delta = (images.double() - x.double()).flatten(1).cpu()
        size = delta.abs().amax(1) if threat.norm == "Linf" else delta.norm(dim=1)
        wrong = exact_logits(model, images).argmax(1) != y.cpu()
        return torch.where(wrong, size, torch.inf).numpy()

    def attack(radius: Tensor) -> Tensor:
        scale = (radius / threat.eps).to(x)
        return search(model, x, y, eps_scale=scale, generator=ExampleNoise(0, rows))

    if isinstance(search, FAB):
        nearest, _ = search.closest(model, x, y, generator=ExampleNoise(0, rows))
        found = distance(nearest)
    elif radii is None:
        found = bisected(attack, distance, len(x), min(threat.eps, largest), largest)
    else:
        found = np.min([distance(attack(torch.full((len(x),), one, dtype=torch.float64))) for one in radii], axis=0)
    return np.where(np.isfinite(distance(x)), 0.0, found)


def _class_row(label: int, name: str, radius: Floats, most: float, eps: float) -> dict[str, Any]:
    """Return the table row of a class; radii above ``most`` are unknown."""
    n = len(radius)
    quartiles = np.quantile(radius, [0.25, 0.5, 0.75], method="inverted_cdf") if n else np.full(3, np.inf)
    radii = [round(float(value), 8) if np.isfinite(value) else None for value in quartiles]
    survives = Estimate(**estimate(int((radius > eps).sum()), n if eps <= most else 0))
    return {
        "class": name,
        "label": label,
        "mean_radius": round(float(np.minimum(radius, most).mean()), 8) if n else None,
        **dict(zip(QUARTILES, radii, strict=True)),
        **interval_columns("survives_eps_percent", survives),
        "unbroken_images": int(np.isinf(radius).sum()),
        "n": n,
    }


def _area(radii: list[Floats], classes: list[str], seed: int) -> dict[str, Any] | None:
    """Return the area between the curves of the best and the worst class, from the bounded radii of each class."""
    present = [label for label, own in enumerate(radii) if len(own)]
    if len(present) < 2:
        return None
    random = np.random.default_rng(seed)
    means = np.array([radii[label].mean() for label in present])
    resampled = np.array([resampled_means(radii[label], random) for label in present])
    best, worst = int(means.argmax()), int(means.argmin())
    value = float(means[best] - means[worst])
    low, high = np.quantile(resampled[best] - resampled[worst], [0.025, 0.975])
    bias = float(np.mean(resampled.max(0) - resampled.min(0))) - value
    return {
        "best_class": classes[present[best]],
        "worst_class": classes[present[worst]],
        "area": round(value, 8),
        "area_low": round(float(low), 8),
        "area_high": round(float(high), 8),
        "corrected_area": round(max(0.0, value - bias), 8),
    }


def _finding(rows: list[dict[str, Any]], area: dict[str, Any] | None, norm: str, attack: str) -> str:
    known = [row for row in rows if row["n"]]
    least, most = (pick(known, key=itemgetter("mean_radius")) for pick in (min, max))
    between = (
        ""
        if area is None
        else f"; the area between the curves is {area['area']:.4f} [{area['area_low']:.4f}, {area['area_high']:.4f}], "
        f"corrected {area['corrected_area']:.4f}"
    )
    return (
        f"The mean smallest {norm} radius at which {attack} breaks an image (an upper bound) ranges from "
        f"{least['mean_radius']:.4f} for {class_name(least['class'])} to {most['mean_radius']:.4f} for "
        f"{class_name(most['class'])}{between}."
    )


def _curves(run: Run, rows: list[dict[str, Any]], by_class: list[Floats], most: float, finding: str) -> Figure:
    grid, threat = np.linspace(0, most, GRID), run.report.threat
    drawn = [row for row in rows if row["n"]]
    if len(drawn) > MOST_CURVES:
        drawn.sort(key=itemgetter("mean_radius"))
        drawn = [*drawn[:ENDS], *drawn[-ENDS:]]
    x = grid.round(8).tolist()
    curves = [
        Series(
            name=row["class"],
            x=x,
            y=survival(by_class[row["label"]], grid),
            color=SERIES_COLORS[place % len(SERIES_COLORS)],
            dash=DASHES[place // len(SERIES_COLORS) % len(DASHES)],
        )
        for place, row in enumerate(drawn)
    ]
    every = Series(name="all", x=x, y=survival(np.concatenate(by_class), grid), color=INK, dash="dashdot")
    return lines(
        [*curves, every],
        title="Robustness curves",
        alt=f"Share of the images of each class of {run.name} that survive a radius. {finding}",
        x=f"radius ({threat.norm})",
        y="surviving images of the class, %",
        zero=True,
        marks={"eps": threat.eps} if threat.eps <= most else None,
    )


def _medians(run: Run, rows: list[dict[str, Any]]) -> Figure:
    view = shown_classes([row["mean_radius"] for row in rows])
    shown = [rows[label] for label in view]
    low, median, high = ([row[name] for row in shown] for name in QUARTILES)
    return bars(
        [row["class"] for row in shown],
        [Series(name="median", y=median, low=low, high=high)],
        title=f"Median radius and quartiles{shown_suffix(view, run.classes)}",
        alt=f"Median of the smallest radii of each class of {run.name}, with quartiles.",
        y=f"radius ({run.report.threat.norm})",
    )
