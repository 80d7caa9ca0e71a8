"""Short experiments that tell when the failure of an attack is no evidence of robustness.

They follow Athalye et al. (Obfuscated Gradients, ICML 2018, Section 3.1), Carlini et al. (On Evaluating Adversarial
Robustness, 2019) and Pintor et al. (Indicators of Attack Failure, NeurIPS 2022). Is there a gradient, and does it
describe the model? Does the loss rise with the steps? Does a ball that holds every image break every image? Does an
attack without gradients break what one with gradients left? Does the model give one answer to one question?

Cost: 8 forward passes and 11 gradients an image; for what survives those, 10 gradients more on each of two losses and
at each larger radius, and 60 queries, with 4 images a class of CIFAR-10.
"""

# B batch, K classes, N examples, S steps, R radii

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from classwise.attacks.losses import Loss, log_odds, margin
from classwise.attacks.pgd import PGD
from classwise.attacks.problem import Problem
from classwise.attacks.square import Square
from classwise.core.model_calls import blamed_on_the_model, device_of, dtype_of, exact, frozen, logits_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall
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

SAMPLE, LARGEST_SAMPLE = 40, 100
"""Images looked at: the first number, or one of each class up to the second."""
STEPS, SHOWN = 10, (0, 1, 2, 5, 10)
"""Steps of a climb, and those after which its loss is reported."""
GROWTH = 4
"""Each radius over the one before, up to the whole box."""
QUERIES = 60
NUDGE = 0.05
"""A small step, relative to eps."""
KEPT = 0.5
"""What a small step must bring of the rise that the gradient promises."""
TREMOR = 2.0**-12
"""Noise of a sixteenth of a grey level."""
LEVEL = 1e-3
"""Error rate of the search for a better scale of the images."""


