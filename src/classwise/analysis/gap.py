"""What adversarial training does to the gap between classes (Tian et al. 2021, Table 5; ICLR Appendix C, Fig. 7).

The paper sets the natural accuracy of a standard model against the robust accuracy of an adversarially trained one: the
variance between classes (CV) and the largest difference (MCD) grow several times over, and the order of the classes
stays almost the same. Here the first run is the baseline, a standard model in the paper. Every other is held against it
twice: like against like, and its robust accuracy against the baseline's natural one, as in the paper.

CV and MCD of a few examples a class are too large, by their noise; so are those of both sides of a difference.
"""

# K classes

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from classwise.analysis.correlation import Correlation, spearman
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import compared, in_view, opened
from classwise.core.errors import InputError
from classwise.reporting.comparison import Row
from classwise.reporting.estimates import ClassEstimate, Estimate
from classwise.reporting.figures import Figure, Series, bars
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

QUANTITIES = ("average", "worst", "best", "cv", "mcd")


class Side(Part):
    """A model untouched, or under attack."""

    average: Estimate
    worst: ClassEstimate
    best: ClassEstimate
    cv: float
    mcd: float
    by_class: list[ClassEstimate]

    @property
    def numbers(self) -> list[float]:
        """The five numbers, as ``QUANTITIES`` names them."""
        assert self.average.value is not None
        assert self.worst.value is not None
        assert self.best.value is not None
        return [self.average.value, self.worst.value, self.best.value, self.cv, self.mcd]


class Difference(Part):
    """A side less that of the baseline: in points, and percent² for CV."""

    average: float
    worst: float
    best: float
    cv: float
    mcd: float

    @property
    def numbers(self) -> list[float]:
        """The same in order."""
        return [self.average, self.worst, self.best, self.cv, self.mcd]


class Growth(Part):
    """The robust accuracy of a model against the natural one of the baseline."""

    cv: float | None
    mcd: float | None
    """How many times larger; null where the baseline has none."""
    order: Correlation
    """Spearman's, of the classes."""


class Model(Part):
    """One model, and where it differs from the baseline; null for the baseline itself."""

    model: str
    natural: Side
    robust: Side
    natural_difference: Difference | None
    robust_difference: Difference | None
    growth: Growth | None


class Gap(Answer):
    """The gaps between classes of several models."""

    kind: ClassVar[str] = "gap"

    dataset: str
    attack: str
    classes: list[str]
    models: list[Model]

    def sentences(self) -> list[str]:
        base = self.models[0]
        found = [
            f"{base.model}: the best class is {base.natural.mcd:.1f} points above the worst untouched, "
            f"{base.robust.mcd:.1f} under {self.attack}."
        ]
        for one in self.models[1:]:
            assert one.growth is not None
            said = (
                f"{one.model} under {self.attack} against {base.model} untouched: "
                f"CV {base.natural.cv:.1f} → {one.robust.cv:.1f}{_times(one.growth.cv)}, "
                f"MCD {base.natural.mcd:.1f} → {one.robust.mcd:.1f}{_times(one.growth.mcd)}"
            )
            order = one.growth.order
            found.append(said + ("." if order.value is None else f"; the order of the classes agrees to {order}."))
        return found

    def tables(self) -> list[Table]:
        def cells(side: Side, difference: Difference | None) -> list[str]:
            signs = [""] * 5 if difference is None else [f" ({value:+.1f})" for value in difference.numbers]
            return [f"{value:.1f}{sign}" for value, sign in zip(side.numbers, signs, strict=True)]

        return [
            Table(
                title=title,
                about=f"Accuracy in percent, CV in percent²; in brackets the difference to {self.models[0].model}.",
                columns=["model", "average", "worst", "best", "CV", "MCD", "worst class", "best class"],
                rows=[[name, *cells(side, less), side.worst.name, side.best.name] for name, side, less in rows],
            )
            for title, rows in (
                (self.attack, [(one.model, one.robust, one.robust_difference) for one in self.models]),
                (NATURAL, [(one.model, one.natural, one.natural_difference) for one in self.models]),
            )
        ]

    def figures(self) -> list[Figure]:
        base = self.models[0]
        view = in_view([part.value for part in base.natural.by_class])
        names = ["all", *(self.classes[label] for label in view)]

        def series(name: str, side: Side) -> Series:
            parts = [side.average, *(side.by_class[label] for label in view)]
            return Series(
                name=name,
                y=[part.value for part in parts],
                low=[part.low for part in parts],
                high=[part.high for part in parts],
            )

        some = f", the {len(view)} weakest classes of {base.model}" if len(view) < len(self.classes) else ""
        return [
            bars(
                names,
                [
                    series(f"{base.model}, {NATURAL}", base.natural),
                    *(series(f"{one.model}, {self.attack}", one.robust) for one in self.models[1:]),
                ],
                title=f"Untouched against attacked{some}",
                alt=f"Bars of the accuracy of each class on {self.dataset}. {' '.join(self.sentences())}",
                y="accuracy, %",
            ),
            bars(
                [one.model for one in self.models],
                [
                    Series(name=NATURAL, y=[one.natural.mcd for one in self.models]),
                    Series(name=self.attack, y=[one.robust.mcd for one in self.models]),
                ],
                title="Best class less worst class (MCD)",
                alt=f"Bars of the largest difference between classes. {' '.join(self.sentences())}",
                x="model",
                y="MCD, points",
            ),
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "model": one.model,
                "attack": name,
                **dict(zip(QUANTITIES, side.numbers, strict=True)),
                "worst_class": side.worst.name,
                "best_class": side.best.name,
            }
            for one in self.models
            for name, side in ((NATURAL, one.natural), (self.attack, one.robust))
        ]


