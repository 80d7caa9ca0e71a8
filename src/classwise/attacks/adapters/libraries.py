"""How each library is asked, and what its objects say of themselves. None is imported before it is needed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from classwise.attacks.adapters.describe import parts_of, settings_of
from classwise.attacks.adapters.question import Library, Question
from classwise.core.errors import InputError
from classwise.storage.files import digest

if TYPE_CHECKING:
    from classwise.attacks.adapters.foreign import ForeignAttack

EXPECTED = "expected a spec like 'pgd:steps=20', an attack object, or a function attack(model, x, y)"


# ---- torchattacks


def _ask_torchattacks(own: ForeignAttack, question: Question) -> Any:
    question.set(device=question.x.device)
    question.seed_what_has_none()
    return own.attack(question.x, question.labels(own.name, targeted=own.attack.attack_mode == "targeted(label)"))


def _stated_by_torchattacks(attack: Any) -> tuple[Any, Any]:
    """Of an ensemble, what its members agree on. Most classes tell their norm in their documentation only."""

    def norm(part: Any) -> Any:
        told = re.search(r"Distance Measure : (\w+)\s*\n", inspect.getdoc(type(part)) or "")
        return getattr(part, "norm", None) or (told and told[1])

    parts = parts_of(attack, "torchattacks")
    return _agreed(parts, lambda part: getattr(part, "eps", None)), _agreed(parts, norm)


def _agreed(parts: list[Any], read: Callable[[Any], Any]) -> Any:
    """What an object says, or else what all of its parts that say something say."""
    for some in (parts[:1], parts):
        said = {value for part in some if isinstance(value := read(part), Real | str)}
        if len(said) == 1:
            return said.pop()
    return None


# ---- foolbox


def _ask_foolbox(own: ForeignAttack, question: Question) -> Any:
    foolbox = import_module("foolbox")
    labels = question.labels(own.name, targeted=question.targets is not None)
    criteria = foolbox.criteria
    aim = criteria.Misclassification if question.targets is None else criteria.TargetedMisclassification
    model = foolbox.PyTorchModel(question.model, bounds=(0, 1), device=question.x.device)
    _, clipped, _ = own.attack(model, question.x, aim(labels), epsilons=own.threat.eps)
    return clipped


def _stated_by_foolbox(attack: Any) -> tuple[Any, Any]:
    try:
        return None, attack.distance.p
    except (AttributeError, ValueError):  # an attack without a distance, or one that was not told which
        return None, None


# ---- ART


def _ask_art(own: ForeignAttack, question: Question) -> Any:
    labels = question.labels(own.name, targeted=bool(getattr(own.attack, "targeted", False)))
    return own.attack.generate(question.x.cpu().numpy(), labels.cpu().numpy())


def _art_preprocesses(attack: Any) -> bool:
    steps = attack.estimator.preprocessing_operations
    return not all(np.all(getattr(step, "mean", 1) == 0) and np.all(step.std == 1) for step in steps)


# ---- AutoAttack, the original and the fork on PyPI


def _ask_autoattack(own: ForeignAttack, question: Question) -> Any:
    # The module in place of its bound method ``forward``, which would pass our hooks by.
    question.set(device=question.x.device, verbose=False, model=question.model, predict=question.model)
    question.seed_what_has_none()
    x, labels = question.x.float(), question.labels(own.name, targeted=False)  # they work in single precision only
    if not hasattr(own.attack, "run_standard_evaluation"):
        return own.attack.perturb(x, labels)
    evaluate = own.attack.run_standard_evaluation
    size = "bs" if "bs" in inspect.signature(evaluate).parameters else "batch_size"
    found = evaluate(x, labels, **{size: len(x)})
    return found[0] if isinstance(found, tuple) else found


def _autoattack_model(attack: Any) -> Any:
    found = getattr(attack, "model", getattr(attack, "predict", None))
    return getattr(found, "__self__", found)


def _stated_by_autoattack(attack: Any) -> tuple[Any, Any]:
    return getattr(attack, "epsilon", getattr(attack, "eps", None)), getattr(attack, "norm", None)


# ---- any function


def _ask_function(own: ForeignAttack, question: Question) -> Any:
    named = _extras(own.attack)
    extras: dict[str, Any] = {"generator": question.generator} if "generator" in named else {}
    if "eps" in named:
        extras["eps"] = own.threat.eps
    for key, value in (("eps_scale", question.eps_scale), ("targets", question.targets)):
        if value is not None and key not in named:
            raise InputError(f"{own.name} has no parameter {key!r}, which is asked for here")
        if value is not None:
            extras[key] = value
    return own.attack(question.model, question.x, question.y, **extras)


def check_function(thing: Any) -> None:
    """Refuse what cannot be called as an attack."""
    shown = " ".join(repr(thing).split())
    shown = shown if len(shown) <= 80 else f"{shown[:80]} ..."
    if not callable(thing):
        raise InputError(f"{shown} is not an attack: {EXPECTED}")
    if (takes := _signature(thing)) is not None:
        try:
            takes.bind(None, None, None, **dict.fromkeys(_extras(thing) & {"eps", "generator"}))
        except TypeError:
            raise InputError(f"{shown} is not an attack: {EXPECTED}; it takes {takes}") from None


def _stated_by_function(thing: Any) -> tuple[Any, Any]:
    settings = thing.keywords if isinstance(thing, partial) else getattr(thing, "__dict__", {})
    return settings.get("eps"), settings.get("norm")


def _signature(thing: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(thing.forward if isinstance(thing, nn.Module) else thing)
    except (TypeError, ValueError):  # some functions written in C have none
        return None


def _extras(thing: Any) -> set[str]:
    """The parameters that a function names beyond the model, the images and the labels."""
    found = _signature(thing)
    parameters = [] if found is None else list(found.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    return {p.name for p in parameters if p not in positional and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def function_name(thing: Any) -> str:
    while isinstance(thing, partial):
        thing = thing.func
    return str(getattr(thing, "__name__", type(thing).__name__)).strip("<>")


def _function_settings(thing: Any) -> dict[str, Any]:
    """What tells two functions of one name apart: their code, what they enclose, and what they are set to."""
    if isinstance(thing, partial):
        given = {str(place): value for place, value in enumerate(thing.args)} | thing.keywords
        return _function_settings(thing.func) | given
    function = getattr(thing, "__func__", thing)
    settings: dict[str, Any] = {}
    if inspect.isfunction(function):
        settings |= inspect.getclosurevars(function).nonlocals
        thing = getattr(thing, "__self__", None)
    if thing is not None:
        settings |= settings_of(thing)
    with suppress(OSError, TypeError):  # typed into a console, or not written in Python
        settings["code"] = digest(inspect.getsource(function if inspect.isfunction(function) else type(thing)))[:8]
    return settings


# ---- all of them

FUNCTION = Library(
    name="",
    package="",
    methods=(),
    ask=_ask_function,
    stated=_stated_by_function,
    settings=_function_settings,
)
LIBRARIES = (
    Library(
        name="torchattacks",
        package="torchattacks",
        methods=("get_logits",),
        ask=_ask_torchattacks,
        stated=_stated_by_torchattacks,
        built_on=lambda attack: attack.model,
        prepares=lambda attack: attack.normalization_used is not None,
    ),
    Library(
        name="foolbox",
        package="foolbox.attacks",
        methods=("repeat",),
        ask=_ask_foolbox,
        stated=_stated_by_foolbox,
    ),
    Library(
        name="art",
        package="art.attacks",
        methods=("generate",),
        ask=_ask_art,
        stated=lambda attack: (getattr(attack, "eps", None), getattr(attack, "norm", None)),
        built_on=lambda attack: getattr(attack.estimator, "model", None),
        prepares=_art_preprocesses,
        # Of a Sequential ART calls the layers one by one, so hooks on the model itself would not be met.
        entrance=lambda attack, model: attack.estimator._model,
    ),
    *(
        Library(
            name=name,
            package=name,
            methods=("run_standard_evaluation", "perturb"),
            ask=_ask_autoattack,
            stated=_stated_by_autoattack,
            built_on=_autoattack_model,
        )
        for name in ("autoattack", "pyautoattack")
    ),
)
