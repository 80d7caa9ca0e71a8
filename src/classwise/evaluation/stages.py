"""Run attacks and corruptions on the examples, and judge every result: one column of verdicts after the other.

An attack is run as its parts. All variants run on every example, and the strongest one counts. Stages run in turn, each
on examples that survive the stages before it. Examples that the model misclassifies naturally count as broken and are
not attacked. Every example has its own random stream, so verdicts depend neither on batches nor on interruptions.
"""

# B batch, K classes, N examples

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from classwise.attacks.losses import margin
from classwise.core.model_calls import attack_errors, device_of, model_errors
from classwise.core.pass_counter import count_passes
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import Attack, AttackCall, Effort
from classwise.corruptions import Corruption
from classwise.data import ImageSet, ordered
from classwise.evaluation.batching import BatchLoop
from classwise.evaluation.judge import judge, predict
from classwise.evaluation.parts import AttackParts
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.storage.files import digest
from classwise.storage.verdicts import NATURAL, PENDING, Verdicts

Costs = dict[str, dict[str, Any]]
"""Examples attacked, results rejected and seconds of each attack or stage, by the name of its column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """State that the stages of one evaluation share."""

    model: nn.Module
    searched: nn.Module
    """The model that attacks search: an optimized copy, or the model itself."""
    images: ImageSet
    threat: Threat
    seed: int
    verdicts: Verdicts
    """Filled in place."""
    effort: Costs
    loop: BatchLoop

    def batch(self, rows: Ints) -> tuple[Tensor, Tensor, Tensor]:
        """The images, labels and indices of some examples, on the device of the model."""
        return next(ordered(self.images, self.verdicts.index[rows], len(rows), device_of(self.model)))


def predict_natural(run: Run, rows: Bools) -> None:
    """Predict the labels of natural images."""
    column = run.verdicts.natural

    def fill(batch: Ints) -> None:
        column[batch] = predict(run.model, run.batch(batch)[0])

    run.loop.run(NATURAL, rows & (column == PENDING), fill)
    run.loop.save()  # from here on an interrupted evaluation can be resumed


def run_attack(run: Run, parts: AttackParts, rows: Bools, warnings: Sequence[str]) -> None:
    """Attack the examples, each part into its own column, and fill the column of the attack.

    ``warnings`` are the codes of the warnings of the trust checks, which may trigger the fallback of ``fast``.
    """
    verdicts = run.verdicts
    column = verdicts.attacks[parts.key]
    if parts.variants:
        for name, variant in parts.variants.items():
            _search(run, name, variant, verdicts.natural, verdicts.attacks[name], rows, selected=rows)
        column[:] = verdicts.attacks[parts.strongest(verdicts)]
    elif parts.stages:
        before = verdicts.natural
        for name, stage in parts.stages.items():
            selected = parts.select(name, verdicts, run.seed, warnings)
            _search(run, name, stage, before, verdicts.stages[name], rows, selected)
            before = verdicts.stages[name]
        column[:] = before
    else:
        _search(run, parts.key, parts.attack, verdicts.natural, column, rows, selected=rows)


def run_corruption(run: Run, key: str, corruption: Corruption, rows: Bools) -> None:
    """Predict the labels of corrupted images."""
    column = run.verdicts.corrupted[key]
    stream = _stream(run.seed, corruption)

    def fill(batch: Ints) -> None:
        x, _, index = run.batch(batch)
        column[batch] = predict(run.model, corruption(x, generator=ExampleNoise(stream, index)))

    run.loop.run(key, rows & (column == PENDING), fill)


def attack_batch(run: Run, key: str, attack: Attack, x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, Effort]:
    """Return the attacked images of one batch and the effort. Deterministic for given examples."""
    searched = run.searched if attack.uses_optimized_copy else run.model
    noise = ExampleNoise(_stream(run.seed, attack), index)
    with (
        model_errors(f"under {key}"),
        attack_errors(key, searched),
        count_passes(
            searched,
            gradients=False,
            report=lambda passes: run.loop.progress.advance(0, f"pass {passes.calls} over this batch"),
        ),
    ):
        return attack.run(AttackCall(searched, x, y, generator=noise))


def _search(run: Run, key: str, attack: Attack, before: Ints, column: Ints, rows: Bools, selected: Bools) -> None:
    """Fill a column: attack the selected survivors of the column before, and copy the other predictions from it."""
    verdicts, size = run.verdicts, len(column)
    forwards = verdicts.forwards.setdefault(key, np.zeros(size, dtype=np.int64))
    backwards = verdicts.backwards.setdefault(key, np.zeros(size, dtype=np.int64))
    margins = verdicts.margins.setdefault(key, np.full(size, np.nan, dtype=np.float32))
    attacked = selected & (before == verdicts.label)
    effort = run.effort.setdefault(key, {"rejected": 0, "seconds": 0.0})
    effort["attacked"] = int(attacked.sum())
    passed_over = ~attacked & (column == PENDING)
    column[passed_over] = before[passed_over]

    def fill(batch: Ints) -> None:
        began = time.perf_counter()
        x, y, index = run.batch(batch)
        x_adv, passes = attack_batch(run, key, attack, x, y, index)
        logits, valid = judge(run.model, run.threat.ball(x), x_adv)
        column[batch], margins[batch] = logits.argmax(1).cpu(), margin(y)(logits).cpu()
        forwards[batch], backwards[batch] = passes.forwards.cpu(), passes.backwards.cpu()
        effort["rejected"] += int((~valid).sum())
        effort["seconds"] = round(effort["seconds"] + time.perf_counter() - began, 3)

    run.loop.run(key, rows & attacked & (column == PENDING), fill)


def _stream(seed: int, perturbation: Attack | Corruption) -> int:
    """The random stream of an attack or corruption, derived from its settings."""
    return int(digest(str(seed), repr(perturbation))[:15], 16)
