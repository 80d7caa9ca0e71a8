"""Attacks of other libraries, and plain functions, where an attack is expected.

``as_attack`` takes an object of torchattacks, foolbox, ART (the Adversarial Robustness Toolbox) or AutoAttack, or any
function ``attack(model, x, y)``. None of the libraries is imported here: an object is known by the module of its class.

* What a library returns is handed on untouched, not projected into the ball: whoever calls judges it, and an
  evaluation counts what lies outside as rejected.
* torchattacks, ART and AutoAttack objects are built on a model, which must be the very module that is attacked.
* The model is asked through hooks that are there for the call alone. They count passes, give the library plain logits
  in the type of its images, and bring the images to the type of the model.
* These libraries draw from the global random states. Those are seeded for the call and given back, so the same batch
  gives the same result; but unlike our own attacks the result of an example may depend on the batch it is in.
"""

# B batch, K classes, N images in one pass of the library

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from classwise.attacks.base import BallAttack
from classwise.errors import InputError
from classwise.files import digest
from classwise.forward import device_of, dtype_of, frozen, logits_of
from classwise.noise import ExampleNoise, Randomness
from classwise.spec import parse_number
from classwise.threat import Threat
from classwise.types import Effort

EXPECTED = "expected a spec like 'pgd:steps=20', an attack object, or a function attack(model, x, y)"
SAME_RADIUS = 1e-6
"""Relative difference up to which two radii are one: a library may hold 8/255 in single precision."""


def as_attack(thing: Any) -> BallAttack | ForeignAttack:
    """Whatever can attack a model, as an attack.

    A function is called as ``attack(model, x, y)`` on images in [0, 1] and returns images; ``model`` answers with plain
    logits. Where its parameters are so named it is also given ``eps``, the radius of the evaluation, and ``generator``,
    a torch generator on the model's device.
    """
    if isinstance(thing, BallAttack | ForeignAttack):
        return thing
    if isinstance(thing, type):
        raise InputError(f"{thing.__name__} is not an attack: {EXPECTED}; it is a class: pass {thing.__name__}(...)")
    library = next((one for one in LIBRARIES if one.made(thing)), FUNCTION)
    if library is FUNCTION:
        _check_function(thing)
    stated = library.stated(thing)
    eps, norm = _radius_text(stated[0]), _norm_text(stated[1])
    told = {*(("eps", "epsilon") if eps else ()), *(("norm",) if norm else ())}
    settings = {key: value for key, value in library.settings(thing).items() if key not in told}
    return ForeignAttack(attack=thing, library=library, settings=_text(settings, library.package), eps=eps, norm=norm)


