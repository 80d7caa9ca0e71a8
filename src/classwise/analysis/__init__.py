"""Why classes differ: one question a file, asked of run directories. Adding one is its file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from classwise.analysis.answer import Answer
from classwise.analysis.confusion import confusion
from classwise.analysis.subject import Subject


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
}

__all__ = ["QUESTIONS", "Answer", "Question", "Subject", "confusion"]
