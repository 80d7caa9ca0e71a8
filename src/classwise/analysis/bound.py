"""The two bounds of worst-class adversarial training (Li & Liu 2023, Theorems 1 and 3): do they hold, and how tightly?

**Theorem 1**, of a run trained by ``wat``. With weights w_t = softmax(eta · Σ_{s<t} L(f_s)) over K classes and the
average, after T rounds max_k min_t L_k(f_t) ≤ 1/T Σ_t Σ_k w_{t,k} L_k(f_t) + log(K + 1) / (eta T). It assumes losses
in [0, 1] and eta ≤ 1/2. Losses in [0, B] are B times such losses, with B · eta in place of eta, and the two sides stay
what they are; so B · eta ≤ 1/2 is what is checked. Its other assumption, that the mean loss of every class is at least
1 / (1 - B · eta) times its smallest, is checked as well. Losses are those on validation, as the run recorded them.

**Theorem 3**, of linear classifiers x → W x in the Linf ball, with probability 1 - delta over the training set S:

    worst-class robust error ≤ K/|S| Σ_i E_i + 2 W K³ U / (gamma |S|) + 2 W K² eps d^{1/q} / (gamma √|S|)
                               + 3 √(K log(2/delta) / (2 |S|))

E_i tells whether example i has a margin of at most gamma against its strongest attack, W bounds the p-norms of the
rows, U = max_k E ‖Σ_{i in S_k} σ_i x_i‖_q with random signs σ, estimated by seeded draws.
"""

# N examples, K classes, D pixels, T rounds

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from classwise.analysis.answer import Answer
from classwise.analysis.runs import recipe_of
from classwise.analysis.subject import Subject
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.data import load_data
from classwise.data.batches import to_float
from classwise.policies import POLICIES, WAT
from classwise.reporting.figures import Figure, Series, bars, lines
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.training.plan import make_objective

Floats = NDArray[np.float64]


class NoRegret(Part):
    """Theorem 1 on one run."""

    rounds: int
    eta: float
    largest_loss: float
    """B."""
    worst_class_loss: float
    """The left side: the largest over classes of the smallest loss over rounds."""
    weighted_loss: float
    regret: float
    """log(K + 1) / (eta T)"""
    bound: float
    """The right side: the sum of the two."""
    holds: bool
    eta_small_enough: bool
    losses_high_enough: bool
    bound_by_round: list[float]
    loss_by_round: list[float]
    """Both sides, had training ended there."""


class LinearBound(Part):
    """Theorem 3 on one linear classifier. Errors are shares, and so is the bound; above 1 it says nothing."""

    examples: int
    classes: int
    eps: float
    gamma: float
    delta: float
    norm: float
    """W."""
    margin_errors: float
    complexity: float
    attack: float
    confidence: float
    bound: float
    worst_class_error: float | None
    """The robust error of the worst class on other examples, exactly: for a linear model it has a closed form."""
    worst_class_error_in_training: float


class Bound(Answer):
    """Both theorems, each where it applies."""

    kind: ClassVar[str] = "bound"

    model: str
    no_regret: NoRegret | None
    linear: LinearBound

    def sentences(self) -> list[str]:
        found = []
        if (game := self.no_regret) is None:
            found.append(f"{self.model} was not trained by wat: Theorem 1 has nothing to say of it.")
        else:
            said = "holds" if game.holds else "does not hold"
            found.append(
                f"Theorem 1 {said}: after {game.rounds} rounds the worst class's loss is {game.worst_class_loss:.3f}, "
                f"and the bound {game.bound:.3f} ({game.weighted_loss:.3f} + {game.regret:.3f})."
            )
            if not game.eta_small_enough:
                found.append(
                    f"Its assumption on eta fails: losses reach {game.largest_loss:.2f}, so eta would have to be at "
                    f"most {0.5 / game.largest_loss:.3g}, and is {game.eta:g}."
                )
            if not game.losses_high_enough:
                found.append("Its assumption on the mean losses fails for some class.")
        worst = self.linear.worst_class_error
        so = "it says nothing, for every error is at most 1" if self.linear.bound >= 1 else "it says something"
        found.append(
            f"Theorem 3 bounds the worst-class robust error of a linear classifier by {self.linear.bound:.3g}: {so}."
            + ("" if worst is None else f" On other examples that error is {worst:.3f}.")
        )
        return found

    def tables(self) -> list[Table]:
        parts = self.linear
        return [
            Table(
                title="Theorem 3, term by term",
                about=f"A linear classifier on {parts.examples} examples; eps {parts.eps:g}, gamma {parts.gamma:g}.",
                columns=["term", "value"],
                rows=[
                    ["margin errors", f"{parts.margin_errors:.4g}"],
                    ["complexity", f"{parts.complexity:.4g}"],
                    ["attack", f"{parts.attack:.4g}"],
                    ["confidence", f"{parts.confidence:.4g}"],
                    ["bound", f"{parts.bound:.4g}"],
                ],
            )
        ]

    def figures(self) -> list[Figure]:
        terms = ("margin_errors", "complexity", "attack", "confidence")
        drawn = [
            bars(
                [term.replace("_", " ") for term in terms],
                [Series(name="term", y=[getattr(self.linear, term) for term in terms])],
                title="Theorem 3, term by term",
                alt=f"The four terms of the bound: {self.sentences()[-1]}",
                x="term",
                y="share of errors (1 is all)",
            )
        ]
        if self.no_regret is None:
            return drawn
        at = list(range(1, self.no_regret.rounds + 1))
        both = [
            Series(name="bound", x=at, y=self.no_regret.bound_by_round, dash="dash"),
            Series(name="worst class's smallest loss", x=at, y=self.no_regret.loss_by_round),
        ]
        title, alt = "Theorem 1, round by round", self.sentences()[0]
        return [lines(both, title=title, alt=alt, x="round (epoch)", y="validation loss", zero=True), *drawn]

    def rows(self) -> list[dict[str, Any]]:
        if self.no_regret is None:
            return []
        sides = zip(self.no_regret.loss_by_round, self.no_regret.bound_by_round, strict=True)
        return [{"round": t, "loss": loss, "bound": bound} for t, (loss, bound) in enumerate(sides, 1)]


