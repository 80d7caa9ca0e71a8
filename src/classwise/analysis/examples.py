"""Images of the weakest class before and after an attack, with the perturbation (as Tian et al. 2021, Fig. 6).

The correctly classified images of a class are ordered by their **margin** under attack: the logit of the label minus
the largest other logit, below 0 if the attack succeeds. Those with the smallest and the largest margins are shown. The
perturbation is amplified around gray and clipped at black and white.
"""

# N examples, K classes

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

from classwise.analysis.model_outputs import BATCH, attack_of, exact_logits
from classwise.analysis.result import AnalysisResult, frame_of
from classwise.analysis.run import Run
from classwise.config.spec import Number, split_list
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.data.batches import ordered
from classwise.evaluation.examples import AttackedImage
from classwise.reporting.examples import Example, amplification
from classwise.reporting.figures import Card, Figure, gallery
from classwise.reporting.formatting import class_name

Indices = Annotated[tuple[int, ...], BeforeValidator(split_list)]


def examples(
    run: Run | str | Path,
    *,
    attack: str = "pgd",
    label: str | int | None = None,
    indices: Indices | None = None,
    number: int = 8,
    amplify: Number | None = None,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Images of the weakest class, of the class ``label``, or at given ``indices``, before and after an attack.

    ``number``: images of a class, half of them the least robust, half the most. ``amplify``: factor of the
    perturbation, by default 0.5 / eps for Linf (a change of ±eps is shown as white or black) and 10 for L2.
    """
    run = Run.open(run)
    if number < 1:
        raise InputError(f"number = {number}; expected at least 1")
    if amplify is None:
        amplify = amplification(run.report.threat.norm, run.report.threat.eps)
    if not amplify > 0:
        raise InputError(f"amplify = {amplify:g}; expected a positive number")
    if label is not None and indices is not None:
        raise InputError("label and indices are mutually exclusive; pass one of them")
    classes, threat = run.classes, run.report.threat
    if indices is None:
        chosen = run.label_of(label, run.report.strongest)
        rows, of = _correct_images(run, chosen), classes[chosen]
    else:
        rows, of = _checked(run, indices), None
    tried = sorted(_attacked(run, rows, attack, progress), key=lambda one: one.margin)
    if of is not None and len(tried) > number:
        tried = [*tried[: (number + 1) // 2], *tried[len(tried) - number // 2 :]]
    found = [Example(**one.facts(classes, amplify)) for one in tried]
    broken = sum(one.after.label != one.label for one in found)
    source = "at the given indices" if of is None else f"of {class_name(of)} (least and most robust of {len(rows)})"
    about = {"model": run.name, "dataset": run.report.dataset.name, "attack": attack, "norm": threat.norm}
    cards = [one.card(attack, amplify) for one in found]
    return AnalysisResult(
        name="examples",
        finding=f"{attack} ({threat.norm} {threat.eps_text}) breaks {broken} of {len(found)} images {source}.",
        about={**about, "eps": threat.eps, "class": of, "images_attacked": len(rows), "amplify": amplify},
        frames={"images": frame_of(_row(one) for one in found)},
        draw=lambda: _figures(cards, attack, of),
    )


def _correct_images(run: Run, label: int) -> NDArray[np.int64]:
    """Return the positions of the correctly classified images of a class; of all its images if there is none."""
    verdicts = run.verdicts
    own = verdicts.label == label
    if not own.any():
        raise InputError(f"{run.path} was evaluated on no examples of {run.classes[label]}")
    right = own & (verdicts.natural == label)
    return np.asarray(verdicts.index[right if right.any() else own])


def _checked(run: Run, indices: tuple[int, ...]) -> NDArray[np.int64]:
    wrong = [index for index in indices if not 0 <= index < len(run.images)]
    if wrong or not indices:
        last = len(run.images) - 1
        raise InputError(f"indices = {list(indices)}; {run.report.dataset.name} has images 0 to {last}")
    return np.array(list(dict.fromkeys(indices)), dtype=np.int64)


def _attacked(run: Run, rows: NDArray[np.int64], attack: str, progress: Progress) -> list[AttackedImage]:
    model, norm = run.model, run.report.threat.norm
    search = attack_of(run, attack)
    tried: list[AttackedImage] = []
    progress.start(f"{attack} on {run.name}", len(rows))
    for x, y, places in ordered(run.images, rows, BATCH, device_of(model)):
        x_adv = search(model, x, y, generator=ExampleNoise(0, places))
        tried += AttackedImage.each(places, y, x, x_adv, exact_logits(model, x), exact_logits(model, x_adv), norm)
        progress.advance(len(x))
    progress.finish()
    return tried


def _row(one: Example) -> dict[str, object]:
    return {
        "index": one.index,
        "class": one.name,
        "label": one.label,
        "natural_prediction": one.before.name,
        "natural_confidence_percent": one.before.confidence,
        "natural_probability_of_label_percent": one.before.of_label,
        "attacked_prediction": one.after.name,
        "attacked_confidence_percent": one.after.confidence,
        "attacked_probability_of_label_percent": one.after.of_label,
        "margin": one.margin,
        "perturbation_size": one.size,
    }


def _figures(cards: list[Card], attack: str, of: str | None) -> list[Figure]:
    half = (len(cards) + 1) // 2
    parts = {"Images at the given indices, least robust first": cards}
    if of is not None:
        parts = {f"Least robust images of {of}": cards[:half], f"Most robust images of {of}": cards[: half - 1 : -1]}
    return [
        gallery(some, title=title, alt=f"{title}, natural and under {attack}.") for title, some in parts.items() if some
    ]
