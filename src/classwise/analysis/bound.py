"""Bounds on the worst class (Li & Liu 2023, Theorems 1 and 3): whether they hold, and how tightly.

**Theorem 1**, for a run trained by ``wat``. With weights w_t = softmax(eta · Σ_{s<t} L(f_s)) over K classes and the
average, after T rounds max_k min_t L_k(f_t) ≤ 1/T Σ_t Σ_k w_{t,k} L_k(f_t) + log(K + 1) / (eta T). It assumes losses
in [0, 1] and eta ≤ 1/2. Losses in [0, B] are B times such losses with B · eta in place of eta, and both sides stay the
same; so B · eta ≤ 1/2 is checked. Its other assumption, that the mean loss of every class is at least 1 / (1 - B · eta)
times its smallest, is checked as well. Losses are the recorded validation losses.

**Theorem 3**, for linear classifiers x → W x in the Linf ball, with probability 1 - delta over the training set S:

    worst-class robust error ≤ K/|S| Σ_i E_i + 2 W K³ U / (gamma |S|) + 2 W K² eps d^{1/q} / (gamma √|S|)
                               + 3 √(K log(2/delta) / (2 |S|))

E_i is 1 if example i has a margin of at most gamma under its strongest attack, W bounds the p-norms of the rows, and
U = max_k E ‖Σ_{i in S_k} σ_i x_i‖_q with random signs σ, estimated by seeded draws. Errors are shares; a bound above 1
is vacuous.
"""

# N examples, K classes, D pixels, T rounds

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from classwise.analysis.result import AnalysisResult, Record, frame_of
from classwise.analysis.retraining import recipe_of
from classwise.analysis.run import Run
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.data import load_data
from classwise.data.batches import to_float
from classwise.policies import POLICIES, WAT
from classwise.reporting.figures import Figure, Series, bars, lines
from classwise.training.plan import make_objective

Floats = NDArray[np.float64]
TERMS = ("margin_errors", "complexity", "attack", "confidence")


def bound(
    run: Run | str | Path,
    *,
    gamma: float = 1.0,
    delta: float = 0.05,
    draws: int = 200,
    seed: int = 0,
) -> AnalysisResult:
    """Theorem 1 for the history of a ``wat`` run, and Theorem 3 for a linear classifier of the run's training data.

    The classifier is scikit-learn's logistic regression on pixels without intercepts; its errors are on the test split.
    """
    from sklearn.linear_model import LogisticRegression

    run = Run.open(run)
    recipe = recipe_of(run)
    threat = Threat.parse(recipe.eps, recipe.norm)
    if threat.norm != "Linf":
        raise InputError(f"Theorem 3 needs a run trained in Linf; {run.path} was trained in {threat.norm}")
    game = None
    policy = build("policy", POLICIES, recipe.policy)
    if isinstance(policy, WAT):
        beta = make_objective(recipe).beta
        game = no_regret(_losses(run, beta), policy.eta)
    (x, y), (other_x, other_y) = (_pixels(recipe.data.name, split) for split in ("train", "test"))
    weights = LogisticRegression(fit_intercept=False, max_iter=1000).fit(x, y).coef_
    linear = linear_bound(
        weights, x, y, eps=threat.eps, gamma=gamma, delta=delta, draws=draws, seed=seed, other=(other_x, other_y)
    )
    values = Record(model=run.name, no_regret=game, linear=linear)
    finding = _finding(values)
    rounds = [] if game is None else zip(game.loss_by_round, game.bound_by_round, strict=True)
    terms = [{"term": term.replace("_", " "), "error_bound": linear[term]} for term in (*TERMS, "bound")]
    return AnalysisResult(
        name="bound",
        finding=finding,
        values=values,
        frames={
            "rounds": frame_of({"round": t, "loss": loss, "bound": bound} for t, (loss, bound) in enumerate(rounds, 1)),
            "Theorem 3": frame_of(terms),
        },
        draw=lambda: _figures(values, finding),
    )


def no_regret(losses: ArrayLike, eta: float) -> Record:
    """Return both sides of Theorem 1 for losses (T, K + 1): of every class and, last, the average, in every round."""
    table = np.asarray(losses, dtype=np.float64)
    rounds, experts = table.shape
    before = np.vstack([np.zeros(experts), table.cumsum(0)[:-1]])
    weighted = (softmax(eta * before, axis=1) * table).sum(1)
    count = np.arange(1, rounds + 1)
    right = weighted.cumsum() / count + math.log(experts) / (eta * count)
    smallest = np.minimum.accumulate(table, 0)[:, :-1]
    left = smallest.max(1)
    largest = float(table.max())
    scaled = eta * largest
    high = scaled < 1 and bool((table.mean(0)[:-1] >= smallest[-1] / (1 - scaled)).all())
    return Record(
        rounds=rounds,
        eta=eta,
        largest_loss=largest,
        worst_class_loss=float(left[-1]),
        weighted_loss=float(weighted.mean()),
        regret=math.log(experts) / (eta * rounds),
        bound=float(right[-1]),
        holds=bool(left[-1] <= right[-1]),
        eta_small_enough=scaled <= 0.5,
        losses_high_enough=high,
        bound_by_round=right.tolist(),
        loss_by_round=left.tolist(),
    )


