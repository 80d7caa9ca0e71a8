"""One adapter per library: a function from its attack object to ``search(call, eps)``. No library is imported here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor, nn

from classwise.attacks.adapters.describe import is_from, norm_text, parts_of, radius_text, settings_of, text_of
from classwise.core.errors import InputError
from classwise.core.types import AttackCall
from classwise.storage.files import digest

Search = Callable[[AttackCall, float | None], Any]
"""From a call and a radius to images, as a tensor or an array."""
EXPECTED = "expected a spec like 'pgd:steps=20', an attack object, or a function attack(model, x, y)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An attack object as a function, with its name and settings."""

    name: str
    """Name in reports."""
    search: Search
    eps: str | None
    norm: str | None
    settings: str
    """Its other settings, without memory addresses."""
    parts: Callable[[], list[Any]] = list
    """The library's objects it consists of, the attack first. A call may change and then restores them."""
    check: Callable[[nn.Module], None] = lambda model: None
    """Raises an error if the object cannot attack this model."""
    hooked: Callable[[nn.Module], nn.Module] = lambda model: model
    """The module through which the library calls the model; one other than the model returns a list, logits last."""


def adapt(thing: Any) -> Adapter:
    """Return the adapter of an attack object or a function."""
    if isinstance(thing, type):
        raise InputError(f"{thing.__name__} is not an attack: {EXPECTED}; it is a class: pass {thing.__name__}(...)")
    for package, methods, adapter in ADAPTERS:
        if is_from(thing, package) and any(hasattr(thing, method) for method in methods):
            return adapter(thing, package)
    return adapt_function(thing)


def adapt_torchattacks(attack: Any, package: str) -> Adapter:
    """Adapt an attack of torchattacks. Most classes state their norm in their docstring only."""

    def norm_of(part: Any) -> Any:
        stated = re.search(r"Distance Measure : (\w+)\s*\n", inspect.getdoc(type(part)) or "")
        return getattr(part, "norm", None) or (stated and stated[1])

    def search(call: AttackCall, eps: float | None) -> Any:
        configure(parts_of(attack, package), device=call.x.device)
        return attack(call.x, labels_of(call, name, targeted=attack.attack_mode == "targeted(label)"))

    name, parts = f"{package}.{type(attack).__name__}", parts_of(attack, package)
    eps = _agreed(parts, lambda part: getattr(part, "eps", None))
    return Adapter(
        search=search,
        check=lambda model: check_model(name, model, attack.model, prepares=attack.normalization_used is not None),
        **_statements(attack, name, package, eps, _agreed(parts, norm_of)),
    )


def adapt_foolbox(attack: Any, package: str) -> Adapter:
    """Adapt an attack of foolbox, which searches the radius of the evaluation."""

    def search(call: AttackCall, eps: float | None) -> Any:
        foolbox = import_module("foolbox")
        if eps is None:
            raise InputError(f"{name} has no radius: set eps of the evaluation, for example eps='8/255'")
        labels, criteria = labels_of(call, name, targeted=call.targets is not None), foolbox.criteria
        criterion = criteria.Misclassification if call.targets is None else criteria.TargetedMisclassification
        model = foolbox.PyTorchModel(call.model, bounds=(0, 1), device=call.x.device)
        _, clipped, _ = attack(model, call.x, criterion(labels), epsilons=eps)
        return clipped

    name, norm = f"foolbox.{type(attack).__name__}", None
    with suppress(AttributeError, ValueError):  # an attack without a distance, or with an unset one
        norm = attack.distance.p
    return Adapter(search=search, **_statements(attack, name, package, None, norm))


def adapt_art(attack: Any, package: str) -> Adapter:
    """Adapt an attack of ART, the Adversarial Robustness Toolbox."""

    def search(call: AttackCall, eps: float | None) -> Any:
        labels = labels_of(call, name, targeted=bool(getattr(attack, "targeted", False)))
        return attack.generate(call.x.cpu().numpy(), labels.cpu().numpy())

    def check(model: nn.Module) -> None:
        steps = attack.estimator.preprocessing_operations
        prepares = not all(np.all(getattr(step, "mean", 1) == 0) and np.all(step.std == 1) for step in steps)
        check_model(name, model, getattr(attack.estimator, "model", None), prepares=prepares)

    name = f"art.{type(attack).__name__}"
    return Adapter(
        search=search,
        check=check,
        # ART calls the layers of a Sequential one by one, which skips hooks on the model itself.
        hooked=lambda model: attack.estimator._model,
        **_statements(attack, name, package, getattr(attack, "eps", None), getattr(attack, "norm", None)),
    )


def adapt_autoattack(attack: Any, package: str) -> Adapter:
    """Adapt AutoAttack, the original or the package pyautoattack, or one of its attacks."""

    def search(call: AttackCall, eps: float | None) -> Any:
        # The module instead of its bound method ``forward``, which skips hooks.
        configure(parts_of(attack, package), device=call.x.device, verbose=False, model=call.model, predict=call.model)
        x, labels = call.x.float(), labels_of(call, name, targeted=False)  # it works in single precision only
        if not hasattr(attack, "run_standard_evaluation"):
            return attack.perturb(x, labels)
        evaluate = attack.run_standard_evaluation
        size = "bs" if "bs" in inspect.signature(evaluate).parameters else "batch_size"
        found = evaluate(x, labels, **{size: len(x)})
        return found[0] if isinstance(found, tuple) else found

    def check(model: nn.Module) -> None:
        found = getattr(attack, "model", getattr(attack, "predict", None))
        check_model(name, model, getattr(found, "__self__", found))

    name = f"{package}.{type(attack).__name__}"
    eps = getattr(attack, "epsilon", getattr(attack, "eps", None))
    return Adapter(search=search, check=check, **_statements(attack, name, package, eps, getattr(attack, "norm", None)))


