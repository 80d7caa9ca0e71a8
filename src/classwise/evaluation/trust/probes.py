"""Probes: short experiments that show whether the failure of an attack is evidence of robustness.

They follow Athalye et al. (Obfuscated Gradients, ICML 2018, Section 3.1), Carlini et al. (On Evaluating Adversarial
Robustness, 2019) and Pintor et al. (Indicators of Attack Failure, NeurIPS 2022). They test whether there is a gradient
and whether it predicts the loss, whether the loss rises over the steps of an attack, whether a ball that contains every
image breaks every image, whether an attack without gradients breaks images that gradient steps do not, and whether
outputs are deterministic.

Cost: 8 forward passes and 11 gradients per image; for the survivors, 10 more gradients on each of two losses and at
each larger radius, and 60 queries. The sample is 4 images per class for CIFAR-10.
"""

# B batch, K classes, N examples, S steps, R radii

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from classwise.attacks.losses import Loss, log_odds, margin
from classwise.attacks.pgd import PGD
from classwise.attacks.problem import Problem
from classwise.attacks.square import Square
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, dtype_of, exact, frozen, logits_of, model_errors
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall
from classwise.evaluation.stages import Run
from classwise.evaluation.trust.findings import warning_codes
from classwise.metrics.comparison import Bools, mcnemar
from classwise.metrics.counts import Ints
from classwise.models.normalize import NORMALIZATIONS
from classwise.reporting.sanity import (
    AgreementProbe,
    BlackBoxProbe,
    ClassProbe,
    NormalizationProbe,
    OutputProbe,
    Probes,
    RadiusProbe,
    StepProbe,
)
from classwise.storage.verdicts import NATURAL

SAMPLE, LARGEST_SAMPLE = 40, 100
"""Number of images: the first value, or one of each class up to the second."""
STEPS, SHOWN = 10, (0, 1, 2, 5, 10)
"""Number of attack steps, and the steps after which the loss is reported."""
GROWTH = 4
"""Ratio of successive radii, up to the radius that contains every image."""
QUERIES = 60
SMALL_STEP = 0.05
"""Length of a small step relative to eps."""
MIN_GAIN = 0.5
"""Minimum increase of the loss after a small step, relative to the first-order prediction."""
NOISE = 2.0**-12
"""Amplitude of noise: 1/16 of a gray level."""
NATURAL_SAMPLE = 200
"""Number of images, correctly classified or not, on which other input scales are tried."""
LEVEL = 1e-3
"""Significance level of the search for a better input scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The measurements, or the reason why there are none."""

    probes: Probes | None = None
    failure: str | None = None

    @property
    def warnings(self) -> list[str]:
        """Codes of the warnings."""
        return ["not-probed"] if self.failure is not None else warning_codes(self.probes)


def run_probes(run: Run, *, black_box: bool) -> ProbeResult:
    """Probe the model on a few images that it classifies correctly, equally many of each class.

    ``black_box`` includes the attack without gradients. A model that fails under the probes can still be evaluated.
    """
    verdicts, batch_size = run.verdicts, run.loop.size
    rows = choose(verdicts.label, verdicts.survived(NATURAL))
    if not len(rows):
        return ProbeResult()
    x, y, index = run.batch(rows)
    some = np.linspace(0, len(verdicts) - 1, min(NATURAL_SAMPLE, len(verdicts)), dtype=int)
    natural = run.batch(some)[:2]
    while True:
        try:
            probes = examine(
                run.model,
                x,
                y,
                index=index,
                threat=run.threat,
                seed=run.seed,
                queries=QUERIES if black_box else 0,
                natural=natural,
                batch_size=batch_size,
                progress=run.loop.progress,
            )
        except torch.OutOfMemoryError:
            if batch_size == 1:
                return ProbeResult(failure="out of memory at batch size 1")
            batch_size = min(batch_size, len(x)) // 2 or 1
        except InputError as error:
            return ProbeResult(failure=str(error))
        else:
            return ProbeResult(probes=probes)


