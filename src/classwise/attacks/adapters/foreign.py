"""Attacks of other libraries, and plain functions, as attacks of this package.

``as_attack`` accepts objects of torchattacks, foolbox, ART (the Adversarial Robustness Toolbox) and AutoAttack, and any
function ``attack(model, x, y)``. Libraries are recognized by the module of the class of an object, and not imported.

* Results are returned unchanged, not projected into the ball: an evaluation counts those outside as rejected.
* torchattacks, ART and AutoAttack objects are built on a model, which must be the module that is attacked.
* Hooks on the model, present during the call only, count passes, return plain logits in the type of the library's
  images, and convert images to the type of the model.
* These libraries use the global random states. They are seeded for the call and restored, so the same batch gives the
  same result; but unlike in this package the result of an example may depend on its batch.
"""

# B batch

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from classwise.attacks.adapters.call import (
    ModelHooks,
    preserve_attributes,
    preserve_model,
    reproducible,
    seed_of,
    torch_generator,
)
from classwise.attacks.adapters.describe import parse_radius, same_radius, text_of
from classwise.attacks.adapters.libraries import Adapter, adapt, configure
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, dtype_of, frozen
from classwise.core.threat import Threat
from classwise.core.types import Attack, AttackCall, Effort


def as_attack(thing: Any) -> Attack:
    """Return an attack object of any library, or a function, as an attack.

    A function is called as ``attack(model, x, y)`` on images in [0, 1] and returns images; ``model`` returns plain
    logits. If it has parameters of these names, it also receives ``eps``, the radius of the evaluation, and
    ``generator``, a torch generator on the model's device.
    """
    if isinstance(thing, Attack):
        return thing
    adapter = adapt(thing)
    return ForeignAttack(adapter=adapter, eps=adapter.eps, norm=adapter.norm)


@dataclass(frozen=True, kw_only=True, repr=False)
class ForeignAttack(Attack):
    """An attack of another library, or a function. Its repr identifies it in reports.

    A call restores the model (modes, flags, buffers, gradients, hooks) and the attributes of the library's object.
    """

    uses_optimized_copy: ClassVar[bool] = False

    adapter: Adapter
    eps: str | None = None
    norm: str | None = None
    """The threat stated by the object or given by the evaluation; None if it is not known yet."""

    @property
    def name(self) -> str:
        return self.adapter.name

    def __repr__(self) -> str:
        threat = text_of({"eps": self.eps, "norm": self.norm})
        return f"{self.name}({', '.join(filter(None, (threat, self.adapter.settings)))})"

    @property
    def threat(self) -> Threat:
        if self.eps is None:
            raise InputError(f"{self.name} has no radius: set eps of the evaluation, for example eps='8/255'")
        return Threat.parse(self.eps, self.norm or "Linf")

    def within(self, threat: Threat) -> Self:
        for setting, own, wanted in (("norm", self.norm, threat.norm), ("eps", self.eps, threat.text)):
            if own is not None and own != wanted and not (setting == "eps" and same_radius(own, threat.eps)):
                raise InputError(
                    f"attack {self.name!r} sets {setting} = {own}, but runs with {setting} = {wanted}: set {setting} "
                    "in one place"
                )
        return replace(self, eps=threat.text, norm=threat.norm)

    def run(self, call: AttackCall) -> tuple[Tensor, Effort]:
        model, x, adapter = call.model, call.x, self.adapter
        if len(x) != len(call.y):
            raise InputError(f"expected one label per image, got {len(call.y)} labels for {len(x)} images")
        adapter.check(model)
        device, seed = device_of(model), seed_of(call.generator)
        hooked, parts = adapter.hooked(model), adapter.parts()
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            # Clones are normal tensors even if the caller is in inference mode.
            call = AttackCall(
                model,
                x.detach().clone().to(device),
                call.y.clone().to(device),
                eps_scale=None if call.eps_scale is None else call.eps_scale.clone().to(device),
                generator=torch_generator(call.generator, seed, device),
                targets=None if call.targets is None else call.targets.clone().to(device),
            )
            hooks = ModelHooks(call.x, dtype_of(model), returns_list=hooked is not model)
            if not len(x):
                return call.x.to(x.device), hooks.effort
            for context in (
                frozen(hooked),
                preserve_model(model),
                reproducible(seed, device),
                preserve_attributes(parts),
            ):
                stack.enter_context(context)
            if seed is not None and parts and vars(parts[0]).get("seed", 0) is None:
                configure(parts, seed=seed)  # seed=None means a seed from the clock
            with hooks.on(hooked):
                found = adapter.search(call, None if self.eps is None else parse_radius(self.eps))
            found = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
            if not isinstance(found, Tensor) or found.shape != x.shape:
                what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise InputError(f"{self.name} returned {what}; expected images of shape {tuple(x.shape)}")
            return found.detach().to(x), hooks.effort
