"""Images as evidence: what an attack did to some of them, drawn and described."""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from classwise.attacks.losses import margin
from classwise.reporting.examples import Answered
from classwise.reporting.figures import png

SIDE = 160
"""Pixels at which an image is drawn at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One image before and after an attack."""

    index: int
    label: int
    x: Tensor
    x_adv: Tensor
    before: Tensor
    after: Tensor
    """(K,) logits."""
    margin: float
    size: float
    """Of the change, in the norm of the threat."""

    @classmethod
    def each(
        cls, index: Tensor, y: Tensor, x: Tensor, x_adv: Tensor, before: Tensor, after: Tensor, norm: str
    ) -> list[Tried]:
        """The examples of a batch."""
        index, y, x, x_adv, before, after = (part.cpu() for part in (index, y, x, x_adv, before, after))
        delta = (x_adv - x).double().flatten(1)
        size = delta.abs().amax(1) if norm == "Linf" else delta.norm(dim=1)
        lead = -margin(y)(after)
        return [
            cls(
                index=int(index[row]),
                label=int(y[row]),
                x=x[row],
                x_adv=x_adv[row],
                before=before[row],
                after=after[row],
                margin=float(lead[row]),
                size=float(size[row]),
            )
            for row in range(len(y))
        ]

    def facts(self, classes: list[str], amplify: float) -> dict[str, Any]:
        """The fields of an ``Example``; the change is drawn around grey, so many times as large."""
        x, x_adv = self.x.numpy(), self.x_adv.numpy()
        return {
            "index": self.index,
            "label": self.label,
            "name": classes[self.label],
            "before": _answered(self.before, self.label, classes),
            "after": _answered(self.after, self.label, classes),
            "margin": round(self.margin, 6),
            "size": round(self.size, 6),
            "natural_png": png(x, SIDE),
            "change_png": png(0.5 + amplify * (x_adv - x), SIDE),
            "adversarial_png": png(x_adv, SIDE),
        }


def _answered(logits: Tensor, label: int, classes: list[str]) -> Answered:
    probabilities = logits.double().softmax(0)
    predicted = int(logits.argmax())
    return Answered(
        label=predicted,
        name=classes[predicted],
        confidence=round(100 * float(probabilities[predicted]), 4),
        of_label=round(100 * float(probabilities[label]), 4),
    )
