"""User code by name: ``package.module:name`` or ``path/to/file.py:name``.

Importing it executes it; it is as trusted as the command that names it. An error in it becomes one line, with the
original exception as its cause.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from classwise.core.errors import InputError, one_line
from classwise.storage.files import digest


def is_attribute_spec(spec: str) -> bool:
    """Whether a spec has the form ``module:name`` or ``file.py:name``, not ``name:key=value``.

    >>> [is_attribute_spec(s) for s in ("my.zoo:net", "zoo/net.py:make", "pgd:steps=3", "resnet18")]
    [True, True, False, False]
    """
    place, colon, name = spec.rpartition(":")
    return bool(colon and place) and all(part.isidentifier() for part in name.split("."))


def absolute(spec: str) -> str:
    """Return the spec with an absolute path of its file, independent of the working directory.

    >>> absolute("my.zoo:net"), absolute("resnet18")
    ('my.zoo:net', 'resnet18')
    """
    place, colon, name = spec.rpartition(":")
    is_file = is_attribute_spec(spec) and place.endswith(".py")
    return f"{Path(place).expanduser().resolve()}{colon}{name}" if is_file else spec


def load_attribute(spec: str, kind: str) -> Any:
    """Import what a spec names; ``kind`` is its role in error messages.

    A file is executed again at every call and may import modules of its directory. A module is searched on Python's
    path and then in the working directory. The name may be dotted.

    >>> load_attribute("pathlib:Path.cwd", "model") == Path.cwd
    True
    """
    if not is_attribute_spec(spec):
        raise InputError(f"{kind} {spec!r}: expected package.module:name or path/to/file.py:name")
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        found: Any = _run_file(Path(place), f"{kind} {spec!r}")
    else:
        found = _import_module(place, f"{kind} {spec!r}")
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise InputError(f"{kind} {spec!r}: {place} does not define {name!r}") from error
    return found


def call_attribute(spec: str, kind: str) -> Any:
    """Import what a spec names, call it without arguments and return the result."""
    factory = load_attribute(spec, kind)
    if not callable(factory):
        raise InputError(f"{kind} {spec!r}: expected a function or class, found {type(factory).__name__}")
    with _one_line_errors(f"{kind} {spec!r}: calling it failed"):
        return factory()


def _run_file(path: Path, owner: str) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{owner}: no such file: {path}")
    # The name is unique: files of the same name must not collide in sys.modules or hide an installed module.
    name = f"classwise_user_{path.stem}_{digest(str(path.resolve()))[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look up their module there
    try:
        with _importable(path.resolve().parent), _one_line_errors(f"{owner}: running {path} failed"):
            spec.loader.exec_module(module)
    except InputError:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise
    return module


def _import_module(name: str, owner: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"{owner}: {name!r} is neither a module name nor a .py file")
    with _importable(Path.cwd()), _one_line_errors(f"{owner}: importing {name} failed"):
        return importlib.import_module(name)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make the modules of a folder importable, after installed ones of the same name."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            # Remove the last occurrence, which was added above; the user's code may have changed the list.
            last = len(sys.path) - 1 - sys.path[::-1].index(str(folder))
            del sys.path[last]


@contextmanager
def _one_line_errors(prefix: str) -> Iterator[None]:
    """Turn any exception of the user's code into a one-line error."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a script that parses arguments at import may exit
        raise InputError(f"{prefix}: {one_line(error)}") from error
