"""The same attack by other libraries, called the way their users call them. None is imported before it is asked for.

Each is given the model as its users would have it: in evaluation mode, with parameters that ask for gradients. What it
does with them (some compute the gradients of the weights at every step) is part of what it costs.
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
from classwise.attacks.base import AnyAttack
from classwise.core.errors import InputError, one_line
from classwise.core.threat import Threat

Search = Callable[[Tensor, Tensor], Tensor]
"""Images (N, C, H, W) and labels (N,) to attacked images, all of them."""
TARGETS = 9
"""Classes that the targeted attacks of the standard ensemble aim at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a peer is to do."""

    model: nn.Module
    """Answers with plain logits."""
    attack: AnyAttack
    threat: Threat
    num_classes: int
    shape: tuple[int, ...]
    """Of one image."""
    batch_size: int
    device: torch.device
    seed: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library, ready to attack."""

    name: str
    version: str | None
    search: Search


def peers_of(asked: Asked) -> tuple[list[Peer], list[str]]:
    """Everybody who has this attack, and a line for each who cannot take part."""
    registered: dict[type[AnyAttack], str] = {kind: name for name, kind in ATTACKS.items()}
    makers = PEERS.get(registered.get(type(asked.attack), ""), {})
    found, left_out = [], [] if makers else [f"no peer is known for {type(asked.attack).__name__}"]
    for name, make in makers.items():
        try:
            if find_spec(name) is None:
                raise InputError("not installed")
            with _quiet():
                search = make(asked)
        except InputError as error:
            left_out.append(f"{name} is left out: {error}")
        except Exception as error:  # a stranger's code may raise anything
            left_out.append(f"{name} is left out: {one_line(error, 120)}")
        else:
            found.append(Peer(name, _version(name), partial(_search, search, asked)))
    return found, left_out


def _search(search: Search, asked: Asked, x: Tensor, y: Tensor) -> Tensor:
    """Let a peer work: without its words, from the same random state every time."""
    with _quiet(), reproducible(asked.seed, asked.device):
        return search(x, y).detach()


@contextmanager
def _quiet() -> Iterator[None]:
    """The warnings, logs and prints of others are theirs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return None


DISTRIBUTIONS = {"art": "adversarial-robustness-toolbox"}


# ---- PGD


@dataclass(frozen=True, slots=True)
class _Walk:
    """The settings that all versions of PGD share."""

    eps: float
    step_size: float
    steps: int
    random: bool
    euclidean: bool


def _walk(asked: Asked) -> _Walk:
    attack = asked.attack
    assert isinstance(attack, PGD)
    common = PGD(eps=attack.eps, norm=attack.norm, steps=attack.steps, step_size=attack.step_size, start=attack.start)
    if attack != common or attack.start == "gaussian":
        raise InputError(
            "its PGD is untargeted, on cross-entropy, without restarts, with a start that is zero or uniform"
        )
    return _Walk(
        eps=asked.threat.eps,
        step_size=attack.step_size if attack.step_size is not None else 2.5 * asked.threat.eps / attack.steps,
        steps=attack.steps,
        random=attack.start == "uniform",
        euclidean=asked.threat.norm == "L2",
    )


def _pgd_of_torchattacks(asked: Asked) -> Search:
    library, walk = import_module("torchattacks"), _walk(asked)
    kind = library.PGDL2 if walk.euclidean else library.PGD
    attack = kind(asked.model, eps=walk.eps, alpha=walk.step_size, steps=walk.steps, random_start=walk.random)
    return _in_batches(attack, asked.batch_size)


def _pgd_of_foolbox(asked: Asked) -> Search:
    library, walk = import_module("foolbox"), _walk(asked)
    kind = library.attacks.L2PGD if walk.euclidean else library.attacks.LinfPGD
    attack = kind(abs_stepsize=walk.step_size, steps=walk.steps, random_start=walk.random)
    model = library.PyTorchModel(asked.model, bounds=(0, 1), device=asked.device)
    # The attack alone; a call of the object would judge its results too, which is done here for everybody alike.
    return _in_batches(lambda x, y: attack.run(model, x, y, epsilon=walk.eps), asked.batch_size)


def _pgd_of_art(asked: Asked) -> Search:
    walk = _walk(asked)
    classifier = import_module("art.estimators.classification").PyTorchClassifier(
        model=asked.model,
        loss=nn.CrossEntropyLoss(),
        input_shape=asked.shape,
        nb_classes=asked.num_classes,
        clip_values=(0, 1),
        device_type="gpu" if asked.device.type == "cuda" else "cpu",
    )
    attack = import_module("art.attacks.evasion").ProjectedGradientDescentPyTorch(
        classifier,
        norm=2 if walk.euclidean else np.inf,
        eps=walk.eps,
        eps_step=walk.step_size,
        max_iter=walk.steps,
        num_random_init=int(walk.random),
        batch_size=asked.batch_size,
        verbose=False,
    )

    def search(x: Tensor, y: Tensor) -> Tensor:
        return torch.from_numpy(attack.generate(x.cpu().numpy(), y.cpu().numpy())).to(x)

    return search


def _in_batches(attack: Callable[[Tensor, Tensor], Any], size: int) -> Search:
    def search(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([attack(*batch) for batch in zip(torch.split(x, size), torch.split(y, size), strict=True)])

    return search


# ---- the standard ensemble: the authors' code, and the fork on PyPI


def _ensemble(library: str, size: str, extras: Mapping[str, Any], asked: Asked) -> Search:
    settings = asked.attack if isinstance(asked.attack, AutoAttack) else AutoAttack()
    attack = import_module(library).AutoAttack(
        asked.model,
        norm=asked.threat.norm,
        eps=asked.threat.eps,
        seed=asked.seed,
        version=settings.version,
        device=asked.device,
        **extras,
    )
    attack.attacks_to_run = list(settings.names)
    for part in (attack.apgd, attack.apgd_targeted, attack.fab):
        part.n_iter = settings.steps
    for part in (attack.apgd_targeted, attack.fab):
        part.n_target_classes = min(TARGETS, asked.num_classes - 1)
    attack.square.n_queries = settings.queries

    def search(x: Tensor, y: Tensor) -> Tensor:
        found = attack.run_standard_evaluation(x, y, **{size: asked.batch_size})
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    return search


ENSEMBLES: Mapping[str, Callable[[Asked], Search]] = {
    "pyautoattack": partial(_ensemble, "pyautoattack", "batch_size", {}),
    "autoattack": partial(_ensemble, "autoattack", "bs", {"verbose": False}),
}
PEERS: Mapping[str, Mapping[str, Callable[[Asked], Search]]] = {
    "pgd": {"torchattacks": _pgd_of_torchattacks, "foolbox": _pgd_of_foolbox, "art": _pgd_of_art},
    "autoattack": ENSEMBLES,
    "fast": ENSEMBLES,
}
"""Attack to library to how it is asked. ``fast`` claims the verdicts of the ensemble, so that is its peer."""