def bound(
    run: Subject | str | Path,
    *,
    gamma: float = 1.0,
    delta: float = 0.05,
    draws: int = 200,
    seed: int = 0,
) -> Bound:
    """Theorem 1 on the history of a ``wat`` run, and Theorem 3 on a linear classifier of the run's training data.

    The classifier is scikit-learn's logistic regression without intercepts, on pixels; its errors are those on the test
    split.
    """
    from sklearn.linear_model import LogisticRegression

    subject = Subject.open(run)
    recipe = recipe_of(subject)
    threat = Threat.parse(recipe.eps, recipe.norm)
    if threat.norm != "Linf":
        raise InputError(f"Theorem 3 is about the Linf ball, and {subject.path} was trained in {threat.norm}")
    game = None
    policy = build("policy", POLICIES, recipe.policy)
    if isinstance(policy, WAT):
        beta = make_objective(recipe).beta
        game = no_regret(_losses(subject, beta), policy.eta)
    (x, y), (other_x, other_y) = (_pixels(recipe.data.name, split) for split in ("train", "test"))
    weights = LogisticRegression(fit_intercept=False, max_iter=1000).fit(x, y).coef_
    return Bound(
        model=subject.name,
        no_regret=game,
        linear=linear_bound(
            weights, x, y, eps=threat.eps, gamma=gamma, delta=delta, draws=draws, seed=seed, other=(other_x, other_y)
        ),
    )


def no_regret(losses: ArrayLike, eta: float) -> NoRegret:
    """Theorem 1 on losses (T, K + 1): of every class and, last, the average, in every round."""
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
    return NoRegret(
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
) -> LinearBound:
    """Theorem 3 for weights (K, D) on examples (N, D) with labels (N,).

    ``norm`` is W, the bound on the rows' p-norms that was fixed beforehand; else the weights' own largest is taken,
    which flatters the bound. ``other`` are examples to measure the error on.
    """
    if gamma <= 0 or not 0 < delta < 1 or p < 1 or draws < 1:
        raise InputError(f"gamma = {gamma}, delta = {delta}, p = {p}, draws = {draws}: out of range")
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
    apart = None if other is None else (np.asarray(other[0], dtype=np.float64), np.asarray(other[1]))
    return LinearBound(
        examples=n,
        classes=k,
        eps=eps,
        gamma=gamma,
        delta=delta,
        norm=largest,
        bound=sum(parts.values()),
        worst_class_error=None if apart is None else _worst_error(robust_margins(rows, *apart, eps), apart[1]),
        worst_class_error_in_training=_worst_error(margins, labels),
        **parts,
    )


def robust_margins(weights: Floats, x: Floats, y: NDArray[np.int64], eps: float) -> Floats:
    """(N,) the smallest margin that an attack within eps (Linf, pixels unbounded) leaves a linear classifier."""
    scores = x @ weights.T
    reach = eps * np.abs(weights[:, None] - weights[None]).sum(2)[y]
    rivals = scores + reach
    rivals[np.arange(len(y)), y] = -np.inf
    return np.asarray(scores[np.arange(len(y)), y] - rivals.max(1))


def _worst_error(margins: Floats, y: NDArray[np.int64]) -> float:
    return max(float((margins[y == label] <= 0).mean()) for label in np.unique(y))


def _rademacher(x: Floats, q: float, draws: int, seed: int) -> float:
    """E ‖Σ σ_i x_i‖_q over random signs, by draws."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, len(x)))
    return float(np.linalg.norm(signs @ x, q, axis=1).mean()) if len(x) else 0.0


def _losses(subject: Subject, beta: float) -> Floats:
    """(T, K + 1) validation losses of a run, in its rounds."""
    table = []
    for record in subject.history:
        validation = record["validation"]
        n = np.array(validation["n"], dtype=np.float64)
        parts = [np.array(validation[key], dtype=np.float64) for key in ("loss_nat", "loss_adv")]
        by_class = parts[0] + beta * parts[1]
        if np.isnan(by_class).any():
            raise InputError(f"{subject.path} has no validation losses of some class")
        table.append([*by_class, (n * by_class).sum() / n.sum()])
    return np.array(table)


def _pixels(data: str, split: str) -> tuple[Floats, NDArray[np.int64]]:
    images = load_data(data, split=split)
    return to_float(images.images).flatten(1).double().numpy(), images.labels.astype(np.int64)
