"""Transfer attack (Papernot et al. 2016): adversarial images are computed on a substitute and tested on the model.

The model itself is not queried, so the passes counted are zero; those of the substitute are not counted. If transfer
succeeds where white-box attacks fail, the model masks its gradients.

In a spec, the settings of the attack on the substitute follow its name after colons, since commas separate the settings
of the transfer:

    transfer:substitute=runs/standard
    transfer:substitute=runs/standard@last,attack=pgd:steps=100:step_size=0.003
    transfer:substitute=resnet18,weights=standard.safetensors,attack=cw-pgd
    transfer:substitute=models.py:surrogate,attack=square:queries=1000
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Self, cast

import torch
from pydantic import InstanceOf
from torch import Tensor, nn

from classwise.attacks.base import BallAttack
from classwise.attacks.problem import Problem
from classwise.config.spec import Spec, build
from classwise.core.errors import InputError
from classwise.core.model_calls import count_outputs, device_of, state_parts
from classwise.core.streams import SharedNoise
from classwise.core.threat import Threat
from classwise.core.types import Attack, AttackCall, LoadModel, Selection
from classwise.storage.files import digest


@dataclass(frozen=True, kw_only=True, repr=False)
class Transfer(BallAttack):
    """Adversarial images computed on a substitute model (Papernot et al. 2016)."""

    black_box: ClassVar[bool] = True

    substitute: InstanceOf[nn.Module] | str | Path | None = None
    """A module, used on its device, or a model spec or run directory, which an evaluation loads."""
    weights: str | Path | None = None
    """Weights file of a substitute given by a spec."""
    attack: InstanceOf[BallAttack] | str = "pgd"
    """Attack on the substitute. Its eps and norm are used if they are not set here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.substitute is None:
            raise InputError("transfer needs a substitute: a module, a model spec or a run directory")
        if self.weights is not None and isinstance(self.substitute, nn.Module):
            raise InputError("weights need a substitute given by a model spec: a module has its own weights")
        object.__setattr__(self, "attack", _read(self.attack))
        if isinstance(self.attack, Transfer):
            raise InputError("attack must be one that searches the substitute, got another transfer")
        for name in ("eps", "norm"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.attack, name))

    def __repr__(self) -> str:
        """Return the settings, with a module shown as its type and a digest of its weights."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.substitute, nn.Module):
            kind = type(self.substitute).__name__
            shown["substitute"] = f"{kind}@{digest(*state_parts(self.substitute))}"
        return f"Transfer({', '.join(f'{name}={value!s}' for name, value in shown.items())})"

    @property
    def attack_on_substitute(self) -> BallAttack:
        """The attack that computes the images."""
        assert isinstance(self.attack, BallAttack)
        return self.attack

    @property
    def supports_targets(self) -> bool:
        return self.attack_on_substitute.supports_targets

    def with_models(self, load: LoadModel) -> Self:
        if isinstance(self.substitute, nn.Module):
            return self
        return replace(self, substitute=load(str(self.substitute), self.weights), weights=None)

    def within(self, threat: Threat) -> Self:
        return replace(super().within(threat), attack=self.attack_on_substitute.within(threat))

    def variants(self) -> Mapping[str, BallAttack]:
        return self._transferred(self.attack_on_substitute.variants())

    def stages(self, num_classes: int) -> Mapping[str, BallAttack]:
        return self._transferred(self.attack_on_substitute.stages(num_classes))

    def _transferred(self, attacks: Mapping[str, Attack]) -> dict[str, BallAttack]:
        return {name: replace(self, attack=cast(BallAttack, attack)) for name, attack in attacks.items()}

    def selects(self, stage: str) -> Selection:
        return self.attack_on_substitute.selects(stage)

    def perturb(self, problem: Problem) -> Tensor:
        substitute, x = self.substitute, problem.ball.center
        if not isinstance(substitute, nn.Module):
            raise InputError(f"the substitute {str(substitute)!r} is not loaded: pass a module, or use evaluate")
        try:
            num_classes = count_outputs(substitute, x[:1].to(device_of(substitute)))
        except InputError as error:
            raise InputError(f"the substitute does not accept these images: {error}") from error
        with torch.no_grad():
            wanted = problem.forward(x[:1]).shape[1]  # not counted, as only the shape is used
        if num_classes != wanted:
            raise InputError(f"the substitute has {num_classes} outputs, but the model has {wanted}")
        noise = problem.noise
        call = AttackCall(
            substitute,
            x,
            problem.y,
            eps_scale=problem.ball.stretch.flatten(),
            generator=noise.generator if isinstance(noise, SharedNoise) else noise,
            targets=problem.targets,
        )
        return self.attack_on_substitute.within(self.threat).run(call)[0]


def _read(attack: BallAttack | str) -> BallAttack:
    if isinstance(attack, BallAttack):
        return attack
    name, colon, settings = attack.partition(":")
    registry: Mapping[str, type[BallAttack]] = import_module(__package__).ATTACKS  # lists this attack too
    return build("attack", registry, Spec.parse(f"{name}{colon}{settings.replace(':', ',')}"))
