"""Reports, comparisons, charts and pages, computed from verdicts. Needs no torch."""

from classwise.reporting.comparison import Comparison, compare
from classwise.reporting.report import ClassReport, load_report

__all__ = ["ClassReport", "Comparison", "compare", "load_report"]
