"""Structure of the package: imports between packages, modules loaded by an import, and printing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
"""Module name to file."""

# Package to what it may import besides itself. The top (cli, __init__, __main__) may import everything.
BASE = {"core", "config", "storage", "metrics"}
MODELED = BASE | {"data", "models"}
ATTACKED = MODELED | {"attacks", "corruptions", "accelerate"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "metrics": {"core"},
    "storage": {"core", "metrics"},
    "config": {"core", "storage"},
    "corruptions": {"core", "config"},
    "reporting": BASE,
    "data": BASE | {"corruptions"},
    "models": BASE,
    "accelerate": {"core"},
    "attacks": BASE,
    "objectives": BASE | {"attacks"},
    "policies": BASE,
    "evaluation": ATTACKED | {"reporting"},
    "training": ATTACKED | {"objectives", "policies", "evaluation"},
    "repairs": ATTACKED | {"objectives", "policies", "evaluation", "training", "reporting"},
    "export": MODELED | {"objectives", "reporting"},
    "api": ATTACKED | {"evaluation", "training", "repairs", "reporting"},
    "analysis": ATTACKED | {"policies", "evaluation", "training", "repairs", "reporting", "api"},
    "studies": BASE | {"analysis", "training", "reporting", "api"},
}
TOP = {"", "__main__", "cli"}
LIGHT = ("classwise", "classwise.cli", "classwise.config", "classwise.metrics", "classwise.reporting")
"""Modules that import no torch: reading a report, checking a gate, listing, and help."""


def package(module: str) -> str:
    """The package of a module: ``attacks`` of ``classwise.attacks.pgd``."""
    return module.split(".")[1] if "." in module else ""


@cache
def syntax(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield child
            yield from nodes(child)


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of this package that a module imports, at the top and inside functions, not for type checking."""
    found = set()
    for node in nodes(syntax(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else str(node.module))
    return frozenset((found & MODULES.keys()) - {module})


def test_packages_import_only_what_the_table_allows() -> None:
    for module in MODULES:
        own = package(module)
        if own in TOP:
            continue
        assert own in ALLOWED, f"{own} is a new package: add what it may import"
        wrong = {name for name in imported(module) if package(name) not in ALLOWED[own] | {own, ""}}
        assert not wrong, f"{module} must not import {sorted(wrong)}"
    assert set(ALLOWED) <= set(map(package, MODULES)), "the table names a package that does not exist"
    list(TopologicalSorter(ALLOWED).static_order())  # raises CycleError if the table has a cycle


def cycles() -> list[set[str]]:
    """Return the groups of modules that import each other in cycles."""
    graph = {module: set(imported(module)) for module in MODULES}
    found = []
    while True:
        try:
            list(TopologicalSorter(graph).static_order())
            return found
        except CycleError as error:
            start = error.args[1][0]
            group = {start} | {name for name in reach(graph, start) if start in reach(graph, name)}
            found.append(group)
            for name in group:
                graph[name] -= group


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that one imports directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_modules_have_no_import_cycles() -> None:
    assert not [sorted(group) for group in cycles()], "these modules import each other"


def loaded_by(code: str) -> set[str]:
    """The modules that are loaded after some code ran in a fresh interpreter."""
    code += "; import sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(ran.stdout.split())


def test_light_modules_import_no_torch() -> None:
    assert "torch" not in loaded_by(f"import {', '.join(LIGHT)}")


def test_evaluation_does_not_import_training() -> None:
    loaded = loaded_by("import classwise; classwise.evaluate")
    assert "classwise.evaluation.runner" in loaded
    assert not [name for name in loaded if name.startswith("classwise.training")]


def test_every_package_opens_with_a_docstring() -> None:
    missing = [
        name for name, path in MODULES.items() if path.name == "__init__.py" and not ast.get_docstring(syntax(name))
    ]
    assert not missing


def test_modules_do_no_work_at_import() -> None:
    """Top-level statements define names. Only registrations are called for their effect."""
    for module in MODULES:
        for node in syntax(module).body:
            calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            works = isinstance(node, ast.For | ast.While | ast.With)
            allowed = package(module) == "cli" or ".register_" in ast.unparse(node)
            assert allowed or not (calls or works), f"{module}, line {node.lineno}: {ast.unparse(node)}"


def test_only_commands_print() -> None:
    for module in MODULES:
        calls = [node for node in ast.walk(syntax(module)) if isinstance(node, ast.Call)]
        prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert package(module) == "cli" or not prints, f"{module} prints in lines {prints}"


def test_only_registries_name_methods() -> None:
    """Training, evaluation and reporting use protocols: none of them names the class of a method."""
    from classwise.objectives import OBJECTIVES
    from classwise.policies import POLICIES

    methods = {kind.__name__ for kind in (*OBJECTIVES.values(), *POLICIES.values())}
    for module in MODULES:
        if package(module) in {"training", "evaluation", "reporting", "metrics", "api", "config"}:
            used = {node.id for node in ast.walk(syntax(module)) if isinstance(node, ast.Name)}
            assert not used & methods, f"{module} names {sorted(used & methods)}"


def test_slow_list_names_existing_tests() -> None:
    """``make slow`` rewrites the list; a renamed test must not leave it silently."""
    tests = Path(__file__).parent
    known = {folder.name for folder in tests.iterdir() if folder.is_dir()}
    for path in tests.rglob("test_*.py"):
        known.add(path.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                known |= {
                    f"{path.name}::{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)
                }
            elif isinstance(node, ast.FunctionDef):
                known.add(f"{path.name}::{node.name}")
    listed = (tests / "slow.txt").read_text(encoding="utf-8").split()
    assert not sorted(set(listed) - known), "not the names of tests"
