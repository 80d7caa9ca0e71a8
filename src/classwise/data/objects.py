"""Data given as Python objects (arrays, tensors, Datasets, DataLoaders) or by a function that returns one."""

# N examples, B batch, C channels, H height, W width

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Generator, Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, TensorDataset

from classwise.config.plugins import load_attribute
from classwise.core.errors import InputError, one_line
from classwise.data.arrays import ImageSet
from classwise.data.decode import mode_of, pixels, undecodable

IMAGE_KEYS = ("image", "img", "pixel_values")
LABEL_KEYS = ("label", "labels")
EXPECTED = "(images, labels), a Dataset or a DataLoader"


def as_image_set(data: Any, *, name: str, split: str, classes: Sequence[str] | None = None) -> ImageSet:
    """Read a data set into memory. ``classes`` overrides the class names of the data."""
    names = tuple(classes) if classes is not None else None
    if isinstance(data, ImageSet):
        return data if names is None else replace(data, classes=names)
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise InputError(
                f"{name}: data is a {type(data).__name__} of length {len(data)}; expected a pair (images, labels)"
            )
        images, labels = _array(data[0], "images"), _array(data[1], "labels")
    elif isinstance(data, Mapping):
        x, y = _pair(data, name)
        images, labels = _array(x, "images"), _array(y, "labels")
    elif isinstance(data, DataLoader):
        names = names or class_names(data.dataset)
        images, labels = _from_loader(data)
    elif isinstance(data, TensorDataset) and len(data.tensors) == 2:
        images, labels = _array(data.tensors[0], "images"), _array(data.tensors[1], "labels")
    elif isinstance(data, np.ndarray | Tensor):
        raise InputError("data is an array without labels; expected a pair (images, labels)")
    elif _is_iterable(data):
        names = names or class_names(data)
        images, labels = _from_items(_items(data))
    else:
        raise InputError(f"data has type {type(data).__name__}; expected a spec, {EXPECTED}")
    return ImageSet(name=name, split=split, images=_nchw(images, labels.size), labels=labels, classes=names)


@dataclass(frozen=True)
class Factory:
    """User code that provides data, ``package.module:factory`` or ``path/to/file.py:factory``.

    It is, or returns, a pair of images and labels, a Dataset, a DataLoader or an ``ImageSet``. A parameter named
    ``split`` receives the data split. The result is not cached, because it may change at any time.
    """

    spec: str
    split: str = "test"

    def read(self) -> ImageSet:
        """Read all images."""
        found = load_attribute(self.spec, "data")
        try:
            if callable(found):
                found = found(split=self.split) if _takes_split(found) else found()
            if not isinstance(found, ImageSet) and not _is_iterable(found):
                kind = type(found).__name__
                raise InputError(f"data {self.spec!r} provides an object of type {kind}; expected {EXPECTED}")
            return as_image_set(found, name=self.spec, split=self.split)  # may run user code as well
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"data {self.spec!r}: reading failed: {one_line(error)}") from error


