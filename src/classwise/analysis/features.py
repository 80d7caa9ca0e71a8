"""Robust and non-robust features of classes (Benz et al. 2020, after Ilyas et al. 2019).

Two data sets are generated from the training images. In the **robust** one, each image is the nearest one, by gradient
descent from another image, with the original's features in a robust model, so that only these features predict the
label. In the **non-robust** one, each image is attacked towards another class within the radius and labeled as that
class, so that only what an attack changes predicts the label. A model is trained in the usual way on each and evaluated
by class on the real test images.

Deviations
* Ilyas et al. keep images as floats; here they are PNG files in class folders, rounded to 256 levels.
* Their non-robust images use the L2 ball; here the ball that the standard model was evaluated in.
"""

# N examples, K classes, D features

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classwise.analysis.image_folders import write_image_folder
from classwise.analysis.model_outputs import BATCH, attack_of, linear_head
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.retraining import evaluate_variant, recipe_of, repeatable_attack, train_variants
from classwise.analysis.run import Run
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, frozen
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import unit
from classwise.data import ImageSet, load_data
from classwise.data.batches import ordered
from classwise.data.splits import balanced_subset
from classwise.reporting.figures import Series, bars
from classwise.storage.verdicts import NATURAL

ORIGINAL, ROBUST, NON_ROBUST = "original", "robust", "non-robust"


def features(
    robust: Run | str | Path,
    standard: Run | str | Path,
    *,
    attack: str | None = None,
    steps: int = 100,
    step_size: float = 0.1,
    per_class: int | None = None,
    seed: int = 0,
    work: Path | None = None,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Generate both data sets, train the standard run's recipe on each, and evaluate it by class.

    ``steps`` and ``step_size`` (L2 norm): of the descent on features. ``per_class``: training images per class. Data
    sets and runs are kept in ``work``, by default ROBUST/features.
    """
    source, plain = Run.open(robust), Run.open(standard)
    recipe, key = recipe_of(plain), repeatable_attack(plain, attack)
    if source.classes != plain.classes:
        raise InputError(f"{source.path} and {plain.path} have different classes")
    linear_head(source)  # fails early for a model without features
    folder = source.path / "features" if work is None else work
    images = load_data(recipe.data.name, split="train")
    if per_class is not None:
        images = _first(images, per_class)
    settings = {"steps": steps, "step_size": step_size, "per_class": per_class, "seed": seed, "attack": key}
    origin = {"digest": images.digest(), "robust": str(source.path.resolve())}
    generated = {
        ROBUST: robust_images(source, images, steps, step_size, seed),
        NON_ROBUST: non_robust_images(plain, images, plain.report.attacks[key].spec, seed),
    }
    places = {
        folder / name: {
            "data": write_image_folder(
                folder / f"{name}-images", settings | origin, {"train": parts}, total=len(images), progress=progress
            )
        }
        for name, parts in generated.items()
    }
    train_variants(plain, places, progress=progress)
    reports = {ORIGINAL: plain.report} | {
        name: evaluate_variant(plain, folder / name, attack=key, progress=progress).report for name in generated
    }
    finding = "Natural accuracy by training images: " + ", ".join(
        f"{name} {report[NATURAL].overall.value:.1f}% (worst class {worst.name}, {worst.value:.1f}%)"
        for name, report in reports.items()
        if (worst := report[NATURAL].worst) is not None
    )
    rows, summary = [], []
    for name, report in reports.items():
        for result_key in (NATURAL, key):
            row, result = {"trained_on": name, "attack": result_key}, report[result_key]
            rows += [
                {
                    **row,
                    "label": part.label,
                    "class": part.name,
                    **interval_columns("accuracy_percent", part),
                    "n": part.n,
                }
                for part in result.by_class
            ]
            spread = {"class_variance": result.cv, "max_class_difference_points": result.mcd}
            summary.append({**row, **interval_columns("average_percent", result.overall), **spread})
    return AnalysisResult(
        name="features",
        finding=f"{finding}.",
        about={"robust_model": source.name, "standard_model": plain.name, "classes": plain.classes, **settings},
        frames={"classes": frame_of(rows), "models": frame_of(summary)},
        draw=lambda: [
            bars(
                plain.classes,
                [Series.of(f"{name} images", report[NATURAL].by_class) for name, report in reports.items()],
                title="Accuracy on real test images, by training images",
                alt=f"{finding}.",
                y="accuracy, %",
            )
        ],
    )


def robust_images(
    run: Run, images: ImageSet, steps: int, step_size: float, seed: int
) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    """Yield for each image another one, changed by gradient descent to have its features, and its label."""
    model = run.model
    _, head = linear_head(run)
    others = np.random.default_rng(seed).permutation(len(images))
    for x, y, rows in ordered(images, None, BATCH, device_of(model)):
        starts, _, _ = next(ordered(images, others[rows.cpu().numpy()], len(x), device_of(model)))
        yield descend(model, head, x, starts, steps, step_size).cpu(), y.cpu().numpy()


def descend(model: nn.Module, head: nn.Module, x: Tensor, start: Tensor, steps: int, step_size: float) -> Tensor:
    """Return images in [0, 1] near ``start`` with the features of ``x``, by steps of normalized gradient descent."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(1)))
    try:
        with frozen(model):
            with torch.no_grad():
                model(x)
            target, found = seen.pop(), start
            for _ in range(steps):
                moving = found.detach().requires_grad_()
                model(moving)
                (gradient,) = torch.autograd.grad((seen.pop() - target).square().sum(), moving)
                found = (found - step_size * unit(gradient)).clamp(0, 1)
    finally:
        hook.remove()
    return found.detach()


def non_robust_images(run: Run, images: ImageSet, attack: str, seed: int) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    """Yield images attacked towards a random other class, with that class as their label."""
    found, k = attack_of(run, attack), run.num_classes
    random = np.random.default_rng(seed)
    for x, y, rows in ordered(images, None, BATCH, device_of(run.model)):
        labels = y.cpu().numpy().astype(np.int64)
        targets = (labels + random.integers(1, k, len(labels))) % k
        target_tensor = torch.from_numpy(targets).to(y.device)
        yield found(run.model, x, y, targets=target_tensor, generator=ExampleNoise(seed, rows)).cpu(), targets


def _first(images: ImageSet, per_class: int) -> ImageSet:
    rows = balanced_subset(images.labels, per_class, int(images.labels.max()) + 1)
    return replace(images, images=images.images[rows], labels=images.labels[rows])
