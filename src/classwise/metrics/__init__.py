"""Statistics from counts: accuracies, spread between classes, intervals, paired tests. May import core; no torch."""

from classwise.metrics.comparison import mcnemar, paired_changes
from classwise.metrics.counts import confusion_matrix, correct_by_class
from classwise.metrics.fairness import class_variance, max_class_difference, rho
from classwise.metrics.intervals import wilson, worst_class

__all__ = [
    "class_variance",
    "confusion_matrix",
    "correct_by_class",
    "max_class_difference",
    "mcnemar",
    "paired_changes",
    "rho",
    "wilson",
    "worst_class",
]
