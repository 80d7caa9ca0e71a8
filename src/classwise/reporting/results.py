"""Results of an evaluation and of a comparison, computed from verdicts only. Accuracies are in percent."""

# K classes

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr

from classwise.core.errors import unknown
from classwise.metrics import class_variance, confusion_matrix, correct_by_class, max_class_difference, worst_class
from classwise.metrics.counts import Ints
from classwise.reporting.allocation import AllocationInfo
from classwise.reporting.corruptions import CorruptionInfo, Corruptions
from classwise.reporting.effort import AttackInfo
from classwise.reporting.estimates import ClassEstimate, Estimate, class_estimates, percent, rounded
from classwise.reporting.examples import BrokenExamples
from classwise.reporting.part import Part
from classwise.reporting.sanity import Sanity
from classwise.storage.verdicts import NATURAL, WORST_CASE, Verdicts


class Corrected(Part):
    """The worst class accuracy, corrected for being the minimum over classes."""

    value: float
    low: float
    high: float


class Worst(Part):
    """The class with the lowest accuracy; ``corrected`` is corrected for being the minimum over noisy values."""

    label: int
    name: str = Field(alias="class")
    value: float
    low: float
    high: float
    n: int
    corrected: Corrected


class Result(Part):
    """Accuracies of a model under one attack, or none."""

    overall: Estimate
    by_class: list[ClassEstimate]
    worst: Worst | None
    cv: float | None
    mcd: float | None

    @property
    def shares(self) -> list[float | None]:
        """Accuracy of every class; None for a class without examples."""
        return [part.value for part in self.by_class]

    @property
    def lowest(self) -> list[int]:
        """The labels that share the lowest accuracy."""
        if self.worst is None:
            return []
        return [label for label, value in enumerate(self.shares) if value == self.worst.value] or [self.worst.label]

    @classmethod
    def from_predictions(cls, labels: Ints, predictions: Ints, classes: list[str]) -> Result:
        """Return the accuracies of all classes with their worst class and spread."""
        correct, n = correct_by_class(labels, predictions, len(classes))
        estimates = class_estimates(correct.tolist(), n.tolist(), classes)
        shares = [math.nan if part.value is None else part.value for part in estimates["by_class"]]
        found, worst = worst_class(correct, n), None
        if found is not None:
            bounds = (percent(one) for one in (found.corrected, found.corrected_low, found.corrected_high))
            corrected = Corrected(**dict(zip(("value", "low", "high"), bounds, strict=True)))
            worst = Worst(corrected=corrected, **dict(estimates["by_class"][found.label]))
        return cls(
            **estimates, worst=worst, cv=rounded(class_variance(shares)), mcd=rounded(max_class_difference(shares))
        )


class DatasetInfo(Part):
    """The examples of an evaluation."""

    name: str
    split: str
    n: int
    classes: list[str]
    digest: str | None = None
    """Hash of all images and labels; two reports are paired only if it is equal."""
    superclasses: dict[str, list[int]] = Field(default_factory=dict)
    """Labels of each superclass, if known; each class is in one."""

    @property
    def together(self) -> list[list[int]]:
        """Labels grouped by superclass; one group if there are no superclasses."""
        return list(self.superclasses.values()) or [list(range(len(self.classes)))]

    @property
    def order(self) -> list[int]:
        """All labels, those of a superclass together."""
        return [label for group in self.together for label in group]


class ThreatInfo(Part):
    """The threat model."""

    norm: str
    eps: float
    eps_text: str


