from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import claimed, encode, picture, write_shard
from PIL import Image

from classwise.core.errors import InputError
from classwise.data import DATASETS, Digits, Folder, HubParquet, load_data, materialize
from classwise.data import decode as decoding
from classwise.data.sources import read


def complaint(action) -> str:
    """Return the one-line error of a function."""
    with pytest.raises(InputError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(source) -> str:
    """Return the error of reading a source."""
    return complaint(lambda: read(source))


# Cards and digits


def test_cards_are_registered_under_their_names():
    for name, card in DATASETS.items():
        assert card.name == name
        assert set(card.splits) == {"train", "test"}
        assert len(set(card.classes)) == len(card.classes)


def test_digits():
    train, test = read(Digits("train")), read(Digits("test"))
    assert train.images.shape == (1100, 1, 8, 8)
    assert test.images.shape == (697, 1, 8, 8)
    assert train.counts(10).tolist() == [110] * 10
    assert test.counts(10).min() >= 60
    assert train.classes == tuple("0123456789")
    assert (train.images.min(), train.images.max()) == (0, 255)
    # The split is the same on every machine and in every version.
    assert train.digest() == "6874eda239e2101784889e3134619fc2"
    assert test.digest() == "d8cde3697da56b9eda35dc62070d2c3e"


def test_digits_are_whole_and_disjoint():
    from sklearn.datasets import load_digits

    found = load_digits()
    parts = [read(Digits(split)) for split in ("train", "test")]
    rows = sorted(
        (int(label), *image.ravel().tolist())
        for part in parts
        for image, label in zip(part.images, part.labels, strict=True)
    )
    expected = sorted(
        (int(label), *(round(value * 255 / 16) for value in image.ravel().tolist()))
        for image, label in zip(found.images, found.target, strict=True)
    )
    assert rows == expected


def test_digits_has_two_splits():
    assert refused(Digits("val")) == "unknown split of digits 'val' (known: test, train)"


# Parquet


def test_shards_are_read_in_order_in_any_image_format(toy, card):
    _, pixels = toy
    found = read(HubParquet(card, "train"))
    assert np.array_equal(found.images, pixels)
    assert found.labels.tolist() == [i % 3 for i in range(30)]
    assert (found.name, found.split, found.classes) == ("toy", "train", ("a", "b", "c"))


def test_images_are_converted_to_the_mode_of_the_card(mirror, card):
    solid = Image.new("RGB", (5, 6), (200, 200, 200))
    smooth = [encode(solid, "JPEG"), encode(solid.convert("L")), encode(solid.convert("RGBA"))]
    palette = solid.convert("P", palette=Image.Palette.ADAPTIVE)
    palette.info["transparency"] = bytes([255, 0])
    smooth += [encode(palette), encode(solid.convert("1")), encode(solid.convert("CMYK"), "JPEG")]
    write_shard(mirror / "org/toy/test-00000-of-00001.parquet", smooth, [0] * 6)
    images = read(HubParquet(card, "test")).images.astype(int)
    assert np.abs(images[[0, 1, 2, 3, 5]] - 200).max() <= 3
    gray = read(HubParquet(replace(card, mode="L"), "test"))
    assert gray.images.shape == (6, 1, 6, 5)


def test_split_aliases_first_wins(mirror, card):
    card = replace(card, splits={"train": ("train",), "test": ("test", "valid")})
    one, two = encode(picture(1)), encode(picture(2))
    write_shard(mirror / "org/toy/data/valid-00000-of-00001-0123456789abcdef.parquet", [one], [1])
    assert read(HubParquet(card, "test")).labels.tolist() == [1]
    write_shard(mirror / "org/toy/data/test-00000-of-00001.parquet", [two], [2])
    assert read(HubParquet(card, "test")).labels.tolist() == [2]


def test_only_files_of_the_split_are_read(mirror, card):
    one, two = encode(picture(1)), encode(picture(2))
    write_shard(mirror / "org/toy/test-00000-of-00001.parquet", [one], [1])
    write_shard(mirror / "org/toy/test-hard-00000-of-00001.parquet", [two], [2])
    write_shard(mirror / "org/toy/.cache/test-00000-of-00001.parquet", [two], [2])
    assert read(HubParquet(card, "test")).labels.tolist() == [1]


def test_shards_without_totals_are_accepted(mirror, card):
    for shard in (0, 1):
        write_shard(mirror / f"org/toy/test-{shard}.parquet", [encode(picture(shard))], [shard])
    assert read(HubParquet(card, "test")).labels.tolist() == [0, 1]


def test_a_missing_shard(toy, card):
    folder, _ = toy
    (folder / "train-00001-of-00003.parquet").unlink()
    said = refused(HubParquet(card, "train"))
    assert said == f"toy: train-00001-of-00003.parquet is missing in {folder}"


def test_shards_of_two_versions(toy, card):
    folder, _ = toy
    write_shard(folder / "train-00000-of-00003-abcdef.parquet", [encode(picture(0))], [0])
    assert "more than one version" in refused(HubParquet(card, "train"))


def test_several_configurations_are_ambiguous(toy, card, mirror):
    write_shard(mirror / "org/toy/other/train-00000-of-00001.parquet", [encode(picture(0))], [2])
    said = refused(HubParquet(card, "train"))
    assert "in several folders: other, plain/deep" in said
    assert read(HubParquet(replace(card, folder="other"), "train")).labels.tolist() == [2]
    assert len(read(HubParquet(replace(card, folder="plain"), "train"))) == 30


def harmed(path: Path, harm) -> None:
    path.write_bytes(harm(path.read_bytes()))


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"PAR1" + data[100:],
        lambda data: b"<html>Not found</html>",
        lambda data: data[:4] + bytes(len(data) - 2000) + data[-1996:],
    ],
    ids=["one byte", "half", "empty", "shifted", "html", "zeroed"],
)
def test_errors_name_the_damaged_shard(toy, card, harm):
    path = toy[0] / "train-00001-of-00003.parquet"
    harmed(path, harm)
    assert str(path) in refused(HubParquet(card, "train"))


