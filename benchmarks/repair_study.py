"""Repair by class biases, over random splits of the images into fitting and held-out images.

The margin matrix of all images of a split is computed once. For every number of fitting images per class and every
seed, biases are fitted to random images and evaluated on the others by the same matrix; the frontier is evaluated at
given losses of the average. With ``--attack``, some of the repaired models are attacked again on the held-out images,
which validates the matrix. With ``--sweep``, one repaired model is attacked at other radii and under L2.

    python benchmarks/repair_study.py --model resnet18 --weights trades.safetensors --data cifar10 --eps 8/255 \
        --attack fast --sweep --out runs/repair-trades

The images of the test split are used only to measure the method; no model reported elsewhere is selected on them.
The matrix is stored in OUT, so a second call does not search again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import classwise as cw
from classwise.core.devices import pick_device
from classwise.core.threat import Threat
from classwise.data import ImageSet, balanced_split, load_data
from classwise.evaluation.margins import MarginSettings, find_margins
from classwise.models.heads import with_biases
from classwise.models.load import load_model
from classwise.repairs.accuracy import ClassAccuracy
from classwise.repairs.fit import Summary
from classwise.repairs.frontier import WEIGHTS, Objective, frontier
from classwise.storage.margins import Margins

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


def attacked(model: nn.Module, images: ImageSet, attack: str, eps: str, norm: str = "Linf") -> Summary:
    """Return the robust accuracies of a model under a new attack, as fractions."""
    report = cw.evaluate(model, images, attacks=[attack], eps=eps, norm=norm)
    parts = report[report.strongest].by_class
    values = np.array([np.nan if one.value is None else one.value for one in parts])
    return Summary.of(values / 100, np.array([one.n for one in parts]))


def validate(
    model: nn.Module, images: ImageSet, margins: Margins, per_class: int, seeds: int, attack: str, eps: str, loss: float
) -> list[dict[str, Any]]:
    """Return expected and measured accuracies at a loss of the average, under a new attack on the held-out images."""
    found = []
    for seed in range(seeds):
        other, fitted = balanced_split(margins.label, per_class, seed, margins.num_classes)
        biases = biases_at_loss(margins.take(fitted), loss)
        x = torch.from_numpy(np.array(images.images[:8])).float() / 255
        repaired, _ = with_biases(model, torch.from_numpy(biases.astype(np.float32)), x)
        held_out = images.take(other)
        before, after = attacked(model, held_out, attack, eps), attacked(repaired, held_out, attack, eps)
        matrix = counted(margins.take(other), biases)
        found.append(
            {
                "seed": seed,
                "before": percent(before),
                "after": percent(after),
                "by_matrix": percent(matrix),
                "fitted": percent(counted(margins.take(fitted), biases)),
                "biases": biases.round(4).tolist(),
            }
        )
    return found


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
    """Measure, print and save ``repair-study.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--eps", default="8/255")
    parser.add_argument("--per-class", default="50,100,300", help="fitting images per class")
    parser.add_argument("--images-per-class", type=int, help="use only this many images of each class")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--attack", help="attack repaired models again, for example fast")
    parser.add_argument("--attack-seeds", type=int, default=5)
    parser.add_argument("--loss", type=float, default=0.8, help="loss of the average at which models are attacked")
    parser.add_argument("--sweep", action="store_true", help="also attack at other radii and under L2")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    images = load_data(given.data, split=given.split)
    if given.images_per_class is not None:
        known = len(images.classes or ()) or int(images.labels.max()) + 1
        rows = np.concatenate(
            [np.flatnonzero(images.labels == label)[: given.images_per_class] for label in range(known)]
        )
        images = images.take(np.sort(rows))
    classes = None if images.classes is None else len(images.classes)
    sizes = {"num_classes": classes, "in_channels": images.images.shape[1]}
    model = load_model(given.model, weights=given.weights, **sizes).to(pick_device(None))
    threat = Threat.parse(given.eps)
    began = time.perf_counter()
    file = given.out / "margins.parquet"
    margins = find_margins(model, images, np.arange(len(images)), threat, settings=MarginSettings(), file=file)
    results: dict[str, Any] = {
        "model": given.model if given.weights is None else given.weights.name,
        "data": f"{images.name}/{images.split}",
        "n": len(margins),
        "eps": threat.text,
        "seconds_margins": round(time.perf_counter() - began, 2),
        "device": str(pick_device(None)),
        "before": percent(counted(margins, np.zeros(margins.num_classes))),
        "gains": {},
    }
    smallest = int(np.bincount(margins.label).min())
    for per_class in map(int, given.per_class.split(",")):
        if per_class >= smallest:
            continue
        for name, variant in {"proportional": None, **VARIANTS}.items():
            found = gains(margins, per_class, given.seeds, variant)
            results["gains"].setdefault(str(per_class), {})[name] = found
            print(per_class, name, {loss: round(gain, 2) for loss, gain in found["worst_gain_at_loss"].items()})
    if given.attack:
        per_class = max(one for one in map(int, given.per_class.split(",")) if one < smallest)
        results["attacked"] = {
            "attack": given.attack,
            "per_class": per_class,
            "loss": given.loss,
            "splits": validate(
                model, images, margins, per_class, given.attack_seeds, given.attack, given.eps, given.loss
            ),
        }
        for one in results["attacked"]["splits"]:
            print(one["seed"], one["before"], one["after"], "matrix", one["by_matrix"], "fitted", one["fitted"])
    if given.sweep:
        results["sweep"] = sweep(model, images, margins, given)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "repair-study.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def sweep(model: nn.Module, images: ImageSet, margins: Margins, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Attack one repaired model at other radii and under L2, on held-out images."""
    per_class = max(one for one in map(int, given.per_class.split(",")) if one < int(np.bincount(margins.label).min()))
    other, fitted = balanced_split(margins.label, per_class, 0, margins.num_classes)
    biases = biases_at_loss(margins.take(fitted), given.loss)
    x = torch.from_numpy(np.array(images.images[:8])).float() / 255
    repaired, _ = with_biases(model, torch.from_numpy(biases.astype(np.float32)), x)
    held_out = images.take(other)
    radii = [(f"{n}/255", "Linf") for n in (2, 4, 6, 8, 10, 12)] + [("0.25", "L2"), ("0.5", "L2"), ("1.0", "L2")]
    found = []
    for eps, norm in radii:
        before, after = (attacked(one, held_out, given.attack or "fast", eps, norm) for one in (model, repaired))
        found.append({"eps": eps, "norm": norm, "before": percent(before), "after": percent(after)})
        print(norm, eps, percent(before), percent(after))
    return found


if __name__ == "__main__":
    main()