def choose(labels: Ints, allowed: Bools) -> Ints:
    """The rows to look at: of those allowed, the first few of every class; of too many classes, some.

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
    """Measure on images that the model classifies correctly: at least one, with their identities ``index``.

    ``queries`` of the attack without gradients, 0 to leave it out. ``natural``: some images and labels, right and
    wrong as they come, to see whether the model expects another scale.
    """
    batch_size = batch_size or len(x)
    precision = torch.finfo(dtype_of(model)).eps
    progress.start("sanity", len(x))
    parts = []
    with (
        blamed_on_the_model("under the probes for sanity"),
        torch.inference_mode(False),
        torch.enable_grad(),
        frozen(model),
        exact(device_of(model)),
    ):
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            noise = ExampleNoise(seed, index[rows])
            problem = PGD().within(threat).problem(AttackCall(model, x[rows], y[rows], generator=noise))
            parts.append(_look(problem, threat, queries, precision))
            progress.advance(len(y[rows]))
        scale = None if natural is None else _better_scale(model, *natural, batch_size)
    progress.finish()
    seen = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
    return _summary(seen, _radii(threat, x[0].numel()), queries, min(0.05, 1000 * precision), scale)


Seen = dict[str, Tensor]
"""What was seen of each image of a batch: (B,) flags or sizes, (B, S + 1) of steps, (B, R) of radii."""


def _look(problem: Problem, threat: Threat, queries: int, precision: float) -> Seen:
    """Every probe on one batch."""
    ball, y, loss = problem.ball, problem.y, log_odds(problem.y)
    gradient, clean_loss, clean = problem.gradient(ball.centre, loss)
    walk = list(_climb(problem, ball.start("uniform", problem.noise), threat.eps, log_odds))
    wrong = torch.stack([z.argmax(1) != y for _, z in walk], 1)
    # A robust model of low confidence withstands one loss or the other; what is masked withstands both.
    fallen, end = wrong.any(1), walk[-1][0]
    broken, x = _press_on(problem, fallen, end, threat.eps, margin)
    no_more, _ = _press_on(problem, fallen, end, threat.eps, log_odds)
    return {
        "label": y,
        **_follow(problem, threat, gradient, clean_loss, precision * clean.abs().amax(1)),
        "losses": torch.stack([loss(z) for _, z in walk], 1),
        "margins": torch.stack([margin(y)(z) for _, z in walk], 1),
        "wrong": wrong,
        "not_finite": ~torch.stack([z.isfinite().all(1) for _, z in walk]).all(0),
        "broken": _widen(problem, threat, broken, x),
        "smooth": broken & ~no_more,
        "black_box": _without_gradients(problem, broken, queries),
        **_ask_again(problem, clean),
        "probabilities": (clean >= 0).all(1) & ((clean.sum(1) - 1).abs() < 1e-3),
        "one_hot": (clean.float().softmax(1) > 0).sum(1) == 1,
        "surest": clean.float().softmax(1).amax(1),
        "margin": -margin(y)(clean),
        "forwards": problem.counter.effort.forwards,
        "backwards": problem.counter.effort.backwards,
    }


def _follow(problem: Problem, threat: Threat, gradient: Tensor, clean_loss: Tensor, last_bit: Tensor) -> Seen:
    """Is there a gradient, does a small step along it bring what it promises, and where does a large one end?

    To first order the loss can change by radius · dual norm within the ball: less than the last bit of a logit is
    nothing, and a promise of a few bits cannot be checked.
    """
    ball, flat = problem.ball, gradient.flatten(1)
    dual = flat.abs().sum(1) if ball.norm == "Linf" else flat.norm(dim=1)
    zero = ~flat.isfinite().all(1) | ~(ball.radius.flatten() * dual > last_bit)
    gradient = gradient.nan_to_num(0, 0, 0)
    nudged = ball.step(ball.centre, gradient, NUDGE * threat.eps)
    promised = (gradient * (nudged - ball.centre)).flatten(1).sum(1)
    brought = log_odds(problem.y)(problem.logits(nudged)) - clean_loss
    return {
        "zero_gradient": zero,
        "misled": ~zero & (promised > 100 * last_bit) & ~(brought >= KEPT * promised),
        "one_step": ~problem.survives(ball.step(ball.centre, gradient, threat.eps)),
    }


def _climb(problem: Problem, x: Tensor, eps: float, loss: Callable[[Tensor], Loss]) -> Iterator[tuple[Tensor, Tensor]]:
    """Projected gradient descent: every image on the way with its logits, from the first to the last."""
    for _ in range(STEPS):
        gradient, _, logits = problem.gradient(x, loss(problem.y))
        yield x, logits
        x = problem.ball.step(x, gradient.nan_to_num(0, 0, 0), 2.5 * eps / STEPS)
    yield x, problem.logits(x)


def _press_on(
    problem: Problem, broken: Tensor, x: Tensor, eps: float, loss: Callable[[Tensor], Loss]
) -> tuple[Tensor, Tensor]:
    """Climb on with what is not broken: which images are broken now, and where all of them stand."""
    rows = (~broken).nonzero().squeeze(1)
    if not len(rows):
        return broken, x
    rest = problem.take(rows)
    walk = list(_climb(rest, x[rows], eps, loss))
    fell = torch.stack([z.argmax(1) != rest.y for _, z in walk]).any(0)
    return broken.index_copy(0, rows, fell), x.index_copy(0, rows, walk[-1][0])


def _widen(problem: Problem, threat: Threat, broken: Tensor, x: Tensor) -> Tensor:
    """(B, R): broken within each radius or a smaller one."""
    columns = [broken]
    for eps in _radii(threat, x[0].numel())[1:]:
        wider = replace(problem, ball=replace(threat, eps=eps).ball(problem.ball.centre))
        broken, x = _press_on(wider, broken, x, eps, log_odds)
        columns.append(broken)
    return torch.stack(columns, 1)


def _radii(threat: Threat, pixels: int) -> list[float]:
    """From the threat's radius to that of a ball which holds every image, wherever its centre lies."""
    whole = 1.0 if threat.norm == "Linf" else math.sqrt(pixels)
    radii = [threat.eps]
    while radii[-1] < whole:
        radii.append(min(GROWTH * radii[-1], whole))
    return radii


def _without_gradients(problem: Problem, broken: Tensor, queries: int) -> Tensor:
    """Which of the images that are not broken a short black-box attack breaks."""
    rows = (~broken).nonzero().squeeze(1)
    if not queries or not len(rows):
        return torch.zeros_like(broken)
    rest = problem.take(rows)
    return torch.zeros_like(broken).index_copy(0, rows, ~rest.survives(Square(queries=queries).perturb(rest)))