@dataclass(frozen=True, kw_only=True, repr=False)
class ForeignAttack:
    """An attack that is not ours. Its repr is its identity in reports.

    The model is given back as it was: modes, flags, buffers, gradients and hooks; and so is a library's object, which
    may keep notes of its last run in itself.
    """

    black_box: ClassVar[bool] = False
    """Unknown; a claim is made of our own attacks only."""

    attack: Any
    library: _Library
    settings: str
    """The plain settings of the object when it came in, without addresses."""
    eps: str | None = None
    norm: str | None = None
    """What the object itself says, or the evaluation; None where nobody has said it yet."""

    @property
    def name(self) -> str:
        """What a report calls it: ``torchattacks.PGD``, or the function's own name."""
        if self.library is FUNCTION:
            return _function_name(self.attack)
        return f"{self.library.name}.{type(self.attack).__name__}"

    def __repr__(self) -> str:
        threat = _text({"eps": self.eps, "norm": self.norm})
        return f"{self.name}({', '.join(filter(None, (threat, self.settings)))})"

    @property
    def threat(self) -> Threat:
        """The ball it is to search."""
        if self.eps is None:
            raise InputError(f"{self.name} has no radius: give the evaluation eps, for example eps='8/255'")
        return Threat.parse(self.eps, self.norm or "Linf")

    def within(self, threat: Threat) -> Self:
        """The same attack for this threat. A norm or radius that its object states must be the same."""
        for what, own, wanted in (("norm", self.norm, threat.norm), ("eps", self.eps, threat.text)):
            if own is not None and own != wanted and not (what == "eps" and _same_radius(own, threat.eps)):
                raise InputError(f"{self.name} asks for {what} = {own}, elsewhere it is {wanted}: give it once")
        return replace(self, eps=threat.text, norm=threat.norm)

    def check(self, model: nn.Module) -> None:
        """Refuse an object that would search on another model, or on images that are not in [0, 1]."""
        if self.library.built_on is None:
            return
        if self.library.built_on(self.attack) is not model:
            raise InputError(
                f"{self.name} was built on another model than the one it is to attack: build it on this very module "
                "(what images made on another model do to this one is a question for 'transfer')"
            )
        if self.library.prepares(self.attack):
            raise InputError(
                f"{self.name} was told to preprocess images, but here they are in [0, 1] and the model does that itself"
            )

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        eps_scale: Tensor | None = None,
        generator: Randomness = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """What the other side makes of ``x`` (B, C, H, W) in [0, 1] with labels ``y`` (B,), wherever that lies.

        ``generator`` seeds torch's, numpy's and Python's global states for the call; None leaves them as they are.
        """
        return self.run(model, x, y, eps_scale=eps_scale, generator=generator, targets=targets)[0]

    def run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        eps_scale: Tensor | None = None,
        generator: Randomness = None,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Effort]:
        """The same as a call, with the passes through the model that each example took.

        A batch of the library's as large as ours is counted as it stands; of any other size, every image counts for
        the example it is nearest to, since libraries drop the examples they have broken.
        """
        if len(x) != len(y):
            raise InputError(f"{len(x)} images need as many labels, got {len(y)}")
        self.check(model)
        device, seed = device_of(model), _seed(generator)
        entrance = self.library.entrance(self.attack, model)
        parts = [] if self.library is FUNCTION else _parts(self.attack, self.library.package)
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            # Clones are normal tensors even where the caller works in inference mode.
            question = _Question(
                model=model,
                x=x.detach().clone().to(device),
                y=y.clone().to(device),
                eps_scale=None if eps_scale is None else eps_scale.clone().to(device),
                targets=None if targets is None else targets.clone().to(device),
                generator=_torch_generator(generator, seed, device),
                seed=seed,
                parts=parts,
            )
            meter = _Meter(question.x, dtype_of(model), wrapped=entrance is not model)
            if not len(x):
                return question.x.to(x.device), meter.effort
            for context in (frozen(entrance), _untouched(model), _reproducible(seed, device), _kept(parts)):
                stack.enter_context(context)
            with meter.on(entrance):
                found = self.library.ask(self, question)
            found = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
            if not isinstance(found, Tensor) or found.shape != x.shape:
                what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise InputError(f"{self.name} returned {what}; expected images of shape {tuple(x.shape)}")
            return found.detach().to(x), meter.effort

    def variants(self) -> Mapping[str, ForeignAttack]:
        """None that we know of."""
        return {}

    def stages(self, num_classes: int) -> Mapping[str, ForeignAttack]:
        """None that we know of."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One batch, put to another library."""

    model: nn.Module
    x: Tensor
    y: Tensor
    eps_scale: Tensor | None
    targets: Tensor | None
    generator: torch.Generator | None
    seed: int | None
    parts: list[Any]
    """The library's objects that work on it; they may be set for the call, and are given back as they were."""

    def labels(self, name: str, *, targeted: bool) -> Tensor:
        """The labels to give to an attack that reads them as its targets, or not."""
        if self.eps_scale is not None:
            raise InputError(f"{name} has one radius for all examples, and cannot stretch it for some")
        if targeted and self.targets is None:
            raise InputError(f"{name} takes the labels it is given for its targets, and there are no targets")
        if not targeted and self.targets is not None:
            raise InputError(f"{name} cannot be told which classes to aim at")
        return self.targets if targeted and self.targets is not None else self.y

    def set(self, **settings: Any) -> None:
        """Set the library's objects for this call, each where it has such a setting."""
        for part in self.parts:
            vars(part).update({key: value for key, value in settings.items() if key in vars(part)})

    def seed_what_has_none(self) -> None:
        """An object made with seed=None takes the time of day for one, and could not be repeated."""
        if self.seed is not None and vars(self.parts[0]).get("seed", 0) is None:
            self.set(seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Library:
    """What there is to know of a library."""

    name: str
    package: str
    """Where its attacks live."""
    methods: tuple[str, ...]
    """An attack of this library has one of these."""
    ask: Callable[[ForeignAttack, _Question], Any]
    stated: Callable[[Any], tuple[Any, Any]]
    """The radius and the norm that an object states."""
    settings: Callable[[Any], dict[str, Any]] = lambda attack: _settings(attack)
    """Whatever else tells two objects of one class apart."""
    built_on: Callable[[Any], Any] | None = None
    """The model an object is bound to, where the library binds them."""
    prepares: Callable[[Any], bool] = lambda attack: False
    """Whether an object was told that images are not what the model takes."""
    entrance: Callable[[Any, nn.Module], nn.Module] = lambda attack, model: model
    """The module through which the library asks the model; one of its own returns a list, with the logits last."""

    def made(self, thing: Any) -> bool:
        """Whether this is one of its attacks."""
        return _is_from(thing, self.package) and any(hasattr(thing, method) for method in self.methods)


# ---- torchattacks


def _ask_torchattacks(own: ForeignAttack, question: _Question) -> Any:
    question.set(device=question.x.device)
    question.seed_what_has_none()
    return own.attack(question.x, question.labels(own.name, targeted=own.attack.attack_mode == "targeted(label)"))


def _stated_by_torchattacks(attack: Any) -> tuple[Any, Any]:
    """Of an ensemble, what its members agree on. Most classes tell their norm in their documentation only."""

    def norm(part: Any) -> Any:
        told = re.search(r"Distance Measure : (\w+)\s*\n", inspect.getdoc(type(part)) or "")
        return getattr(part, "norm", None) or (told and told[1])

    parts = _parts(attack, "torchattacks")
    return _agreed(parts, lambda part: getattr(part, "eps", None)), _agreed(parts, norm)


def _agreed(parts: list[Any], read: Callable[[Any], Any]) -> Any:
    """What an object says, or else what all of its parts that say something say."""
    for some in (parts[:1], parts):
        said = {value for part in some if isinstance(value := read(part), Real | str)}
        if len(said) == 1:
            return said.pop()
    return None


# ---- foolbox


def _ask_foolbox(own: ForeignAttack, question: _Question) -> Any:
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


def _ask_art(own: ForeignAttack, question: _Question) -> Any:
    labels = question.labels(own.name, targeted=bool(getattr(own.attack, "targeted", False)))
    return own.attack.generate(question.x.cpu().numpy(), labels.cpu().numpy())


def _art_preprocesses(attack: Any) -> bool:
    steps = attack.estimator.preprocessing_operations
    return not all(np.all(getattr(step, "mean", 1) == 0) and np.all(step.std == 1) for step in steps)


# ---- AutoAttack, the original and the fork on PyPI


def _ask_autoattack(own: ForeignAttack, question: _Question) -> Any:
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


def _ask_function(own: ForeignAttack, question: _Question) -> Any:
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


def _check_function(thing: Any) -> None:
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


def _function_name(thing: Any) -> str:
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
        settings |= _settings(thing)
    with suppress(OSError, TypeError):  # typed into a console, or not written in Python
        settings["code"] = digest(inspect.getsource(function if inspect.isfunction(function) else type(thing)))[:8]
    return settings


# ---- what objects of strangers are made of


def _is_from(thing: Any, package: str) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(thing).__mro__)


