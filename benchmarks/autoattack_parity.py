"""Agreement of our AutoAttack and its four attacks with ``pyautoattack``, a fork of the authors' code.

Each attack runs alone on the images that the model classifies correctly, and the standard ensemble runs as a whole.
Both run in the same evaluation: same images, same check of every result, float32.

    python benchmarks/autoattack_parity.py --weights trades.safetensors --per-class 200
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import numpy as np
import torch

import classwise as cw
from classwise.core.devices import pick_device
from classwise.models.load import load_model
from classwise.reporting import ClassReport
from classwise.storage.verdicts import Verdicts

EPS, CLASSES = 8 / 255, 10
PARTS = ("apgd-ce", "apgd-t", "fab-t", "square")


def fork_attack(model: torch.nn.Module, parts: tuple[str, ...]) -> Any:
    """Return an attack object of the fork with one restart per attack, as in the standard ensemble."""
    from pyautoattack import AutoAttack  # type: ignore[import-untyped]

    logging.disable()
    attack = AutoAttack(
        model, attacks=list(parts), eps=EPS, version="custom", seed=0, device=next(model.parameters()).device
    )
    attack.apgd.n_restarts = 1
    return attack


def row(name: str, reports: list[ClassReport]) -> str:
    """Return the table row of one attack: agreement of the verdicts, and the seconds of both."""
    tables = [report.verdicts for report in reports if isinstance(report.verdicts, Verdicts)]
    ours, other = (table.survived() for table in tables)
    label = tables[0].label
    by_class = [int(ours[label == k].sum() - other[label == k].sum()) for k in range(CLASSES)]
    seconds = [next(iter(report.attacks.values())).seconds for report in reports]
    left = f"{100 * ours.mean():6.2f} {100 * other.mean():6.2f}"
    return (
        f"{name:10} {left} {100 * np.mean(ours == other):8.2f} {int((ours & ~other).sum()):6} "
        f"{int((~ours & other).sum()):6} {max(by_class):+6} {min(by_class):+6} {seconds[0]:8.1f} {seconds[1]:8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--per-class", type=int, default=200)
    parser.add_argument("--parts", nargs="*", default=list(PARTS))
    parser.add_argument("--whole", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    model = load_model("resnet18", weights=given.weights).to(pick_device(None))
    rows = []
    for name in [*given.parts, *(["standard"] if given.whole else [])]:
        parts = PARTS if name == "standard" else (name,)
        attacks = [f"autoattack:attacks={'+'.join(parts)}", fork_attack(model, parts)]
        reports = [
            cw.evaluate(model, "cifar10", attacks=[attack], eps="8/255", per_class=given.per_class)
            for attack in attacks
        ]
        rows.append(row(name, reports))
        print(rows[-1], flush=True)
    print(f"\n{'':10} {'robust, %':^13} {'same, %':>8} {'ours only +/-':^13}  class, most/least {'seconds':^17}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