def _ask_again(problem: Problem, clean: Tensor) -> Seen:
    """The same question again, in other company, and changed by less than any eye or image format can tell."""
    x = problem.ball.centre
    half = len(x) // 2
    first = torch.arange(len(x), device=x.device) < half
    twice, thrice = problem.logits(x), problem.logits(x)
    company = problem.logits(torch.cat([x[:half], 1 - x[half:]]))
    tremor = problem.logits((x + TREMOR * (2 * problem.noise.uniform(x) - 1)).clamp(0, 1))
    # Black and white images are where a model divides by a deviation of zero.
    corners = x.round()
    corners[:1], corners[-1:] = 0, 1
    label = clean.argmax(1)
    return {
        "repeated": torch.maximum(_difference(clean, twice), _difference(clean, thrice)),
        "repeated_changed": (twice.argmax(1) != label) | (thrice.argmax(1) != label),
        "company": torch.where(first, _difference(clean, company), torch.nan),
        "company_changed": first & (company.argmax(1) != label),
        "tremor": _difference(clean, tremor),
        "tremor_changed": tremor.argmax(1) != label,
        "not_finite_beyond": ~problem.logits(corners).isfinite().all(1),
    }


def _difference(one: Tensor, two: Tensor) -> Tensor:
    """The largest difference of an image's logits, relative to their spread."""
    return (one - two).abs().amax(1) / one.std(1).clamp_min(torch.finfo(one.dtype).tiny)


def _better_scale(model: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> NormalizationProbe:
    """Whether some usual scale of the images, or the way back from it, makes the model see significantly better.

    A model that was trained on normalised images and does not normalise them itself, or that does so twice, shows it
    in this way whatever its code looks like.
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
    """The usual ways to normalise images of so many channels: a name, whether it is undone, and how."""
    known = {f"the normalisation of {name}": v for name, v in NORMALIZATIONS.items() if len(v[0]) == channels}
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
    seen: Seen, radii: list[float], queries: int, rounding: float, normalization: NormalizationProbe | None
) -> Probes:
    label, losses = seen["label"], seen["losses"]
    survived = ~seen["broken"][:, 0]
    start, end, highest = losses[:, 0], losses[:, -1], losses.amax(1)
    counted = {
        "zero_gradient": seen["zero_gradient"],
        # Where the model rounds its input, a small step changes nothing, whatever a large one does.
        "misled": seen["misled"] & (seen["tremor"] > 0),
        # One without a gradient has been told already.
        "slack": ~seen["zero_gradient"] & ~((end > start) & (end >= (start + highest) / 2)),
        "survived": survived,
        "one_step": survived & seen["one_step"],
        "shielded": ~survived & ~seen["one_step"],
        "smooth": seen["smooth"],
        "unreached": ~seen["broken"][:, -1],
        "black_box": seen["black_box"],
    }

    def in_class(k: int) -> ClassProbe:
        rows = label == k
        counts = {name: int(flags[rows].sum()) for name, flags in counted.items()}
        return ClassProbe(label=k, n=int(rows.sum()), **counts)

    def agreement(name: str) -> AgreementProbe:
        differences = seen[name][~seen[name].isnan()]
        # An image between two classes may fall either way by rounding alone.
        changed = seen[f"{name}_changed"] & (seen[name] > rounding)
        largest = differences.amax() if len(differences) else math.nan
        return AgreementProbe(n=len(differences), changed=int(changed.sum()), difference=_finite(largest))

    tried = int(survived.sum())
    return Probes(
        n=len(label),
        by_class=[in_class(k) for k in sorted(set(label.tolist()))],
        steps=[
            StepProbe(
                step=step,
                log_odds=_finite(losses[:, step].mean()),
                margin=_finite(seen["margins"][:, step].mean()),
                broken=int(seen["wrong"][:, step].sum()),
            )
            for step in SHOWN
        ],
        radii=[
            RadiusProbe(eps=eps, broken=int(column.sum()))
            for eps, column in zip(radii, seen["broken"].unbind(1), strict=True)
        ],
        black_box=BlackBoxProbe(queries=queries, tried=tried, broken=int(seen["black_box"].sum())) if queries else None,
        rounding=rounding,
        repeated=agreement("repeated"),
        company=agreement("company"),
        tremor=agreement("tremor"),
        output=OutputProbe(
            probabilities=int(seen["probabilities"].sum()),
            one_hot=int(seen["one_hot"].sum()),
            median_margin=_finite(seen["margin"].median()),
            surest=_finite(seen["surest"].amax()),
            unmoved=int((seen["tremor"] == 0).sum()),
            not_finite=int(seen["not_finite"].sum()),
            not_finite_beyond=int((seen["not_finite_beyond"] & ~seen["not_finite"]).sum()),
        ),
        normalization=normalization,
        forwards=int(seen["forwards"].sum()),
        backwards=int(seen["backwards"].sum()),
    )


def _finite(value: Tensor | float) -> float | None:
    """Six digits of a number; None where it is not one."""
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