def _parts(thing: Any, package: str) -> list[Any]:
    """An attack object and those of its library that it holds, itself first."""
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif _is_from(value, package) and hasattr(value, "__dict__") and not any(value is part for part in found):
            found.append(value)
            visit(list(vars(value).values()))

    visit(thing)
    return found


NOT_SETTINGS = frozenset({"device", "logger", "model_name", "summary_writer", "supported_mode", "verbose"})
"""Attributes that say nothing about what an attack does."""


def _settings(thing: Any) -> dict[str, Any]:
    names = {name for name in getattr(thing, "__dict__", {}) if not name.startswith("_")}
    names |= set(getattr(thing, "attack_params", ()))  # ART keeps some of its own behind properties
    return {name: getattr(thing, name, None) for name in names - NOT_SETTINGS}


def _text(settings: Mapping[str, Any], package: str = "") -> str:
    texts = {key: text for key, value in settings.items() if (text := _plain(value, package)) is not None}
    return ", ".join(f"{key}={texts[key]}" for key in sorted(texts))


def _plain(value: Any, package: str) -> str | None:
    """A setting as text, or None for what has no short and lasting one: tensors, modules, functions, nothing at all."""
    if isinstance(value, bool | str | BallAttack | ForeignAttack):
        return repr(value)
    if isinstance(value, Real):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, list | tuple | set | frozenset):
        items = [text for item in value if (text := _plain(item, package)) is not None]
        return f"({', '.join(sorted(items) if isinstance(value, set | frozenset) else items)})"
    if isinstance(value, dict):
        return f"{{{_text({str(key): item for key, item in value.items()}, package)}}}"
    if package and _is_from(value, package) and not isinstance(value, nn.Module | type):
        return f"{type(value).__name__}({_text(_settings(value), package)})"
    return None


def _radius_text(value: Any) -> str | None:
    """A radius as one would write it, so that a library's float and our 8/255 are one threat.

    >>> _radius_text(8 / 255), _radius_text(0.5), _radius_text(0.0123456789), _radius_text(None)
    ('8/255', '0.5', '0.0123456789', None)
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    radius = float(value)
    for text in (f"{radius:.6g}", f"{round(radius * 255) if math.isfinite(radius) else 0}/255"):
        if _same_radius(text, radius, 1e-7):
            return text
    return str(radius)


def _same_radius(text: str, radius: float, tolerance: float = SAME_RADIUS) -> bool:
    try:
        return math.isclose(float(parse_number(text)), radius, rel_tol=tolerance)  # type: ignore[arg-type]
    except ValueError:
        return False


def _norm_text(value: Any) -> str | None:
    """The name of a norm.

    >>> [_norm_text(value) for value in (np.inf, "inf", "linf", 2, "L2", 1.0, None, len)]
    ['Linf', 'Linf', 'Linf', 'L2', 'L2', 'L1', None, None]
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        value = f"{float(value):g}"
    if isinstance(value, str) and (found := re.fullmatch(r"[lL]?(inf|\d+(?:\.\d+)?)", value)):
        return f"L{found[1]}"
    return None


