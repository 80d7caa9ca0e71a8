"""The data sets known by name. Adding one is adding one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DatasetCard:
    """What has to be known of a data set to read it."""

    name: str
    hub: str | None
    """``org/name`` on the Hugging Face hub; None for the one that comes with scikit-learn."""
    image_columns: tuple[str, ...] = ("image",)
    """Names the image column may have; the first that is there is taken."""
    label_column: str = "label"
    classes: tuple[str, ...]
    mode: Literal["L", "RGB"]
    size: tuple[int, int]
    """Height and width, the same for every image."""
    superclasses: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Groups of labels that belong together, by name; none where nobody has named any."""
    folder: str = ""
    """The sub-folder (the hub's configuration) to read; needed where several hold files of one split."""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"train": ("train",), "test": ("test",)})
    """From our split names to those the files may have, most wanted first."""


DATASETS: dict[str, DatasetCard] = {
    "digits": DatasetCard(
        name="digits",
        hub=None,
        classes=("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
        mode="L",
        size=(8, 8),
    ),
    "mnist": DatasetCard(
        name="mnist",
        hub="ylecun/mnist",
        classes=("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
        mode="L",
        size=(28, 28),
    ),
    "cifar10": DatasetCard(
        name="cifar10",
        hub="uoft-cs/cifar10",
        image_columns=("img",),
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        superclasses={"transportation": (0, 1, 8, 9), "animals": (2, 3, 4, 5, 6, 7)},
        mode="RGB",
        size=(32, 32),
    ),
}


def known_superclasses(dataset: str, num_classes: int) -> dict[str, list[int]]:
    """The superclasses of a data set by name; none where nobody has named any, or for other classes."""
    card = DATASETS.get(dataset)
    if card is None or len(card.classes) != num_classes:
        return {}
    return {name: list(labels) for name, labels in card.superclasses.items()}
