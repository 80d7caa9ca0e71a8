"""How far each image is from being misclassified: the smallest radius found at which an attack breaks it.

FAB looks for the nearest misclassified image by itself. Of any other attack the radius is **bisected** for each image:
beginning at the report's eps, it is doubled while the attack fails, up to the whole range of pixels, then the interval
between failure and success is halved until the radius is known to half a percent of itself. With ``radii`` these alone
are tried.

Whichever way, what is told is the distance to an image at hand, in [0, 1], that a float32 pass of the model
misclassifies. It is therefore an upper bound of the true smallest radius, whatever the attack missed; nothing here is a
lower bound, and of two answers the smaller is the better one. On digits, the mean of FAB is 17% smaller than that of
bisected PGD for a TRADES model, and 4% for a standard one, which is why it is the default. An image that is wrong
untouched has the radius 0; one that nothing broke has none, and counts as withstanding every radius.

The **robustness curve** of a class is the share of its images that withstand a radius, as far as was found: it too is
an upper bound. It ends at the largest radius that broke an image, or that was tried. The area under it is the mean
radius of the class; the area between the curves of the best and the worst class, the difference of their means. Its
interval is a seeded bootstrap over the images of the two, as if they had been named beforehand. The largest of many
noisy differences is too large: ``corrected`` takes off what redrawing every class and choosing anew adds on average.
"""

# N examples, K classes, R radii

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from classwise.analysis.bootstrap import ask, redrawn_means
from classwise.analysis.model_outputs import BATCH, attack_of, chosen
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import in_view
from classwise.analysis.wording import decimal, left_out
from classwise.attacks import FAB
from classwise.config.spec import Numbers
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.types import MeasuredAttack
from classwise.data.batches import ordered
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import COLOURS, DASHES, INK, Figure, Series, bars, lines
from classwise.reporting.part import Part
from classwise.reporting.tables import Table

Floats = NDArray[np.float64]
PRECISION = 0.005
"""The radius is bisected until it is known to this share of itself, up to what the attack misses."""
HALVINGS = 20
"""But not more often than this."""
GRID = 101
"""Radii at which the curves are drawn."""
MOST_CURVES = 16
"""Classes that get a curve each; of more, the weakest and the strongest few."""
ENDS = 4

Search = Literal["nearest", "bisection", "grid"]
SEARCHED: dict[Search, str] = {
    "nearest": "to the nearest image found",
    "bisection": "by bisection",
    "grid": "on a grid",
}
Attack = Callable[[Tensor], Tensor]
"""From radii (N,) to attacked images."""


class ClassMargin(Part):
    """The radii of one class."""

    label: int
    name: str = Field(alias="class")
    n: int
    mean: float | None
    """The area under the curve: the mean radius, where images that nothing broke count as the largest radius."""
    quartiles: list[float | None]
    """The radii that a quarter, half and three quarters of the images do not withstand; null beyond what was broken."""
    unbroken: int
    at_eps: Estimate | None
    """Share that withstands the radius of the report, in percent; null where no radius so large was tried."""
    curve: list[float] | None
    """(R,) share that withstands each radius of ``radii``, in percent; null for an absent class."""


class Area(Part):
    """Between the curves of the best and of the worst class."""

    best: str
    worst: str
    value: float
    low: float
    high: float
    corrected: float


class Margin(Part):
    """One image."""

    index: int
    label: int
    radius: float | None
    """Null where nothing broke it."""