def test_wrong_columns(mirror, card):
    path = mirror / "org/toy/test-00000-of-00001.parquet"
    image = encode(picture(0))
    write_shard(path, [image], [0], column="picture")
    assert (
        refused(HubParquet(card, "test")) == f"{path} has the columns picture, label; expected img or image and label"
    )
    write_shard(path, [image], [0], label="fine_label")
    assert "columns img, fine_label" in refused(HubParquet(card, "test"))
    write_shard(path, [image], ["cat"])
    assert "column label is string; expected integers" in refused(HubParquet(card, "test"))
    pq.write_table(pa.table({"img": [image], "label": [0]}), path)
    assert "column img is binary; expected a struct with the field bytes" in complaint(
        lambda: read(HubParquet(card, "test"))
    )


def test_missing_values(mirror, card):
    path = mirror / "org/toy/test-00000-of-00001.parquet"
    image = encode(picture(0))
    write_shard(path, [image] * 5 + [None], [0] * 6)
    assert refused(HubParquet(card, "test")) == f"{path}: row 5 has no image bytes"
    write_shard(path, [image] * 3, [0, None, 1])
    assert refused(HubParquet(card, "test")) == f"{path}: row 1 has no label"
    write_shard(path, [image], [7])
    assert refused(HubParquet(card, "test")) == "toy (test): label 7 at index 0; expected 0..2 (3 classes)"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"not an image", "not an image, or in a format that Pillow does not read"),
        (b"", "not an image, or in a format that Pillow does not read"),
        (encode(picture(0))[:60], "cannot be decoded: OSError"),
        (encode(picture(0), "WEBP")[:-40], "cannot be decoded"),
        (encode(picture(0, (7, 5))), "5x7 pixels; expected 5x6, the size of all images"),
        (encode(Image.new("I;16", (5, 6))), "pixels of mode 'I;16'; expected 8 bits per channel"),
        (claimed(9000, 9000), "9000x9000 pixels; expected at most 67108864"),
        (claimed(12000, 12000), "more than 67108864"),
        (claimed(60000, 60000), "more than 67108864 pixels"),
    ],
)
def test_errors_name_the_invalid_image(mirror, card, image, message):
    path = mirror / "org/toy/test-00000-of-00001.parquet"
    write_shard(path, [encode(picture(i)) for i in range(130)] + [image], [0] * 131)
    said = refused(HubParquet(card, "test"))
    assert said.startswith(f"{path}: row 130: ")
    assert message in said


def test_fingerprint_depends_on_files_and_card(toy, card):
    folder, _ = toy
    source = HubParquet(card, "train")
    seen = {source.fingerprint()}
    assert source.fingerprint() in seen
    path = folder / "train-00000-of-00003.parquet"
    os.utime(path, ns=(1, 1))
    seen.add(source.fingerprint())
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    seen.add(source.fingerprint())
    seen.add(HubParquet(replace(card, mode="L"), "train").fingerprint())
    assert len(seen) == 4


