"""A real download by huggingface_hub, from a small hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from data_files import encode, picture, write_shard

from small_hub import hub_of, run_beside


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one data set, and its requests so far."""
    files = {"README.md": b"# toy"}
    for split, shards in (("train", 2), ("test", 1)):
        for shard in range(shards):
            path = tmp_path / "shard.parquet"
            # All files differ, because the hub's cache would download equal ones only once.
            write_shard(path, [encode(picture(shards + shard), "WEBP")], [shard])
            files[f"plain/{split}-{shard:05}-of-{shards:05}.parquet"] = path.read_bytes()
    with hub_of("datasets", "org/toy", files) as found:
        yield found


SCRIPT = """
from dataclasses import replace
from classwise.data import DATASETS, DatasetCard, HubParquet, load_data
from classwise.data.sources import read
from classwise.core.errors import InputError

card = DatasetCard(name="toy", hub="org/toy", image_columns=("img",), classes=("a", "b"), mode="RGB", size=(6, 5))
DATASETS["toy"] = card
DATASETS["absent"] = replace(card, name="absent", hub="org/absent")
print(load_data("toy", split="train").labels.tolist())
print(len(read(HubParquet(card, "train"))))
for name in ("absent", "toy"):
    try:
        print(load_data(name, split="test").labels.tolist())
    except InputError as error:
        print(error)
"""


def test_download(hub, tmp_path):
    address, asked = hub
    train, again, absent, test = run_beside(SCRIPT, address, tmp_path / "hub")
    assert (train, again, test) == ("[0, 1]", "2", "[0]")
    assert absent.startswith("absent: cannot download org/absent from the Hugging Face hub: ")
    assert "set CLASSWISE_DATA to a directory that contains org/absent, or run classwise data prepare" in absent
    fetched = sorted(line.rpartition("/")[2] for line in asked if line.startswith("GET /datasets/"))
    assert fetched == [
        "test-00000-of-00001.parquet",
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