class Margins(Answer):
    """The margins of one model."""

    kind: ClassVar[str] = "margins"

    model: str
    dataset: str
    classes: list[str]
    attack: str
    search: Search
    """How the radius was looked for."""
    norm: str
    eps: float
    radii: list[float]
    """(R,) where the curves are told."""
    by_class: list[ClassMargin]
    overall: list[float]
    """(R,) share of all images that withstands each radius, in percent."""
    area: Area | None
    """Null where fewer than two classes have examples."""
    examples: list[Margin]

    def sentences(self) -> list[str]:
        known = [part for part in self.by_class if part.mean is not None]
        least = min(known, key=lambda part: part.mean or 0.0)
        most = max(known, key=lambda part: part.mean or 0.0)
        found = [
            f"The smallest radius that {self.attack} needs ({self.norm}, {SEARCHED[self.search]}, an upper bound) is "
            f"{least.mean:.4f} on average for {least.name}, and {most.mean:.4f} for {most.name}; eps is {self.eps:g}."
        ]
        if (area := self.area) is not None:
            found.append(
                f"The area between the curves of {area.best} and {area.worst} is {area.value:.4f} "
                f"[{area.low:.4f}, {area.high:.4f}]; corrected for having chosen the two, {area.corrected:.4f}."
            )
        if unbroken := sum(part.unbroken for part in self.by_class):
            found.append(f"{unbroken} of {len(self.examples)} images were broken at no radius.")
        return found

    def tables(self) -> list[Table]:
        view = in_view([part.mean for part in self.by_class])
        return [
            Table(
                title="radii by class",
                about=f"Smallest radius at which {self.attack} breaks an image ({self.norm}): mean, quartiles and "
                f"median; and the share that withstands eps in percent [95%]. From the weakest class.",
                columns=["class", "mean", "quarter", "half", "three quarters", f"at {self.eps:g}", "images"],
                rows=[
                    [
                        part.name,
                        decimal(part.mean, 4),
                        *(decimal(value, 4) for value in part.quartiles),
                        "–" if part.at_eps is None else share(part.at_eps),
                        str(part.n),
                    ]
                    for part in sorted(self.by_class, key=lambda part: (part.mean is None, part.mean))
                    if part.label in view
                ],
                foot=left_out(len(view), len(self.classes)),
            )
        ]

    def figures(self) -> list[Figure]:
        view = in_view([part.mean for part in self.by_class])
        quartiles = [self.by_class[label].quartiles for label in view]
        shown = "" if len(view) == len(self.classes) else ", the weakest classes"
        return [
            lines(
                [
                    *(
                        Series(
                            name=part.name,
                            x=self.radii,
                            y=part.curve or [],
                            colour=COLOURS[place % len(COLOURS)],
                            dash=DASHES[place // len(COLOURS) % len(DASHES)],
                        )
                        for place, part in enumerate(self._curves())
                    ),
                    Series(name="all", x=self.radii, y=self.overall, colour=INK, dash="dashdot"),
                ],
                title="Who withstands which radius",
                alt=f"Share of each class of {self.model} that withstands a radius. {' '.join(self.sentences())}",
                x=f"radius ({self.norm})",
                y="withstands it, % of the class",
                zero=True,
                marks={"eps": self.eps} if self.eps <= self.radii[-1] else None,
            ),
            bars(
                [self.classes[label] for label in view],
                [
                    Series(
                        name="median",
                        y=[half for _, half, _ in quartiles],
                        low=[low for low, _, _ in quartiles],
                        high=[high for _, _, high in quartiles],
                    )
                ],
                title=f"Median radius and quartiles{shown}",
                alt=f"Median of the smallest radii of each class of {self.model}, with quartiles.",
                y=f"radius ({self.norm})",
            ),
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "index": one.index,
                "label": one.label,
                "class": self.classes[one.label],
                "radius": one.radius,
            }
            for one in self.examples
        ]

    def _curves(self) -> list[ClassMargin]:
        known = [part for part in self.by_class if part.curve is not None]
        if len(known) <= MOST_CURVES:
            return known
        known.sort(key=lambda part: part.mean or 0.0)
        return [*known[:ENDS], *known[-ENDS:]]


