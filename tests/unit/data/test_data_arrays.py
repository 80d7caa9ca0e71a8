from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from classwise.core.errors import InputError
from classwise.data import ImageSet, arrays, materialize
from classwise.data import cache as disk
from classwise.data.sources import Reading
from each import for_each

UINT8 = np.arange(2 * 3 * 2 * 2, dtype=np.uint8).reshape(2, 3, 2, 2)
FLOAT = UINT8.astype(np.float32) / 255


def build(images=UINT8, labels=(0, 1), classes=("a", "b")):
    return ImageSet(name="set", split="test", images=images, labels=np.asarray(labels), classes=classes)


@for_each(
    ("images", "labels", "message"),
    [
        (UINT8, (0, 2), "label 2 at index 1; expected 0..1 (2 classes)"),
        (UINT8, (-1, 0), "label -1 at index 0"),
        (UINT8, (0.0, 1.0), "labels are float64 of shape (2,); expected integers from 0 of shape (N,)"),
        (UINT8, ("cat", "dog"), "labels are text or objects such as 'cat'; expected integers"),
        (
            UINT8,
            ((1, 0), (0, 1)),
            "int64 of shape (2, 2); expected integers from 0 of shape (N,); if they are one-hot, pass argmax(1)",
        ),
        (
            UINT8,
            ((1.0, 0.0), (0.0, 1.0)),
            "labels are float64 of shape (2, 2); expected integers from 0 of shape (N,); ",
        ),
        (UINT8, (0, 1, 1), "2 images but 3 labels"),
        (UINT8[0], (0, 1), "images have shape (3, 2, 2); expected (N, C, H, W)"),
        (UINT8[:0], np.zeros(0, int), "at least one"),
        (UINT8[:, :0], (0, 1), "shape (2, 0, 2, 2)"),
        (UINT8.astype(np.int64), (0, 1), "images are int64; expected uint8, or float32 in [0, 1]"),
        (UINT8.astype(np.float32), (0, 1), "pixels lie in [0, 23]; expected [0, 1]; divide by 255"),
        (FLOAT * 4 - 2, (0, 1), "if they are normalized, move the normalization into the model"),
        (FLOAT - 2e-6, (0, 1), "pixels lie in [-2e-06"),
        (np.where(np.arange(2).reshape(2, 1, 1, 1) == 1, np.nan, FLOAT), (0, 1), "image 1 has NaN pixels"),
        (np.where(FLOAT > 0.05, np.inf, FLOAT), (0, 1), "inf]"),
    ],
)
def test_invalid_arrays_raise_one_line_errors(images, labels, message):
    if images.dtype == np.float64:
        images = images.astype(np.float32)
    with pytest.raises(InputError) as caught:
        build(images, labels)
    assert message in str(caught.value)
    assert str(caught.value).startswith("set (test):")
    assert "\n" not in str(caught.value)


def test_without_classes_any_label_from_zero_is_allowed():
    assert build(labels=(0, 700), classes=None).labels.tolist() == [0, 700]
    with pytest.raises(InputError, match="label -3 at index 1; expected 0 or more"):
        build(labels=(0, -3), classes=None)


def test_accepts_any_number_of_channels_and_any_integer_labels():
    made = build(np.zeros((2, 7, 2, 2), np.uint8), np.array([0, 1], np.uint8))
    assert made.labels.dtype == np.int64


def test_rounding_errors_are_clipped_without_changing_the_input():
    given = FLOAT.copy()
    given[0, 0, 0, 0], given[1, 0, 0, 0] = -9e-7, np.float32(1 + 9e-7)
    made = build(given)
    assert (made.images.min(), made.images.max()) == (0, 1)
    assert given.min() < 0


def test_exact_range_is_not_copied():
    assert build(FLOAT).images is FLOAT