class ReportData(Part):
    """The robustness of one model, class by class."""

    schema_: Literal["classwise/report/1"] = Field(alias="schema")
    dataset: DatasetInfo
    model: dict[str, Any]
    threat: ThreatInfo
    attacks: dict[str, AttackInfo] = Field(default_factory=dict)
    results: dict[str, Result]
    confusion: dict[str, list[list[int]]]
    corruptions: Corruptions | None = None
    sanity: Sanity = Sanity()
    allocation: AllocationInfo | None = None
    """Result of adaptive evaluation; None if all examples were attacked."""

    command: str | None = None
    """The command that reproduces the report."""

    _verdicts: Verdicts | None = PrivateAttr(default=None)
    _examples: BrokenExamples | None = PrivateAttr(default=None)

    @classmethod
    def from_verdicts(
        cls,
        verdicts: Verdicts,
        *,
        dataset: DatasetInfo,
        model: dict[str, Any],
        threat: ThreatInfo,
        attacks: dict[str, AttackInfo],
        corruptions: Sequence[CorruptionInfo] = (),
        sanity: Sanity | None = None,
        allocation: AllocationInfo | None = None,
        overall: Mapping[str, Estimate] | None = None,
        command: str | None = None,
    ) -> Self:
        """Compute a report from the table of verdicts.

        ``overall``: estimates instead of the pooled ones, which are biased if classes were drawn unevenly.
        """
        keys = [*verdicts.keys, WORST_CASE] if verdicts.attacks else verdicts.keys
        classes = dataset.classes
        report = cls(
            schema_="classwise/report/1",
            dataset=dataset,
            model=model,
            threat=threat,
            attacks=attacks,
            results={key: Result.from_predictions(verdicts.label, verdicts.predictions(key), classes) for key in keys},
            confusion={
                key: confusion_matrix(verdicts.label, verdicts.predictions(key), len(classes)).tolist() for key in keys
            },
            corruptions=Corruptions.from_verdicts(verdicts, corruptions, classes) if corruptions else None,
            sanity=sanity or Sanity(),
            allocation=allocation,
            command=command,
        )
        for key, better in (overall or {}).items():
            report.results[key] = report.results[key].model_copy(update={"overall": better})
        if allocation is not None:  # a class with few attacked examples can be lower by chance
            bounds = {"value": allocation.value, "low": allocation.low, "high": allocation.high}
            label, n = allocation.label, allocation.attacked[allocation.label]
            worst = Worst(label=label, name=classes[label], n=n, corrected=Corrected(**bounds), **bounds)
            strongest = report.strongest
            report.results[strongest] = report.results[strongest].model_copy(update={"worst": worst})
        report._verdicts = verdicts
        return report

    def __getitem__(self, key: str) -> Result:
        if key not in self.results:
            raise unknown("result", key, self.results)
        return self.results[key]

    @property
    def name(self) -> str:
        """Name of the model."""
        return str(self.model.get("name", "model"))

    @property
    def verdicts(self) -> Verdicts | None:
        """The table of verdicts, if available."""
        return self._verdicts

    @property
    def examples(self) -> BrokenExamples | None:
        """Some images of the weakest class that attacks broke, if available."""
        return self._examples

    def keep_examples(self, examples: BrokenExamples | None) -> None:
        """Set the images to show on the page."""
        self._examples = examples

    @property
    def strongest(self) -> str:
        """Key of the result over all attacks; ``natural`` without attacks."""
        return WORST_CASE if WORST_CASE in self.results else NATURAL

    @property
    def worst(self) -> Worst | None:
        """The worst class over all attacks."""
        return self[self.strongest].worst


class Change(Part):
    """A difference to the baseline in points, with the number of examples gained and lost."""

    points: float
    gained: int
    lost: int
    n: int
    p_value: float
    """Exact McNemar test on the same examples; for classes corrected by Holm for their number."""


class ClassChange(Change):
    """The change of one class."""

    label: int
    name: str = Field(alias="class")


class Row(Result):
    """One model under one attack."""

    model: str
    rho: float | None
    """rho against the baseline; null for the baseline itself."""
    change: Change | None
    """Overall change; null for the baseline, and if the two were not measured on the same examples."""
    changes: list[ClassChange]
    """Changes by class; empty if ``change`` is null."""


class ComparisonData(Part):
    """Models compared with the first of them."""

    schema_: Literal["classwise/comparison/1"] = Field("classwise/comparison/1", alias="schema")
    dataset: DatasetInfo
    threat: ThreatInfo
    models: list[str]
    paired: bool
    """Whether all models were measured on the same examples."""
    results: dict[str, list[Row]]

    def __getitem__(self, key: str) -> list[Row]:
        if key not in self.results:
            raise unknown("result", key, self.results)
        return self.results[key]

    @property
    def strongest(self) -> str:
        """Key of the result over all attacks; ``natural`` without attacks."""
        return list(self.results)[-1]

    @property
    def rho(self) -> float | None:
        """rho of the last model against the baseline under the strongest result."""
        return self.results[self.strongest][-1].rho
