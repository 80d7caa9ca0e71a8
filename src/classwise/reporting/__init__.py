"""Reports, comparisons, charts and pages, computed from verdicts.

Imports ``core``, ``config``, ``storage`` and ``metrics``; no torch, and no package that evaluates or trains.
"""

from classwise.reporting.comparison import Comparison, compare
from classwise.reporting.report import ClassReport, load_report

__all__ = ["ClassReport", "Comparison", "compare", "load_report"]
