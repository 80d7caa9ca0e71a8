"""Models from the Hugging Face hub, its cache, or a folder with the layout of a repository.

Only configurations and safetensors are downloaded and read: no pickles and no code. The image processor of a
transformers model becomes a part of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from classwise.core.errors import InputError, one_line
from classwise.core.hub import from_hub, is_repository
from classwise.models.model_config import CONFIG, SCHEMA, read_config
from classwise.models.optional_packages import optional
from classwise.models.preprocess import Prepared, Resize
from classwise.models.size_limits import check_numbers, no_larger_than_its_weights

PROCESSOR = "preprocessor_config.json"
FILES = (CONFIG, "*.safetensors", PROCESSOR, "*.safetensors.index.json")
"""The files of a repository that are downloaded."""

RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's resampling filters by number."""

STEPS = {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"}
"""The supported steps of an image processor; images are already RGB."""


def folder_of(spec: str) -> Path:
    """Return the folder of ``hf:DIR`` or ``hf:org/name@revision``, downloading it if necessary."""
    place = spec.partition(":")[2].strip()
    folder = Path(place).expanduser()
    if place and folder.is_dir():
        return folder
    if not place or place.startswith((".", "/", "~")):
        raise InputError(f"model {spec!r}: no such directory")
    repository, at, revision = place.partition("@")
    if not is_repository(repository) or (at and not revision):
        raise InputError(f"model {spec!r}: expected a directory, hf:org/name or hf:org/name@revision")
    return from_hub(
        repository,
        FILES,
        lambda folder: folder if _is_complete(folder) else None,
        revision=revision or None,
        hint="pass hf:DIR with a local directory",
    )


def _is_complete(folder: Path) -> bool:
    """Whether a folder has all files of a model; directories of ``classwise export`` have no image processor."""
    if not (folder / CONFIG).is_file() or not any(folder.glob("*.safetensors")):
        return False
    return (folder / PROCESSOR).is_file() or read_config(folder).get("schema") == SCHEMA


def transformers_model(folder: Path, num_classes: int | None) -> nn.Module:
    """Load an image classifier of transformers with its image processor as a part of the model."""
    transformers = optional("transformers", "hf")
    check_numbers(folder / CONFIG, read_config(folder))
    settings = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet(transformers.utils.logging):
            with no_larger_than_its_weights(folder):
                model, found = transformers.AutoModelForImageClassification.from_pretrained(
                    folder, use_safetensors=True, output_loading_info=True, **settings
                )
            processor = transformers.AutoImageProcessor.from_pretrained(folder, **settings)
    except InputError:
        raise
    except Exception as error:  # invalid files raise many kinds of exceptions
        raise InputError(
            f"{folder} is not an image classifier that transformers can load: {one_line(error, 200)}"
        ) from error
    absent = [*found["missing_keys"], *found["mismatched_keys"]]
    if absent:  # transformers would initialize them randomly
        raise InputError(
            f"{folder}: {len(absent)} weights are missing or have other shapes, such as {str(absent[0])[:80]!r}"
        )
    if num_classes is not None and model.config.num_labels != num_classes:
        raise InputError(f"{folder} has {model.config.num_labels} classes, but the data has {num_classes}")
    try:
        return prepared(model, processor.to_dict())
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    except Exception as error:  # wrong types and missing keys
        raise InputError(f"{folder}: the image processor cannot be read: {one_line(error, 120)}") from error


@contextmanager
def _quiet(log: Any) -> Iterator[None]:
    """Suppress progress bars and warnings of transformers; problems are exceptions or are checked here."""
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def prepared(model: nn.Module, processor: Mapping[str, Any]) -> nn.Module:
    """Add an image processor, given as the content of ``preprocessor_config.json``, to a model."""
    unsupported = [key for key, value in processor.items() if key.startswith("do_") and value and key not in STEPS]
    unsupported += [key for key in ("rescale_offset",) if processor.get(key)]
    if unsupported:
        raise InputError(
            f"the image processor has {unsupported[0]}; supported are resizing, center cropping, rescaling and "
            "normalization"
        )
    # Processors take pixels in 0..255.
    scale = 255 * float(processor["rescale_factor"]) if processor.get("do_rescale") else 255.0
    mean, std = [0.0], [1.0]
    if processor.get("do_normalize"):
        mean, std = processor["image_mean"], processor["image_std"]
    return Prepared(model, _resize(processor), [value / scale for value in mean], [value / scale for value in std])


def _resize(processor: Mapping[str, Any]) -> Resize | None:
    size, crop = processor.get("size"), None
    if processor.get("do_center_crop"):
        crop = _sides(processor["crop_size"])
        if not processor.get("do_resize"):
            raise InputError("the image processor crops without resizing, which is not supported")
    if not processor.get("do_resize"):
        return None
    mode = RESAMPLING[int(processor.get("resample", 2))]
    fraction = processor.get("crop_pct")  # ConvNeXt resizes to a larger size before the crop
    if fraction is not None:
        side = int(dict(size or {}).get("shortest_edge", 0))
        return Resize(int(side / fraction), mode, (side, side)) if side < 384 else Resize((side, side), mode)
    sides = dict(size or {})
    return Resize(int(sides["shortest_edge"]) if set(sides) == {"shortest_edge"} else _sides(sides), mode, crop)


def _sides(size: Any) -> tuple[int, int]:
    if not isinstance(size, Mapping) or set(size) != {"height", "width"}:
        raise InputError(f"the image processor has the size {str(size)[:80]!r}; expected height and width")
    return int(size["height"]), int(size["width"])
