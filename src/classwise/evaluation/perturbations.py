"""Read the attacks, within one threat, and the corruptions of an evaluation from specs and objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from classwise.attacks import ATTACKS
from classwise.attacks.adapters import as_attack
from classwise.config.plugins import is_attribute_spec, load_attribute
from classwise.config.spec import Spec, build
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.core.types import Attack as AnyAttack
from classwise.corruptions import Corruption, make_corruptions
from classwise.storage.verdicts import NATURAL, WORST_CASE


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbations:
    """Attacks and corruptions, by their keys in the report."""

    attacks: Mapping[str, tuple[str, AnyAttack]]
    """Spec as it was given, and attack, by key."""
    corruptions: Mapping[str, Corruption]
    threat: Threat


def read_perturbations(given: Any, eps: float | str | None = None, norm: str | None = None) -> Perturbations:
    """Read one or several specs, attack objects of this package or of another library, or functions.

    The threat is the one passed here, else that of the attacks, else Linf 8/255.
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    attacks, corruptions = [], []
    for one in several:
        if isinstance(one, Corruption):
            corruptions.append(one)
        elif isinstance(one, str) and one.partition(":")[0] == "corruptions":
            corruptions.extend(make_corruptions(one))
        else:
            attack = read_attack(one)
            attacks.append((one if isinstance(one, str) else repr(attack), attack))
    threat = _common_threat([attack for _, attack in attacks], eps, norm)
    keys = _keys(attacks)
    _refuse_repetition([*keys, *(corruption.key for corruption in corruptions)])
    return Perturbations(
        attacks={key: (spec, attack.within(threat)) for key, (spec, attack) in zip(keys, attacks, strict=True)},
        corruptions={corruption.key: corruption for corruption in corruptions},
        threat=threat,
    )


def read_attack(given: Any) -> AnyAttack:
    """Read one attack: ``name:key=value``, ``file.py:name``, or an object."""
    if not isinstance(given, str):
        return as_attack(given)
    if Spec.parse(given.partition(":")[0]).name not in ATTACKS and is_attribute_spec(given):
        return as_attack(load_attribute(given, "attack"))
    if given.endswith(".py"):
        raise InputError(f"attack {given!r}: expected a function or an object in the file, as in {given}:my_attack")
    return build("attack", ATTACKS, given)


def _common_threat(attacks: Sequence[AnyAttack], eps: float | str | None, norm: str | None) -> Threat:
    """Return the threat that all attacks share."""
    chosen = []
    for setting, wanted, default, values in (
        ("eps", eps, "8/255", [attack.eps for attack in attacks]),
        ("norm", norm, "Linf", [attack.norm for attack in attacks]),
    ):
        own = sorted({str(value) for value in values if value is not None})
        if wanted is None and len(own) > 1:
            raise InputError(f"the attacks have different {setting} ({', '.join(own)}): evaluate them separately")
        chosen.append(wanted if wanted is not None else next(iter(own), default))
    return Threat.parse(chosen[0], str(chosen[1]))


def _keys(attacks: Sequence[tuple[str, AnyAttack]]) -> list[str]:
    """Return the key of each attack: its name, or its spec if several attacks have that name."""
    registered: dict[type[AnyAttack], str] = {kind: name for name, kind in ATTACKS.items()}
    names = [registered.get(type(attack), attack.name) for _, attack in attacks]
    return [name if names.count(name) == 1 else spec for name, (spec, _) in zip(names, attacks, strict=True)]


def _refuse_repetition(keys: Sequence[str]) -> None:
    for key in keys:
        if key in (NATURAL, WORST_CASE):
            raise InputError(f"an attack must not be named {key!r}: reports use this name")
        if keys.count(key) > 1:
            raise InputError(f"the attack {key!r} is given twice")
