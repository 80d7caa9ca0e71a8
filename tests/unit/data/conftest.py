"""Fixtures of the tests of data: a cache for each test, a mirror, a small data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import encode, picture, write_shard

from classwise.data import DatasetCard, ImageSet


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLASSWISE_CACHE", str(folder))
    if "real_data" not in request.fixturenames:
        monkeypatch.delenv("CLASSWISE_DATA", raising=False)
    return folder


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    monkeypatch.setenv("CLASSWISE_DATA", str(folder))
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """An unreachable hub; the list records the requests."""
    asked: list[dict[str, Any]] = []

    def refuse(repository: str, **options: Any) -> str:
        asked.append({"repository": repository, **options})
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    return asked


CARD = DatasetCard(
    name="toy",
    hub="org/toy",
    image_columns=("img", "image"),
    classes=("a", "b", "c"),
    mode="RGB",
    size=(6, 5),
)


@pytest.fixture
def card() -> DatasetCard:
    return CARD


@pytest.fixture
def toy(mirror: Path) -> tuple[Path, np.ndarray]:
    """Thirty images of three classes in three shards and three formats; their folder and their pixels."""
    folder = mirror / "org" / "toy" / "plain" / "deep"
    pictures = [picture(i) for i in range(30)]
    for shard in range(3):
        form = ("PNG", "WEBP", "BMP")[shard]
        rows = range(10 * shard, 10 * shard + 10)
        write_shard(
            folder / f"train-{shard:05}-of-00003.parquet",
            [encode(pictures[i], form) for i in rows],
            [i % 3 for i in rows],
        )
    return folder, np.stack([np.asarray(p) for p in pictures]).transpose(0, 3, 1, 2)


@pytest.fixture
def make_set() -> Callable[..., ImageSet]:
    def make(count: int = 12, shape: tuple[int, ...] = (3, 4, 4), **options: Any) -> ImageSet:
        random = np.random.default_rng(0)
        settings: dict[str, Any] = {
            "name": "made",
            "split": "train",
            "images": random.integers(0, 256, (count, *shape), dtype=np.uint8),
            "labels": np.arange(count) % 3,
            "classes": ("a", "b", "c"),
        }
        return ImageSet(**{**settings, **options})

    return make
