"""Repair by class biases, over random splits of the images into fitting and held-out images.

The margin matrix of all images of a split is computed once, and models repaired on random images are attacked again on
the others, which validates the matrix. With ``--sweep``, one repaired model is also attacked at other radii and under
L2. Without ``--model``, the gain of the worst class at given losses of the average is computed from the matrix alone,
for several sizes of the fit set and estimators.

    python benchmarks/repair_study.py --model resnet18 --weights trades.safetensors --data cifar10 --sweep --out OUT
    python benchmarks/repair_study.py --out OUT
    python benchmarks/repair_study.py --tables results/repair-checkpoints      # only the tables, from kept files

The images of the test split are used only to measure the method; no model reported elsewhere is selected on them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

import classwise as cw
from classwise.core.devices import pick_device
from classwise.core.threat import Threat
from classwise.data import ImageSet, balanced_split, balanced_subset, load_data
from classwise.evaluation.margins import MarginSettings, find_margins
from classwise.models.heads import with_biases
from classwise.models.load import load_model
from classwise.repairs.accuracy import ClassAccuracy, by_class
from classwise.repairs.fit import Summary
from classwise.repairs.frontier import WEIGHTS, Objective, frontier
from classwise.storage.margins import Margins
from classwise.storage.verdicts import Verdicts

LOSSES = (0.3, 0.4, 0.5, 0.8, 1.0, 1.5, 2.0)
"""Losses of the average, in points, at which the frontier is evaluated."""
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "counted, nearly": {"bandwidth": 0.2},
    "no penalty": {"penalty": 0.0},
    "hard minimum": {"softness": 0.05},
    "hard, no penalty, nearly counted": {"bandwidth": 0.2, "penalty": 0.0, "softness": 0.05},
}
"""The estimator, and settings that switch off one of its parts."""


def counted(margins: Margins, biases: np.ndarray) -> Summary:
    """Return robust accuracies counted in the matrix."""
    accuracy = ClassAccuracy.of(margins.attacked, margins.label, bandwidth=0)
    return Summary.of(accuracy.values(biases), accuracy.counts)


def proportional(margins: Margins, floor: float) -> np.ndarray:
    """Return the simplest fit: raise each class below the floor in proportion to its deficit until none is below."""
    accuracy = ClassAccuracy.of(margins.attacked, margins.label, bandwidth=0)
    biases = np.zeros(margins.num_classes)
    for _ in range(1500):
        lacking = np.maximum(0, floor - np.nan_to_num(accuracy.values(biases), nan=1.0))
        if lacking.max() <= 0:
            break
        biases += 0.02 * lacking / lacking.max() * min(1.0, 10 * lacking.max() + 0.1)
    return biases


def gains(margins: Margins, per_class: int, seeds: int, variant: dict[str, Any] | None) -> dict[str, Any]:
    """Return the mean gain of the worst class on held-out images at each loss of the average."""
    paths = []
    for seed in range(seeds):
        other, fitted = balanced_split(margins.label, per_class, seed, margins.num_classes)
        fitting, held_out = margins.take(fitted), margins.take(other)
        before = counted(held_out, np.zeros(margins.num_classes))
        if variant is None:
            start = counted(fitting, np.zeros(margins.num_classes))
            floors = start.worst + np.arange(0.01, 0.16, 0.01)
            biases = [proportional(fitting, float(floor)) for floor in floors]
        else:
            settings = dict(variant)
            accuracy = ClassAccuracy.of(fitting.attacked, fitting.label, bandwidth=settings.pop("bandwidth", 1.5))
            biases = frontier(accuracy, WEIGHTS, Objective(**settings))
        after = [counted(held_out, one) for one in biases]
        paths.append([(one.average - before.average, one.worst - before.worst) for one in after])
    mean, spread = 100 * np.mean(paths, axis=0), 100 * np.std(paths, axis=0)
    order = np.argsort(mean[:, 0])
    losses, worst = mean[order, 0], mean[order, 1]
    read = {str(loss): float(np.interp(-loss, losses, worst)) for loss in LOSSES if losses[0] <= -loss}
    near = int(np.argmin(np.abs(mean[:, 0] + 0.8)))
    return {"worst_gain_at_loss": read, "sd_worst": float(spread[near, 1]), "sd_average": float(spread[near, 0])}


def attacked(model: nn.Module, images: ImageSet, attack: str, eps: str, norm: str = "Linf") -> Verdicts:
    """Attack a model and return the verdicts."""
    with TemporaryDirectory() as out:
        cw.evaluate(model, images, attacks=[attack], eps=eps, norm=norm, out=out)
        return Verdicts.load(Path(out) / "verdicts.parquet")[0]


def summarize(verdicts: Verdicts, num_classes: int) -> Summary:
    """Return the robust accuracies."""
    accuracy = by_class(verdicts.survived().astype(float), verdicts.label, num_classes)
    return Summary.of(accuracy, np.bincount(verdicts.label, minlength=num_classes))


def validate(
    model: nn.Module, images: ImageSet, margins: Margins, per_class: int, given: argparse.Namespace, before: Verdicts
) -> Iterator[dict[str, Any]]:
    """Yield expected and measured accuracies at a loss of the average, under a new attack on the held-out images."""
    x = torch.from_numpy(np.array(images.images[:8])).float() / 255
    for seed in range(given.attack_seeds):
        other, fitted = balanced_split(margins.label, per_class, seed, margins.num_classes)
        biases = biases_at_loss(margins.take(fitted), given.loss)
        repaired, _ = with_biases(model, torch.from_numpy(biases.astype(np.float32)), x)
        after = attacked(repaired, images.take(other), given.attack, given.eps)
        matrix = ClassAccuracy.of(margins.attacked[other], margins.label[other], bandwidth=0).values(biases)
        measured = by_class(after.survived().astype(float), after.label, margins.num_classes)
        yield {
            "seed": seed,
            "before": percent(summarize(before.take(other), margins.num_classes)),
            "after": percent(summarize(after, margins.num_classes)),
            "by_matrix": percent(counted(margins.take(other), biases)),
            "fitted": percent(counted(margins.take(fitted), biases)),
            "by_class": (100 * measured).round(2).tolist(),
            "matrix_minus_measured": (100 * (matrix - measured)).round(2).tolist(),
            "biases": biases.round(4).tolist(),
        }


def biases_at_loss(fitting: Margins, loss: float) -> np.ndarray:
    """Return the biases of the frontier whose fitted average is about ``loss`` points lower."""
    accuracy = ClassAccuracy.of(fitting.attacked, fitting.label)
    paths = frontier(accuracy)
    start, *averages = (
        Summary.of(accuracy.values(one), accuracy.counts).average for one in [np.zeros(fitting.num_classes), *paths]
    )
    return paths[int(np.argmin([abs(100 * (start - average) - loss) for average in averages]))]


def percent(summary: Summary) -> dict[str, float]:
    """Convert a summary to percent."""
    return {name: round(100 * getattr(summary, name), 2) for name in ("average", "worst", "tenth")}


def main() -> None:
    """Measure, print and add to ``repair-study.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model spec; without it, gains are computed from the margins in OUT")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--split", default="test")
    parser.add_argument("--eps", default="8/255")
    parser.add_argument("--images-per-class", type=int, help="use only this many images of each class")
    parser.add_argument("--attack", default="fast")
    parser.add_argument("--attack-seeds", type=int, default=5, help="splits whose repaired models are attacked")
    parser.add_argument(
        "--attack-per-class", default="300", help="images per class of the fit set of the attacked models"
    )
    parser.add_argument("--loss", type=float, default=0.8, help="loss of the average at which models are attacked")
    parser.add_argument("--sweep", action="store_true", help="also attack at other radii and under L2")
    parser.add_argument("--per-class", default="50,100,300", help="images per class of the fit set of the gains")
    parser.add_argument("--seeds", type=int, default=20, help="splits of the gains")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tables", type=Path, help="only print the tables of the studies in this directory")
    given = parser.parse_args()
    if given.tables is not None:
        print(tables(given.tables))
        return
    if given.out is None:
        parser.error("--out is needed, or --tables")
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "repair-study.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    parts: Iterable[dict[str, Any]]
    if given.model is None:
        parts = [{"gains": all_gains(Margins.load(given.out / "margins.parquet"), given)}]
    elif given.data is None:
        parser.error("--model needs --data")
    else:
        parts = attack_repairs(given)
    for part in parts:
        for key, value in part.items():
            results[key] = {**results.get(key, {}), **value} if isinstance(value, dict) else value
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def tables(place: Path) -> str:
    """Format the studies in the subdirectories: repairs of random splits, gains by number of images, other threats."""
    studies = {file.parent.name: json.loads(file.read_text()) for file in sorted(place.glob("*/repair-study.json"))}
    lines = ["| model | images of each class | before | after | change | on the fit set |"]
    for name, study in studies.items():
        for per_class in (key for key in study["attack"] if key.isdecimal()):
            splits = study["attack"][per_class]
            changes = [{key: one["after"][key] - one["before"][key] for key in ("average", "worst")} for one in splits]
            cells = [pair([one[key] for one in splits]) for key in ("before", "after", "fitted")]
            cells.insert(2, pair(changes, sign="+", spread=len(splits) > 2))
            lines.append(f"| {name} | {per_class} ({len(splits)} splits) | {' | '.join(cells)} |")
    lines += ["", "| model | images of each class | −0.4 | −0.8 | −1.0 | proportional: −0.4 | −0.8 | −1.0 |"]
    for name, study in studies.items():
        for per_class, variants in study["gains"].items():
            found = [variants[which]["worst_gain_at_loss"] for which in ("default", "proportional")]
            cells = [f"{one[loss]:.1f}" for one in found for loss in ("0.4", "0.8", "1.0")]
            lines.append(f"| {name} | {per_class} | {' | '.join(cells)} |")
    lines += ["", f"| threat | {' | '.join(f'{name} before | after' for name in studies)} |"]
    for row in zip(*(study["sweep"] for study in studies.values()), strict=True):
        cells = [pair([one[key]]) for one in row for key in ("before", "after")]
        lines.append(f"| {row[0]['norm']} {row[0]['eps']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pair(found: list[dict[str, float]], *, sign: str = "", spread: bool = False) -> str:
    """Format the means of average / worst class, optionally with standard deviations."""
    parts = []
    for key in ("average", "worst"):
        values = [one[key] for one in found]
        deviation = f" ± {np.std(values, ddof=1):.1f}" if spread else ""
        parts.append(f"{np.mean(values):{sign}.1f}{deviation}".replace("-", "−"))
    return " / ".join(parts)


def all_gains(margins: Margins, given: argparse.Namespace) -> dict[str, Any]:
    """Return the gains of every estimator and size of the fit set, from the matrix alone."""
    found: dict[str, Any] = {}
    for per_class in map(int, given.per_class.split(",")):
        for name, variant in {"proportional": None, **VARIANTS}.items():
            one = gains(margins, per_class, given.seeds, variant)
            found.setdefault(str(per_class), {})[name] = one
            print(per_class, name, {loss: round(gain, 2) for loss, gain in one["worst_gain_at_loss"].items()})
    return found


def attack_repairs(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Search the margins, then attack the original and the repaired models. Yields each finished part."""
    images = load_data(given.data, split=given.split)
    if given.images_per_class is not None:
        known = int(images.labels.max()) + 1
        images = images.take(balanced_subset(images.labels, given.images_per_class, known, seed=0))
    classes = None if images.classes is None else len(images.classes)
    sizes = {"num_classes": classes, "in_channels": images.images.shape[1]}
    model = load_model(given.model, weights=given.weights, **sizes).to(pick_device(None))
    threat = Threat.parse(given.eps)
    file = given.out / "margins.parquet"
    searched, began = not file.exists(), time.perf_counter()
    margins = find_margins(model, images, np.arange(len(images)), threat, settings=MarginSettings(), file=file)
    if searched:
        yield {"seconds_margins": round(time.perf_counter() - began, 2)}
    yield {
        "model": given.model if given.weights is None else given.weights.name,
        "data": f"{images.name}/{images.split}",
        "n": len(margins),
        "eps": threat.text,
        "device": str(pick_device(None)),
        "before": percent(counted(margins, np.zeros(margins.num_classes))),
    }
    if given.attack_seeds:
        before = attacked(model, images, given.attack, given.eps)
        part: dict[str, Any] = {
            "name": given.attack,
            "loss": given.loss,
            "before": percent(summarize(before, margins.num_classes)),
        }
        for per_class in map(int, given.attack_per_class.split(",")):
            part[str(per_class)] = []
            for one in validate(model, images, margins, per_class, given, before):
                part[str(per_class)].append(one)
                print(per_class, one["before"], one["after"], "matrix", one["by_matrix"], "fitted", one["fitted"])
                yield {"attack": part}
    found: list[dict[str, Any]] = []
    for one in sweep(model, images, margins, given) if given.sweep else ():
        found.append(one)
        print(one)
        yield {"sweep": found}


def sweep(model: nn.Module, images: ImageSet, margins: Margins, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Attack one repaired model at other radii and under L2, on 300 held-out images of each class."""
    per_class = int(given.attack_per_class.split(",")[0])
    other, fitted = balanced_split(margins.label, per_class, 0, margins.num_classes)
    biases = biases_at_loss(margins.take(fitted), given.loss)
    x = torch.from_numpy(np.array(images.images[:8])).float() / 255
    repaired, _ = with_biases(model, torch.from_numpy(biases.astype(np.float32)), x)
    held_out = images.take(other[balanced_subset(margins.label[other], 300, margins.num_classes, seed=0)])
    radii = [(f"{n}/255", "Linf") for n in (2, 4, 6, 8, 10, 12)] + [("0.25", "L2"), ("0.5", "L2"), ("1.0", "L2")]
    for eps, norm in radii:
        before, after = (
            percent(summarize(attacked(one, held_out, given.attack or "fast", eps, norm), margins.num_classes))
            for one in (model, repaired)
        )
        yield {"eps": eps, "norm": norm, "before": before, "after": after}


if __name__ == "__main__":
    main()
