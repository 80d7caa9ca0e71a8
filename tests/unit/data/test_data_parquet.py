"""``parquet:PATH`` and ``hf:org/name``: parquet files whose classes, columns and image size are read from the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import claimed, encode, picture, write_shard
from typer.testing import CliRunner

from classwise.cli import app
from classwise.core.errors import InputError
from classwise.data import load_data
from each import for_each

PIXELS = np.stack([np.asarray(picture(i)).transpose(2, 0, 1) for i in range(6)])
ENCODED = [encode(picture(i)) for i in range(6)]


def complaint(spec: str, split: str = "test") -> str:
    with pytest.raises(InputError) as caught:
        load_data(spec, split=split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_names(path: Path, names: Any, column: str = "label") -> None:
    """Add the class names to a parquet file as the datasets library does."""
    features = {column: {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)


def test_one_file_is_every_split(tmp_path):
    path = tmp_path / "mine.parquet"
    write_shard(path, ENCODED, [0, 1, 2, 0, 1, 2], column="image")
    for split in ("train", "test"):
        found = load_data(f"parquet:{path}", split=split)
        assert np.array_equal(found.images, PIXELS)
        assert found.labels.tolist() == [0, 1, 2, 0, 1, 2]
        assert (found.name, found.split, found.classes) == (f"parquet:{path}", split, ("0", "1", "2"))


def test_directory_with_splits(tmp_path):
    write_shard(tmp_path / "data/train-00000-of-00002.parquet", ENCODED[:2], [0, 1])
    write_shard(tmp_path / "data/train-00001-of-00002.parquet", ENCODED[2:5], [1, 0, 1])
    write_shard(tmp_path / "data/validation-00000-of-00001.parquet", ENCODED[5:], [1])
    train, test = (load_data(f"parquet:{tmp_path}", split=split) for split in ("train", "test"))
    assert np.array_equal(train.images, PIXELS[:5])
    assert train.labels.tolist() == [0, 1, 1, 0, 1]
    assert np.array_equal(test.images, PIXELS[5:])
    assert "is missing" not in complaint(f"parquet:{tmp_path}", "unlabeled")
    (tmp_path / "data/train-00000-of-00002.parquet").unlink()
    assert "train-00000-of-00002.parquet is missing" in complaint(f"parquet:{tmp_path}", "train")


def test_files_named_by_their_split_only(tmp_path):
    write_shard(tmp_path / "train.parquet", ENCODED[:2], [0, 1])
    write_shard(tmp_path / "test.parquet", ENCODED[2:], [0, 1, 0, 1])
    assert len(load_data(f"parquet:{tmp_path}", split="train")) == 2
    assert len(load_data(f"parquet:{tmp_path}", split="test")) == 4
    write_shard(tmp_path / "test-00000-of-00001.parquet", ENCODED, [0] * 6)
    assert "more than one version" in complaint(f"parquet:{tmp_path}")


def test_directory_without_splits(tmp_path):
    write_shard(tmp_path / "b.parquet", ENCODED[3:], [1, 1, 1])
    write_shard(tmp_path / "a.parquet", ENCODED[:3], [0, 0, 0])
    assert np.array_equal(load_data(f"parquet:{tmp_path}", split="train").images, PIXELS)
    write_shard(tmp_path / "train.parquet", ENCODED[:1], [0])
    assert complaint(f"parquet:{tmp_path}") == f"parquet:{tmp_path}: no parquet files of the split test"


def test_class_names_and_other_columns(tmp_path):
    path = tmp_path / "test.parquet"
    write_shard(path, ENCODED[:2], [2, 0], label="fine_label")
    with_names(path, ["cat", "dog", "fox"], "fine_label")
    assert load_data(f"parquet:{path}").classes == ("cat", "dog", "fox")
    with_names(path, ["cat", "dog"], "fine_label")
    assert "label 2 at index 0; expected 0..1 (2 classes)" in complaint(f"parquet:{path}")
    for names in (None, 7, [], [1, 2, 3], {"cat": 0}):
        with_names(path, names, "fine_label")
        assert load_data(f"parquet:{path}").classes == ("0", "1", "2")


def test_gray_images_stay_gray_unless_one_has_color(tmp_path):
    path, gray = tmp_path / "test.parquet", [encode(picture(i, mode="L")) for i in range(2)]
    write_shard(path, gray, [0, 1])
    assert load_data(f"parquet:{path}").images.shape == (2, 1, 6, 5)
    write_shard(path, [*gray, ENCODED[0]], [0, 1, 1])
    found = load_data(f"parquet:{path}").images
    assert found.shape == (3, 3, 6, 5)
    assert np.array_equal(found[2], PIXELS[0])


@for_each(
    ("encoded", "labels", "message"),
    [
        (
            [ENCODED[0], encode(picture(0, (7, 5)))],
            [0, 0],
            "images have different sizes: {path}: row 0 is 5x6, {path}: ",
        ),
        ([ENCODED[0], b"not an image"], [0, 0], "{path}: row 1: not an image"),
        ([claimed(60000, 60000)], [0], "{path}: row 0: more than 67108864 pixels"),
        ([ENCODED[0], None], [0, 0], "{path}: row 1 has no image bytes"),
        ([ENCODED[0]], [-1], "label -1 at index 0"),
        ([ENCODED[0]], [10**15], "label 1000000000000000; expected integers below 100000"),
        ([ENCODED[0]], ["cat"], "{path}: column label is string; expected integers"),
        ([ENCODED[0]], [0.5], "{path}: column label is double; expected integers"),
        ([], pa.array([], pa.int64()), "{path}: contains no images"),
    ],
)
def test_invalid_content(tmp_path, encoded, labels, message):
    path = tmp_path / "test.parquet"
    write_shard(path, encoded, labels)
    assert message.format(path=path) in complaint(f"parquet:{path}")


def test_invalid_files(tmp_path):
    path = tmp_path / "test.parquet"
    assert complaint(f"parquet:{path}") == f"parquet:{path}: no such file or directory"
    path.write_bytes(b"PAR1 is not enough PAR1")
    assert complaint(f"parquet:{path}").startswith(f"{path}: not a readable parquet file: ")
    pq.write_table(pa.table({"image": ENCODED, "label": [0] * 6}), path)
    assert "column image is binary; expected a struct with the field bytes" in complaint(f"parquet:{path}")
    write_shard(path, ENCODED, [0] * 6, column="photo", label="kind")
    assert complaint(f"parquet:{path}") == (f"{path} has the columns photo, kind; expected image or img and label")


def test_changed_file_is_read_again(tmp_path, cache):
    path = tmp_path / "test.parquet"
    write_shard(path, ENCODED[:2], [0, 1])
    assert len(load_data(f"parquet:{path}")) == 2
    write_shard(path, ENCODED[:3], [0, 1, 1])
    assert len(load_data(f"parquet:{path}")) == 3
    assert len(list(cache.iterdir())) == 1


def test_mirror_of_the_hub(mirror, offline):
    write_shard(mirror / "org/toy/plain/test-00000-of-00001.parquet", ENCODED[:2], [0, 1])
    write_shard(mirror / "org/toy/other/test-00000-of-00001.parquet", ENCODED[2:], [0, 1, 2, 0])
    assert np.array_equal(load_data("hf:org/toy:plain").images, PIXELS[:2])
    assert load_data("hf:org/toy:other").classes == ("0", "1", "2")
    assert "in several folders: other, plain" in complaint("hf:org/toy")
    assert offline == []
    said = complaint("hf:org/absent")
    assert said.startswith("hf:org/absent: cannot download org/absent from the Hugging Face hub: OSError")
    assert said.endswith(". Without network access, set CLASSWISE_DATA to a directory that contains org/absent")
    assert [asked["local_files_only"] for asked in offline] == [True, False]


@pytest.mark.parametrize(
    "spec", ["hf:toy", "hf:org/toy:../other", "hf:org/toy:/etc", "hf:../toy/x", "hf:org/toy:a:b", "hf:../.."]
)
def test_invalid_repositories(spec, offline):
    assert complaint(spec) == f"data {spec!r}: expected hf:org/name or hf:org/name:config"
    assert offline == []


def test_command(tmp_path):
    write_shard(tmp_path / "test.parquet", ENCODED, [0, 1, 0, 1, 0, 1])
    result = CliRunner().invoke(app, ["data", "info", f"parquet:{tmp_path}", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert (facts["n"], facts["shape"], facts["from"]) == (6, [3, 6, 5], str(tmp_path))
