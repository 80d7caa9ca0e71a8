"""Compute the margin matrix of a model with targeted attacks.

The targeted margin loss z_y - z_j changes by a constant when biases are added to the logits, so neither its gradient
nor the image it finds depends on them. The likeliest classes are attacked by 15 steps each, then the three with the
smallest margins by 40 steps, twice. All margins come from float32 forward passes of the model itself on inputs verified
to lie in the ball; each verified input bounds the margins over all classes, not only over the one that was attacked.
"""

# B batch, K classes, N examples, T targets

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.accelerate import release_memory, search_model
from classwise.attacks.cosine_pgd import MarginSearch
from classwise.core.choices import EngineName
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, has_gradients, model_errors
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.data import ImageSet, ordered
from classwise.evaluation.batching import BatchLoop
from classwise.evaluation.inputs import SAMPLE, SAMPLE_BATCH, count_classes, default_batch_size
from classwise.evaluation.judge import compute_logits, judge
from classwise.evaluation.parts import at_most
from classwise.metrics.counts import Ints
from classwise.models.weights import digest_model
from classwise.storage.files import digest, digest_json
from classwise.storage.margins import SCHEMA, Margins
from classwise.storage.run_directory import versions

_LOG = logging.getLogger(__name__)

MOST_TARGETS = 19
"""Maximum number of wrong classes attacked by default; of more, the likeliest."""
FINGERPRINTED = 4
"""Number of images whose logits are part of a table's fingerprint."""
AUDITED = 64
"""Number of robust images on which all classes are attacked if the search attacks fewer."""
PROBABILITY_TOLERANCE = 1e-3
"""Tolerance: outputs between 0 and 1 whose rows sum to one within this are taken as probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginSettings:
    """Settings of the search."""

    steps: int = 15
    """Steps of the first attack on every target class."""
    more_steps: int = 40
    """Steps of every further attack on the nearest target classes."""
    nearest: int = 3
    """Number of target classes with the smallest margins that are attacked further."""
    searches: int = 2
    """Number of further searches. Each has another random start and selects the nearest classes again."""
    targets: int | None = None
    """Number of wrong classes to attack, the likeliest first. Default: all, at most 19."""
    seed: int = 0

    def chosen(self, num_classes: int) -> int:
        """Return the number of target classes."""
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
        raise InputError("the margin search needs gradients, but the model has none")
    targets = settings.chosen(num_classes)
    identity = {
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
        "model": digest_json([digest_model(model), _rounded_logits(model, images, index)]),
        "versions": {name: versions()[name] for name in ("classwise", "torch")},
    }
    fingerprint = digest_json([identity, digest(np.ascontiguousarray(index).data.cast("B"))])
    margins = Margins.pending(index, images.labels[index], num_classes, {**identity, "fingerprint": fingerprint})
    margins, loaded_from = _load_matching(margins, [path for path in (file, known) if path is not None])
    audits = targets < num_classes - 1 and len(margins) > 0
    if margins.complete and ("audit" in margins.info or not audits):
        if file is not None and loaded_from != file:
            margins.save(file)
        return margins
    size = batch_size or default_batch_size(images, device_of(model))
    _check_logits(model, images, index[:SAMPLE], min(SAMPLE_BATCH, size))
    searched = search_model(model, next(ordered(images, index[:size], size, device_of(model)))[0], engine)
    search = _Search(
        model=model,
        searched=searched,
        images=images,
        margins=margins,
        threat=threat,
        settings=settings,
        targets=targets,
    )
    free = partial(release_memory, searched)

    def save() -> None:
        if file is not None:
            margins.save(file)

    try:
        loop = BatchLoop(size=size, progress=progress, save=save, free=free)
        loop.run(f"margins of {len(index):,} images of {images.name}/{images.split}", margins.missing, search.fill)
        if audits:
            margins.info["audit"] = search.audit(loop)
    finally:
        free()
        save()
    return margins if file is None else Margins.load(file)  # in half precision, as if it had been loaded


def _load_matching(pending: Margins, paths: Sequence[Path]) -> tuple[Margins, Path | None]:
    """Return the most complete saved table with the fingerprint of ``pending`` and its path, else ``pending``."""
    margins, loaded_from = pending, None
    for path in paths:
        if path.is_file():
            saved = Margins.load(path)
            if saved.info.get("fingerprint") != pending.info["fingerprint"]:
                keys = [
                    key for key in pending.info if key != "fingerprint" and saved.info.get(key) != pending.info[key]
                ]
                differing = ", ".join(keys[:-1]) or "images"  # without the fingerprint
                _LOG.info("the margins in %s are not used: they differ in %s", path, differing)
            elif saved.missing.sum() < margins.missing.sum():
                margins, loaded_from = saved, path
    return margins, loaded_from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The search for margins. Fills the table in place."""

    model: nn.Module
    searched: nn.Module
    images: ImageSet
    margins: Margins
    threat: Threat
    settings: MarginSettings
    targets: int

    def fill(self, batch: Ints) -> None:
        """Compute some rows of the table."""
        x, y, index = self._batch(batch)
        natural = compute_logits(self.model, x).float()
        found = _margins(natural, y)
        likeliest = found.argsort(dim=1, stable=True)[:, : self.targets]
        found = self._lowered(found, x, y, index, likeliest, self.settings.steps)
        for number in range(1, self.settings.searches + 1):
            nearest = found.argsort(dim=1, stable=True)[:, : min(self.settings.nearest, self.targets)]
            found = self._lowered(found, x, y, index, nearest, self.settings.more_steps, number)
        self.margins.natural[batch], self.margins.attacked[batch] = natural.cpu().numpy(), found.cpu().numpy()

    def audit(self, loop: BatchLoop) -> dict[str, Any]:
        """Attack every class on a random sample of robust images. Return how many break, and the 95% upper bound."""
        margins = self.margins
        robust = np.flatnonzero(margins.attacked.min(axis=1) > 0)
        rows = np.random.default_rng(self.settings.seed).permutation(robust)[:AUDITED]
        if not len(rows):
            return {"images": 0, "broken": 0, "at_most": None}
        broken = 0

        def fill(batch: Ints) -> None:
            nonlocal broken
            x, y, index = self._batch(batch)
            natural = compute_logits(self.model, x).float()
            others = _margins(natural, y).argsort(dim=1, stable=True)[:, self.targets : natural.shape[1] - 1]
            found = torch.from_numpy(margins.attacked[batch]).to(x.device)
            found = self._lowered(found, x, y, index, others, self.settings.steps)
            broken += int((found.amin(1) <= 0).sum())

        sample = np.isin(np.arange(len(margins)), rows)
        loop.run("audit of margins", sample, fill)
        return {"images": len(rows), "broken": broken, "at_most": at_most(broken, len(rows))}

    def _batch(self, rows: Ints) -> tuple[Tensor, Tensor, Tensor]:
        return next(ordered(self.images, self.margins.index[rows], len(rows), device_of(self.model)))

    def _lowered(
        self, found: Tensor, x: Tensor, y: Tensor, index: Tensor, targets: Tensor, steps: int, attempt: int = 0
    ) -> Tensor:
        """Return the margins (B, K) after attacks on each column of targets. Later attempts start with longer steps."""
        search = MarginSearch(eps=self.threat.text, norm=self.threat.norm, steps=steps, first_step=max(1.0, attempt))
        stream = int(digest(str(self.settings.seed), repr(search))[:15], 16)
        ball = self.threat.ball(x)
        for number, target in enumerate(targets.unbind(1)):
            noise = ExampleNoise(stream, index).fork([number])
            with model_errors("in the search for margins"):
                x_adv = search(self.searched, x, y, generator=noise, targets=target)
            logits, _ = judge(self.model, ball, x_adv)
            found = torch.minimum(found, _margins(logits.float(), y))
        return found


def _rounded_logits(model: nn.Module, images: ImageSet, index: Ints) -> list[list[float]]:
    """Return the rounded logits of a few images. Models of equal weights may differ in other settings."""
    each = (x for x, _, _ in ordered(images, index[:FINGERPRINTED], 1, device_of(model)))
    return [compute_logits(model, x)[0].double().cpu().round(decimals=2).tolist() for x in each]


def _margins(logits: Tensor, y: Tensor) -> Tensor:
    """Return the margins z_y - z_j (B, K), infinite at the label."""
    return (logits.gather(1, y[:, None]) - logits).scatter(1, y[:, None], torch.inf)


def _check_logits(model: nn.Module, images: ImageSet, index: Ints, batch_size: int) -> None:
    """Refuse models that return probabilities: adding a bias to these differs from adding it to logits."""
    outputs = torch.cat([compute_logits(model, x) for x, _, _ in ordered(images, index, batch_size, device_of(model))])
    sums = outputs.sum(1)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() <= PROBABILITY_TOLERANCE).all()):
        raise InputError(
            "the model returns probabilities, not logits: margins and class biases need the values before the softmax"
        )
