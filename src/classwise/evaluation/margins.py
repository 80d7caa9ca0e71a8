"""Compute the margin matrix of a model with targeted attacks.

The targeted margin loss z_y - z_j changes by a constant when biases are added to the logits, so neither its gradient
nor the image it finds depends on them. The likeliest classes are attacked by 15 steps each, then the three with the
smallest margins by 40 steps, twice. All margins come from float32 forward passes of the model itself on inputs verified
to lie in the ball; each verified input bounds the margins over all classes, not only over the one that was attacked.
"""

# B batch, K classes, N examples, T targets

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.accelerate import give_back, searcher
from classwise.attacks.cosine_pgd import MarginSearch
from classwise.core.choices import EngineName
from classwise.core.errors import InputError
from classwise.core.model_calls import blamed_on_the_model, device_of, has_gradients
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.data import ImageSet, ordered
from classwise.evaluation.batching import in_batches
from classwise.evaluation.fast import at_most
from classwise.evaluation.runner import PROBE, PROBE_BATCH, count_classes, fitting_batch
from classwise.evaluation.stages import SAVE_SECONDS, answers
from classwise.metrics.counts import Ints
from classwise.models.weights import digest_model
from classwise.storage.files import digest, digest_json
from classwise.storage.margins import SCHEMA, Margins
from classwise.storage.run_directory import versions

_LOG = logging.getLogger(__name__)

