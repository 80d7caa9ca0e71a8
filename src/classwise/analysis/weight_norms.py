"""Whether classes with small last-layer weights are the weak ones (Tian et al. 2021, ICLR submission, Fig. 4).

For each class c, ‖w_c‖₂ of the last linear layer beside the class's accuracy, untouched and under attack. The paper
shows both min-max normalised, and finds that they rise together in robust models, but not in standard ones. Of the
latter it means the natural accuracy: little is left of them under attack.

Coefficients are taken over classes; how their intervals and p values are made is said in ``correlation``.
"""

# K classes, D features

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from classwise.analysis.correlation import Correlation, pearson, spearman
from classwise.analysis.model_outputs import linear_head
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import in_view, names_apart, opened
from classwise.analysis.wording import decimal, left_out, told
from classwise.core.errors import InputError
from classwise.models.hypersphere import HypersphereHead
from classwise.reporting.estimates import ClassEstimate, share
from classwise.reporting.figures import READABLE, Figure, Series, lines, points
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL


class ClassNorm(Part):
    """One class: the length of its weights and what it comes to."""

    norm: float
    norm_scaled: float | None
    """0 for the shortest weights, 1 for the longest; null where all are of one length."""
    natural: ClassEstimate
    robust: ClassEstimate
    robust_scaled: float | None
    """0 for the weakest class, 1 for the strongest."""


class Relation(Part):
    """How the lengths go with accuracies."""

    pearson: Correlation
    spearman: Correlation


class ModelNorms(Part):
    """The weights of one model."""

    model: str
    attack: str
    layer: str
    """The name of the last layer."""
    features: int
    """D."""
    normalised: bool
    """Whether the layer divides the weights by their length, so that it cannot matter to the output."""
    by_class: list[ClassNorm]
    robust: Relation
    natural: Relation


class WeightNorms(Answer):
    """The weight norms of one model, or of two."""

    kind: ClassVar[str] = "weight-norms"

    dataset: str
    classes: list[str]
    models: list[ModelNorms]

    def sentences(self) -> list[str]:
        found = []
        for one in self.models:
            for name, relation in ((f"robustness under {one.attack}", one.robust), ("natural accuracy", one.natural)):
                found.append(
                    f"{one.model}: weight norms and {name} cannot be related: too few classes, or all alike."
                    if relation.spearman.value is None
                    else f"{one.model}: the weight norm of a class and its {name} correlate with Spearman "
                    f"{told(relation.spearman)}, and Pearson {told(relation.pearson)}."
                )
            if one.normalised:
                found.append(f"{one.model} divides the weights by their norm, which therefore cannot cause anything.")
        return found

    def tables(self) -> list[Table]:
        return [
            Table(
                title=f"weight norms of {one.model}",
                about=f"Length of the weights of {one.layer}, and accuracies in percent [95%], from the weakest class.",
                columns=["class", "norm", "scaled", one.attack, NATURAL],
                rows=[
                    [
                        part.robust.name,
                        decimal(part.norm, 4),
                        decimal(part.norm_scaled, 2),
                        share(part.robust),
                        share(part.natural),
                    ]
                    for part in self._ordered(one)
                    if part.robust.label in view
                ],
                foot=left_out(len(view), len(self.classes)),
            )
            for one in self.models
            for view in [in_view([part.robust.value for part in one.by_class])]
        ]

    def figures(self) -> list[Figure]:
        found = []
        for one in self.models:
            parts = self._ordered(one)
            found.append(
                lines(
                    [
                        Series(name="weight norm", y=[part.norm_scaled for part in parts]),
                        Series(name=f"robustness under {one.attack}", y=[part.robust_scaled for part in parts]),
                    ],
                    title=f"Weight norms and robustness of {one.model}",
                    alt=f"Scaled weight norm and robustness of each class of {one.model}, from the weakest class: "
                    f"Spearman {told(one.robust.spearman)}.",
                    x="class, from the weakest",
                    y="scaled from smallest to largest",
                    zero=True,
                    names=[part.robust.name for part in parts],
                )
            )
        few = len(self.classes) <= READABLE
        for name in ("robust", "natural"):
            found.append(
                points(
                    [
                        Series(
                            name=one.model,
                            x=[part.norm for part in one.by_class],
                            y=[estimate.value for estimate in estimates],
                            low=[estimate.low for estimate in estimates] if few else None,
                            high=[estimate.high for estimate in estimates] if few else None,
                            text=[estimate.name for estimate in estimates],
                        )
                        for one in self.models
                        for estimates in [[getattr(part, name) for part in one.by_class]]
                    ],
                    title="Robustness by weight norm" if name == "robust" else "Natural accuracy by weight norm",
                    alt=" ".join(
                        f"{one.model}: {'accuracy under ' + one.attack if name == 'robust' else 'natural accuracy'} of "
                        f"each class over its weight norm, Spearman {told(getattr(one, name).spearman)}."
                        for one in self.models
                    ),
                    x="norm of the class's weights",
                    y=f"accuracy in %, {'attacked' if name == 'robust' else NATURAL}{' [95%]' if few else ''}",
                )
            )
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "model": one.model,
                "attack": one.attack,
                "label": part.robust.label,
                "class": part.robust.name,
                "norm": part.norm,
                "norm_scaled": part.norm_scaled,
                "robust": part.robust.value,
                "robust_scaled": part.robust_scaled,
                "natural": part.natural.value,
                "n": part.robust.n,
            }
            for one in self.models
            for part in one.by_class
        ]

    @staticmethod
    def _ordered(one: ModelNorms) -> list[ClassNorm]:
        present = [part for part in one.by_class if part.robust.value is not None]
        return sorted(present, key=lambda part: part.robust.value or 0.0)


