"""The code of an architecture as one file of plain PyTorch, concatenated from the modules of this package."""

from __future__ import annotations

import ast
import importlib
import inspect

import classwise
from classwise.config.spec import Spec, convert
from classwise.models import MODELS, hypersphere, normalize, settings
from classwise.models.model_config import ModelConfig

HEADER = '''\
"""{name}, as classwise {version} builds it (MIT license). Needs torch and safetensors."""

from __future__ import annotations
'''

LOADER = '''\
def build() -> nn.Module:
    """Build the initialized architecture."""
    return {call}


def load(folder: str = ".") -> nn.Module:
    """Load the trained model in evaluation mode: NCHW images in [0, 1] to logits."""
    from pathlib import Path

    from safetensors.torch import load_file

    model = build()
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()
'''


def architecture_source(config: ModelConfig) -> str:
    """Return the source of a module whose function ``load`` builds the model of an exported directory."""
    spec = Spec.parse(config.architecture)
    registered = MODELS[spec.name]
    factory = inspect.unwrap(registered)
    sizes = {"num_classes": config.num_classes, "in_channels": config.in_channels}
    options = {**convert(spec.name, registered, spec.options), **sizes}
    head, named = options.pop("head", "linear"), options.pop("normalize", None)
    call = f"{factory.__name__}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    if head == "hypersphere":
        call = f"with_hypersphere({call})"
    if named is not None:
        call = f"normalized({call}, *NORMALIZATIONS[{named!r}])"
    elif config.normalization is not None:  # it came with the weights
        call = f"normalized({call}, mean={config.normalization.mean}, std={config.normalization.std})"
    modules: dict[str, str] = {}
    for name in (normalize.__name__, hypersphere.__name__, factory.__module__):
        _collect(name, modules)
    header = HEADER.format(name=spec.name, version=classwise.__version__)
    return "\n\n".join([header, *modules.values(), LOADER.replace("{call}", call)])


def _collect(name: str, modules: dict[str, str]) -> None:
    """Add a module, after the modules of this package that it imports, without those imports and its decorators."""
    if name in modules or name == settings.__name__:  # the types of settings are used in annotations only
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
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(f"{settings.architecture.__name__}("):
            dropped.add(node.lineno)
        elif isinstance(node, ast.FunctionDef):
            dropped |= {line.lineno for line in node.decorator_list}
    lines = [line for number, line in enumerate(source.splitlines(), 1) if number not in dropped]
    modules[name] = "\n".join(lines).strip() + "\n"