def test_changed_shard_replaces_the_cache_entry(toy, card, cache):
    folder, _ = toy
    assert materialize(HubParquet(card, "train")).labels[0] == 0
    write_shard(folder / "train-00000-of-00003.parquet", [encode(picture(0))], [2])
    changed = materialize(HubParquet(card, "train"))
    assert (len(changed), changed.labels[0]) == (21, 2)
    assert len(list(cache.iterdir())) == 1


# The hub


def test_failed_download_is_a_one_line_error(card, offline):
    said = refused(HubParquet(card, "test"))
    assert said.startswith("toy: cannot download org/toy from the Hugging Face hub")
    assert "CLASSWISE_DATA" in said
    assert "no route to host" in said
    assert [asked["local_files_only"] for asked in offline] == [True, False]
    assert offline[0]["repository"] == "org/toy"
    assert offline[0]["repo_type"] == "dataset"
    assert offline[0]["allow_patterns"] == ["test-*.parquet", "*/test-*.parquet"]


def test_data_set_absent_from_the_mirror_is_downloaded(card, offline, toy):
    refused(HubParquet(card, "test"))
    assert len(offline) == 2


def test_mirror_must_be_a_folder(card, offline, monkeypatch, tmp_path):
    monkeypatch.setenv("CLASSWISE_DATA", str(tmp_path / "nowhere"))
    assert "nowhere' is not a folder" in refused(HubParquet(card, "test"))
    assert offline == []


def test_incomplete_hub_cache_is_completed(card, monkeypatch, tmp_path):
    asked = []

    def snapshot_download(repository, *, local_files_only, **options):
        asked.append(local_files_only)
        for shard in range(1 if local_files_only else 2):
            write_shard(tmp_path / f"snap/test-{shard:05}-of-00002.parquet", [encode(picture(shard))], [shard])
        return str(tmp_path / "snap")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert read(HubParquet(card, "test")).labels.tolist() == [0, 1]
    assert asked == [True, False]
    asked.clear()
    assert len(HubParquet(card, "test").shards()) == 2
    assert asked == [True]


def test_repository_without_matching_files(card, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(tmp_path))
    said = refused(HubParquet(replace(card, folder="plain"), "test"))
    assert said == "toy: org/toy on the Hugging Face hub has no files plain/test-*.parquet"


# Folders


