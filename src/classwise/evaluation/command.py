"""The command, or the call, that makes an evaluation again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULTS = {"split": "test", "seed": 0, "engine": "auto", "exhaustive": False, "margins": False, "trust": False}
"""What need not be said; besides what is None."""


def command(model: Any, data: Any, attacks: Any, options: Mapping[str, Any]) -> str:
    """A line for a shell where everything has a name, else a call in Python.

    >>> command("runs/wat", "cifar10", "fast", {"eps": "8/255", "seed": 0, "per_class": 100})
    'classwise evaluate --model runs/wat --data cifar10 --attack fast --eps 8/255 --per-class 100'
    """
    said = {name: value for name, value in options.items() if value is not None and DEFAULTS.get(name) != value}
    asked = [attacks] if isinstance(attacks, str) or not isinstance(attacks, list | tuple) else list(attacks)
    if all(isinstance(part, str | Path) for part in (model, data, *asked)):
        words = ["classwise", "evaluate", "--model", str(model), "--data", str(data)]
        words += [word for attack in asked for word in ("--attack", str(attack))]
        for name, value in said.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return shlex.join(words)
    names = [_named(model, "model"), _named(data, "data")]
    listed = ", ".join(repr(str(one)) if isinstance(one, str | Path) else _named(one, "attack") for one in asked)
    rest = [
        f"{name}={str(value) if isinstance(value, int | float) else repr(str(value))}" for name, value in said.items()
    ]
    return f"classwise.evaluate({', '.join([*names, f'attacks=[{listed}]', *rest])})"


def _named(value: Any, name: str) -> str:
    return repr(str(value)) if isinstance(value, str | Path) else name
