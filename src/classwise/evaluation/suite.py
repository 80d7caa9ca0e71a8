"""What an evaluation runs: specs and objects of many kinds, read into attacks within one threat, and corruptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from classwise.attacks import ATTACKS
from classwise.attacks.adapters import as_attack
from classwise.attacks.base import AnyAttack
from classwise.config.plugins import is_attribute_spec, load_attribute
from classwise.config.spec import Spec, build
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.corruptions import Corruption, make_corruptions
from classwise.storage.verdicts import NATURAL, WORST_CASE


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Attacks and corruptions under the keys of the report."""

    attacks: Mapping[str, tuple[str, AnyAttack]]
    """Key to the spec as it was given, and the attack."""
    corruptions: Mapping[str, Corruption]
    threat: Threat


def read_suite(
    given: Any, eps: float | str | None = None, norm: str | None = None, *, exhaustive: bool = False
) -> Suite:
    """Read what was asked for: a spec, an attack object of ours or of another library, a function, or several.

    The threat is what is given here, else what the attacks bring, else Linf 8/255. ``exhaustive`` is for ``fast``.
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
            attack = replace(cast(Any, attack), exhaustive=True) if exhaustive and attack.has_audit else attack
            attacks.append((one if isinstance(one, str) else repr(attack), attack))
    if exhaustive and not any(attack.has_audit for _, attack in attacks):
        raise InputError("exhaustive goes with the attack fast: the others always run in full")
    threat = _common_threat([attack for _, attack in attacks], eps, norm)
    keys = _keys(attacks)
    _refuse_repetition([*keys, *(corruption.key for corruption in corruptions)])
    return Suite(
        attacks={key: (spec, attack.within(threat)) for key, (spec, attack) in zip(keys, attacks, strict=True)},
        corruptions={corruption.key: corruption for corruption in corruptions},
        threat=threat,
    )


def read_attack(given: Any) -> AnyAttack:
    """One attack: ``name:key=value``, ``file.py:name``, or an object."""
    if not isinstance(given, str):
        return as_attack(given)
    if Spec.parse(given.partition(":")[0]).name not in ATTACKS and is_attribute_spec(given):
        return as_attack(load_attribute(given, "attack"))
    return build("attack", ATTACKS, given)


def _common_threat(attacks: Sequence[AnyAttack], eps: float | str | None, norm: str | None) -> Threat:
    """The one threat of an evaluation."""
    chosen = []
    for what, wanted, default in (("eps", eps, "8/255"), ("norm", norm, "Linf")):
        brought = sorted({str(own) for attack in attacks if (own := getattr(attack, what)) is not None})
        if wanted is None and len(brought) > 1:
            raise InputError(f"the attacks ask for different {what} ({', '.join(brought)}): evaluate them one by one")
        chosen.append(wanted if wanted is not None else next(iter(brought), default))
    return Threat.parse(chosen[0], str(chosen[1]))


def _keys(attacks: Sequence[tuple[str, AnyAttack]]) -> list[str]:
    """An attack's name, or its whole spec where two of one name ran."""
    registered: dict[type[AnyAttack], str] = {kind: name for name, kind in ATTACKS.items()}
    names = [registered.get(type(attack), attack.name) for _, attack in attacks]
    return [name if names.count(name) == 1 else spec for name, (spec, _) in zip(names, attacks, strict=True)]


def _refuse_repetition(keys: Sequence[str]) -> None:
    for key in keys:
        if key in (NATURAL, WORST_CASE):
            raise InputError(f"an attack must not be called {key!r}: reports use the name")
        if keys.count(key) > 1:
            raise InputError(f"the attack {key!r} is given twice")