def save(path: Path, image: Image.Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def test_folder_of_classes(tmp_path):
    save(tmp_path / "f/zebra/1.png", picture(0))
    save(tmp_path / "f/ant/deeper/2.BMP", picture(1))
    save(tmp_path / "f/ant/10.webp", picture(2))
    (tmp_path / "f/moth").mkdir()
    (tmp_path / "f/.git").mkdir()
    (tmp_path / "f/ant/readme.txt").write_text("no image")
    (tmp_path / "f/ant/._10.png").write_text("left by another system")
    found = read(Folder(tmp_path / "f"))
    assert found.classes == ("ant", "moth", "zebra")
    assert found.labels.tolist() == [0, 0, 2]
    assert found.images.shape == (3, 3, 6, 5)
    assert np.array_equal(found.images[1].transpose(1, 2, 0), np.asarray(picture(1)))
    assert found.name == f"folder:{tmp_path / 'f'}"


def test_mixed_gray_and_color_become_color(tmp_path):
    save(tmp_path / "a/1.png", picture(0, mode="L"))
    save(tmp_path / "b/1.png", picture(1, mode="L").convert("1"))
    assert read(Folder(tmp_path)).images.shape == (2, 1, 6, 5)
    save(tmp_path / "b/2.png", picture(2))
    found = read(Folder(tmp_path))
    assert found.images.shape == (3, 3, 6, 5)
    assert np.array_equal(found.images[0], np.repeat(np.asarray(picture(0, mode="L"))[None], 3, 0))


def test_splits_are_sub_folders_and_share_their_classes(tmp_path):
    for path in ("train/a/1.png", "train/b/1.png", "train/c/1.png", "val/c/1.png"):
        save(tmp_path / path, picture(0))
    train, test = read(Folder(tmp_path, "train")), read(Folder(tmp_path, "test"))
    assert train.labels.tolist() == [0, 1, 2]
    assert test.labels.tolist() == [2]
    assert train.classes == test.classes == ("a", "b", "c")
    assert "unknown split of folder:" in refused(Folder(tmp_path, "extra"))
    assert "(known: train, val)" in refused(Folder(tmp_path, "extra"))


def test_class_may_be_named_train(tmp_path):
    for name in ("car", "train"):
        save(tmp_path / name / "1.png", picture(0))
    assert read(Folder(tmp_path, "test")).classes == ("car", "train")


def test_folder_errors(tmp_path):
    assert refused(Folder(tmp_path / "none")).endswith("none: no such folder")
    assert "no class folders" in refused(Folder(tmp_path))
    (tmp_path / "a").mkdir()
    assert "no image files" in refused(Folder(tmp_path))
    one = save(tmp_path / "a/1.png", picture(0))
    two = save(tmp_path / "b/2.png", picture(0, (6, 9)))
    said = refused(Folder(tmp_path))
    assert f"images have different sizes: {one} is 5x6, {two} is 9x6" in said
    two.write_bytes(b"junk")
    assert refused(Folder(tmp_path)) == f"{two}: not an image, or in a format that Pillow does not read"
    two.write_bytes(encode(picture(0))[:60])
    assert refused(Folder(tmp_path)).startswith(f"{two}: cannot be decoded")
    two.write_bytes(claimed(60000, 60000))
    assert "more than" in refused(Folder(tmp_path))


def test_folder_fingerprint(tmp_path):
    one = save(tmp_path / "a/1.png", picture(0))
    source = Folder(tmp_path)
    seen = {source.fingerprint()}
    assert source.fingerprint() in seen
    os.utime(one, ns=(5, 5))
    seen.add(source.fingerprint())
    (tmp_path / "b").mkdir()
    seen.add(source.fingerprint())
    one.rename(tmp_path / "b/1.png")
    seen.add(source.fingerprint())
    assert len(seen) == 4


def test_changed_folders_are_read_again(tmp_path, cache):
    path = tmp_path / "pictures"
    save(path / "a/1.png", picture(0))
    spec = f"folder:{path}"
    assert isinstance(load_data(spec).images, np.memmap)
    save(path / "a/2.png", picture(1))
    assert len(load_data(spec)) == 2
    assert len(load_data(path)) == 2
    assert len(list(cache.iterdir())) == 1


# The user's own code

FACTORIES = """
import numpy as np, torch
from torch.utils.data import DataLoader, TensorDataset
from classwise.data import ImageSet

x, y = torch.rand(6, 3, 4, 4), torch.arange(6) % 3

def pair(): return x, y
def arrays(): return x.numpy(), y.numpy()
def dataset(): return TensorDataset(x, y)
def loader(): return DataLoader(TensorDataset(x, y), batch_size=4)
def images(): return ImageSet(name="mine", split="all", images=x.numpy(), labels=y.numpy())
def by_split(split): return (x[:4], y[:4]) if split == "train" else (x[4:], y[4:])
def by_anything(**options): return by_split(options["split"])
def broken(): raise RuntimeError("two\\nlines")
def nothing(): return None
def leaves(): raise SystemExit(3)
class Bad:
    def __len__(self): return 2
    def __getitem__(self, i): return {}["gone"]
thing = TensorDataset(x, y)
"""


@pytest.fixture
def factories(tmp_path) -> str:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return str(path)


@pytest.mark.parametrize("name", ["pair", "arrays", "dataset", "loader", "images", "thing"])
def test_factories(factories, name, cache):
    found = load_data(f"{factories}:{name}")
    assert found.images.shape == (6, 3, 4, 4)
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.name == ("mine" if name == "images" else f"{factories}:{name}")
    assert not cache.exists()


@pytest.mark.parametrize("name", ["by_split", "by_anything"])
def test_factories_receive_the_split(factories, name):
    assert len(load_data(f"{factories}:{name}", split="train")) == 4
    assert len(load_data(f"{factories}:{name}", split="test")) == 2


def test_a_module_on_the_path(factories, monkeypatch):
    monkeypatch.syspath_prepend(Path(factories).parent)
    assert len(load_data("factories:pair", classes=["a", "b", "c"]).classes) == 3


def test_factory_errors(factories):
    assert "reading failed: RuntimeError: two lines" in complaint(lambda: load_data(f"{factories}:broken"))
    said = complaint(lambda: load_data(f"{factories}:nothing"))
    assert said.startswith(
        f"data '{factories}:nothing' provides an object of type NoneType; expected (images, labels), a"
    )
    assert "reading failed: SystemExit: 3" in complaint(lambda: load_data(f"{factories}:leaves"))
    assert "reading failed: KeyError: 'gone'" in complaint(lambda: load_data(f"{factories}:Bad"))
    assert "absent" in complaint(lambda: load_data(f"{factories}:absent"))
    assert "no such file" in complaint(lambda: load_data("nowhere.py:pair"))


def test_wrong_format_hint_is_harmless():
    for hint in ("JPEG", "MPO", "no format"):
        assert decoding.read_header(encode(picture(0)), hint).format == "PNG"
