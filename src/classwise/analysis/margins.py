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
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from classwise.analysis.bootstrap import resampled_means
from classwise.analysis.model_outputs import BATCH, attack_of, exact_logits, selected_examples
from classwise.analysis.plots import shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
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

Search = Literal["nearest", "bisection", "grid"]
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
    for x, y, rows in ordered(run.images, index, BATCH, device_of(run.model)):
        found.append(_smallest_radii(run, search, x, y, rows, radii, largest))
        progress.advance(len(x))
    progress.finish()
    label, radius = run.images.labels[index], np.concatenate(found)
    known = radius[np.isfinite(radius)]
    most = float(max(radii or [threat.eps, *known]))
    grid = np.linspace(0, most, GRID)
    searched: Search = "nearest" if isinstance(search, FAB) else "bisection" if radii is None else "grid"
    values = Record(
        model=run.name,
        dataset=run.report.dataset.name,
        classes=classes,
        attack=attack,
        search=searched,
        norm=threat.norm,
        eps=threat.eps,
        radii=[round(float(value), 8) for value in grid],
        by_class=[
            _of_class(number, name, radius[label == number], grid, threat.eps) for number, name in enumerate(classes)
        ],
        overall=survival(radius, grid),
        area=_area([np.minimum(radius[label == number], most) for number in range(len(classes))], classes, seed),
        examples=[
            Record(index=int(place), label=int(own), radius=round(float(value), 8) if np.isfinite(value) else None)
            for place, own, value in zip(index, label, radius, strict=True)
        ],
    )
    images = frame_of(values.examples)
    images.insert(2, "class", np.array(classes, dtype=object)[images["label"]])
    finding = _finding(values)
    return AnalysisResult(
        name="margins",
        finding=finding,
        values=values,
        frames={"images": images, "classes": _class_frame(values)},
        draw=lambda: _figures(values, finding),
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


def _of_class(label: int, name: str, radius: Floats, grid: Floats, eps: float) -> Record:
    n = len(radius)
    quartiles = np.quantile(radius, [0.25, 0.5, 0.75], method="inverted_cdf") if n else np.full(3, np.inf)
    return Record(
        {"label": label, "class": name},
        n=n,
        mean=round(float(np.minimum(radius, grid[-1]).mean()), 8) if n else None,
        quartiles=[round(float(value), 8) if np.isfinite(value) else None for value in quartiles],
        unbroken=int(np.isinf(radius).sum()),
        at_eps=Estimate(**estimate(int((radius > eps).sum()), n)) if eps <= grid[-1] else None,
        curve=survival(radius, grid) if n else None,
    )


def _area(radii: list[Floats], classes: list[str], seed: int) -> Record | None:
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
    return Record(
        best=classes[present[best]],
        worst=classes[present[worst]],
        value=round(value, 8),
        low=round(float(low), 8),
        high=round(float(high), 8),
        corrected=round(max(0.0, value - bias), 8),
    )


def _class_frame(values: Record) -> pd.DataFrame:
    """Return one row for each class, from the smallest mean radius."""
    order = sorted(values.by_class, key=lambda part: (part.mean is None, part.mean or 0.0))
    nothing = Estimate(value=None, low=None, high=None, n=0)
    rows = [
        {
            "class": part["class"],
            "label": part.label,
            "mean_radius": part.mean,
            "quartile_1_radius": part.quartiles[0],
            "median_radius": part.quartiles[1],
            "quartile_3_radius": part.quartiles[2],
            **interval_columns("survives_eps_percent", part.at_eps or nothing),
            "unbroken_images": part.unbroken,
            "n": part.n,
        }
        for part in order
    ]
    return frame_of(rows)


def _finding(values: Record) -> str:
    known = [part for part in values.by_class if part.mean is not None]
    least, most = (pick(known, key=lambda part: float(part.mean)) for pick in (min, max))
    area = values.area
    between = (
        ""
        if area is None
        else f"; the area between the curves is {area.value:.4f} [{area.low:.4f}, {area.high:.4f}], corrected "
        f"{area.corrected:.4f}"
    )
    return (
        f"The mean smallest {values.norm} radius at which {values.attack} breaks an image (an upper bound) ranges from "
        f"{least.mean:.4f} for {class_name(least['class'])} to {most.mean:.4f} for {class_name(most['class'])}"
        f"{between}."
    )


def _figures(values: Record, finding: str) -> list[Figure]:
    view = shown_classes([part.mean for part in values.by_class])
    quartiles = [values.by_class[label].quartiles for label in view]
    drawn = [part for part in values.by_class if part.curve is not None]
    if len(drawn) > MOST_CURVES:
        drawn.sort(key=lambda part: float(part.mean))
        drawn = [*drawn[:ENDS], *drawn[-ENDS:]]
    curves = [
        Series(
            name=part["class"],
            x=values.radii,
            y=part.curve,
            color=SERIES_COLORS[place % len(SERIES_COLORS)],
            dash=DASHES[place // len(SERIES_COLORS) % len(DASHES)],
        )
        for place, part in enumerate(drawn)
    ]
    return [
        lines(
            [*curves, Series(name="all", x=values.radii, y=values.overall, color=INK, dash="dashdot")],
            title="Robustness curves",
            alt=f"Share of the images of each class of {values.model} that survive a radius. {finding}",
            x=f"radius ({values.norm})",
            y="surviving images of the class, %",
            zero=True,
            marks={"eps": values.eps} if values.eps <= values.radii[-1] else None,
        ),
        bars(
            [values.classes[label] for label in view],
            [
                Series(
                    name="median",
                    y=[half for _, half, _ in quartiles],
                    low=[low for low, _, _ in quartiles],
                    high=[high for _, _, high in quartiles],
                )
            ],
            title=f"Median radius and quartiles{shown_suffix(view, values.classes)}",
            alt=f"Median of the smallest radii of each class of {values.model}, with quartiles.",
            y=f"radius ({values.norm})",
        ),
    ]
