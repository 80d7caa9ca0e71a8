"""Transfer: adversarial images made on a substitute and shown to the model (Papernot et al. 2016).

The model itself is never asked, so the passes counted for each example are zero: the substitute's are not queries.
Where white-box attacks fail and this one succeeds, the model hides its gradients.

In a shell the settings of the attack that makes the images follow its name, joined by colons, as the comma ends a
setting of the transfer:

    transfer:substitute=runs/standard
    transfer:substitute=runs/standard@last,attack=pgd:steps=100:step_size=0.003
    transfer:substitute=resnet18,weights=standard.safetensors,attack=cw-pgd
    transfer:substitute=models.py:surrogate,attack=square:queries=1000
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from pydantic import InstanceOf
from torch import Tensor, nn

from classwise.attacks.base import BallAttack
from classwise.attacks.problem import Problem
from classwise.config.spec import Spec, build
from classwise.core.errors import InputError
from classwise.core.model_calls import count_outputs, device_of
from classwise.core.streams import ExampleNoise, PartNoise, SharedNoise
from classwise.core.threat import Threat
from classwise.core.types import Whom
from classwise.storage.files import digest


@dataclass(frozen=True, kw_only=True, repr=False)
class Transfer(BallAttack):
    """Images made on a substitute model, without asking the model itself."""

    black_box: ClassVar[bool] = True
    aims: ClassVar[bool] = True  # where the attack on the substitute does

    substitute: InstanceOf[nn.Module] | str | Path | None = None
    """A module, used where it is, or the spec of a model or a run directory, which an evaluation loads."""
    weights: str | Path | None = None
    """Weights for a substitute that is a spec."""
    attack: InstanceOf[BallAttack] | str = "pgd"
    """What makes the images; it brings eps and norm where they are not given here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.substitute is None:
            raise InputError("a transfer needs a substitute: a module, a model spec or a run directory")
        if self.weights is not None and isinstance(self.substitute, nn.Module):
            raise InputError("weights go with a substitute that is a spec; a module in memory has its own")
        object.__setattr__(self, "attack", _read(self.attack))
        if isinstance(self.attack, Transfer):
            raise InputError("a transfer needs an attack that works on the substitute, not another transfer")
        for name in ("eps", "norm"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.attack, name))

    def __repr__(self) -> str:
        """Its settings, with a module as its type and a digest of its weights: an address would be news every time."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.substitute, nn.Module):
            shown["substitute"] = _identity(self.substitute)
        return f"Transfer({', '.join(f'{name}={value!s}' for name, value in shown.items())})"

    @property
    def crafter(self) -> BallAttack:
        """The attack on the substitute."""
        assert isinstance(self.attack, BallAttack)
        return self.attack

    def resolved(self, load: Callable[[str, str | Path | None], nn.Module]) -> Self:
        """The same with its substitute loaded, by a function of the model's spec and its weights."""
        if isinstance(self.substitute, nn.Module):
            return self
        return replace(self, substitute=load(str(self.substitute), self.weights), weights=None)

    def within(self, threat: Threat) -> Self:
        """The same attack and the one it makes the images by, both limited to this threat."""
        return replace(super().within(threat), attack=self.crafter.within(threat))

    def variants(self) -> Mapping[str, BallAttack]:
        """One transfer for each variant of the attack that makes the images."""
        return {name: replace(self, attack=variant) for name, variant in self.crafter.variants().items()}

    def stages(self, num_classes: int) -> Mapping[str, BallAttack]:
        """One transfer for each of its stages."""
        return {name: replace(self, attack=stage) for name, stage in self.crafter.stages(num_classes).items()}

    def whom(self, stage: str) -> Whom:
        """As the attack that makes the images has it."""
        return self.crafter.whom(stage)

    def perturb(self, problem: Problem) -> Tensor:
        substitute, x = self.substitute, problem.ball.centre
        if not isinstance(substitute, nn.Module):
            raise InputError(f"the substitute {str(substitute)!r} is not loaded: give a module, or call evaluate")
        try:
            num_classes = count_outputs(substitute, x[:1].to(device_of(substitute)))
        except InputError as error:
            raise InputError(f"the substitute does not fit: {error}") from error
        with torch.no_grad():
            wanted = problem.forward(x[:1]).shape[1]  # of its shape alone, and no query for the images
        if num_classes != wanted:
            raise InputError(f"the substitute has {num_classes} outputs, but the model has {wanted}")
        noise = problem.noise
        assert isinstance(noise, ExampleNoise | PartNoise | SharedNoise)
        return self.crafter.within(self.threat)(
            substitute,
            x,
            problem.y,
            eps_scale=problem.ball.stretch.flatten(),
            generator=noise.generator if isinstance(noise, SharedNoise) else noise,
            targets=problem.targets,
        )


def _read(attack: BallAttack | str) -> BallAttack:
    if isinstance(attack, BallAttack):
        return attack
    from classwise.attacks import ATTACKS  # which has this attack in it

    name, _, settings = attack.partition(":")
    return build("attack", ATTACKS, Spec.parse(f"{name}:{settings.replace(':', ',')}"))


def _identity(module: nn.Module) -> str:
    parts: list[str | memoryview] = []
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            parts += [f"{name} {tuple(value.shape)} {value.dtype}", flat.numpy().data]
    return f"{type(module).__name__}@{digest(*parts)}"