def gap(*runs: Subject | str | Path, attack: str | None = None) -> Gap:
    """Hold runs against the first. ``attack``: one that all have, else all attacks together where they are the same."""
    subjects = opened(runs, 2)
    key, comparison = compared(subjects, attack)
    if key == NATURAL:
        raise InputError("a gap under attack needs an attack, not natural")
    classes = comparison.dataset.classes
    if len(classes) < 2:
        raise InputError(f"{subjects[0].path} has one class: there is no gap")
    models: list[Model] = []
    for name, untouched, attacked in zip(comparison.models, comparison[NATURAL], comparison[key], strict=True):
        natural, robust = side_of(untouched), side_of(attacked)
        base = models[0] if models else None
        models.append(
            Model(
                model=name,
                natural=natural,
                robust=robust,
                natural_difference=None if base is None else _less(natural, base.natural),
                robust_difference=None if base is None else _less(robust, base.robust),
                growth=None if base is None else _growth(robust, base.natural),
            )
        )
    return Gap(dataset=comparison.dataset.name, attack=key, classes=classes, models=models)


def side_of(row: Row) -> Side:
    """The numbers of one row of a comparison."""
    present = [part for part in row.by_class if part.value is not None]
    if not present or row.worst is None or row.cv is None or row.mcd is None:
        raise InputError(f"{row.model} has no examples")
    return Side(
        average=row.overall,
        worst=row.by_class[row.worst.label],
        best=max(present, key=lambda part: part.value or 0.0),
        cv=row.cv,
        mcd=row.mcd,
        by_class=row.by_class,
    )


def _less(side: Side, base: Side) -> Difference:
    less = [round(one - other, 4) for one, other in zip(side.numbers, base.numbers, strict=True)]
    return Difference(**dict(zip(QUANTITIES, less, strict=True)))


def _growth(robust: Side, natural: Side) -> Growth:
    return Growth(
        cv=round(robust.cv / natural.cv, 4) if natural.cv else None,
        mcd=round(robust.mcd / natural.mcd, 4) if natural.mcd else None,
        order=spearman([part.value for part in natural.by_class], [part.value for part in robust.by_class]),
    )


def _times(factor: float | None) -> str:
    return "" if factor is None else f" ({factor:.1f} times)"
