"""Influence of the background on a class (Tian et al. 2021, Sec. 6.2: Fig. 5, Fig. 6 and Table 4).

**Colors**, for gray images on a dark background: every class gets one of two background colors, in two assignments, and
the run's recipe is trained on each. If the background determines which classes are confused, wrong predictions stay
within one color. For comparison there is the share for the same classes in the model of the *other* assignment, which
never saw these colors, and the share by chance.

**White**, for any images: the background in the images of one class becomes white, and the model is evaluated on them
without retraining. Table 4 is the number of predictions per class, without and under attack, before and after. Further
runs (the paper's has a lower beta for the confused class) are evaluated on the same white images. Masks come from a
file or are estimated; the area that they cover and the share of the model's gradient within them are reported.

Deviations
* The paper's masks are made by hand.
* Its two sets of colors are not given in numbers. Here the colors are blue and yellow; the first assignment separates
  even and odd classes, the second the lower and the upper half.
"""

# N examples, K classes, C channels, H height, W width

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classwise.analysis.foreground import foregrounds
from classwise.analysis.image_folders import write_image_folder
from classwise.analysis.model_outputs import BATCH, attack_of, exact_logits
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.retraining import evaluate_variant, recipe_of, repeatable_attack, train_variants
from classwise.analysis.run import Run
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, frozen, logits_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.data import ImageSet, load_data
from classwise.data.batches import ordered, to_float
from classwise.data.derived import on_colors
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Card, Figure, Picture, Series, bars, gallery, heatmap, off_diagonal, png
from classwise.storage.verdicts import NATURAL

Ints = NDArray[np.int64]
COLORS: dict[str, list[float]] = {"blue": [0.0, 0.2, 0.7], "yellow": [0.7, 0.6, 0.0]}
SHOWN = 6
"""Number of images at each end of the gallery."""


