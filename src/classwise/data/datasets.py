"""The data sets known by name. Adding one is adding one entry."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from PIL import ImageColor

from classwise.config.spec import Names, Number, Spec, convert
from classwise.core.errors import InputError
from classwise.corruptions import Corruption
from classwise.data.wordnet import IMAGENET, TINY_IMAGENET

MAX_SIDE = 4096
"""Larger images are asked for by mistake."""


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
    wnids: tuple[str, ...] = ()
    """The WordNet ids of the classes, where folders are called by them."""
    mode: Literal["L", "RGB"]
    size: tuple[int, int]
    """Height and width, the same for every image."""
    resize: int | None = None
    """Images come in many sizes: the shorter side is brought to so many pixels, then the centre is cut out."""
    superclasses: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Groups of labels that belong together, by name; none where nobody has named any."""
    folder: str = ""
    """The sub-folder (the hub's configuration) to read; needed where several hold files of one split."""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"train": ("train",), "test": ("test",)})
    """From our split names to those the files may have, most wanted first."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        return len(self.mode), *self.size


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a data set is used, and at which size: the settings a name takes, as in ``cifar10:without=cat``."""

    only: Names = ()
    """The classes to keep, by name or number; the rest is left out and labels are numbered anew. [default: all]"""
    without: Names = ()
    """Classes to leave out."""
    imbalance: Number = 1.0
    """Of the training images, so many times fewer of the last class than of the first, falling exponentially."""
    seed: int = 0
    """Which examples an imbalance keeps, and of the noise of a corruption."""
    background: Names = ()
    """Colours put behind grey images, for the classes in turn, as ``blue+yellow`` or ``#0033b3``. [default: none]"""
    corruption: str | None = None
    """A corruption of all images, as ``fog``."""
    severity: int = 3
    """Of the corruption, from 1 to 5."""
    resize: int | None = None
    """The shorter side before the centre is cut out, for images of many sizes."""
    crop: int | None = None
    """Height and width of what is cut out."""

    def __post_init__(self) -> None:
        if self.imbalance < 1:
            raise InputError(f"imbalance = {self.imbalance:g}; expected 1 or more")
        if self.seed < 0:
            raise InputError(f"seed = {self.seed}; expected 0 or more")
        if self.corruption is not None:
            Corruption(kind=self.corruption, severity=self.severity)  # one that does not exist is said now
        _ = self.colours

    @classmethod
    def parse(cls, spec: str) -> tuple[Spec, Choice]:
        """A name and its settings."""
        read = Spec.parse(spec)
        return read, cls(**convert(f"data {read.name!r}", cls, read.options))

    @property
    def derives(self) -> bool:
        """Whether it leaves something else than the whole data set."""
        return bool(self.only or self.without or self.imbalance > 1 or self.background or self.corruption)

    @property
    def colours(self) -> list[tuple[int, ...]]:
        """The background's, each of three numbers up to 255."""
        try:
            return [ImageColor.getrgb(colour)[:3] for colour in self.background]
        except ValueError as error:
            raise InputError(f"background: {error}; expected a colour like red or #ff0000") from None

    def sized(self, card: DatasetCard) -> DatasetCard:
        """The card with images of the chosen size, and a name that says so."""
        if self.background and card.mode != "L":
            raise InputError(f"{card.name} has colour images: a background is put behind grey ones")
        if self.resize is None and self.crop is None:
            return card
        if card.resize is None:
            raise InputError(f"{card.name} has images of one size: it takes neither resize nor crop")
        resize = card.resize if self.resize is None else self.resize
        crop = card.size[0] if self.crop is None else self.crop
        if not 1 <= crop <= resize <= MAX_SIDE:
            raise InputError(f"resize = {resize}, crop = {crop}; expected 1 <= crop <= resize <= {MAX_SIDE}")
        return replace(card, name=f"{card.name}:resize={resize},crop={crop}", size=(crop, crop), resize=resize)

    def labels(self, card: DatasetCard) -> list[int]:
        """The labels of the classes that are kept, in order."""
        left_out = {_label(card, name) for name in self.without}
        only = {_label(card, name) for name in self.only} or set(range(len(card.classes)))
        if not (kept := sorted(only - left_out)):
            raise InputError(f"{card.name}: no class is left")
        return kept


