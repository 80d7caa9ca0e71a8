"""The code of an architecture as one file of plain PyTorch: its own modules of this package, joined in order."""

from __future__ import annotations

import ast
import importlib
import inspect

import classwise
from classwise.config.spec import Spec, convert
from classwise.models import MODELS, hypersphere, normalize
from classwise.models.model_config import ModelConfig
from classwise.models.settings import __name__ as settings_name

HEADER = '''\
"""{name}, as classwise {version} builds it (MIT license). Needs torch and safetensors."""

from __future__ import annotations
'''

LOADER = '''\
def build() -> nn.Module:
    """The architecture, freshly initialised."""
    return {call}


def load(folder: str = ".") -> nn.Module:
    """The trained model, ready to be asked: NCHW images in [0, 1] to logits."""
    from pathlib import Path

    from safetensors.torch import load_file

    model = build()
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()
'''


def architecture_source(config: ModelConfig) -> str:
    """A module with a function ``load`` that makes the model of an exported directory."""
    spec = Spec.parse(config.architecture)
    wrapped = MODELS[spec.name]
    factory = inspect.unwrap(wrapped)
    sizes = {"num_classes": config.num_classes, "in_channels": config.in_channels}
    settings = {**convert(spec.name, wrapped, spec.options), **sizes}
    head = settings.pop("head", "linear")
    call = f"{factory.__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"
    if head == "hypersphere":
        call = f"with_hypersphere({call})"
    if config.normalization is not None and settings.get("normalize") is None:
        # The one that the weights brought.
        call = f"normalized({call}, mean={config.normalization.mean}, std={config.normalization.std})"
    modules: dict[str, str] = {}
    for name in (normalize.__name__, hypersphere.__name__, factory.__module__):
        _collect(name, modules)
    header = HEADER.format(name=spec.name, version=classwise.__version__)
    return "\n\n".join([header, *modules.values(), LOADER.replace("{call}", call)])


def _collect(name: str, modules: dict[str, str]) -> None:
    """A module without its imports from this package, after the modules that it imports from there."""
    if name in modules or name == settings_name:  # which names types of settings, for annotations only
        return
    source = inspect.getsource(importlib.import_module(name))
    dropped: set[int] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            own = node.module.startswith("classwise.")
            if own:
                _collect(node.module, modules)
            if own or node.module == "__future__":
                dropped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = [line for number, line in enumerate(source.splitlines(), 1) if number not in dropped]
    modules[name] = "\n".join(lines).strip() + "\n"
