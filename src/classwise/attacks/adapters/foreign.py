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

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from classwise.attacks.adapters.call import Meter, kept, reproducible, seed_of, torch_generator, untouched
from classwise.attacks.adapters.describe import norm_text, parts_of, radius_text, same_radius, text_of
from classwise.attacks.adapters.libraries import EXPECTED, FUNCTION, LIBRARIES, check_function, function_name
from classwise.attacks.adapters.question import Library, Question
from classwise.attacks.base import BallAttack
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, dtype_of, frozen
from classwise.core.streams import Randomness
from classwise.core.threat import Threat
from classwise.core.types import Effort, Whom


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
        check_function(thing)
    stated = library.stated(thing)
    eps, norm = radius_text(stated[0]), norm_text(stated[1])
    told = {*(("eps", "epsilon") if eps else ()), *(("norm",) if norm else ())}
    settings = {key: value for key, value in library.settings(thing).items() if key not in told}
    return ForeignAttack(attack=thing, library=library, settings=text_of(settings, library.package), eps=eps, norm=norm)


@dataclass(frozen=True, kw_only=True, repr=False)
class ForeignAttack:
    """An attack that is not ours. Its repr is its identity in reports.

    The model is given back as it was: modes, flags, buffers, gradients and hooks; and so is a library's object, which
    may keep notes of its last run in itself.
    """

    black_box: ClassVar[bool] = False
    """Unknown; a claim is made of our own attacks only."""
    uses_optimized_copy: ClassVar[bool] = False
    resembles_cascade: ClassVar[bool] = False

    attack: Any
    library: Library
    settings: str
    """The plain settings of the object when it came in, without addresses."""
    eps: str | None = None
    norm: str | None = None
    """What the object itself says, or the evaluation; None where nobody has said it yet."""

    @property
    def name(self) -> str:
        """What a report calls it: ``torchattacks.PGD``, or the function's own name."""
        if self.library is FUNCTION:
            return function_name(self.attack)
        return f"{self.library.name}.{type(self.attack).__name__}"

    def __repr__(self) -> str:
        threat = text_of({"eps": self.eps, "norm": self.norm})
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
            if own is not None and own != wanted and not (what == "eps" and same_radius(own, threat.eps)):
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
        device, seed = device_of(model), seed_of(generator)
        entrance = self.library.entrance(self.attack, model)
        parts = [] if self.library is FUNCTION else parts_of(self.attack, self.library.package)
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            # Clones are normal tensors even where the caller works in inference mode.
            question = Question(
                model=model,
                x=x.detach().clone().to(device),
                y=y.clone().to(device),
                eps_scale=None if eps_scale is None else eps_scale.clone().to(device),
                targets=None if targets is None else targets.clone().to(device),
                generator=torch_generator(generator, seed, device),
                seed=seed,
                parts=parts,
            )
            meter = Meter(question.x, dtype_of(model), wrapped=entrance is not model)
            if not len(x):
                return question.x.to(x.device), meter.effort
            for context in (frozen(entrance), untouched(model), reproducible(seed, device), kept(parts)):
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

    def whom(self, stage: str) -> Whom:
        """Everybody."""
        return "survivors"
