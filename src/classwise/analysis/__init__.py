"""Why classes differ: one question a file, asked of run directories. Adding one is its file and a line here."""

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
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import MOST_RUNS
from classwise.analysis.similarity import similarity
from classwise.analysis.trade_off import trade_off
from classwise.analysis.universality import universality
from classwise.analysis.weight_norms import weight_norms
from classwise.config.spec import convert
from classwise.core.errors import InputError, unknown
from classwise.core.progress import SILENT, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Something to be asked of runs."""

    ask: Callable[..., Answer]
    about: str
    takes: tuple[int, int | None] = (1, 1)
    """How many runs at least and at most."""

    @property
    def runs(self) -> str:
        """How many runs it takes, in words."""
        least, most = self.takes
        return "one" if most == 1 else f"{least} or more" if most is None else f"{least} to {most}"


QUESTIONS: dict[str, Question] = {
    "confusion": Question(ask=confusion, about="which classes are taken for which, untouched and under attack"),
    "features": Question(
        ask=features, about="which classes live on robust features: a robust run, then a standard one", takes=(2, 2)
    ),
    "homing": Question(ask=homing, about="which flipped examples come home when the class they were taken for is gone"),
    "background": Question(ask=background, about="what the background of images does to a class", takes=(1, None)),
    "bound": Question(ask=bound, about="whether the bounds on the worst class hold, and how tightly"),
    "trade-off": Question(ask=trade_off, about="what the worst class costs the average", takes=(1, None)),
    "groups": Question(ask=groups, about="which classes form groups by mutual confusion"),
    "epochs": Question(ask=epochs, about="how the classes fare over training"),
    "intervals": Question(
        ask=intervals, about="how many classes lie in each interval of accuracy", takes=(1, MOST_RUNS)
    ),
    "gap": Question(ask=gap, about="what training does to the gap between classes", takes=(2, None)),
    "radar": Question(ask=radar, about="models around one centre, class by class", takes=(2, MOST_RUNS)),
    "universality": Question(
        ask=universality, about="whether the same classes are weak however a model is made", takes=(2, None)
    ),
    "corruptions": Question(ask=corruptions, about="whether corruptions and attacks hit the same classes"),
    "weight-norms": Question(
        ask=weight_norms, about="whether the last layer's weights of a class go with its robustness", takes=(1, 2)
    ),
    "similarity": Question(
        ask=similarity, about="how alike classes are to the model, and whether alike means confused"
    ),
    "confidence": Question(ask=confidence, about="how sure the model is of each class, and how rightly"),
    "embedding": Question(ask=embedding, about="how the classes lie in the space of features"),
    "examples": Question(ask=examples, about="what the attack does to images of the weakest class"),
    "margins": Question(ask=margins, about="which radius breaks each image, class by class"),
    "bias-share": Question(
        ask=bias_share,
        about="how much of the class differences, and of a method's gain, class biases explain",
        takes=(1, MOST_RUNS),
    ),
}


def ask(kind: str, runs: Sequence[Subject], settings: Mapping[str, Any], progress: Progress = SILENT) -> Answer:
    """Ask a question by its name, with settings as text or numbers."""
    if kind not in QUESTIONS:
        raise unknown("analysis", kind, QUESTIONS)
    question = QUESTIONS[kind]
    least, most = question.takes
    if not least <= len(runs) <= (most or len(runs)):
        raise InputError(f"{kind} takes {question.runs}, not {len(runs)} run directories")
    parameters = inspect.signature(question.ask).parameters.values()
    free = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "progress"]
    for key in settings:
        if key not in free:
            raise unknown(f"setting of {kind}:", key, free)
    given = convert(kind, question.ask, settings)
    if any(one.name == "progress" for one in parameters):
        given["progress"] = progress
    return question.ask(*runs, **given)


__all__ = [
    "QUESTIONS",
    "Answer",
    "Question",
    "Subject",
    "ask",
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