def _label(card: DatasetCard, name: str) -> int:
    """The label of a class, given by its name or else by its number."""
    if name in card.classes:
        return card.classes.index(name)
    if name.isdecimal() and name.isascii() and int(name) < len(card.classes):
        return int(name)
    near = difflib.get_close_matches(name, card.classes, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise InputError(f"{card.name} has no class {name!r}: {hint}(a name, or a number up to {len(card.classes) - 1})")


_DIGITS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
_HELD_OUT = {"train": ("train",), "test": ("validation", "valid", "val")}
"""Where labels of the test images were never published, the validation images serve as such."""

_CIFAR100 = {
    "aquatic_mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food_containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit_and_vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household_electrical_devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household_furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large_carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large_man-made_outdoor_things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large_natural_outdoor_scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large_omnivores_and_herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium_mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect_invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small_mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles_1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles_2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}
_CIFAR100_CLASSES = tuple(sorted(name for names in _CIFAR100.values() for name in names))

DATASETS: dict[str, DatasetCard] = {
    "digits": DatasetCard(name="digits", hub=None, classes=_DIGITS, mode="L", size=(8, 8)),
    "mnist": DatasetCard(name="mnist", hub="ylecun/mnist", classes=_DIGITS, mode="L", size=(28, 28)),
    "fashion-mnist": DatasetCard(
        name="fashion-mnist",
        hub="zalando-datasets/fashion_mnist",
        classes=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
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
    "cifar100": DatasetCard(
        name="cifar100",
        hub="uoft-cs/cifar100",
        image_columns=("img",),
        label_column="fine_label",
        classes=_CIFAR100_CLASSES,
        superclasses={
            group: tuple(_CIFAR100_CLASSES.index(name) for name in names) for group, names in _CIFAR100.items()
        },
        mode="RGB",
        size=(32, 32),
    ),
    "svhn": DatasetCard(
        name="svhn", hub="ufldl-stanford/svhn", folder="cropped_digits", classes=_DIGITS, mode="RGB", size=(32, 32)
    ),
    "stl10": DatasetCard(
        name="stl10",
        hub="tanganke/stl10",
        classes=("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"),
        superclasses={"transportation": (0, 2, 8, 9), "animals": (1, 3, 4, 5, 6, 7)},
        mode="RGB",
        size=(96, 96),
    ),
    "tiny-imagenet": DatasetCard(
        name="tiny-imagenet",
        hub="zh-plus/tiny-imagenet",
        classes=tuple(TINY_IMAGENET.values()),
        wnids=tuple(TINY_IMAGENET),
        mode="RGB",
        size=(64, 64),
        splits=_HELD_OUT,
    ),
    "imagenet": DatasetCard(
        name="imagenet",
        hub="ILSVRC/imagenet-1k",
        classes=tuple(IMAGENET.values()),
        wnids=tuple(IMAGENET),
        mode="RGB",
        size=(224, 224),
        resize=256,
        splits=_HELD_OUT,
    ),
}


def known_superclasses(dataset: str, num_classes: int) -> dict[str, list[int]]:
    """The superclasses of a data set by its name or spec; none where nobody has named any, or for other classes."""
    name, _, rest = dataset.partition(":")
    card = DATASETS.get(name)
    if card is None or (rest and "=" not in rest):
        return {}
    try:
        kept = Choice.parse(dataset)[1].labels(card)
    except InputError:  # a name of somebody else's
        return {}
    if len(kept) != num_classes:
        return {}
    groups = {
        group: [kept.index(label) for label in labels if label in kept] for group, labels in card.superclasses.items()
    }
    return {group: labels for group, labels in groups.items() if labels}
