"""Who may import whom. Reads the source; runs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "src" / "classwise"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# Package → what it may import besides itself. The top (cli, __init__, __main__) may import everything.
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


def room(module: str) -> str:
    return module.split(".")[0]


def imported(path: Path) -> set[str]:
    """The rooms of this package that a file imports, also inside functions, but not for type checking alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names = [node.module or ""]
            if node.module == "classwise":
                names = [f"classwise.{alias.name}" for alias in node.names]
        found |= {room(name.removeprefix("classwise.")) for name in names if name.startswith("classwise.")}
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) not in TOP])
def test_imports_go_one_way(module: str) -> None:
    own = room(module)
    assert own in ALLOWED, f"{own} is a new room: say here what it may import"
    assert imported(MODULES[module]) - {own} <= ALLOWED[own]


def test_there_is_no_way_round() -> None:
    """The allowed imports themselves have no cycle."""
    order: list[str] = []
    while len(order) < len(ALLOWED):
        ready = [name for name, uses in ALLOWED.items() if name not in order and uses <= set(order)]
        assert ready, f"a cycle among {sorted(set(ALLOWED) - set(order))}"
        order += ready


@pytest.mark.parametrize("module", ["classwise", "classwise.reporting", "classwise.metrics", "classwise.cli"])
def test_reading_reports_needs_no_torch(module: str) -> None:
    """Neither does asking a command for help."""
    code = f"import sys, {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_commands_print() -> None:
    for name, path in MODULES.items():
        if room(name) != "cli":
            calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
            assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_methods_are_named_in_registries_only() -> None:
    """No room but its own knows a paper by name: ``if method == ...`` exists nowhere."""
    from classwise.objectives import OBJECTIVES
    from classwise.policies import POLICIES

    names = {kind.__name__ for kind in (*OBJECTIVES.values(), *POLICIES.values())}
    for module, path in MODULES.items():
        if room(module) in {"training", "evaluation", "reporting", "metrics", "api", "recipes"}:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not used & names, path
