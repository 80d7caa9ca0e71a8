"""Templates to HTML, and what every page may and may not hold.

Every text from outside (class, model and attack names, settings) reaches the page through Jinja's autoescape; ids
and selectors are built from positions, never from names.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from classwise.core.errors import InputError
from classwise.reporting import charts, story
from classwise.reporting.report import Worst
from classwise.storage.verdicts import NATURAL, WORST_CASE

MOST_MARKED = 3
"""Classes with the lowest value that are marked."""


def render(template: str, **values: Any) -> str:
    """A template with its values."""
    return _environment().get_template(template).render(**values)


def relative(href: str) -> str:
    """A link that stays one: a page of ours points at nothing outside its own directory tree."""
    parts = urlsplit(href)
    if parts.scheme or parts.netloc:
        raise InputError(f"a link must be a relative path, got {href!r}")
    return href


def marked(values: Sequence[float | None], worst: Worst | None) -> set[int]:
    """The weakest class, or a few that share the lowest value; where many do, none of them stands out."""
    tied = set() if worst is None else {label for label, value in enumerate(values) if value == worst.value}
    return tied if len(tied) <= MOST_MARKED else set()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("classwise.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = files("classwise.reporting").joinpath("templates/page.js").read_text(encoding="utf-8")
    environment.filters.update(
        percent=story.percent,
        number=story.number,
        signed=story.signed,
        audit_sentence=story.audit_sentence,
        allocation_sentence=story.allocation_sentence,
        p_text=story.p_text,
        listing=story.listing,
        unbroken=_unbroken,
        count=lambda value: f"{value:,}",
        compact=lambda value: f"{value:g}",
        decided=lambda settings: re.sub(r"\b\w+=None(, |(?=\)))", "", settings).replace(", )", ")"),
    )
    environment.globals.update(
        interval=story.interval,
        NATURAL=NATURAL,
        WORST_CASE=WORST_CASE,
        LEVEL=story.LEVEL,
        WHOM=story.WHOM,
        SCATTER_HEIGHT=charts.SCATTER_HEIGHT,
        RADAR_SIZE=charts.RADAR_SIZE,
        SCRIPT=Markup(script),
        SCRIPT_DIGEST=f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}",
    )
    return environment


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def _printable(value: Any) -> Any:
    """Show what cannot or must not be written as a replacement character.

    A name made of undecodable bytes (a path, say) holds surrogates that no file can be written with, and one
    that turns the direction of writing would turn the rest of its sentence too.
    """
    if isinstance(value, str) and not isinstance(value, Markup):
        return _UNPRINTABLE.sub("\ufffd", value)
    return value


def _unbroken(text: str) -> str:
    """Keep an interval and a p-value on one line."""
    text = re.sub(r"(?<=\d)–(?=\d)", "\u2060–\u2060", text)
    return re.sub(r"\bp ([<=]) (?=[01])", "p\u00a0\\1\u00a0", text)