def linear_bound(
    weights: ArrayLike,
    x: ArrayLike,
    y: ArrayLike,
    *,
    eps: float,
    gamma: float = 1.0,
    delta: float = 0.05,
    p: float = 1.0,
    norm: float | None = None,
    draws: int = 200,
    seed: int = 0,
    other: tuple[ArrayLike, ArrayLike] | None = None,
) -> Record:
    """Return the terms of Theorem 3 for weights (K, D) on examples (N, D) with labels (N,).

    ``norm`` is W, a bound on the p-norms of the rows fixed in advance; by default the largest norm, which makes the
    bound too small. ``other`` are examples and labels to measure the error on.
    """
    if gamma <= 0 or not 0 < delta < 1 or p < 1 or draws < 1:
        raise InputError(
            f"gamma = {gamma}, delta = {delta}, p = {p}, draws = {draws}; expected gamma > 0, 0 < delta < 1, p and "
            "draws at least 1"
        )
    rows, images = np.asarray(weights, dtype=np.float64), np.asarray(x, dtype=np.float64)
    labels = np.asarray(y)
    k, n, q = len(rows), len(images), math.inf if p == 1 else 1.0 if math.isinf(p) else p / (p - 1)
    largest = float(np.linalg.norm(rows, p, axis=1).max()) if norm is None else norm
    margins = robust_margins(rows, images, labels, eps)
    complexity = max(_rademacher(images[labels == label], q, draws, seed) for label in range(k))
    spread = 1.0 if math.isinf(q) else images.shape[1] ** (1 / q)
    parts = {
        "margin_errors": k * float((margins <= gamma).mean()),
        "complexity": 2 * largest * k**3 * complexity / (gamma * n),
        "attack": 2 * largest * k**2 * eps * spread / (gamma * math.sqrt(n)),
        "confidence": 3 * math.sqrt(k * math.log(2 / delta) / (2 * n)),
    }
    held_out = None if other is None else (np.asarray(other[0], dtype=np.float64), np.asarray(other[1]))
    return Record(
        examples=n,
        classes=k,
        eps=eps,
        gamma=gamma,
        delta=delta,
        norm=largest,
        bound=sum(parts.values()),
        worst_class_error=None if held_out is None else _worst_error(robust_margins(rows, *held_out, eps), held_out[1]),
        worst_class_error_in_training=_worst_error(margins, labels),
        **parts,
    )


def robust_margins(weights: Floats, x: Floats, y: NDArray[np.int64], eps: float) -> Floats:
    """Return (N,) the smallest margin of a linear classifier within eps (Linf, pixels unbounded)."""
    scores = x @ weights.T
    reach = eps * np.abs(weights[:, None] - weights[None]).sum(2)[y]
    rivals = scores + reach
    rivals[np.arange(len(y)), y] = -np.inf
    return np.asarray(scores[np.arange(len(y)), y] - rivals.max(1))


def _worst_error(margins: Floats, y: NDArray[np.int64]) -> float:
    return max(float((margins[y == label] <= 0).mean()) for label in np.unique(y))


def _rademacher(x: Floats, q: float, draws: int, seed: int) -> float:
    """Estimate E ‖Σ σ_i x_i‖_q over random signs."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, len(x)))
    return float(np.linalg.norm(signs @ x, q, axis=1).mean()) if len(x) else 0.0


def _losses(run: Run, beta: float) -> Floats:
    """Return (T, K + 1) the validation losses of a run by epoch."""
    table = []
    for record in run.history:
        validation = record["validation"]
        n = np.array(validation["n"], dtype=np.float64)
        parts = [np.array(validation[key], dtype=np.float64) for key in ("loss_nat", "loss_adv")]
        by_class = parts[0] + beta * parts[1]
        if np.isnan(by_class).any():
            raise InputError(f"{run.path} lacks validation losses of a class")
        table.append([*by_class, (n * by_class).sum() / n.sum()])
    return np.array(table)


def _pixels(data: str, split: str) -> tuple[Floats, NDArray[np.int64]]:
    images = load_data(data, split=split)
    return to_float(images.images).flatten(1).double().numpy(), images.labels.astype(np.int64)


def _finding(values: Record) -> str:
    game, linear = values.no_regret, values.linear
    if game is None:
        first = f"{values.model} was not trained by wat, so Theorem 1 does not apply"
    else:
        assumptions = (("eta", game.eta_small_enough), ("mean losses", game.losses_high_enough))
        failed = [name for name, holds in assumptions if not holds]
        although = f", although its assumption on {' and '.join(failed)} fails" if failed else ""
        sign = "≤" if game.holds else ">"
        first = (
            f"Theorem 1 {'holds' if game.holds else 'does not hold'} after {game.rounds} rounds (worst class's loss "
            f"{game.worst_class_loss:.3f} {sign} bound {game.bound:.3f}){although}"
        )
    vacuous = " (vacuous)" if linear.bound >= 1 else ""
    error = "" if linear.worst_class_error is None else f", measured {linear.worst_class_error:.3f}"
    return (
        f"{first}; Theorem 3 bounds the worst-class error of a linear classifier by {linear.bound:.3g}{vacuous}{error}."
    )


def _figures(values: Record, finding: str) -> list[Figure]:
    terms = bars(
        [term.replace("_", " ") for term in TERMS],
        [Series(name="term", y=[values.linear[term] for term in TERMS])],
        title="Terms of Theorem 3",
        alt=f"The four terms of the bound. {finding}",
        x="term",
        y="share of errors",
    )
    if (game := values.no_regret) is None:
        return [terms]
    rounds = list(range(1, game.rounds + 1))
    sides = [
        Series(name="bound", x=rounds, y=game.bound_by_round, dash="dash"),
        Series(name="worst class's smallest loss", x=rounds, y=game.loss_by_round),
    ]
    title = "Theorem 1 by round"
    return [lines(sides, title=title, alt=finding, x="round (epoch)", y="validation loss", zero=True), terms]
