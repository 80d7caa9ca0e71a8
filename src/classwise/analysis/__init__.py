"""Analyses of why classes differ: one per file, each from run directories to an ``AnalysisResult``.

Adding one takes its file and an entry of ``ANALYSES``. Imports everything below ``studies`` and ``cli``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from classwise.analysis.background import background
from classwise.analysis.bias_share import bias_share
from classwise.analysis.bound import bound
from classwise.analysis.confidence import confidence
from classwise.analysis.confusion import confusion
from classwise.analysis.corruptions import corruptions
from classwise.analysis.embedding import embedding
from classwise.analysis.epochs import epochs
from classwise.analysis.examples import examples
from classwise.analysis.features import features
from classwise.analysis.gap import gap
from classwise.analysis.groups import groups
from classwise.analysis.homing import homing
from classwise.analysis.intervals import intervals
from classwise.analysis.margins import margins
from classwise.analysis.radar import radar
from classwise.analysis.result import AnalysisResult
from classwise.analysis.run import MOST_RUNS, Run
from classwise.analysis.similarity import similarity
from classwise.analysis.trade_off import trade_off
from classwise.analysis.universality import universality
from classwise.analysis.weight_norms import weight_norms
from classwise.config.spec import convert
from classwise.core.errors import InputError, unknown
from classwise.core.progress import SILENT, Progress


@dataclass(frozen=True, slots=True)
class Analysis:
    """An analysis, its description, and its minimum and maximum number of runs."""

    run: Callable[..., AnalysisResult]
    about: str
    least: int = 1
    most: int | None = 1

    @property
    def runs(self) -> str:
        """The accepted number of runs as text."""
        if self.least == self.most:
            return str(self.most)
        return f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"


ANALYSES: dict[str, Analysis] = {
    "confusion": Analysis(confusion, "Which classes are predicted as which, without and under attack"),
    "features": Analysis(features, "Which classes rely on robust features: a robust run, then a standard one", 2, 2),
    "homing": Analysis(homing, "Which errors are corrected when the confused class is removed from training"),
    "background": Analysis(background, "How the background of images affects a class", 1, None),
    "bound": Analysis(bound, "Whether the bounds on the worst class hold, and how tightly"),
    "trade-off": Analysis(trade_off, "How much average accuracy a higher worst class costs", 1, None),
    "groups": Analysis(groups, "Which classes form groups by mutual confusion"),
    "epochs": Analysis(epochs, "Class accuracies over training"),
    "intervals": Analysis(intervals, "Number of classes in each interval of accuracy", 1, MOST_RUNS),
    "gap": Analysis(
        gap, "How training changes the class variance (CV) and the maximum class difference (MCD)", 2, None
    ),
    "radar": Analysis(radar, "Radar chart of the class accuracies of several models", 2, MOST_RUNS),
    "universality": Analysis(universality, "Whether the same classes are weak in differently trained models", 2, None),
    "corruptions": Analysis(corruptions, "Whether corruptions and attacks affect the same classes"),
    "weight-norms": Analysis(weight_norms, "Whether weight norms of the last layer correlate with robustness", 1, 2),
    "similarity": Analysis(similarity, "How similar classes are to the model, and whether similar ones are confused"),
    "confidence": Analysis(confidence, "Confidence and calibration of each class"),
    "embedding": Analysis(embedding, "Classes in feature space, as t-SNE or principal components"),
    "examples": Analysis(examples, "Images of the weakest class before and after an attack"),
    "margins": Analysis(margins, "Smallest radius that breaks each image, by class"),
    "bias-share": Analysis(
        bias_share, "Share of the class differences, and of a method's gain, explained by class biases", 1, MOST_RUNS
    ),
}


def analyze(name: str, runs: Sequence[Run], settings: Mapping[str, Any], progress: Progress = SILENT) -> AnalysisResult:
    """Run an analysis by its name, with settings as text or numbers."""
    if name not in ANALYSES:
        raise unknown("analysis", name, ANALYSES)
    analysis = ANALYSES[name]
    if not analysis.least <= len(runs) <= (analysis.most or len(runs)):
        raise InputError(f"analysis {name!r}: the number of run directories must be {analysis.runs}, got {len(runs)}")
    parameters = inspect.signature(analysis.run).parameters.values()
    allowed = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "progress"]
    for key in settings:
        if key not in allowed:
            raise unknown(f"setting of {name}:", key, allowed)
    converted = convert(name, analysis.run, settings)
    if any(one.name == "progress" for one in parameters):
        converted["progress"] = progress
    return analysis.run(*runs, **converted)


__all__ = [
    "ANALYSES",
    "Analysis",
    "AnalysisResult",
    "Run",
    "analyze",
    "background",
    "bias_share",
    "bound",
    "confidence",
    "confusion",
    "corruptions",
    "embedding",
    "epochs",
    "examples",
    "features",
    "gap",
    "groups",
    "homing",
    "intervals",
    "margins",
    "radar",
    "similarity",
    "trade_off",
    "universality",
    "weight_norms",
]
