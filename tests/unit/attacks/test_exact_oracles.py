"""Attacks against exact answers: the true smallest perturbation of linear and of small piecewise linear models.

On every cell of a ReLU network, that is for every pattern of active units, the logits are affine. So the nearest
misclassified image is the least of finitely many projections onto polyhedra: linear programs for Linf, and least
distance problems for L2, which Lawson & Hanson (1974, chapter 23) turn into non-negative least squares.
"""

# B batch, D pixels, K classes, H hidden units, M constraints

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from scipy.optimize import linprog, nnls
from torch import Tensor, nn

Array = np.ndarray
NORMS = ("Linf", "L2")


@dataclass(frozen=True)
class Cell:
    """A polyhedron {z : walls · z ≤ limits} on which the logits are weight · z + bias."""

    walls: Array
    limits: Array
    weight: Array
    bias: Array


class Affine(nn.Module):
    """Logits W z + b."""

    def __init__(self, pixels: int, num_classes: int, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.last = layer(random, random.normal(size=(num_classes, pixels)), centre=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1))

    def cells(self) -> list[Cell]:
        weight, bias = arrays(self.last)
        return [Cell(np.zeros((0, weight.shape[1])), np.zeros(0), weight, bias)]


class Folded(nn.Module):
    """Logits W relu(V z + a) + b, with every fold going through the box."""

    def __init__(self, pixels: int, hidden: int, num_classes: int, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.first = layer(random, random.normal(size=(hidden, pixels)), centre=random.uniform(size=(hidden, pixels)))
        self.last = layer(random, random.normal(size=(num_classes, hidden)), centre=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(1)).relu())

    def cells(self) -> list[Cell]:
        (fold, offset), (weight, bias) = arrays(self.first), arrays(self.last)
        found = []
        for pattern in product((0.0, 1.0), repeat=len(offset)):
            active = np.array(pattern)
            side = 1 - 2 * active  # an active unit has fold · z + offset ≥ 0
            walls, limits = side[:, None] * fold, -side * offset
            if linprog(np.zeros(fold.shape[1]), walls, limits, bounds=(0, 1)).status == 0:
                found.append(Cell(walls, limits, weight * active @ fold, weight * active @ offset + bias))
        return found


def layer(random: np.random.Generator, weight: Array, centre: Array | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0]).double()
    bias = 0.1 * random.normal(size=len(weight)) if centre is None else -(weight * centre).sum(1)
    made.weight.data, made.bias.data = torch.from_numpy(weight), torch.from_numpy(bias)
    return made


def arrays(made: nn.Linear) -> tuple[Array, Array]:
    return made.weight.detach().numpy(), made.bias.detach().numpy()


def exact_distance(cells: list[Cell], x: Array, label: int, norm: str) -> float:
    """The distance (D,) to the nearest image in the box that is not given its label, infinity if there is none.

    Each cell and rival gives a polyhedron. They are visited in the order of a lower bound, the distance to their
    farthest wall, and those that cannot improve on the best are left out.
    """
    polyhedra = []
    for cell in cells:
        for rival in set(range(len(cell.bias))) - {label}:
            lost = cell.weight[label] - cell.weight[rival]
            walls = np.vstack([cell.walls, lost])
            limits = np.append(cell.limits, cell.bias[rival] - cell.bias[label])
            thickness = np.abs(walls).sum(1) if norm == "Linf" else np.linalg.norm(walls, axis=1)
            bound = np.max((walls @ x - limits) / np.maximum(thickness, 1e-300))
            polyhedra.append((bound, walls, limits))
    best = np.inf
    for bound, walls, limits in sorted(polyhedra, key=lambda polyhedron: polyhedron[0]):
        if bound >= best:
            break
        best = min(best, (linf_distance if norm == "Linf" else l2_distance)(walls, limits, x))
    return best


def linf_distance(walls: Array, limits: Array, x: Array) -> float:
    """min t with |z - x| ≤ t, walls · z ≤ limits and z in the box."""
    identity, ones = np.eye(len(x)), np.ones((len(x), 1))
    rows = [np.hstack([walls, np.zeros((len(walls), 1))]), np.hstack([identity, -ones]), np.hstack([-identity, -ones])]
    answer = linprog(
        np.append(np.zeros(len(x)), 1.0),
        np.vstack(rows),
        np.concatenate([limits, x, -x]),
        bounds=[(0, 1)] * len(x) + [(0, None)],
    )
    return float(answer.fun) if answer.status == 0 else np.inf


def l2_distance(walls: Array, limits: Array, x: Array) -> float:
    """min ‖u‖ with G u ≥ h for u = z - x, by the residual of min ‖(Gᵀ; hᵀ) v - (0; 1)‖ over v ≥ 0."""
    identity = np.eye(len(x))
    left = np.vstack([-walls, identity, -identity])
    right = np.concatenate([walls @ x - limits, -x, x - 1])
    goal = np.append(np.zeros(len(x)), 1.0)
    system = np.vstack([left.T, right])
    residual = system @ nnls(system, goal)[0] - goal
    if np.linalg.norm(residual) < 1e-9:
        return np.inf
    return float(np.linalg.norm(residual[:-1] / residual[-1]))
