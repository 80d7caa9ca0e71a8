"""Data sets: a source is decoded once into arrays (uint8, cached on disk), which are served as batches.

Imports ``core``, ``config``, ``storage``, ``metrics`` and ``corruptions``.
"""

from classwise.data.arrays import ImageSet
from classwise.data.augment import augment
from classwise.data.batches import Batch, Batches, MixedBatches, ordered, share_of, to_float
from classwise.data.cache import materialize
from classwise.data.datasets import DATASETS, DatasetCard
from classwise.data.folders import Folder
from classwise.data.load import load_data, source_of
from classwise.data.objects import Factory
from classwise.data.parquet import HubParquet
from classwise.data.sources import Digits, Source
from classwise.data.splits import balanced_split, balanced_subset

__all__ = [
    "DATASETS",
    "Batch",
    "Batches",
    "DatasetCard",
    "Digits",
    "Factory",
    "Folder",
    "HubParquet",
    "ImageSet",
    "MixedBatches",
    "Source",
    "augment",
    "balanced_split",
    "balanced_subset",
    "load_data",
    "materialize",
    "ordered",
    "share_of",
    "source_of",
    "to_float",
]