def _takes_split(factory: Any) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    named = any(p.name == "split" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    return named or any(p.kind is p.VAR_KEYWORD for p in parameters)


def class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return the class names of a dataset: ``.classes`` of torchvision's, ``.features`` of the hub's."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    found = getattr(dataset, "classes", None)
    features = getattr(dataset, "features", None)
    if found is None and isinstance(features, Mapping):
        found = next((getattr(features[key], "names", None) for key in LABEL_KEYS if key in features), None)
    if isinstance(found, list | tuple) and found and all(isinstance(entry, str) for entry in found):
        return tuple(found)
    return None


def _array(value: Any, what: str) -> np.ndarray:
    """Convert a tensor, or anything that numpy accepts, to an array."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        # numpy has no bfloat16
        array: np.ndarray = (value.float() if value.is_floating_point() else value).numpy()
        return array
    try:
        return np.asarray(value)
    except ValueError:
        raise InputError(f"{what} have different shapes; expected one shape for all") from None


def _nchw(images: np.ndarray, examples: int) -> np.ndarray:
    """Convert images to (N, C, H, W) and floats to float32.

    Images (N, H, W) are gray. Channels are last if the last axis has length 1 or 3 and the second has not; float images
    must also be larger than 4 pixels in height and width, because other data comes as (N, features, 1, 1).
    """
    if images.dtype.kind == "f":
        images = images.astype(np.float32, copy=False)
    if images.ndim == 3 and len(images) == examples:
        images = images[:, None]
    channels_last = images.ndim == 4 and images.shape[3] in (1, 3) and images.shape[1] not in (1, 3)
    if channels_last and (images.dtype == np.uint8 or min(images.shape[1:3]) > 4):
        images = images.transpose(0, 3, 1, 2)
    return images


def _is_iterable(data: Any) -> bool:
    """Whether an object has items, as a map-style or iterable dataset has."""
    return hasattr(data, "__getitem__") or hasattr(data, "__iter__")


def _items(data: Any) -> Iterator[Any]:
    """Return the examples of a map-style or iterable dataset, in order."""
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        # Iteration would rely on an IndexError at the end, which not every Dataset raises.
        return (data[i] for i in range(len(data)))
    return iter(data)


def _from_items(items: Iterable[Any]) -> tuple[np.ndarray, np.ndarray]:
    images: list[np.ndarray] = []
    labels: list[Any] = []
    for index, item in enumerate(items):
        image, label = _pair(item, f"example {index}")
        image = _image(image, f"example {index}")
        if images and image.shape != images[0].shape:
            raise InputError(
                f"example 0 has shape {images[0].shape}, example {index} has {image.shape}; expected one shape for all"
            )
        images.append(image)
        labels.append(label.item() if isinstance(label, Tensor) and label.numel() == 1 else label)
    if not images:
        raise InputError("the data set is empty; expected at least one example")
    return np.stack(images), _array(labels, "labels")


def _from_loader(loader: DataLoader[Any]) -> tuple[np.ndarray, np.ndarray]:
    loader = _unshuffled(loader)
    if loader.batch_size is None and loader.batch_sampler is None:
        return _from_items(loader)
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for index, batch in enumerate(loader):
        x, y = _pair(batch, f"batch {index}")
        images.append(_array(x, "images"))
        labels.append(_array(y, "labels"))
        if images[-1].shape[1:] != images[0].shape[1:]:
            raise InputError(
                f"batch 0 has images of shape {images[0].shape[1:]}, batch {index} of {images[-1].shape[1:]}; "
                "expected one shape for all"
            )
    if not images:
        raise InputError("the DataLoader is empty; expected at least one batch")
    return np.concatenate(images), np.concatenate(labels)


def _unshuffled(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader in the order of its dataset, without dropping the last batch.

    Results are stored by index, so the order must be the same in every run. A custom sampler is kept.
    """
    sampler = loader.sampler
    plain = isinstance(sampler, RandomSampler | SequentialSampler) and not getattr(sampler, "replacement", False)
    if not plain or loader.batch_size is None or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=Generator(),  # iteration draws a seed for the workers, which must not change the user's generator
    )


def _pair(item: Any, where: str) -> tuple[Any, Any]:
    """Return image and label of an example or a batch."""
    if isinstance(item, Mapping):
        image = next((key for key in IMAGE_KEYS if key in item), None)
        label = next((key for key in LABEL_KEYS if key in item), None)
        if image is None or label is None:
            wanted = f"one of {', '.join(IMAGE_KEYS)} and one of {', '.join(LABEL_KEYS)}"
            raise InputError(f"{where} has the keys {', '.join(map(str, item))}; expected {wanted}")
        return item[image], item[label]
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    raise InputError(f"{where} has type {type(item).__name__}; expected (image, label) or a dict with both")


def _image(value: Any, where: str) -> np.ndarray:
    """Return an image as (C, H, W); arrays and tensors keep their axes."""
    if isinstance(value, Image.Image):
        try:
            return pixels(value, mode_of(value)).transpose(2, 0, 1)
        except Exception as error:
            raise undecodable(where, error) from error
    return _array(value, "images")