def adapt_function(function: Any) -> Adapter:
    """Adapt a function ``attack(model, x, y)``, which receives further arguments if it has parameters for them."""
    if not callable(function):
        shown = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(function).split()))
        raise InputError(f"{shown if len(shown) <= 80 else f'{shown[:80]} ...'} is not an attack: {EXPECTED}")
    named = function
    while isinstance(named, partial):
        named = named.func
    name = str(getattr(named, "__name__", type(named).__name__)).strip("<>")
    accepted = _further_parameters(function)
    if (signature := _signature(function)) is not None:
        try:
            signature.bind(None, None, None, **dict.fromkeys(accepted & {"eps", "generator"}))
        except TypeError:
            raise InputError(
                f"{name} is not an attack: expected a function attack(model, x, y), but its parameters are {signature}"
            ) from None

    def search(call: AttackCall, eps: float | None) -> Any:
        further: dict[str, Any] = {"generator": call.generator} if "generator" in accepted else {}
        if "eps" in accepted:
            if eps is None:
                raise InputError(f"{name} has no radius: set eps of the evaluation, for example eps='8/255'")
            further["eps"] = eps
        for key, value in (("eps_scale", call.eps_scale), ("targets", call.targets)):
            if value is not None and key not in accepted:
                raise InputError(f"{name} needs a parameter {key!r} for this call")
            if value is not None:
                further[key] = value
        return function(call.model, call.x, call.y, **further)

    stated = function.keywords if isinstance(function, partial) else getattr(function, "__dict__", {})
    settings = _function_settings(function)
    return Adapter(search=search, **_described(name, stated.get("eps"), stated.get("norm"), settings))


ADAPTERS: tuple[tuple[str, tuple[str, ...], Callable[[Any, str], Adapter]], ...] = (
    ("torchattacks", ("get_logits",), adapt_torchattacks),
    ("foolbox.attacks", ("repeat",), adapt_foolbox),
    ("art.attacks", ("generate",), adapt_art),
    ("autoattack", ("run_standard_evaluation", "perturb"), adapt_autoattack),
    ("pyautoattack", ("run_standard_evaluation", "perturb"), adapt_autoattack),
)
"""Package of the attacks, methods of which an attack has one, and the adapter."""


def configure(parts: list[Any], **settings: Any) -> None:
    """Change settings of a library's objects, each where it has them."""
    for part in parts:
        vars(part).update({key: value for key, value in settings.items() if key in vars(part)})


def labels_of(call: AttackCall, name: str, *, targeted: bool) -> Tensor:
    """Return the labels to pass to a library: the targets for a targeted attack, else the true labels."""
    if call.eps_scale is not None:
        raise InputError(f"{name} has one radius for all examples and does not support eps_scale")
    if targeted and call.targets is None:
        raise InputError(f"{name} is targeted and needs targets")
    if not targeted and call.targets is not None:
        raise InputError(f"{name} does not support targets")
    return call.targets if targeted and call.targets is not None else call.y


def check_model(name: str, model: nn.Module, own: Any, *, prepares: bool = False) -> None:
    """Raise an error if an object was built on another model than the attacked one, or preprocesses images."""
    if own is not model:
        raise InputError(
            f"{name} was built on a different model: build it on the attacked module "
            "(to test images computed on another model, use the attack 'transfer')"
        )
    if prepares:
        raise InputError(f"{name} preprocesses images: leave normalization to the model, which takes images in [0, 1]")


def _statements(attack: Any, name: str, package: str, eps: Any, norm: Any) -> dict[str, Any]:
    """The fields of an adapter that describe an object of a library."""
    described = _described(name, eps, norm, settings_of(attack), package)
    return described | {"parts": lambda: parts_of(attack, package)}


def _described(name: str, eps: Any, norm: Any, settings: Mapping[str, Any], package: str = "") -> dict[str, Any]:
    """The fields of an adapter that describe it. A stated threat is not repeated among the settings."""
    eps, norm = radius_text(eps), norm_text(norm)
    stated = {*(("eps", "epsilon") if eps else ()), *(("norm",) if norm else ())}
    others = {key: value for key, value in settings.items() if key not in stated}
    return {"name": name, "eps": eps, "norm": norm, "settings": text_of(others, package)}


def _agreed(parts: list[Any], read: Callable[[Any], Any]) -> Any:
    """Return the value an object states, or else the one that all of its parts with a value agree on."""
    for some in (parts[:1], parts):
        values = {value for part in some if isinstance(value := read(part), Real | str)}
        if len(values) == 1:
            return values.pop()
    return None


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # some functions written in C have none
        return None


def _further_parameters(function: Any) -> set[str]:
    """Return the names of the parameters after the model, the images and the labels."""
    signature = _signature(function)
    parameters = [] if signature is None else list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    return {p.name for p in parameters if p not in positional and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _function_settings(function: Any) -> dict[str, Any]:
    """Return what distinguishes functions of the same name: their code, closures, bound objects and arguments."""
    if isinstance(function, partial):
        given = {str(position): value for position, value in enumerate(function.args)} | function.keywords
        return _function_settings(function.func) | given
    code = getattr(function, "__func__", function)
    settings: dict[str, Any] = {}
    owner = function
    if inspect.isfunction(code):
        settings |= inspect.getclosurevars(code).nonlocals
        owner = getattr(function, "__self__", None)
    if owner is not None:
        settings |= settings_of(owner)
    with suppress(OSError, TypeError):  # defined interactively, or not in Python
        settings["code"] = digest(inspect.getsource(code if inspect.isfunction(code) else type(owner)))[:8]
    return settings