def weight_norms(*runs: Subject | str | Path, attack: str | None = None, seed: int = 0) -> WeightNorms:
    """The norms of one model, or of a robust one and a standard one beside it.

    ``attack``: one of the report's, else all of them together.
    """
    subjects = opened(runs, 1, 2)
    classes = subjects[0].classes
    for subject in subjects:
        if subject.classes != classes:
            raise InputError(f"{subject.path} has other classes than {subjects[0].path}")
    if len(classes) < 2:
        raise InputError(f"{subjects[0].path} has one class: there is nothing to relate")
    return WeightNorms(
        dataset=subjects[0].report.dataset.name,
        classes=classes,
        models=[
            _norms_of(subject, name, attack, seed)
            for subject, name in zip(subjects, names_apart(subjects), strict=True)
        ],
    )


def _norms_of(subject: Subject, name: str, attack: str | None, seed: int) -> ModelNorms:
    key = subject.key(attack)
    layer, head = linear_head(subject)
    norms = head.weight.detach().double().norm(dim=1).cpu().numpy()
    if len(norms) != subject.num_classes:
        raise InputError(f"the model of {subject.path} has {len(norms)} outputs for {subject.num_classes} classes")
    robust, natural = subject.report[key].by_class, subject.report[NATURAL].by_class
    lengths = [float(value) for value in norms]

    def relation(parts: list[ClassEstimate]) -> Relation:
        accuracies = [part.value for part in parts]
        return Relation(pearson=pearson(lengths, accuracies), spearman=spearman(lengths, accuracies, seed))

    return ModelNorms(
        model=name,
        attack=key,
        layer=layer,
        features=head.in_features,
        normalised=isinstance(head, HypersphereHead),
        by_class=[
            ClassNorm(norm=norm, norm_scaled=long, natural=part, robust=attacked, robust_scaled=strong)
            for norm, long, part, attacked, strong in zip(
                lengths, scaled(lengths), natural, robust, scaled([part.value for part in robust]), strict=True
            )
        ],
        robust=relation(robust),
        natural=relation(natural),
    )


def scaled(values: list[float] | list[float | None]) -> list[float | None]:
    """0 for the smallest, 1 for the largest; None for what is None, and for all where they are equal.

    >>> scaled([2.0, None, 4.0, 3.0])
    [0.0, None, 1.0, 0.5]
    """
    known = [value for value in values if value is not None]
    low, span = min(known, default=0.0), np.ptp(known) if known else 0.0
    return [None if value is None or span == 0 else float((value - low) / span) for value in values]