def background(
    *runs: Run | str | Path,
    experiment: Literal["auto", "colors", "white", "colours"] = "auto",
    label: str | int | None = None,
    masks: Path | None = None,
    attack: str | None = None,
    work: Path | None = None,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Change the background of images and evaluate a model on them.

    ``auto`` is ``colors`` for images of one channel and ``white`` for others; ``colours`` is the former name of
    ``colors``. ``label`` is the class on white, by default the worst one; ``masks`` a NumPy file (images of that class,
    H, W), true for the foreground. Models and colored images are written into ``work``, by default RUN/background.
    """
    if not runs:
        raise InputError("background needs at least one run")
    opened = [Run.open(run) for run in runs]
    first = opened[0]
    if experiment == "auto":
        experiment = "colors" if first.images.images.shape[1] == 1 else "white"
    if experiment in ("colors", "colours"):
        return _colored(first, attack, first.path / "background" if work is None else work, progress)
    return _white(opened, label, masks, repeatable_attack(first, attack), progress)


def assignments(num_classes: int) -> dict[str, Ints]:
    """Return two assignments of two colors to classes: (K,) numbers of colors.

    >>> assignments(4)["halves"].tolist()
    [0, 0, 1, 1]
    """
    labels = np.arange(num_classes)
    return {"even and odd": labels % 2, "halves": (2 * labels >= num_classes).astype(np.int64)}


def _colored(run: Run, attack: str | None, folder: Path, progress: Progress) -> AnalysisResult:
    recipe, key = recipe_of(run), repeatable_attack(run, attack)
    if run.images.images.shape[1] != 1:
        raise InputError(f"{run.path} has color images; experiment = colors needs gray ones")
    run.require_classes(4)
    ways, classes = assignments(run.num_classes), run.classes
    counts = _train_on_colors(run, recipe.data.name, ways, key, folder, progress)
    rows, summary, phrases = [], [], []
    for (name, result), matrix in counts.items():
        (other,) = set(ways) - {name}
        same = ways[name][:, None] == ways[name]
        within, chance = _within_color(matrix, same)
        without, _ = _within_color(counts[other, result], same)
        about = {"colors": name, "attack": result}
        rows += [
            {
                **about,
                "class": classes[i],
                "predicted_class": classes[j],
                "label": i,
                "predicted": j,
                "same_color": bool(same[i, j]),
                "count": int(count),
            }
            for (i, j), count in np.ndenumerate(matrix)
        ]
        summary.append(
            {
                **about,
                **interval_columns("within_color_percent", within),
                **interval_columns("without_colors_percent", without),
                "by_chance_percent": chance,
                "n": within.n,
            }
        )
        if result == key and chance is not None:
            phrases.append(
                f"{share(within, '%')} with the colors {name} (without these colors {share(without, '%')}, by chance "
                f"{chance:.1f}%)"
            )
    frame = frame_of(rows)
    finding = f"Wrong predictions under {key} that stay within a background color: {' and '.join(phrases)}."
    if len(phrases) < len(ways):
        finding = "No example is misclassified under attack, so the effect of background colors cannot be measured."
    return AnalysisResult(
        name="background",
        finding=finding,
        about={"model": run.name, "dataset": recipe.data.name, "attack": key, "colors": ways},
        frames={
            "predictions": frame.iloc[np.lexsort((-frame["count"], frame["label"] == frame["predicted"]))],
            "summary": frame_of(summary),
        },
        draw=lambda: [_color_figure(name, way, counts[name, key], classes) for name, way in ways.items()],
    )


def _train_on_colors(
    run: Run, data: str, ways: dict[str, Ints], key: str, folder: Path, progress: Progress
) -> dict[tuple[str, str], Ints]:
    """Train on each assignment and return the confusion matrices by assignment and result."""
    sets = {split: load_data(data, split=split) for split in ("train", "test")}
    changes = {}
    for name, way in ways.items():
        labels = {color: np.flatnonzero(way == number).tolist() for number, color in enumerate(COLORS)}
        settings = {"colours": COLORS, "classes": labels} | {split: some.digest() for split, some in sets.items()}
        parts = {split: _with_colors(some, way) for split, some in sets.items()}
        place = folder / name.replace(" ", "-")
        images = place.with_name(f"{place.name}-images")
        spec = write_image_folder(images, settings, parts, total=sum(map(len, sets.values())), progress=progress)
        changes[place] = {"data": spec}
    train_variants(run, changes, progress=progress)
    found: dict[tuple[str, str], Ints] = {}
    for name, (place, change) in zip(ways, changes.items(), strict=True):
        report = evaluate_variant(run, place, data=change["data"], attack=key, progress=progress).report
        found |= {(name, result): np.array(report.confusion[result]) for result in (key, NATURAL)}
    return found


def _within_color(counts: Ints, same: NDArray[np.bool_]) -> tuple[Estimate, float | None]:
    """Return the share of wrong predictions within the true background color, and the share by chance in percent."""
    wrong, others = counts - np.diag(np.diag(counts)), (same.sum(1) - 1) / (len(counts) - 1)
    chance = round(float(100 * (wrong.sum(1) * others).sum() / wrong.sum()), 4) if wrong.any() else None
    return Estimate(**estimate(int(wrong[same].sum()), int(wrong.sum()))), chance


def _with_colors(images: ImageSet, assignment: Ints) -> Iterator[tuple[Tensor, Ints]]:
    of_class = torch.tensor(list(COLORS.values()))[assignment]
    for x, y, _ in ordered(images, None, BATCH):
        yield on_colors(x, of_class[y]), y.numpy().astype(np.int64)


def _white(
    runs: list[Run], chosen: str | int | None, masks: Path | None, key: str, progress: Progress
) -> AnalysisResult:
    first = runs[0]
    label, classes, spec = first.label_of(chosen, key), first.classes, first.report.attacks[key].spec
    index = first.verdicts.index[first.verdicts.label == label]
    if not len(index):
        raise InputError(f"{first.path} has no examples of class {classes[label]}")
    x = to_float(first.images.images[index])
    foreground = foregrounds(x.numpy()) if masks is None else _read_masks(masks, x)
    on_white = torch.where(torch.from_numpy(foreground)[:, None], x, 1.0)
    outputs = [[_probabilities(run, some, label, index, spec, progress) for some in (x, on_white)] for run in runs]
    counts = [
        (
            f"{images}, {run.name}" if place else images,
            result,
            np.bincount(pair[attacked].argmax(1), minlength=len(classes)),
        )
        for place, (run, pairs) in enumerate(zip(runs, outputs, strict=True))
        for attacked, result in enumerate((NATURAL, key))
        for images, pair in zip(("original", "white background"), pairs, strict=True)
    ]
    rows = [
        {"images": images, "attack": result, "predicted_class": name, "predicted": predicted, "count": int(count)}
        for images, result, found in counts
        for predicted, (name, count) in enumerate(zip(classes, found, strict=True))
    ]
    before, after = (share(Estimate(**estimate(int(found[label]), len(x))), "%") for *_, found in counts[2:4])
    covered, gradient = 100 * foreground.mean(), 100 * _gradient_share(first, x, label, foreground)
    source = "estimated masks" if masks is None else "masks"
    finding = (
        f"On white, the accuracy of class {classes[label]} under {key} changes from {before} to {after}; the {source} "
        f"cover {covered:.0f}% of an image and hold {gradient:.0f}% of the model's gradient."
    )
    return AnalysisResult(
        name="background",
        finding=finding,
        about={
            "models": [run.name for run in runs],
            "dataset": first.report.dataset.name,
            "attack": key,
            "classes": classes,
            "label": label,
            "masks": masks and str(masks),
        },
        frames={"predictions": frame_of(rows)},
        draw=lambda: [
            bars(
                classes,
                [Series(name=images, y=[float(n) for n in found]) for images, result, found in counts if result == key],
                title=f"Predictions for class {classes[label]} under attack",
                alt=finding,
                x="predicted class",
                y="images",
            ),
            _gallery(classes[label], index, outputs[0][0][1][:, label], x, on_white),
        ],
    )


def _gallery(name: str, index: Ints, confidence: NDArray[np.float64], x: Tensor, on_white: Tensor) -> Figure:
    order = np.argsort(-confidence, kind="stable")
    cards = [
        Card(
            heading=f"{which}, image {index[row]}",
            pictures=[
                Picture(png=png(x[row].numpy()), alt=f"Image {index[row]}", caption="original"),
                Picture(png=png(on_white[row].numpy()), alt=f"Image {index[row]} on white", caption="on white"),
            ],
            lines=[f"confidence in {name} under attack {100 * confidence[row]:.1f}%"],
        )
        for which, rows in (("most robust", order[:SHOWN]), ("least robust", order[::-1][:SHOWN]))
        for row in rows
    ]
    return gallery(cards, title="Most and least robust images", alt=f"Images of class {name}")


def _probabilities(run: Run, x: Tensor, label: int, index: Ints, spec: str, progress: Progress) -> NDArray[np.float64]:
    """Return (2, N, K) probabilities without and under attack."""
    model, attack = run.model, attack_of(run, spec)
    found = []
    progress.start(f"{spec} on {run.name}", len(x))
    for some, rows in zip(torch.split(x, BATCH), torch.split(torch.from_numpy(index), BATCH), strict=True):
        natural = some.to(device_of(model))
        y = torch.full((len(some),), label, device=natural.device)
        attacked = attack(model, natural, y, generator=ExampleNoise(0, rows))
        found.append(torch.stack([exact_logits(model, images).double().softmax(1) for images in (natural, attacked)]))
        progress.advance(len(some))
    progress.finish()
    return np.asarray(torch.cat(found, 1).numpy())


def _gradient_share(run: Run, x: Tensor, label: int, masks: NDArray[np.bool_]) -> float:
    """Return the share of the gradient's absolute values within the masks."""
    model, shares = run.model, []
    for images, mask in zip(torch.split(x, BATCH), torch.split(torch.from_numpy(masks), BATCH), strict=True):
        some = images.to(device_of(model)).requires_grad_()
        with frozen(model):
            loss = -logits_of(model(some)).log_softmax(1)[:, label].sum()
        (gradient,) = torch.autograd.grad(loss, some)
        size = gradient.abs().sum(1).cpu()
        total = size.sum((1, 2))
        shares.append(((size * mask).sum((1, 2)) / total)[total > 0])
    every = torch.cat(shares)
    return float(every.mean()) if len(every) else 0.0


def _read_masks(path: Path, x: Tensor) -> NDArray[np.bool_]:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"masks {path} cannot be read: {error}") from None
    wanted = (len(x), *x.shape[2:])
    if found.shape != wanted:
        raise InputError(
            f"masks {path} have the shape {found.shape}; expected {wanted}, one mask for each image of the class"
        )
    return np.asarray(found, dtype=bool)


def _color_figure(name: str, assignment: Ints, counts: Ints, classes: list[str]) -> Figure:
    order, colors = np.argsort(assignment, kind="stable"), list(COLORS)
    return heatmap(
        off_diagonal(counts[np.ix_(order, order)]),
        title=f"Wrong predictions under attack, {name}",
        alt=f"Misclassified matrix with the classes ordered by background color ({name})",
        names=[f"{classes[label]} ({colors[assignment[label]]})" for label in order],
        x="predicted class",
        y="true class",
        unit="examples",
        groups=[int((assignment == 0).sum())],
    )
