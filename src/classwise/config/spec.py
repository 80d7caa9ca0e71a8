"""The grammar of specs: ``name`` or ``name:key=value,key=value``.

Attacks, objectives, policies, models, optimizers and schedules are dataclasses or functions in a registry. A spec
selects one and sets its fields. Values are converted to the declared types, so a spec from a shell, a TOML table and
a call in Python make the same object.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from classwise.core.errors import InputError, unknown
from classwise.core.numbers import parse_number

T = TypeVar("T")


def split_list(value: object) -> object:
    """Split ``2+5+10`` into three values; put a single value into a tuple.

    >>> split_list("2+5+10"), split_list(3.0), split_list((1, 2))
    (('2', '5', '10'), (3.0,), (1, 2))
    """
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split("+"))
    return value if isinstance(value, tuple | list) else (value,)


Number = Annotated[float, BeforeValidator(parse_number)]
"""A float that may also be written as a fraction."""
Numbers = Annotated[tuple[Number, ...], BeforeValidator(split_list)]
"""One or several numbers, joined by ``+`` in a spec."""
Names = Annotated[tuple[str, ...], BeforeValidator(split_list)]
"""One or several names, joined by ``+`` in a spec."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A registered name and its settings."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: str | Mapping[str, Any] | Spec) -> Spec:
        """Parse text, or a table with a ``name``.

        >>> Spec.parse("pgd:steps=100,step_size=0.003")
        Spec(name='pgd', options={'steps': '100', 'step_size': '0.003'})
        >>> Spec.parse({"name": "wat", "eta": 0.1})
        Spec(name='wat', options={'eta': 0.1})
        """
        if isinstance(given, Spec):
            return given
        if isinstance(given, Mapping):
            options = dict(given)
            name = options.pop("name", None)
            if not isinstance(name, str):
                raise InputError(f'a table needs a name, as in {{ name = "..." }}; got {dict(given)!r}')
            return cls(name, options)
        if not isinstance(given, str):
            raise InputError(f"expected a name, name:key=value or a table with a name, got {given!r}")
        name, colon, rest = given.strip().partition(":")
        if colon and not rest:
            raise InputError(f"no settings after ':' in {given!r}: add settings as key=value, or omit ':'")
        options = {}
        for item in rest.split(",") if rest else ():
            key, equals, value = item.partition("=")
            if not equals or not key.strip():
                raise InputError(f"cannot read {item!r} in {given!r}: settings are key=value, joined by commas")
            if key.strip() in options:
                raise InputError(f"{key.strip()!r} is given twice in {given!r}")
            options[key.strip()] = value.strip()
        return cls(name.strip(), options)

    def __str__(self) -> str:
        settings = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{settings}" if settings else self.name


def build(kind: str, registry: Mapping[str, Callable[..., T]], given: str | Mapping[str, Any] | Spec) -> T:
    """Call the registered factory of a spec with its settings, converted to their types."""
    spec = Spec.parse(given)
    if spec.name not in registry:
        raise unknown(kind, spec.name, registry)
    factory = registry[spec.name]
    return factory(**convert(f"{kind} {spec.name!r}", factory, spec.options))


def convert(owner: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to the types of a factory's parameters; raise ``InputError`` for unknown keys and bad values."""
    parameters = settings_of(factory)
    converted = {}
    for key, value in options.items():
        if not parameters:
            raise InputError(f"{owner} has no settings, got {key!r}")
        if key not in parameters:
            raise unknown(f"setting of {owner}:", key, parameters)
        try:
            converted[key] = _adapter(parameters[key]).validate_python(value)
        except ValidationError as error:
            raise InputError(f"{owner}: {key} = {value!r}: {first_line(error)}") from None
        if isinstance(converted[key], float) and not math.isfinite(converted[key]):
            raise InputError(f"{owner}: {key} = {value!r}: must be a finite number")
    return converted


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


@cache
def settings_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of a factory with their types: fields of a dataclass or parameters of a function."""
    # The types of inherited fields are resolved in the module of the class that declares them.
    source = factory.__init__ if inspect.isclass(factory) and not is_dataclass(factory) else factory
    hints = get_type_hints(source, include_extras=True)
    return {name: hints.get(name, Any) for name in inspect.signature(factory).parameters}


def first_line(error: ValidationError) -> str:
    """Return the first message of a validation error, in plain words and without a capital letter."""
    message = error.errors()[0]["msg"].removeprefix("Value error, ")
    for formal, plain in _PLAIN.items():
        message = message.replace(formal, plain)
    return message[0].lower() + message[1:]


_PLAIN = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "an integer",
    "a valid": "a",
    "a dictionary": "a table",
}
