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
U = max_k E ‖Σ_{i in S_k} σ_i x_i‖_q with random signs σ, estimated by seeded draws. Here p = 1, so q = ∞, and W is the
largest norm of the rows, which is not fixed in advance and makes the bound too small. Errors are shares; a bound above
1 is vacuous.
"""

# N examples, K classes, D pixels, T rounds

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from classwise.analysis.result import AnalysisResult
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
Ints = NDArray[np.int64]


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
    rounds, failed = pd.DataFrame(), list[str]()
    policy = build("policy", POLICIES, recipe.policy)
    if isinstance(policy, WAT):
        rounds, failed = no_regret(_losses(run, make_objective(recipe).beta), policy.eta)
    splits = {split: _pixels(recipe.data.name, split) for split in ("train", "test")}
    weights = LogisticRegression(fit_intercept=False, max_iter=1000).fit(*splits["train"]).coef_
    terms = linear_bound(weights, *splits["train"], eps=threat.eps, gamma=gamma, delta=delta, draws=draws, seed=seed)
    errors = {split: worst_class_error(weights, x, y, threat.eps) for split, (x, y) in splits.items()}
    finding = _finding(run.name, rounds, failed, terms["bound"], errors["test"])
    settings = {"gamma": gamma, "delta": delta, "draws": draws, "seed": seed}
    return AnalysisResult(
        name="bound",
        finding=finding,
        about={"model": run.name, "dataset": recipe.data.name, "eps": threat.eps} | settings,
        frames={
            "rounds": rounds,
            "Theorem 3": terms.rename_axis("term").reset_index(name="error_bound"),
            "errors": pd.DataFrame({"split": list(errors), "worst_class_error": list(errors.values())}),
        },
        draw=lambda: _figures(rounds, terms, finding),
    )


def no_regret(losses: ArrayLike, eta: float) -> tuple[pd.DataFrame, list[str]]:
    """Return both sides of Theorem 1 by round, and the assumptions that fail.

    ``losses``: (T, K + 1), of every class and, last, the average, in every round.
    """
    table = np.asarray(losses, dtype=np.float64)
    rounds, experts = table.shape
    before = np.vstack([np.zeros(experts), table.cumsum(0)[:-1]])
    weighted = (softmax(eta * before, axis=1) * table).sum(1)
    count = np.arange(1, rounds + 1)
    right = weighted.cumsum() / count + math.log(experts) / (eta * count)
    smallest = np.minimum.accumulate(table, 0)[:, :-1]
    scaled = eta * float(table.max())
    holds = {
        "eta": scaled <= 0.5,
        "mean losses": scaled < 1 and bool((table.mean(0)[:-1] >= smallest[-1] / (1 - scaled)).all()),
    }
    frame = pd.DataFrame({"round": count, "loss": smallest.max(1), "bound": right})
    return frame, [name for name, held in holds.items() if not held]


def linear_bound(
    weights: Floats,
    x: Floats,
    y: Ints,
    *,
    eps: float,
    gamma: float = 1.0,
    delta: float = 0.05,
    draws: int = 200,
    seed: int = 0,
) -> pd.Series:
    """Return the terms of Theorem 3 and their sum for weights (K, D) on examples (N, D) with labels (N,)."""
    if gamma <= 0 or not 0 < delta < 1 or draws < 1:
        raise InputError(
            f"gamma = {gamma}, delta = {delta}, draws = {draws}; expected gamma > 0, 0 < delta < 1 and draws at least 1"
        )
    k, n, norm = len(weights), len(x), np.linalg.norm(weights, 1, axis=1).max()
    complexity = max(_rademacher(x[y == label], draws, seed) for label in range(k))
    terms = pd.Series(
        {
            "margin errors": k * (robust_margins(weights, x, y, eps) <= gamma).mean(),
            "complexity": 2 * norm * k**3 * complexity / (gamma * n),
            "attack": 2 * norm * k**2 * eps / (gamma * math.sqrt(n)),
            "confidence": 3 * math.sqrt(k * math.log(2 / delta) / (2 * n)),
        }
    )
    terms["bound"] = terms.sum()
    return terms


def robust_margins(weights: Floats, x: Floats, y: Ints, eps: float) -> Floats:
    """Return (N,) the smallest margin of a linear classifier within eps (Linf, pixels unbounded)."""
    scores = x @ weights.T
    reach = eps * np.abs(weights[:, None] - weights[None]).sum(2)[y]
    rivals = scores + reach
    rivals[np.arange(len(y)), y] = -np.inf
    return np.asarray(scores[np.arange(len(y)), y] - rivals.max(1))


def worst_class_error(weights: Floats, x: Floats, y: Ints, eps: float) -> float:
    """Return the highest robust error of a class, as a share."""
    return float(pd.Series(robust_margins(weights, x, y, eps) <= 0).groupby(y).mean().max())


def _rademacher(x: Floats, draws: int, seed: int) -> float:
    """Estimate E ‖Σ σ_i x_i‖_∞ over random signs."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, len(x)))
    return float(np.abs(signs @ x).max(1).mean()) if len(x) else 0.0


def _losses(run: Run, beta: float) -> Floats:
    """Return (T, K + 1) the validation losses of a run by epoch."""
    table = []
    for record in run.history:
        n, natural, adversarial = (
            np.array(record["validation"][key], dtype=np.float64) for key in ("n", "loss_nat", "loss_adv")
        )
        by_class = natural + beta * adversarial
        if np.isnan(by_class).any():
            raise InputError(f"{run.path} lacks validation losses of a class")
        table.append([*by_class, (n * by_class).sum() / n.sum()])
    return np.array(table)


def _pixels(data: str, split: str) -> tuple[Floats, Ints]:
    images = load_data(data, split=split)
    return to_float(images.images).flatten(1).double().numpy(), images.labels.astype(np.int64)


def _finding(model: str, rounds: pd.DataFrame, failed: list[str], bound: float, error: float) -> str:
    first = f"{model} was not trained by wat, so Theorem 1 does not apply"
    if len(rounds):
        last = rounds.iloc[-1]
        verb, sign = ("holds", "≤") if last["loss"] <= last["bound"] else ("does not hold", ">")
        although = f", although its assumption on {' and '.join(failed)} fails" if failed else ""
        first = (
            f"Theorem 1 {verb} after {len(rounds)} rounds (worst class's loss {last['loss']:.3f} {sign} bound "
            f"{last['bound']:.3f}){although}"
        )
    vacuous = " (vacuous)" if bound >= 1 else ""
    return (
        f"{first}; Theorem 3 bounds the worst-class error of a linear classifier by {bound:.3g}{vacuous}, measured "
        f"{error:.3f}."
    )


def _figures(rounds: pd.DataFrame, terms: pd.Series, finding: str) -> list[Figure]:
    parts = bars(
        list(terms.index[:-1]),
        [Series(name="term", y=list(terms[:-1]))],
        title="Terms of Theorem 3",
        alt=f"The four terms of the bound. {finding}",
        x="term",
        y="share of errors",
    )
    if rounds.empty:
        return [parts]
    x, loss, bound = (list(rounds[column]) for column in rounds)
    sides = [Series(name="bound", x=x, y=bound, dash="dash"), Series(name="worst class's smallest loss", x=x, y=loss)]
    title = "Theorem 1 by round"
    return [lines(sides, title=title, alt=finding, x="round (epoch)", y="validation loss", zero=True), parts]
