"""``classwise data`` on the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_files import encode, picture
from layout_files import random_images, save_image, write_cifar_binary
from PIL import Image
from typer.testing import CliRunner

from classwise.cli import app
from classwise.data import ImageSet, load_data
from classwise.data.describe import contact_sheet, describe


def invoke(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_prepare_and_info(tmp_path, cache):
    images = random_images(20, (3, 32, 32))
    labels = [i % 10 for i in range(20)]
    folder = tmp_path / "mine"
    write_cifar_binary(folder / "test_batch.bin", images, labels)
    code, out, _ = invoke("data", "prepare", "cifar10", "--from", folder)
    assert code == 0
    said = out.splitlines()
    assert said[0] == "cifar10/test: 20 images of 3x32x32 in 10 classes"
    assert said[1].startswith("missing: ")
    assert said[1].endswith("data_batch_1.bin is missing")
    code, out, _ = invoke("data", "info", "cifar10", "--json", "--out", tmp_path / "out")
    assert code == 0
    facts = json.loads(out)
    assert facts == json.loads((tmp_path / "out" / "info.json").read_text())
    assert facts["from"] == str(folder)
    assert facts["classes"][3] == {"label": 3, "class": "cat", "n": 2}
    assert (facts["n"], facts["shape"]) == (20, [3, 32, 32])
    assert np.allclose(facts["mean"], images.mean((0, 2, 3)) / 255, atol=1e-12)
    assert np.allclose(facts["std"], images.std((0, 2, 3)) / 255, atol=1e-12)
    with Image.open(tmp_path / "out" / "sheet.png") as sheet:
        shown = np.asarray(sheet)[:64, 160:224]
    assert np.array_equal(shown[::2, ::2], images[0].transpose(1, 2, 0))  # class 0's first image, enlarged twice


def test_info_of_digits_is_a_table():
    code, out, _ = invoke("data", "info", "digits")
    assert code == 0
    assert "digits/test: 697 images, 1x8x8 uint8" in out
    assert "from: scikit-learn" in out
    assert "10 classes of " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "cifar1"], "unknown data set 'cifar1'"),
        (["info", "digits", "--split", "val"], "unknown split of digits 'val'"),
        (["info", "digits:only=11"], "digits has no class '11'"),
        (["prepare", "folder:/tmp"], "folder:/tmp needs no preparation: pass --data folder:/tmp directly"),
        (["prepare", "mine.py:make"], "mine.py:make needs no preparation: pass --data mine.py:make directly"),
        (["prepare", "foldr:/tmp"], "unknown data set 'foldr'"),
        (["prepare", "cifar10", "--from", "/nowhere"], "/nowhere: no such directory"),
        (["prepare", "cifar10", "--from", __file__], f"{__file__} is a file; expected a directory"),
        (["info", "parquet:nope.parquet"], "parquet:nope.parquet: no such file or directory"),
    ],
)
def test_errors_are_one_line(words, message):
    code, out, err = invoke("data", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_unwritable_output(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = invoke("data", "info", "digits", "--out", tmp_path / "file")
    assert code == 2
    assert "cannot write to" in err


HOSTILE = [
    "<script>alert(1)</script>",
    "two\nlines",
    "\x1b[31mred",
    "abc\u202egnp.exe",
    "n" * 250,
    "'; DROP",
    "\udcff\udcfe",
]


def test_hostile_class_names(tmp_path):
    for name in HOSTILE:
        folder = tmp_path / "hostile" / name
        try:
            folder.mkdir(parents=True)
        except OSError:  # not every file system takes every name
            continue
        (folder / "1.png").write_bytes(encode(picture(0)))
    code, out, _ = invoke("data", "info", f"folder:{tmp_path / 'hostile'}", "--out", tmp_path / "out")
    assert code == 0
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "two lines" in out
    code, out, _ = invoke("data", "info", f"folder:{tmp_path / 'hostile'}", "--json")
    assert len(json.loads(out)["classes"]) == len(list((tmp_path / "hostile").iterdir()))
    with Image.open(tmp_path / "out" / "sheet.png") as sheet:
        assert sheet.size == (160 + 10 * 62, 62 * len(json.loads(out)["classes"]))


def test_thousand_classes_are_drawn_as_a_grid():
    images = random_images(1500, (1, 8, 8))
    names = tuple(f"c{i}" for i in range(1000))
    made = ImageSet(name="k", split="test", images=images, labels=np.arange(1500) % 1000, classes=names)
    sheet = contact_sheet(made, names)
    assert max(sheet.size) < 3000
    found = describe(made)
    assert found.counts.tolist() == [2] * 500 + [1] * 500


def test_many_classes_are_summarized(tmp_path):
    for label in range(40):
        for i in range(1 + (label == 7)):
            save_image(tmp_path / "f" / f"{label:02d}" / f"{i}.png", random_images(1, (3, 4, 4))[0])
    code, out, _ = invoke("data", "info", f"folder:{tmp_path / 'f'}")
    assert code == 0
    assert "40 classes of 1 to 2 images, median 1" in out
    rows = [line.split()[0] for line in out.splitlines()[6:]]
    assert rows == ["fewest", "class", "00", "01", "02", "03", "04", "...", "36", "37", "38", "39", "07"]


def test_float_images_have_the_same_description():
    whole = load_data("digits")
    pixels = np.float32(whole.images) / np.float32(255)
    as_float = ImageSet(name="f", split="test", images=pixels, labels=whole.labels, classes=whole.classes)
    one, other = describe(whole), describe(as_float)
    assert np.allclose(one.mean, other.mean, atol=1e-7)
    assert np.allclose(one.std, other.std, atol=1e-7)
    sheets = [np.asarray(contact_sheet(images, whole.classes)) for images in (whole, as_float)]
    assert np.array_equal(*sheets)
