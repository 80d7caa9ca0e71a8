"""Memory is independent of the size of a data set, both while it is cached and while it is iterated over."""

from __future__ import annotations

import secrets
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_files import encode, picture, write_shard
from layout_files import random_images, save_image

from classwise.data import HubParquet, materialize, ordered, source_of
from classwise.data.describe import describe
from classwise.data.sources import Reading

MB = 2**20


class Large:
    """96 MB of images, generated on demand."""

    name, split = "large", "test"

    def origin(self) -> str:
        return "here"

    def fingerprint(self) -> str:
        return "0"

    def open(self) -> Reading:
        parts = ((np.full((64, 1, 128, 128), i, np.uint8), np.zeros(64, np.int64)) for i in range(96))
        return Reading(96 * 64, (1, 128, 128), ("a",), parts)


def mapped_memory() -> int:
    """Return the resident bytes of memory-mapped files of this process."""
    status = Path("/proc/self/status")
    if not status.exists() or "RssFile" not in status.read_text():
        pytest.skip("the system does not tell how much of a file is resident")
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("RssFile"))


def test_building_and_iterating_needs_little_memory():
    tracemalloc.start()
    try:
        found = materialize(Large())
        assert tracemalloc.get_traced_memory()[1] < 24 * MB
    finally:
        tracemalloc.stop()
    assert found.images.nbytes == 96 * MB
    before = mapped_memory()
    held = []
    for x, _, _ in ordered(found, None, 64):
        assert x.shape == (64, 1, 128, 128)
        held.append(mapped_memory() - before)
    found.digest()
    described = describe(found)
    held.append(mapped_memory() - before)
    assert max(held) < 24 * MB
    assert abs(described.mean[0] - np.arange(96).mean() / 255) < 1e-12
    assert found.images[64 * 95, 0, 0, 0] == 95  # released pages are read again


def test_interrupted_build_leaves_no_files_and_restarts(cache, stop_after):
    with pytest.raises(KeyboardInterrupt):
        materialize(Large(), stop_after(1000))
    assert list(cache.iterdir()) == []
    assert len(materialize(Large())) == 96 * 64


def test_decoding_memory_is_independent_of_the_number_of_files(tmp_path, mirror, card, monkeypatch):
    """From folders and from parquet: four times the images, the same peak."""
    monkeypatch.setattr("classwise.data.decode.PART_BYTES", 2 * MB)
    large = replace(card, size=(224, 224), resize=256)

    def peaks(count: int) -> tuple[int, int]:
        folder = tmp_path / secrets.token_hex(4)
        for i in range(count):
            path = folder / "val" / "n01440764" / f"{i:03}.JPEG"
            if i < 2:
                save_image(path, random_images(1, (3, 260 + i, 270), seed=i)[0])
            else:
                path.hardlink_to(path.with_name(f"{i % 2:03}.JPEG"))
        pictures = [encode(picture(0, (260, 270)))] * count
        write_shard(mirror / "org/toy/test-00000-of-00001.parquet", pictures, [0] * count)
        found = []
        for source in (source_of(f"folder:{folder}", "test"), HubParquet(large, "test")):
            tracemalloc.start()
            assert len(materialize(source)) == count
            found.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return found[0], found[1]

    peaks(40)  # imports and other one-time allocations
    few, many = peaks(40), peaks(160)
    for one, other in zip(few, many, strict=True):
        assert other < 1.2 * one
        assert other < 160 * 3 * 224 * 224
