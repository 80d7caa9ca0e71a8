from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.config.spec import Number, Spec, build, convert
from classwise.core.errors import InputError, unknown
from classwise.core.numbers import parse_number
from each import for_each


@dataclass(frozen=True, kw_only=True)
class Pgd:
    steps: int = 10
    step_size: Number | None = None
    start: Literal["uniform", "zero"] = "uniform"
    targeted: bool = False
    milestones: tuple[int, ...] = field(default=(1, 2))

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}")


def net(width: int = 16, name: str = "net") -> tuple[int, str]:
    return width, name


class Plain:
    def __init__(self, depth: int = 2) -> None:
        self.depth = depth


REGISTRY = {"pgd": Pgd, "net": net, "plain": Plain}


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("pgd", "pgd", {}),
        ("pgd:steps=100,step_size=0.003", "pgd", {"steps": "100", "step_size": "0.003"}),
        ("  pgd : steps = 5 , start = zero ", "pgd", {"steps": "5", "start": "zero"}),
        ("net:name=a=b", "net", {"name": "a=b"}),
        ("net:name=", "net", {"name": ""}),
    ],
)
def test_text(text, name, options):
    assert Spec.parse(text) == Spec(name, options)


def test_table_and_spec():
    given_table = {"name": "wat", "eta": 0.1}
    assert Spec.parse(given_table) == Spec("wat", {"eta": 0.1})
    assert given_table == {"name": "wat", "eta": 0.1}
    spec = Spec("pgd", {"steps": 3})
    assert Spec.parse(spec) is spec


names = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
values = st.from_regex(r"[A-Za-z0-9./+-]{1,8}", fullmatch=True)


@given(names, st.dictionaries(names, values, max_size=4))
@settings(deadline=None, max_examples=100)
def test_text_round_trip(name, options):
    spec = Spec(name, options)
    assert Spec.parse(str(spec)) == spec


@for_each(
    ("given_spec", "complaint"),
    [
        ("pgd:steps", "cannot read 'steps' in 'pgd:steps': settings are key=value, joined by commas"),
        ("pgd:=3", "cannot read '=3'"),
        ("pgd:steps=3,", "cannot read ''"),
        ("pgd:steps=3,steps=4", "'steps' is given twice"),
        ({"eta": 0.1}, "a table needs a name"),
        ({"name": 3}, "a table needs a name"),
        (3, "got 3"),
        (None, "got None"),
        (["pgd"], r"got \['pgd'\]"),
    ],
)
def test_invalid_specs_are_refused(given_spec, complaint):
    with pytest.raises(InputError, match=complaint) as caught:
        Spec.parse(given_spec)
    assert "\n" not in str(caught.value)


def test_build_converts_to_the_declared_types():
    assert build("attack", REGISTRY, "pgd") == Pgd()
    from_text = build("attack", REGISTRY, "pgd:steps=5,step_size=2/255,start=zero,targeted=true")
    from_table = build(
        "attack", REGISTRY, {"name": "pgd", "steps": 5, "step_size": 2 / 255, "start": "zero", "targeted": True}
    )
    assert from_text == from_table == Pgd(steps=5, step_size=2 / 255, start="zero", targeted=True)
    assert build("attack", REGISTRY, {"name": "pgd", "milestones": [3, 4]}).milestones == (3, 4)
    assert build("model", REGISTRY, "net:width=8") == (8, "net")
    assert build("model", REGISTRY, "plain:depth=5").depth == 5


@pytest.mark.parametrize(
    ("given_spec", "complaint"),
    [
        ("pdg", "unknown attack 'pdg': did you mean 'pgd'? (known: net, pgd, plain)"),
        ("zzz", "unknown attack 'zzz' (known: net, pgd, plain)"),
        ("", "unknown attack '' (known: net, pgd, plain)"),
        (
            "pgd:stpes=3",
            "unknown setting of attack 'pgd': 'stpes': did you mean 'steps'? "
            "(known: milestones, start, step_size, steps, targeted)",
        ),
        ("pgd:", "no settings after ':' in 'pgd:': add settings as key=value, or omit ':'"),
        ("bare:eta=1", "attack 'bare' has no settings, got 'eta'"),
        ("pgd:steps=0", "steps must be at least 1, got 0"),
        ("pgd:step_size=8/0", "attack 'pgd': step_size = '8/0': '8/0' is not a number like 0.03 or 8/255"),
        ("pgd:step_size=nan", "attack 'pgd': step_size = 'nan': must be a finite number"),
        ("pgd:step_size=inf", "attack 'pgd': step_size = 'inf': must be a finite number"),
    ],
)
def test_build_errors(given_spec, complaint):
    with pytest.raises(InputError) as caught:
        build("attack", REGISTRY | ({"bare": object} if given_spec.startswith("bare") else {}), given_spec)
    assert str(caught.value) == complaint


@pytest.mark.parametrize(
    "given_spec",
    ["pgd:steps=many", "pgd:steps=1.5", "pgd:start=middle", "pgd:targeted=perhaps", "pgd:step_size=a/b"],
)
def test_invalid_values_name_the_setting(given_spec):
    key, value = given_spec.removeprefix("pgd:").split("=")
    with pytest.raises(InputError) as caught:
        build("attack", REGISTRY, given_spec)
    assert str(caught.value).startswith(f"attack 'pgd': {key} = {value!r}: ")
    assert "\n" not in str(caught.value)


def test_convert_leaves_unset_settings_out():
    assert convert("it", Pgd, {}) == {}
    assert convert("it", Pgd, {"steps": "7"}) == {"steps": 7}


@given(st.integers(1, 10**6), st.integers(1, 10**6))
@settings(deadline=None, max_examples=50)
def test_fractions_are_correctly_rounded(a, b):
    assert parse_number(f"{a}/{b}") == parse_number(f" {a} / {b} ") == a / b


@pytest.mark.parametrize("text", ["a/b", "8/0", "/", "1/", "8/255/2", "9" * 400 + "/1"])
def test_bad_fractions(text):
    with pytest.raises(ValueError, match="is not a number like"):
        parse_number(text)


def test_other_values_are_unchanged():
    assert parse_number("0.031") == "0.031"
    assert parse_number(3) == 3
    assert parse_number(None) is None


def test_unknown_lists_known_names():
    assert str(unknown("norm", "l2", ["Linf", "L2"])) == "unknown norm 'l2': did you mean 'L2'? (known: L2, Linf)"
    assert str(unknown("attack", "PGD", ["pgd"])) == "unknown attack 'PGD': did you mean 'pgd'? (known: pgd)"
    assert str(unknown("result", 0, ["natural"])) == "unknown result 0 (known: natural)"
    assert str(unknown("thing", "x", [])) == "unknown thing 'x' (known: none)"
    assert isinstance(unknown("thing", "x", []), ValueError)
