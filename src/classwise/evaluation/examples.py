"""Adversarial examples as images for reports."""

# B batch, K classes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from classwise.attacks.losses import margin
from classwise.evaluation.judge import compute_logits
from classwise.evaluation.parts import AttackParts
from classwise.evaluation.stages import Run, attack_batch
from classwise.metrics.comparison import Bools
from classwise.reporting.examples import Answered, Broken, BrokenExamples, amplification
from classwise.reporting.figures import png
from classwise.storage.verdicts import PENDING

SIDE = 160
"""Maximum side of an image in pixels."""
SHOWN = 6
"""Number of broken examples in a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackedImage:
    """One image before and after an attack."""

    index: int
    label: int
    x: Tensor
    x_adv: Tensor
    before: Tensor
    after: Tensor
    """Logits (K,)."""
    margin: float
    size: float
    """Norm of the perturbation."""

    @classmethod
    def each(
        cls, index: Tensor, y: Tensor, x: Tensor, x_adv: Tensor, before: Tensor, after: Tensor, norm: str
    ) -> list[AttackedImage]:
        """Return the images of a batch."""
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

    def facts(self, classes: Sequence[str], amplify: float) -> dict[str, Any]:
        """Return the fields of an ``Example``. The perturbation is drawn on gray, ``amplify`` times as large."""
        x, x_adv = self.x.numpy(), self.x_adv.numpy()
        return {
            "index": self.index,
            "label": self.label,
            "name": classes[self.label],
            "before": _prediction(self.before, self.label, classes),
            "after": _prediction(self.after, self.label, classes),
            "margin": round(self.margin, 6),
            "size": round(self.size, 6),
            "natural_png": png(x, SIDE),
            "change_png": png(0.5 + amplify * (x_adv - x), SIDE),
            "adversarial_png": png(x_adv, SIDE),
        }


def find_broken_examples(
    run: Run, parts: Sequence[AttackParts], label: int, classes: Sequence[str], rows: Bools
) -> BrokenExamples | None:
    """Return the first broken examples of a class by repeating the attacks; None if no example is broken."""
    verdicts, progress = run.verdicts, run.loop.progress
    amplify = amplification(run.threat.norm, run.threat.eps)
    survived = rows & (verdicts.label == label) & (verdicts.natural == label)
    found: list[Broken] = []
    total = 0
    progress.start("examples", SHOWN)
    for unit, attack in [unit for one in parts for unit in one.units.items()]:
        broken = survived & ~np.isin(verdicts.predictions(unit), (label, PENDING))
        total += int(broken.sum())
        survived = survived & ~broken
        shown = np.flatnonzero(broken)[: SHOWN - len(found)]
        if not len(shown):
            continue
        x, y, index = run.batch(shown)
        x_adv, _ = attack_batch(run, unit, attack, x, y, index)
        before, after = compute_logits(run.model, x), compute_logits(run.model, x_adv)
        images = AttackedImage.each(index, y, x, x_adv, before, after, run.threat.norm)
        found += [Broken(**image.facts(classes, amplify), attack=unit) for image in images]
        progress.advance(len(shown))
    progress.finish()
    return BrokenExamples(name=classes[label], broken=total, amplify=amplify, examples=found) if found else None


def _prediction(logits: Tensor, label: int, classes: Sequence[str]) -> Answered:
    probabilities = logits.double().softmax(0)
    predicted = int(logits.argmax())
    return Answered(
        label=predicted,
        name=classes[predicted],
        confidence=round(100 * float(probabilities[predicted]), 4),
        of_label=round(100 * float(probabilities[label]), 4),
    )