def test_take_and_counts():
    made = build(labels=(0, 1), classes=("a", "b", "c"))
    taken = made.take([1, 1])
    assert len(taken) == 2
    assert taken.labels.tolist() == [1, 1]
    assert (taken.images == UINT8[1]).all()
    assert made.take(np.array([False, True])).labels.tolist() == [1]
    assert made.counts(3).tolist() == [1, 1, 0]
    with pytest.raises(InputError, match=r"label 1 at index 1; expected 0\.\.0"):
        made.counts(1)
    with pytest.raises(InputError, match=r"index 2 is out of range; expected 0\.\.1"):
        made.take([0, 2])
    with pytest.raises(InputError, match="index -1"):
        made.take([-1])
    with pytest.raises(InputError, match="no examples are selected"):
        made.take([])


def test_digest_depends_only_on_content(monkeypatch):
    one = build()
    assert one.digest() == build(classes=None).digest() == build(np.asfortranarray(UINT8)).digest()
    changed = UINT8.copy()
    changed[1, 2, 1, 1] ^= 1
    others = [build(changed), build(labels=(1, 0)), build(UINT8.reshape(2, 3, 4, 1)), build(FLOAT)]
    assert len({one.digest(), *(other.digest() for other in others)}) == 5
    before = one.digest()
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 12)
    assert build().digest() == build(np.asfortranarray(UINT8)).digest() != before  # several chunks


def test_nan_is_found_in_a_later_chunk(monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 1)
    images = np.zeros((5, 1, 2, 2), np.float32)
    images[3, 0, 1, 1] = np.nan
    with pytest.raises(InputError, match="image 3 has NaN"):
        build(images, np.zeros(5, int))


# The cache


@dataclass
class Fake:
    """A source that counts how often it is read."""

    name: str = "fake"
    split: str = "test"
    version: str = "a0"
    reads: list[int] = field(default_factory=list)
    labels: tuple[int, ...] = (0, 1)

    def origin(self) -> str:
        return "here"

    def fingerprint(self) -> str:
        return self.version

    def open(self) -> Reading:
        self.reads.append(1)
        return Reading(2, UINT8.shape[1:], ("a", "b"), [(UINT8, np.array(self.labels))])


def same(found: ImageSet) -> bool:
    return bool((found.images == UINT8).all()) and found.labels.tolist() == [0, 1]


def test_second_read_is_from_disk(cache):
    source = Fake()
    first, second = materialize(source), materialize(source)
    assert len(source.reads) == 1
    for found in (first, second):
        assert isinstance(found.images, np.memmap)
        assert not found.images.flags.writeable
        assert same(found)
        assert (found.name, found.split, found.classes) == ("fake", "test", ("a", "b"))
    assert [entry.name for entry in cache.iterdir()] == ["fake-test-a0"]
    assert sorted(p.name for p in (cache / "fake-test-a0").iterdir()) == [
        "images.npy",
        "labels.npy",
        "meta.json",
    ]
    meta = json.loads((cache / "fake-test-a0" / "meta.json").read_text())
    assert meta["shape"] == [2, 3, 2, 2]


def test_invalid_data_is_not_cached(cache):
    with pytest.raises(InputError, match=r"label 7 at index 1; expected 0\.\.1"):
        materialize(Fake(labels=(0, 7)))
    assert list(cache.iterdir()) == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def rename_class(path: Path) -> None:
    path.write_text(path.read_text().replace('"b"', '"z"'))


@pytest.mark.parametrize(
    ("file", "harm"),
    [(file, harm) for file in ("images.npy", "labels.npy", "meta.json") for harm in (truncate, flip, empty, remove)]
    + [("meta.json", rename_class)],
)
def test_damaged_entry_is_rebuilt(cache, file, harm):
    source = Fake()
    materialize(source)
    harm(cache / "fake-test-a0" / file)
    found = materialize(source)
    assert len(source.reads) == 2
    assert same(found)
    assert found.classes == ("a", "b")
    materialize(source)
    assert len(source.reads) == 2
    assert [entry.name for entry in cache.iterdir()] == ["fake-test-a0"]