def choose(labels: Ints, allowed: Bools) -> Ints:
    """Return the rows to probe: the first allowed ones of every class, or of some classes if there are many.

    >>> labels = np.repeat([0, 1, 2], 30)
    >>> np.bincount(labels[choose(labels, labels != 1)]).tolist()
    [20, 0, 20]
    """
    present = np.unique(labels[allowed])
    size = min(max(SAMPLE, len(present)), LARGEST_SAMPLE)
    if len(present) > size:
        present = present[np.linspace(0, len(present) - 1, size, dtype=int)]
    rows = [np.flatnonzero(allowed & (labels == label))[: size // len(present)] for label in present]
    return np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)


def examine(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    index: Tensor,
    threat: Threat,
    seed: int = 0,
    queries: int = QUERIES,
    natural: tuple[Tensor, Tensor] | None = None,
    batch_size: int | None = None,
    progress: Progress = SILENT,
) -> Probes:
    """Run the probes on at least one image, all classified correctly, with their indices in the data set.

    ``queries`` is the number of queries of the attack without gradients, 0 to skip it. ``natural`` are images and
    labels, classified correctly or not, on which other input scales are tried.
    """
    batch_size = batch_size or len(x)
    precision = torch.finfo(dtype_of(model)).eps
    progress.start("trust checks", len(x))
    parts = []
    with (
        model_errors("under the probes"),
        torch.inference_mode(False),
        torch.enable_grad(),
        frozen(model),
        exact(device_of(model)),
    ):
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            noise = ExampleNoise(seed, index[rows])
            problem = PGD().within(threat).problem(AttackCall(model, x[rows], y[rows], generator=noise))
            parts.append(_probe_batch(problem, threat, queries, precision))
            progress.advance(len(y[rows]))
        scale = None if natural is None else _find_better_scale(model, *natural, batch_size)
    progress.finish()
    measured = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
    return _summary(measured, _radii(threat, x[0].numel()), queries, min(0.05, 1000 * precision), scale)


Measured = dict[str, Tensor]
"""Measurements of each image of a batch: (B,) flags or values, (B, S + 1) of steps, (B, R) of radii."""


def _probe_batch(problem: Problem, threat: Threat, queries: int, precision: float) -> Measured:
    """Run every probe on one batch."""
    ball, y, loss = problem.ball, problem.y, log_odds(problem.y)
    gradient, clean_loss, clean = problem.gradient(ball.center, loss)
    path = list(_ascend(problem, ball.start("uniform", problem.noise), threat.eps, log_odds))
    wrong = torch.stack([z.argmax(1) != y for _, z in path], 1)
    # A robust model of low confidence may resist one of the two losses; masked gradients resist both.
    end = path[-1][0]
    broken, x = _ascend_further(problem, wrong.any(1), end, threat.eps, margin)
    by_cross_entropy, _ = _ascend_further(problem, wrong.any(1), end, threat.eps, log_odds)
    return {
        "label": y,
        **_check_gradient(problem, threat, gradient, clean_loss, precision * clean.abs().amax(1)),
        "losses": torch.stack([loss(z) for _, z in path], 1),
        "margins": torch.stack([margin(y)(z) for _, z in path], 1),
        "wrong": wrong,
        "not_finite": ~torch.stack([z.isfinite().all(1) for _, z in path]).all(0),
        "broken": _break_at_radii(problem, threat, broken, x),
        "smooth": broken & ~by_cross_entropy,
        "black_box": _break_by_queries(problem, broken, queries),
        **_check_consistency(problem, clean),
        "probabilities": (clean >= 0).all(1) & ((clean.sum(1) - 1).abs() < 1e-3),
        "one_hot": (clean.float().softmax(1) > 0).sum(1) == 1,
        "surest": clean.float().softmax(1).amax(1),
        "margin": -margin(y)(clean),
        "forwards": problem.counter.effort.forwards,
        "backwards": problem.counter.effort.backwards,
    }


def _check_gradient(
    problem: Problem, threat: Threat, gradient: Tensor, clean_loss: Tensor, resolution: Tensor
) -> Measured:
    """Check for a gradient, whether a small step along it raises the loss, and whether a large one breaks the image.

    To first order the loss changes by at most radius * dual norm within the ball. A change below the last bit of a
    logit counts as none, and a change of a few bits cannot be checked.
    """
    ball, flat = problem.ball, gradient.flatten(1)
    dual = flat.abs().sum(1) if ball.norm == "Linf" else flat.norm(dim=1)
    zero = ~flat.isfinite().all(1) | ~(ball.radius.flatten() * dual > resolution)
    gradient = gradient.nan_to_num(0, 0, 0)
    moved = ball.step(ball.center, gradient, SMALL_STEP * threat.eps)
    predicted = (gradient * (moved - ball.center)).flatten(1).sum(1)
    gained = log_odds(problem.y)(problem.logits(moved)) - clean_loss
    return {
        "zero_gradient": zero,
        "misled": ~zero & (predicted > 100 * resolution) & ~(gained >= MIN_GAIN * predicted),
        "one_step": ~problem.survives(ball.step(ball.center, gradient, threat.eps)),
    }


def _ascend(problem: Problem, x: Tensor, eps: float, loss: Callable[[Tensor], Loss]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images and logits of every step of projected gradient ascent."""
    for _ in range(STEPS):
        gradient, _, logits = problem.gradient(x, loss(problem.y))
        yield x, logits
        x = problem.ball.step(x, gradient.nan_to_num(0, 0, 0), 2.5 * eps / STEPS)
    yield x, problem.logits(x)


def _ascend_further(
    problem: Problem, broken: Tensor, x: Tensor, eps: float, loss: Callable[[Tensor], Loss]
) -> tuple[Tensor, Tensor]:
    """Continue the ascent of the images that are not broken. Return which are broken, and the images."""
    rows = (~broken).nonzero().squeeze(1)
    if not len(rows):
        return broken, x
    rest = problem.take(rows)
    path = list(_ascend(rest, x[rows], eps, loss))
    fell = torch.stack([z.argmax(1) != rest.y for _, z in path]).any(0)
    return broken.index_copy(0, rows, fell), x.index_copy(0, rows, path[-1][0])


def _break_at_radii(problem: Problem, threat: Threat, broken: Tensor, x: Tensor) -> Tensor:
    """Return which images are broken within each radius or a smaller one (B, R)."""
    columns = [broken]
    for eps in _radii(threat, x[0].numel())[1:]:
        wider = replace(problem, ball=replace(threat, eps=eps).ball(problem.ball.center))
        broken, x = _ascend_further(wider, broken, x, eps, log_odds)
        columns.append(broken)
    return torch.stack(columns, 1)


def _radii(threat: Threat, pixels: int) -> list[float]:
    """Return the radii from that of the threat to one whose ball contains every image."""
    whole = 1.0 if threat.norm == "Linf" else math.sqrt(pixels)
    radii = [threat.eps]
    while radii[-1] < whole:
        radii.append(min(GROWTH * radii[-1], whole))
    return radii


def _break_by_queries(problem: Problem, broken: Tensor, queries: int) -> Tensor:
    """Return which of the images that are not broken a short black-box attack breaks (B,)."""
    rows = (~broken).nonzero().squeeze(1)
    if not queries or not len(rows):
        return torch.zeros_like(broken)
    rest = problem.take(rows)
    return torch.zeros_like(broken).index_copy(0, rows, ~rest.survives(Square(queries=queries).perturb(rest)))


def _check_consistency(problem: Problem, clean: Tensor) -> Measured:
    """Compare outputs between passes, between batches, and under invisible noise."""
    x = problem.ball.center
    half = len(x) // 2
    first = torch.arange(len(x), device=x.device) < half
    second, third = problem.logits(x), problem.logits(x)
    mixed = problem.logits(torch.cat([x[:half], 1 - x[half:]]))
    noisy = problem.logits((x + NOISE * (2 * problem.noise.uniform(x) - 1)).clamp(0, 1))
    # On black and white images a model may divide by a standard deviation of zero.
    corners = x.round()
    corners[:1], corners[-1:] = 0, 1
    label = clean.argmax(1)
    return {
        "repeated": torch.maximum(_difference(clean, second), _difference(clean, third)),
        "repeated_changed": (second.argmax(1) != label) | (third.argmax(1) != label),
        "company": torch.where(first, _difference(clean, mixed), torch.nan),
        "company_changed": first & (mixed.argmax(1) != label),
        "tremor": _difference(clean, noisy),
        "tremor_changed": noisy.argmax(1) != label,
        "not_finite_beyond": ~problem.logits(corners).isfinite().all(1),
    }


def _difference(one: Tensor, two: Tensor) -> Tensor:
    """Return the largest difference between two logits of each image, relative to their spread (B,)."""
    return (one - two).abs().amax(1) / one.std(1).clamp_min(torch.finfo(one.dtype).tiny)


def _find_better_scale(model: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> NormalizationProbe:
    """Test whether a common input scale, or its inverse, significantly improves the accuracy.

    This detects a model that expects normalized images but does not normalize them, or normalizes twice.
    """
    device, dtype = device_of(model), dtype_of(model)

    def right(images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            parts = [images[start : start + batch_size] for start in range(0, len(images), batch_size)]
            predicted = torch.cat([logits_of(model(part.to(device, dtype))).argmax(1) for part in parts])
        return predicted == labels.to(device)

    before = right(x, y).to(x.device)
    n, correct, scales = len(x), int(before.sum()), _scales(x.shape[1])

    def corrected(gained: int, lost: int) -> float:
        return mcnemar(gained, lost) * len(scales) if gained > lost else 1.0

    if corrected(n - correct, 0) >= LEVEL:
        return NormalizationProbe(n=n, correct=correct, tried=0)
    found = [(1.0, correct, "", False)]
    for name, undone, scale in scales:
        gained = int(right(scale(x[~before]), y[~before]).sum())
        if corrected(gained, 0) < LEVEL:
            kept = int(right(scale(x[before]), y[before]).sum()) if correct else 0
            found.append((corrected(gained, correct - kept), gained + kept, name, undone))
    p_value, most, name, undone = min(found, key=lambda one: (one[0], -one[1]))
    if p_value >= LEVEL:
        return NormalizationProbe(n=n, correct=correct, tried=len(scales))
    return NormalizationProbe(
        n=n, correct=correct, tried=len(scales), best=name, undone=undone, best_correct=most, p_value=p_value
    )


Scale = Callable[[Tensor], Tensor]


def _scales(channels: int) -> list[tuple[str, bool, Scale]]:
    """Return the common scales of images with this number of channels: name, whether it is inverted, and function."""
    known = {f"the normalization of {name}": v for name, v in NORMALIZATIONS.items() if len(v[0]) == channels}
    known |= {"the scale from -1 to 1": ((0.5,), (0.5,)), "the scale from 0 to 255": ((0.0,), (1 / 255,))}
    scales: list[tuple[str, bool, Scale]] = []
    for name, values in known.items():
        mean, std = (torch.tensor(part).view(-1, 1, 1) for part in values)
        scales.append((name, False, partial(_normalize, mean=mean, std=std)))
        scales.append((name, True, partial(_normalize, mean=-mean / std, std=1 / std)))
    return scales


def _normalize(x: Tensor, *, mean: Tensor, std: Tensor) -> Tensor:
    return (x - mean.to(x)) / std.to(x)


def _summary(
    measured: Measured, radii: list[float], queries: int, rounding: float, normalization: NormalizationProbe | None
) -> Probes:
    label, losses = measured["label"], measured["losses"]
    survived = ~measured["broken"][:, 0]
    start, end, highest = losses[:, 0], losses[:, -1], losses.amax(1)
    counted = {
        "zero_gradient": measured["zero_gradient"],
        # If the model rounds its input, a small step changes nothing.
        "misled": measured["misled"] & (measured["tremor"] > 0),
        # Images without a gradient are counted above.
        "slack": ~measured["zero_gradient"] & ~((end > start) & (end >= (start + highest) / 2)),
        "survived": survived,
        "one_step": survived & measured["one_step"],
        "shielded": ~survived & ~measured["one_step"],
        "smooth": measured["smooth"],
        "unreached": ~measured["broken"][:, -1],
        "black_box": measured["black_box"],
    }

    def count_class(k: int) -> ClassProbe:
        rows = label == k
        counts = {name: int(flags[rows].sum()) for name, flags in counted.items()}
        return ClassProbe(label=k, n=int(rows.sum()), **counts)

    def agreement(name: str) -> AgreementProbe:
        differences = measured[name][~measured[name].isnan()]
        # Rounding alone may change the label of an image between two classes.
        changed = measured[f"{name}_changed"] & (measured[name] > rounding)
        largest = differences.amax() if len(differences) else math.nan
        return AgreementProbe(n=len(differences), changed=int(changed.sum()), difference=_finite(largest))

    by_queries = BlackBoxProbe(queries=queries, tried=int(survived.sum()), broken=int(measured["black_box"].sum()))
    return Probes(
        n=len(label),
        by_class=[count_class(k) for k in sorted(set(label.tolist()))],
        steps=[
            StepProbe(
                step=step,
                log_odds=_finite(losses[:, step].mean()),
                margin=_finite(measured["margins"][:, step].mean()),
                broken=int(measured["wrong"][:, step].sum()),
            )
            for step in SHOWN
        ],
        radii=[
            RadiusProbe(eps=eps, broken=int(column.sum()))
            for eps, column in zip(radii, measured["broken"].unbind(1), strict=True)
        ],
        black_box=by_queries if queries else None,
        rounding=rounding,
        repeated=agreement("repeated"),
        company=agreement("company"),
        tremor=agreement("tremor"),
        output=OutputProbe(
            probabilities=int(measured["probabilities"].sum()),
            one_hot=int(measured["one_hot"].sum()),
            median_margin=_finite(measured["margin"].median()),
            surest=_finite(measured["surest"].amax()),
            unmoved=int((measured["tremor"] == 0).sum()),
            not_finite=int(measured["not_finite"].sum()),
            not_finite_beyond=int((measured["not_finite_beyond"] & ~measured["not_finite"]).sum()),
        ),
        normalization=normalization,
        forwards=int(measured["forwards"].sum()),
        backwards=int(measured["backwards"].sum()),
    )


def _finite(value: Tensor | float) -> float | None:
    """Round to six digits; None if not finite."""
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
