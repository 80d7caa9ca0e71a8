"""Read the content of registries from their source, because importing attacks and corruptions imports torch.

A registry is a dict literal from names to classes, functions or further registries, followed through imports.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered dataclass."""

    name: str
    settings: dict[str, Any]
    """Fields with their defaults."""
    summary: str
    """First line of the docstring."""


def entries(package: str, registry: str) -> list[Entry]:
    """Read a registry of dataclasses of ``classwise.<package>``.

    >>> [entry.settings["steps"] for entry in entries("attacks", "ATTACKS") if entry.name == "fast"]
    [100]
    """
    found = []
    for name, (module, node) in _items(f"classwise.{package}", registry).items():
        assert isinstance(node, ast.ClassDef)
        summary = (ast.get_docstring(node) or "").split("\n")[0]
        found.append(Entry(name, _fields(module, node), summary))
    return found


def nested_names(package: str, registry: str) -> dict[str, list[str]]:
    """Read the names in a registry of registries of ``classwise.<package>``.

    >>> nested_names("corruptions", "FAMILIES")["noise"]
    ['gaussian-noise', 'shot-noise', 'impulse-noise']
    """
    return {name: _keys(node) for name, (_, node) in _items(f"classwise.{package}", registry).items()}


def _items(module: str, registry: str) -> dict[str, tuple[str, ast.AST]]:
    """The names in a registry, with the definitions of their values and the modules that contain them."""
    module, node = _definition(module, registry)
    assert isinstance(node, ast.Dict)
    values = [value.id for value in node.values if isinstance(value, ast.Name)]
    return {name: _definition(module, value) for name, value in zip(_keys(node), values, strict=True)}


def _keys(node: ast.AST) -> list[str]:
    assert isinstance(node, ast.Dict)
    return [str(ast.literal_eval(key)) for key in node.keys if key is not None]


@cache
def _tree(module: str) -> ast.Module:
    path = Path(str(files("classwise"))).joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8"))


def _definition(module: str, name: str) -> tuple[str, ast.AST]:
    """The class or value that a name in a module refers to, and the module that defines it."""
    for node in _tree(module).body:
        match node:
            case ast.ClassDef() if node.name == name:
                return module, node
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                return module, value
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return module, value
            case ast.ImportFrom() if any((alias.asname or alias.name) == name for alias in node.names):
                return _definition(str(node.module), name)
    raise LookupError(f"{module} does not define {name}")


def _fields(module: str, definition: ast.ClassDef) -> dict[str, Any]:
    """The fields of a dataclass, those of its base classes first."""
    found: dict[str, Any] = {}
    for base in reversed(definition.bases):
        if isinstance(base, ast.Name) and base.id != "ABC":
            home, node = _definition(module, base.id)
            assert isinstance(node, ast.ClassDef)
            found |= _fields(home, node)
    for node in definition.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=hint, value=value):
                if not ast.unparse(hint).startswith("ClassVar"):
                    found[name] = None if value is None else ast.literal_eval(value)
    return found