@pytest.mark.parametrize("content", ["[]", "3", "{}", "null", '{"seal": 1}', "{"])
def test_invalid_meta_file(cache, content):
    source = Fake()
    materialize(source)
    (cache / "fake-test-a0" / "meta.json").write_text(content)
    assert same(materialize(source))
    assert len(source.reads) == 2


def test_pickle_in_the_cache_is_not_loaded(cache):
    source = Fake()
    materialize(source)
    path = cache / "fake-test-a0" / "labels.npy"
    with path.open("wb") as file:
        np.save(file, np.array([object()], dtype=object), allow_pickle=True)
    meta = json.loads((path.parent / "meta.json").read_text())
    del meta["seal"]
    meta["files"]["labels"] = disk._measure(path)
    meta["seal"] = disk.digest_json(meta)
    (path.parent / "meta.json").write_text(json.dumps(meta))
    assert same(materialize(source))
    assert len(source.reads) == 2


def test_changed_source_replaces_only_its_own_entry(cache):
    for source in (Fake(), Fake(split="train"), Fake(name="other-fake"), Fake(name="fake-test")):
        materialize(source)
    old = cache / ".fake-test-a0.123abc"
    young = cache / ".fake-test-a0.456def"
    for leftover in (old, young):
        leftover.mkdir()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    changed = Fake(version="b1")
    assert same(materialize(changed))
    expected = {"fake-test-b1", "fake-train-a0", "other-fake-test-a0", "fake-test-test-a0", young.name}
    assert {entry.name for entry in cache.iterdir()} == expected


def test_names_that_are_invalid_file_names(cache):
    assert same(materialize(Fake(name="folder:/some/where/" + 300 * "x")))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("place", ["file/below", "/proc/nowhere"])
def test_unwritable_cache_keeps_images_in_memory(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLASSWISE_CACHE", str(tmp_path / place))
    source = Fake()
    assert same(materialize(source))
    assert not isinstance(materialize(source).images, np.memmap)


def test_full_disk_leaves_no_files(cache, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    assert same(materialize(Fake()))
    assert list(cache.iterdir()) == []


def test_cache_directory(monkeypatch):
    monkeypatch.delenv("CLASSWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert disk.cache_directory() == Path("/xdg/classwise")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert disk.cache_directory() == Path("/home/me/.cache/classwise")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(disk.Path, "home", homeless)
    assert disk.cache_directory() is None
    assert same(materialize(Fake()))


def test_threads_can_build_the_same_entry(cache):
    together = threading.Barrier(4)

    class Slow(Fake):
        def open(self) -> Reading:
            together.wait(10)
            return super().open()

    source = Slow()
    found: list[ImageSet] = []
    threads = [threading.Thread(target=lambda: found.append(materialize(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(source.reads) == 4
    assert [same(one) for one in found] == [True] * 4
    assert [entry.name for entry in cache.iterdir()] == ["fake-test-a0"]
    assert same(materialize(source))
    assert len(source.reads) == 4


WORKER = """
import sys, time
from pathlib import Path
import numpy as np
from classwise.data import materialize
from classwise.data.sources import Reading

here = Path(sys.argv[1])

class Source:
    name, split = "shared", "test"
    def fingerprint(self): return "c0"
    def open(self):
        (here / sys.argv[2]).touch()
        while not all((here / other).exists() for other in "AB"): time.sleep(0.01)
        images = np.arange(4000000, dtype=np.uint8).reshape(100, 1, 200, 200)
        return Reading(100, (1, 200, 200), ("a",), [(images[:60], np.zeros(60, int)), (images[60:], np.zeros(40, int))])

found = materialize(Source())
assert found.images.sum(dtype=np.int64) == np.arange(4000000, dtype=np.uint8).sum(dtype=np.int64)
assert type(found.images).__name__ == "memmap", type(found.images)
"""


def test_processes_can_build_the_same_entry(cache, tmp_path):
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "AB"]
    for worker in workers:
        _, complaint = worker.communicate(timeout=60)
        assert worker.returncode == 0, complaint
    assert [entry.name for entry in cache.iterdir()] == ["shared-test-c0"]