def margins(
    run: Subject | str | Path,
    *,
    attack: str | None = None,
    per_class: int | None = 20,
    radii: Numbers | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> Margins:
    """The smallest radius at which ``attack`` breaks each of the first ``per_class`` images of each class.

    Without an attack it is FAB, aimed at the likeliest nine classes where there are more to aim at; with ``radii``,
    PGD. ``radii``: try these, in the units of eps, and no others.
    """
    subject = Subject.open(run)
    threat, classes = subject.report.threat, subject.classes
    if len(classes) < 2:
        raise InputError(f"{subject.path} has one class: nothing can be misclassified")
    if attack is None:
        attack = "pgd" if radii else "fab" if len(classes) <= 10 else "fab:target=all,num_targets=9"
    search = attack_of(subject, attack)
    if isinstance(search, FAB) and radii is not None:
        raise InputError("fab looks for the nearest image by itself: give radii to another attack")
    whole = 1.0 if threat.norm == "Linf" else float(np.sqrt(subject.images.images[0].size))
    if radii is not None and not (radii and all(0 < radius <= whole for radius in radii)):
        raise InputError(f"radii = {list(radii)}: expected numbers above 0 and at most {whole:g}")
    index = chosen(subject, per_class)
    found = []
    progress.start(f"radii of {subject.name}", len(index))
    for x, y, rows in ordered(subject.images, index, BATCH, device_of(subject.model)):
        found.append(_smallest(subject, search, x, y, rows, radii, whole))
        progress.advance(len(x))
    progress.finish()
    label, radius = subject.images.labels[index], np.concatenate(found)
    known = radius[np.isfinite(radius)]
    most = float(max(radii or [threat.eps, *known]))
    grid = np.linspace(0, most, GRID)
    return Margins(
        model=subject.name,
        dataset=subject.report.dataset.name,
        classes=classes,
        attack=attack,
        search="nearest" if isinstance(search, FAB) else "bisection" if radii is None else "grid",
        norm=threat.norm,
        eps=threat.eps,
        radii=[round(float(value), 8) for value in grid],
        by_class=[
            _of_class(number, name, radius[label == number], grid, threat.eps) for number, name in enumerate(classes)
        ],
        overall=withstanding(radius, grid),
        area=_area([np.minimum(radius[label == number], most) for number in range(len(classes))], classes, seed),
        examples=[
            Margin(index=int(place), label=int(own), radius=round(float(value), 8) if np.isfinite(value) else None)
            for place, own, value in zip(index, label, radius, strict=True)
        ],
    )


def withstanding(radius: Floats, grid: Floats) -> list[float]:
    """(R,) the share of images, by the smallest radii that break them, that withstands each radius, in percent.

    >>> withstanding(np.array([0.0, 0.1, 0.3, np.inf]), np.array([0.0, 0.1, 0.2]))
    [75.0, 50.0, 50.0]
    """
    return [round(100 * float(share), 4) for share in (radius[:, None] > grid).mean(0)]


def bisected(attack: Attack, distance: Callable[[Tensor], Floats], n: int, start: float, whole: float) -> Floats:
    """(N,) the smallest distances found; infinity where even the whole range breaks nothing.

    ``distance``: from attacked images to how far away they are; infinity where they are classified correctly.
    """
    found, failed, radius = np.full(n, np.inf), np.zeros(n), np.full(n, start)
    halvings = np.zeros(n, dtype=np.int64)
    searching = np.ones(n, dtype=bool)
    while searching.any():
        reached = distance(attack(torch.from_numpy(radius)))
        found = np.where(searching, np.minimum(found, reached), found)
        failed = np.where(searching & np.isinf(reached), radius, failed)
        # An attack may fail further out than it succeeds. What is nearer is then still open.
        failed = np.where(failed < found, failed, 0.0)
        bracketed = np.isfinite(found)
        halvings += bracketed
        searching = np.where(
            bracketed, (found - failed > PRECISION * found) & (halvings <= HALVINGS), searching & (failed < whole)
        )
        radius = np.where(bracketed, failed + (found - failed) / 2, np.minimum(2 * failed, whole))
    return found


def _smallest(
    subject: Subject,
    search: MeasuredAttack,
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    radii: tuple[float, ...] | None,
    whole: float,
) -> Floats:
    """(N,) of one batch."""
    model, threat = subject.model, subject.report.threat

    def distance(images: Tensor) -> Floats:
        delta = (images.double() - x.double()).flatten(1).cpu()
        size = delta.abs().amax(1) if threat.norm == "Linf" else delta.norm(dim=1)
        wrong = ask(model, images).argmax(1) != y.cpu()
        return torch.where(wrong, size, torch.inf).numpy()

    def attack(radius: Tensor) -> Tensor:
        scale = (radius / threat.eps).to(x)
        return search(model, x, y, eps_scale=scale, generator=ExampleNoise(0, rows))

    if isinstance(search, FAB):
        nearest, _ = search.closest(model, x, y, generator=ExampleNoise(0, rows))
        found = distance(nearest)
    elif radii is None:
        found = bisected(attack, distance, len(x), min(threat.eps, whole), whole)
    else:
        found = np.min([distance(attack(torch.full((len(x),), one, dtype=torch.float64))) for one in radii], axis=0)
    return np.where(np.isfinite(distance(x)), 0.0, found)


def _of_class(label: int, name: str, radius: Floats, grid: Floats, eps: float) -> ClassMargin:
    n = len(radius)
    quartiles = np.quantile(radius, [0.25, 0.5, 0.75], method="inverted_cdf") if n else np.full(3, np.inf)
    return ClassMargin(
        label=label,
        name=name,
        n=n,
        mean=round(float(np.minimum(radius, grid[-1]).mean()), 8) if n else None,
        quartiles=[round(float(value), 8) if np.isfinite(value) else None for value in quartiles],
        unbroken=int(np.isinf(radius).sum()),
        at_eps=Estimate(**estimate(int((radius > eps).sum()), n)) if eps <= grid[-1] else None,
        curve=withstanding(radius, grid) if n else None,
    )


def _area(radii: list[Floats], classes: list[str], seed: int) -> Area | None:
    """Between the best and the worst class, of the bounded radii of every class."""
    present = [label for label, own in enumerate(radii) if len(own)]
    if len(present) < 2:
        return None
    random = np.random.default_rng(seed)
    means = np.array([radii[label].mean() for label in present])
    redrawn = np.array([redrawn_means(radii[label], random) for label in present])
    best, worst = int(means.argmax()), int(means.argmin())
    value = float(means[best] - means[worst])
    low, high = np.quantile(redrawn[best] - redrawn[worst], [0.025, 0.975])
    bias = float(np.mean(redrawn.max(0) - redrawn.min(0))) - value
    return Area(
        best=classes[present[best]],
        worst=classes[present[worst]],
        value=round(value, 8),
        low=round(float(low), 8),
        high=round(float(high), 8),
        corrected=round(max(0.0, value - bias), 8),
    )