# ---- around the call


class _Meter:
    """Hooks on a model that count the images which pass, and hide its type and the form of its answers."""

    def __init__(self, clean: Tensor, dtype: torch.dtype, wrapped: bool) -> None:
        self.centres = clean.flatten(1).float()
        self.dtype, self.wrapped = dtype, wrapped
        self.asked_in = clean.dtype
        # Whole batches are counted on the host, which costs nothing and works under torch.func, the rest by example.
        self.whole = {"forwards": 0, "backwards": 0}
        self.single = Effort.none(len(clean), clean.device)

    @property
    def effort(self) -> Effort:
        """The passes so far."""
        return Effort(**{name: getattr(self.single, name) + count for name, count in self.whole.items()})

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Count while this lasts."""
        # Of the base class: a scripted module honours such hooks, though its own methods refuse them.
        before = nn.Module.register_forward_pre_hook(module, self._enter, prepend=True)
        after = nn.Module.register_forward_hook(module, self._leave)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        images = inputs[0]
        rows = self._rows(images)
        self._count("forwards", rows)
        self.asked_in = images.dtype
        if images.requires_grad and torch.is_grad_enabled():
            # A view of its own for every pass: images asked about twice would else count the second time for both.
            images = images.view_as(images)
            images.register_hook(lambda gradient: self._count("backwards", rows))
        return images.to(self.dtype), *inputs[1:]

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if self.wrapped:
            return [*output[:-1], logits_of(output[-1]).to(self.asked_in)]
        return logits_of(output).to(self.asked_in)

    def _rows(self, images: Tensor) -> Tensor | None:
        """(N,) the example that each image belongs to; None where the batch is ours, as it stands."""
        size = len(self.centres)
        if len(images) == size:
            return None
        if images.shape[1:].numel() != self.centres.shape[1]:  # of another shape, so there is no nearest
            return torch.arange(len(images), device=self.centres.device) % size
        return torch.cdist(images.detach().flatten(1).to(self.centres), self.centres).argmin(1)

    def _count(self, which: str, rows: Tensor | None) -> None:
        if rows is None:
            self.whole[which] += 1
        else:
            getattr(self.single, which).index_add_(0, rows, torch.ones_like(rows))


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """What our own attacks never touch, but a library may: gradients of parameters, and statistics of batch norm."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # batch norm changes its own without a sign
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _kept(parts: list[Any]) -> Iterator[None]:
    """Objects with their attributes given back as they were."""
    before = [(part, dict(vars(part))) for part in parts]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


@contextmanager
def _reproducible(seed: int | None, device: torch.device) -> Iterator[None]:
    """The global random states seeded, and given back as they were."""
    if seed is None:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _seed(randomness: Randomness) -> int | None:
    """One number of 32 bits, the most that numpy takes, from whatever drives an attack."""
    if isinstance(randomness, ExampleNoise):
        parts = randomness.seed, randomness.draws, randomness.index.tolist()
        return int(digest(*map(str, parts))[:8], 16)
    if randomness is None:
        return None
    return int(torch.randint(2**32, (1,), generator=randomness, device=randomness.device))


def _torch_generator(randomness: Randomness, seed: int | None, device: torch.device) -> torch.Generator | None:
    """What a function that draws from a generator is given."""
    if isinstance(randomness, ExampleNoise) and seed is not None:
        return torch.Generator(device).manual_seed(seed)
    return randomness if isinstance(randomness, torch.Generator) else None


# ---- the libraries

FUNCTION = _Library(
    name="",
    package="",
    methods=(),
    ask=_ask_function,
    stated=_stated_by_function,
    settings=_function_settings,
)
LIBRARIES = (
    _Library(
        name="torchattacks",
        package="torchattacks",
        methods=("get_logits",),
        ask=_ask_torchattacks,
        stated=_stated_by_torchattacks,
        built_on=lambda attack: attack.model,
        prepares=lambda attack: attack.normalization_used is not None,
    ),
    _Library(
        name="foolbox",
        package="foolbox.attacks",
        methods=("repeat",),
        ask=_ask_foolbox,
        stated=_stated_by_foolbox,
    ),
    _Library(
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
        _Library(
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