MOST_TARGETS = 19
"""Wrong classes attacked by default; of more classes than that, the likeliest."""
ANSWERED = 4
"""Images whose logits are part of a table's fingerprint."""
AUDITED = 64
"""Robust images on which all classes are attacked, where the search attacks fewer."""
PROBABLE = 1e-3
"""Outputs whose rows sum to one within this, all between 0 and 1, are probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginSettings:
    """Effort of the search."""

    steps: int = 15
    """Steps towards every target."""
    more_steps: int = 40
    """Steps of every further search, towards the nearest targets."""
    nearest: int = 3
    """How many targets each further search covers."""
    searches: int = 2
    """How many further searches there are; each starts elsewhere and chooses the nearest targets anew."""
    targets: int | None = None
    """Wrong classes to attack, the likeliest first. Default: all, at most 19."""
    seed: int = 0

    def chosen(self, num_classes: int) -> int:
        """The number of targets for this many classes."""
        if self.targets is not None and not 1 <= self.targets <= num_classes - 1:
            raise InputError(f"targets must be between 1 and {num_classes - 1}, got {self.targets}")
        return self.targets or min(MOST_TARGETS, num_classes - 1)


def find_margins(
    model: nn.Module,
    images: ImageSet,
    index: Ints,
    threat: Threat,
    *,
    settings: MarginSettings | None = None,
    batch_size: int | None = None,
    engine: EngineName = "auto",
    file: Path | None = None,
    known: Path | None = None,
    progress: Progress = SILENT,
) -> Margins:
    """Compute the margin matrix of the examples at ``index``.

    With ``file`` the table is saved there as it grows. A matching table in ``file`` or ``known`` (same model, images
    and settings) is completed; any other table in ``file`` is overwritten.
    """
    settings = settings or MarginSettings()
    index = np.asarray(index, dtype=np.int64)
    num_classes = count_classes(model, images)
    if not has_gradients(model):
        raise InputError("the margin search needs gradients, and the model has none")
    targets = settings.chosen(num_classes)
    what = {
        "schema": SCHEMA,
        "data": f"{images.name}/{images.split}",
        "digest": images.digest(),
        "norm": threat.norm,
        "eps": threat.text,
        "targets": targets,
        "steps": [settings.steps, settings.more_steps],
        "searches": settings.searches,
        "nearest": min(settings.nearest, targets),
        "seed": settings.seed,
        "engine": engine,
        "model": digest_json([digest_model(model), _answers_of(model, images, index)]),
        "versions": {name: versions()[name] for name in ("classwise", "torch")},
    }
    fingerprint = digest_json([what, digest(np.ascontiguousarray(index).data.cast("B"))])
    margins = Margins.pending(index, images.labels[index], num_classes, {**what, "fingerprint": fingerprint})
    kept = None
    for place in (file, known):
        if place is not None and place.is_file():
            saved = Margins.load(place)
            if saved.info.get("fingerprint") != fingerprint:
                differing = [key for key in what if saved.info.get(key) != what[key]] or ["images"]
                _LOG.info("the margins in %s are not used: they differ in %s", place, ", ".join(differing))
            elif saved.missing.sum() < margins.missing.sum():
                margins, kept = saved, place
    audits = targets < num_classes - 1 and len(margins) > 0
    if margins.complete and ("audit" in margins.info or not audits):
        if file is not None and kept != file:
            margins.save(file)
        return margins
    size = batch_size or fitting_batch(images, device_of(model))
    _check_logits(model, images, index[:PROBE], min(PROBE_BATCH, size))
    some = next(ordered(images, index[:size], size, device_of(model)))[0]
    search = _Search(model, searcher(model, some, engine), images, margins, threat, settings, targets)
    saved_at = time.monotonic()

    def save(*, now: bool = False) -> None:
        nonlocal saved_at
        if file is not None and (now or time.monotonic() - saved_at > SAVE_SECONDS):
            margins.save(file)
            saved_at = time.monotonic()

    try:
        task = f"margins of {images.name}/{images.split}"
        in_batches(task, margins.missing, size, search.fill, save, search.smaller, progress)
        if audits:
            margins.info["audit"] = search.audit(size, progress)
    finally:
        give_back(search.searched)
        save(now=True)
    return margins if file is None else Margins.load(file)  # in half precision, whether computed now or read


class _Search:
    """The attacks on one batch after the other; fills the table in place."""

    def __init__(
        self,
        model: nn.Module,
        searched: nn.Module,
        images: ImageSet,
        margins: Margins,
        threat: Threat,
        settings: MarginSettings,
        targets: int,
    ) -> None:
        self.model, self.searched, self.images, self.margins, self.threat = model, searched, images, margins, threat
        self.settings, self.targets = settings, targets
        self.device = device_of(model)

    def fill(self, batch: Ints) -> None:
        """Compute some rows of the table."""
        x, y, index = next(ordered(self.images, self.margins.index[batch], len(batch), self.device))
        natural = answers(self.model, x).float()
        found = _margins(natural, y)
        likeliest = found.argsort(dim=1, stable=True)[:, : self.targets]
        found = self._lowered(found, x, y, index, likeliest, self.settings.steps)
        for number in range(1, self.settings.searches + 1):
            nearest = found.argsort(dim=1, stable=True)[:, : min(self.settings.nearest, self.targets)]
            found = self._lowered(found, x, y, index, nearest, self.settings.more_steps, number)
        self.margins.natural[batch], self.margins.attacked[batch] = natural.cpu().numpy(), found.cpu().numpy()

    def audit(self, batch_size: int, progress: Progress) -> dict[str, Any]:
        """How many robust images of a random sample break when every class is attacked, and the 95% upper bound."""
        margins = self.margins
        robust = np.flatnonzero(margins.attacked.min(axis=1) > 0)
        rows = np.random.default_rng(self.settings.seed).permutation(robust)[:AUDITED]
        if not len(rows):
            return {"images": 0, "broken": 0, "at_most": None}
        broken = 0

        def fill(batch: Ints) -> None:
            nonlocal broken
            x, y, index = next(ordered(self.images, margins.index[batch], len(batch), self.device))
            natural = answers(self.model, x).float()
            others = _margins(natural, y).argsort(dim=1, stable=True)[:, self.targets : natural.shape[1] - 1]
            found = torch.from_numpy(margins.attacked[batch]).to(self.device)
            found = self._lowered(found, x, y, index, others, self.settings.steps)
            broken += int((found.amin(1) <= 0).sum())

        sample = np.isin(np.arange(len(margins)), rows)
        in_batches("audit of margins", sample, batch_size, fill, lambda: None, self.smaller, progress)
        return {"images": len(rows), "broken": broken, "at_most": at_most(broken, len(rows))}

    def smaller(self, _: int) -> None:
        """Free the memory of graphs before smaller batches."""
        give_back(self.searched)

    def _lowered(
        self, found: Tensor, x: Tensor, y: Tensor, index: Tensor, targets: Tensor, steps: int, attempt: int = 0
    ) -> Tensor:
        """(B, K) margins after attacks towards each column of targets; later attempts begin with longer steps."""
        search = MarginSearch(eps=self.threat.text, norm=self.threat.norm, steps=steps, first_step=max(1.0, attempt))
        stream = int(digest(str(self.settings.seed), repr(search))[:15], 16)
        ball = self.threat.ball(x)
        for number, target in enumerate(targets.unbind(1)):
            noise = ExampleNoise(stream, index).fork([number])
            with blamed_on_the_model("in the search for margins"):
                x_adv = search(self.searched, x, y, generator=noise, targets=target)
            inside = ball.contains(x_adv)
            logits = answers(self.model, torch.where(inside[:, None, None, None], x_adv, x)).float()
            found = torch.minimum(found, _margins(logits, y))
        return found


def _answers_of(model: nn.Module, images: ImageSet, index: Ints) -> list[list[float]]:
    """Rounded logits of a few images: models of equal weights may still differ, as in a temperature."""
    each = (x for x, _, _ in ordered(images, index[:ANSWERED], 1, device_of(model)))
    return [answers(model, x)[0].double().cpu().round(decimals=2).tolist() for x in each]


def _margins(logits: Tensor, y: Tensor) -> Tensor:
    """(B, K) z_y - z_j, infinite at the label."""
    return (logits.gather(1, y[:, None]) - logits).scatter(1, y[:, None], torch.inf)


def _check_logits(model: nn.Module, images: ImageSet, index: Ints, batch_size: int) -> None:
    """Refuse probabilities: adding a bias to them is not adding it to the logits."""
    outputs = torch.cat([answers(model, x) for x, _, _ in ordered(images, index, batch_size, device_of(model))])
    sums = outputs.sum(1)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() <= PROBABLE).all()):
        raise InputError(
            "the model returns probabilities, not logits: margins and class biases need the values before the softmax"
        )
