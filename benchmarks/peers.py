"""The same attacks in other libraries, through their public interfaces. Each library is imported on first use.

A peer is a function ``attack(model, x, y, threat)`` that returns the attacked images. The model is in evaluation mode
and its parameters require gradients, so the time includes gradients of the weights if a library computes them.
"""

# B batch, N images

from __future__ import annotations

import importlib.metadata
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.attacks import ATTACKS, PGD, AutoAttack
from classwise.attacks.adapters.call import reproducible
from classwise.core.threat import Threat

Attack = Callable[[nn.Module, Tensor, Tensor, Threat], Tensor]
TARGETS = 9
"""Target classes of the targeted attacks in the standard ensemble."""
DISTRIBUTIONS = {"art": "adversarial-robustness-toolbox"}
"""Package name to the name it is distributed under, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Our attack, whose settings are passed to the peers, and further arguments of a library."""

    attack: Any
    num_classes: int
    batch_size: int
    seed: int


def peers_of(settings: Settings) -> tuple[dict[str, Attack], list[str]]:
    """Return every library that has this attack, and one line for each that is left out."""
    names = {kind: name for name, kind in ATTACKS.items()}
    known = PEERS.get(names.get(type(settings.attack), ""), {})
    found: dict[str, Attack] = {}
    notes = [] if known else [f"no peer is known for {type(settings.attack).__name__}"]
    for name, attack in known.items():
        if find_spec(name) is None:
            notes.append(f"{name} is left out: not installed")
        elif isinstance(settings.attack, PGD) and not _is_plain(settings.attack):
            notes.append(
                f"{name} is left out: its PGD supports only untargeted cross-entropy, no restarts, "
                "and a zero or uniform start"
            )
        else:
            found[name] = partial(_called, attack, settings)
    return found, notes


def version_of(name: str) -> str | None:
    """Return the installed version of a library."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_plain(attack: PGD) -> bool:
    common = PGD(eps=attack.eps, norm=attack.norm, steps=attack.steps, step_size=attack.step_size, start=attack.start)
    return attack == common and attack.start != "gaussian"


def _called(
    attack: Callable[..., Tensor], settings: Settings, model: nn.Module, x: Tensor, y: Tensor, threat: Threat
) -> Tensor:
    """Call a library without its output, with the same random state every time."""
    with _quiet(), reproducible(settings.seed, x.device):
        return attack(model, x, y, threat, settings).detach()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings, logs and prints of a library."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _step_size(attack: PGD, threat: Threat) -> float:
    return attack.step_size if attack.step_size is not None else 2.5 * threat.eps / attack.steps


def _torchattacks_pgd(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, settings: Settings) -> Tensor:
    library, ours = import_module("torchattacks"), settings.attack
    kind = library.PGDL2 if threat.norm == "L2" else library.PGD
    attack = kind(
        model,
        eps=threat.eps,
        alpha=_step_size(ours, threat),
        steps=ours.steps,
        random_start=ours.start == "uniform",
    )
    return _in_batches(attack, x, y, settings.batch_size)


def _foolbox_pgd(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, settings: Settings) -> Tensor:
    library, ours = import_module("foolbox"), settings.attack
    kind = library.attacks.L2PGD if threat.norm == "L2" else library.attacks.LinfPGD
    attack = kind(abs_stepsize=_step_size(ours, threat), steps=ours.steps, random_start=ours.start == "uniform")
    wrapped = library.PyTorchModel(model, bounds=(0, 1), device=x.device)
    # Not the public call, which would also check its results.
    return _in_batches(lambda x, y: attack.run(wrapped, x, y, epsilon=threat.eps), x, y, settings.batch_size)


def _art_pgd(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, settings: Settings) -> Tensor:
    classifier = import_module("art.estimators.classification").PyTorchClassifier(
        model=model,
        loss=nn.CrossEntropyLoss(),
        input_shape=tuple(x.shape[1:]),
        nb_classes=settings.num_classes,
        clip_values=(0, 1),
        device_type="gpu" if x.device.type == "cuda" else "cpu",
    )
    attack = import_module("art.attacks.evasion").ProjectedGradientDescentPyTorch(
        classifier,
        norm=2 if threat.norm == "L2" else np.inf,
        eps=threat.eps,
        eps_step=_step_size(settings.attack, threat),
        max_iter=settings.attack.steps,
        num_random_init=int(settings.attack.start == "uniform"),
        batch_size=settings.batch_size,
        verbose=False,
    )
    return torch.from_numpy(attack.generate(x.cpu().numpy(), y.cpu().numpy())).to(x)


def _in_batches(attack: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor, size: int) -> Tensor:
    return torch.cat([attack(*batch) for batch in zip(torch.split(x, size), torch.split(y, size), strict=True)])


def _ensemble(
    library: str,
    size: str,
    extras: Mapping[str, Any],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    settings: Settings,
) -> Tensor:
    """Run AutoAttack by its authors, or its fork on PyPI, with our budget."""
    ours = settings.attack if isinstance(settings.attack, AutoAttack) else AutoAttack()
    attack = import_module(library).AutoAttack(
        model,
        norm=threat.norm,
        eps=threat.eps,
        seed=settings.seed,
        version=ours.version,
        device=x.device,
        **extras,
    )
    attack.attacks_to_run = list(ours.names)
    for part in (attack.apgd, attack.apgd_targeted, attack.fab):
        part.n_iter = ours.steps
    for part in (attack.apgd_targeted, attack.fab):
        part.n_target_classes = min(TARGETS, settings.num_classes - 1)
    attack.square.n_queries = ours.queries
    found = attack.run_standard_evaluation(x, y, **{size: settings.batch_size})
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


_ENSEMBLES: Mapping[str, Callable[..., Tensor]] = {
    "pyautoattack": partial(_ensemble, "pyautoattack", "batch_size", {}),
    "autoattack": partial(_ensemble, "autoattack", "bs", {"verbose": False}),
}
PEERS: Mapping[str, Mapping[str, Callable[..., Tensor]]] = {
    "pgd": {"torchattacks": _torchattacks_pgd, "foolbox": _foolbox_pgd, "art": _art_pgd},
    "autoattack": _ENSEMBLES,
    "fast": _ENSEMBLES,
}
"""Attack to library to its function. ``fast`` reproduces the verdicts of the ensemble, so the ensemble is its peer."""
