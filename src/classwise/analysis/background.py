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

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from classwise.analysis.confusion import matrix_of
from classwise.analysis.foreground import foregrounds
from classwise.analysis.image_folders import write_image_folder
from classwise.analysis.model_outputs import BATCH, attack_of
from classwise.analysis.result import AnalysisResult, Record, frame_of
from classwise.analysis.retraining import evaluate_variant, recipe_of, repeatable_attack, train_variants
from classwise.analysis.run import Run
from classwise.analysis.superclasses import membership
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, frozen, logits_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.data import ImageSet, load_data
from classwise.data.batches import ordered, to_float
from classwise.data.derived import on_colors
from classwise.metrics import confusion_matrix
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Card, Figure, Picture, Series, bars, gallery, heatmap, off_diagonal, png
from classwise.storage.verdicts import NATURAL

COLORS: dict[str, list[float]] = {"blue": [0.0, 0.2, 0.7], "yellow": [0.7, 0.6, 0.0]}
SHOWN = 6
"""Number of images at each end of the gallery."""


def background(
    *runs: Run | str | Path,
    experiment: Literal["auto", "colours", "white"] = "auto",
    label: str | int | None = None,
    masks: Path | None = None,
    attack: str | None = None,
    work: Path | None = None,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Change the background of images and evaluate a model on them.

    ``auto`` is ``colours`` for images of one channel and ``white`` for others. ``label`` is the class on white, by
    default the worst one; ``masks`` a NumPy file (images of that class, H, W), true for the foreground. Models and
    colored images are written into ``work``, by default RUN/background.
    """
    if not runs:
        raise InputError("background needs at least one run")
    opened = [Run.open(run) for run in runs]
    first = opened[0]
    if experiment == "auto":
        experiment = "colours" if first.images.images.shape[1] == 1 else "white"
    if experiment == "colours":
        values = _colored(first, attack, first.path / "background" if work is None else work, progress)
        return AnalysisResult(
            name="background",
            finding=_color_finding(values),
            values=values,
            frames={"predictions": _color_frame(values)},
            draw=lambda: [_color_figure(one, values.classes) for one in values.assignments],
        )
    key = repeatable_attack(first, attack)
    white = _white(opened, first.label_of(label, key), masks, key, progress)
    values = Record(model=first.name, attack=key, classes=first.classes, white=white, assignments=[])
    return AnalysisResult(
        name="background",
        finding=_white_finding(values),
        values=values,
        frames={"predictions": _white_frame(values)},
        draw=lambda: _white_figures(values),
    )


def assignments(num_classes: int) -> dict[str, dict[str, list[int]]]:
    """Return two assignments of two colors to classes.

    >>> assignments(4)["halves"]
    {'blue': [0, 1], 'yellow': [2, 3]}
    """
    labels, half = range(num_classes), (num_classes + 1) // 2
    ways = {"even and odd": [label % 2 for label in labels], "halves": [int(label >= half) for label in labels]}
    return {
        name: {color: [label for label in labels if which[label] == place] for place, color in enumerate(COLORS)}
        for name, which in ways.items()
    }


def _colored(run: Run, attack: str | None, folder: Path, progress: Progress) -> Record:
    recipe, key = recipe_of(run), repeatable_attack(run, attack)
    if run.images.images.shape[1] != 1:
        raise InputError(f"{run.path} has color images; experiment = colours needs gray ones")
    run.require_classes(4)
    ways = assignments(run.num_classes)
    places = {name: folder / name.replace(" ", "-") for name in ways}
    specs = {}
    for name, assignment in ways.items():
        sets = {split: load_data(recipe.data.name, split=split) for split in ("train", "test")}
        settings = {"colours": {color: COLORS[color] for color in assignment}, "classes": assignment} | {
            split: images.digest() for split, images in sets.items()
        }
        parts = {split: _with_colors(images, assignment) for split, images in sets.items()}
        place = places[name].with_name(f"{places[name].name}-images")
        specs[name] = write_image_folder(place, settings, parts, total=sum(map(len, sets.values())), progress=progress)
    train_variants(run, {places[name]: {"data": spec} for name, spec in specs.items()}, progress=progress)
    verdicts_of = {
        name: evaluate_variant(run, places[name], data=spec, attack=key, progress=progress).verdicts
        for name, spec in specs.items()
    }
    found = []
    for name, assignment in ways.items():
        (other,) = (verdicts for theirs, verdicts in verdicts_of.items() if theirs != name)
        matrices = [
            matrix_of(
                confusion_matrix(verdicts_of[name].label, verdicts_of[name].predictions(k), run.num_classes),
                run.classes,
                assignment,
            )
            for k in (NATURAL, key)
        ]
        member = membership(assignment, run.num_classes)
        wrong = other.predictions(key) != other.label
        inside = int((member[other.predictions(key)] == member[other.label])[wrong].sum())
        found.append(
            Record(
                name=name,
                colours=assignment,
                natural=matrices[0],
                adversarial=matrices[1],
                under_the_other=Estimate(**estimate(inside, int(wrong.sum()))),
            )
        )
    return Record(model=run.name, attack=key, classes=run.classes, white=None, assignments=found)


def _with_colors(images: ImageSet, assignment: dict[str, list[int]]) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    of_class = torch.zeros(sum(map(len, assignment.values())), 3)
    for color, labels in assignment.items():
        of_class[labels] = torch.tensor(COLORS[color])
    for x, y, _ in ordered(images, None, BATCH):
        yield on_colors(x, of_class[y]), y.numpy().astype(np.int64)


def _white(runs: Sequence[Run], label: int, masks: Path | None, key: str, progress: Progress) -> Record:
    first = runs[0]
    index = first.verdicts.index[first.verdicts.label == label]
    if not len(index):
        raise InputError(f"{first.path} has no examples of class {first.classes[label]}")
    x = to_float(first.images.images[index])
    foreground = foregrounds(x.numpy()) if masks is None else _read_masks(masks, x)
    on_white = torch.where(torch.from_numpy(foreground)[:, None], x, 1.0)
    lines: list[Record] = []
    confidences = np.zeros(len(x))
    for place, run in enumerate(runs):
        spec = first.report.attacks[key].spec
        name = "" if place == 0 else f", {run.name}"
        sets = {f"original{name}": x, f"white background{name}": on_white}
        outputs = {what: _probabilities(run, some, label, index, spec, progress) for what, some in sets.items()}
        for attacked in (False, True):
            for what, (natural, adversarial) in outputs.items():
                predicted = (adversarial if attacked else natural).argmax(1)
                counts = np.bincount(predicted, minlength=first.num_classes)
                correct = Estimate(**estimate(int(counts[label]), len(x)))
                lines.append(Record(name=what, attacked=attacked, counts=counts.tolist(), correct=correct))
        if place == 0:
            confidences = outputs["original"][1][:, label]
    order = np.argsort(-confidences, kind="stable")

    def shown(rows: NDArray[np.int64]) -> list[Record]:
        return [
            Record(
                index=int(index[row]),
                confidence=float(confidences[row]),
                before=png(x[row].numpy()),
                after=png(on_white[row].numpy()),
            )
            for row in rows
        ]

    return Record(
        label=label,
        name=first.classes[label],
        lines=lines,
        covered=round(100 * float(foreground.mean()), 2),
        gradient=round(100 * _gradient_share(first, x, label, foreground), 2),
        estimated=masks is None,
        most_robust=shown(order[:SHOWN]),
        least_robust=shown(order[::-1][:SHOWN]),
    )


def _probabilities(
    run: Run, x: Tensor, label: int, index: NDArray[np.int64], spec: str, progress: Progress
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (N, K) probabilities without and under attack."""
    model, attack = run.model, attack_of(run, spec)
    found: list[tuple[Tensor, Tensor]] = []
    progress.start(f"{spec} on {run.name}", len(x))
    for start in range(0, len(x), BATCH):
        some = x[start : start + BATCH].to(device_of(model))
        y = torch.full((len(some),), label, device=some.device)
        rows = torch.from_numpy(index[start : start + BATCH])
        attacked = attack(model, some, y, generator=ExampleNoise(0, rows))
        with torch.no_grad(), frozen(model):
            pair = [logits_of(model(images)).double().softmax(1).cpu() for images in (some, attacked)]
        found.append((pair[0], pair[1]))
        progress.advance(len(some))
    progress.finish()
    natural, adversarial = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    return natural, adversarial


def _gradient_share(run: Run, x: Tensor, label: int, masks: NDArray[np.bool_]) -> float:
    """Return the share of the gradient's absolute values within the masks."""
    model = run.model
    shares = []
    for start in range(0, len(x), BATCH):
        some = x[start : start + BATCH].to(device_of(model)).requires_grad_()
        with frozen(model):
            loss = -logits_of(model(some)).log_softmax(1)[:, label].sum()
        (gradient,) = torch.autograd.grad(loss, some)
        size = gradient.abs().sum(1).cpu().numpy()
        total = size.sum((1, 2))
        inside = (size * masks[start : start + BATCH]).sum((1, 2))
        shares.append(inside[total > 0] / total[total > 0])
    every = np.concatenate(shares)
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


def _color_finding(values: Record) -> str:
    phrases = []
    for one in values.assignments:
        within = one.adversarial.within_superclass
        if within.value is None:
            return "No example is misclassified under attack, so the effect of background colors cannot be measured."
        phrases.append(
            f"{share(within, '%')} with the colors {one.name} (without these colors {share(one.under_the_other, '%')}, "
            f"by chance {one.adversarial.within_by_chance:.1f}%)"
        )
    return f"Wrong predictions under {values.attack} that stay within a background color: {' and '.join(phrases)}."


def _color_frame(values: Record) -> pd.DataFrame:
    rows = [
        {
            "colors": one.name,
            "attack": key,
            "class": values.classes[i],
            "predicted_class": values.classes[j],
            "label": i,
            "predicted": j,
            "same_color": any(i in labels and j in labels for labels in one.colours.values()),
            "count": count,
        }
        for one in values.assignments
        for key, matrix in ((values.attack, one.adversarial), (NATURAL, one.natural))
        for i, row in enumerate(matrix.counts)
        for j, count in enumerate(row)
    ]
    frame = frame_of(rows)
    return frame.iloc[np.lexsort((-frame["count"], frame["label"] == frame["predicted"]))]


def _color_figure(one: Record, classes: list[str]) -> Figure:
    order = [label for labels in one.colours.values() for label in labels]
    color_of = {label: color for color, labels in one.colours.items() for label in labels}
    return heatmap(
        off_diagonal(np.array(one.adversarial.counts)[np.ix_(order, order)]),
        title=f"Wrong predictions under attack, {one.name}",
        alt=f"Misclassified matrix with the classes ordered by background color ({one.name})",
        names=[f"{classes[label]} ({color_of[label]})" for label in order],
        x="predicted class",
        y="true class",
        unit="examples",
        groups=np.cumsum([len(labels) for labels in one.colours.values()])[:-1].tolist(),
    )


def _white_finding(values: Record) -> str:
    white = values.white
    before, after = (share(line.correct, "%") for line in white.lines[2:4])
    return (
        f"On white, the accuracy of class {white.name} under {values.attack} changes from {before} to {after}; "
        f"the {'estimated ' if white.estimated else ''}masks cover {white.covered:.0f}% of an image and hold "
        f"{white.gradient:.0f}% of the model's gradient."
    )


def _white_frame(values: Record) -> pd.DataFrame:
    return frame_of(
        {
            "images": line.name,
            "attack": values.attack if line.attacked else NATURAL,
            "predicted_class": values.classes[label],
            "predicted": label,
            "count": count,
        }
        for line in values.white.lines
        for label, count in enumerate(line.counts)
    )


def _white_figures(values: Record) -> list[Figure]:
    white = values.white
    cards = [
        Card(
            heading=f"{which}, image {one.index}",
            pictures=[
                Picture(png=one.before, alt=f"Image {one.index}", caption="original"),
                Picture(png=one.after, alt=f"Image {one.index} on white", caption="on white"),
            ],
            lines=[f"confidence in {white.name} under attack {100 * one.confidence:.1f}%"],
        )
        for which, some in (("most robust", white.most_robust), ("least robust", white.least_robust))
        for one in some
    ]
    return [
        bars(
            values.classes,
            [Series(name=line.name, y=[float(n) for n in line.counts]) for line in white.lines if line.attacked],
            title=f"Predictions for class {white.name} under attack",
            alt=_white_finding(values),
            x="predicted class",
            y="images",
        ),
        gallery(cards, title="Most and least robust images", alt=f"Images of class {white.name}"),
    ]
