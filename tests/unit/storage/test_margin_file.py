"""Margin matrices on disk: half precision, and one-line errors for invalid files."""

# N examples, K classes

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from classwise.core.errors import InputError
from classwise.storage.margins import SCHEMA, Margins

LARGEST = 65504.0
"""The largest finite half float."""


def table(natural: np.ndarray, attacked: np.ndarray, label: np.ndarray | None = None) -> Margins:
    """A matrix of some examples, infinite at the labels."""
    size, num_classes = natural.shape
    label = np.arange(size) % num_classes if label is None else label
    attacked = attacked.astype(np.float32).copy()
    attacked[np.arange(size), label] = np.inf
    info = {"schema": SCHEMA, "eps": "8/255", "targets": num_classes - 1}
    return Margins(
        index=np.arange(size) * 3 + 7, label=label, natural=natural.astype(np.float32), attacked=attacked, info=info
    )


def random_table(size: int, num_classes: int, seed: int = 0) -> Margins:
    random = np.random.default_rng(seed)
    natural = random.normal(0, 3, (size, num_classes))
    return table(natural, random.normal(1, 3, (size, num_classes)))


def complaint(path: Path) -> str:
    """Return the one-line error of loading."""
    with pytest.raises(InputError) as caught:
        Margins.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@settings(max_examples=30, deadline=None)
@given(values=arrays.arrays(np.float16, st.tuples(st.integers(0, 6), st.integers(2, 5)), elements=st.floats(width=16)))
def test_float16_values_round_trip_exactly(values: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("table") / "margins.parquet"
    saved = table(values, -values)
    saved.save(path)
    found = Margins.load(path)
    assert (found.index.dtype, found.label.dtype) == (np.int64, np.int64)
    assert (found.natural.dtype, found.attacked.dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(found.index, saved.index)
    np.testing.assert_array_equal(found.label, saved.label)
    np.testing.assert_array_equal(found.natural, saved.natural)
    np.testing.assert_array_equal(found.attacked, saved.attacked)
    assert found.info == saved.info
    assert found.num_classes == values.shape[1]
    assert len(found) == len(values)


def test_other_values_are_rounded_to_half_precision(tmp_path: Path) -> None:
    saved = random_table(200, 7)
    saved.save(tmp_path / "m.parquet")
    found = Margins.load(tmp_path / "m.parquet")
    for name in ("natural", "attacked"):
        before, after = getattr(saved, name), getattr(found, name)
        np.testing.assert_array_equal(after, before.astype(np.float16).astype(np.float32))
        np.testing.assert_array_equal(np.isinf(after), np.isinf(before))
        finite = np.isfinite(before)
        np.testing.assert_allclose(after[finite], before[finite], rtol=2**-11, atol=2**-25)


def test_values_beyond_half_precision_are_clipped_and_stay_finite(tmp_path: Path) -> None:
    natural = np.array([[1e5, -3e38, 2.0], [7e4, 0.0, -65504.0]])
    saved = table(natural, -natural)
    saved.save(tmp_path / "m.parquet")
    found = Margins.load(tmp_path / "m.parquet")
    assert found.natural.tolist() == [[LARGEST, -LARGEST, 2.0], [LARGEST, 0.0, -LARGEST]]
    assert found.attacked.tolist() == [[np.inf, LARGEST, -2.0], [-LARGEST, np.inf, LARGEST]]


def test_pending_rows(tmp_path: Path) -> None:
    margins = Margins.pending(np.array([4, 9, 2]), np.array([0, 1, 1]), 2, {"schema": SCHEMA})
    assert margins.missing.tolist() == [True, True, True]
    assert not margins.complete
    margins.natural[1], margins.attacked[1] = [1, 2], [-1, np.inf]
    assert np.isnan(margins.attacked[0]).all()
    margins.save(tmp_path / "m.parquet")
    found = Margins.load(tmp_path / "m.parquet")
    assert found.missing.tolist() == [True, False, True]
    assert found.attacked[1].tolist() == [-1, np.inf]
    assert np.isnan(found.natural[[0, 2]]).all()
    found.natural[:] = 0
    assert found.complete


def test_pending_matrices_are_separate() -> None:
    margins = Margins.pending(np.arange(2), np.arange(2), 3, {})
    margins.attacked[:] = 5
    assert np.isnan(margins.natural).all()


def test_margins_without_attack() -> None:
    margins = table(np.array([[3.0, 1.0, 4.0], [1.0, 5.0, 9.0]]), np.zeros((2, 3)), np.array([0, 2]))
    assert margins.without_attack.tolist() == [[np.inf, 2.0, -1.0], [8.0, 4.0, np.inf]]
    # A natural prediction is correct exactly if all margins are positive.
    random = random_table(300, 5)
    right = random.natural.argmax(axis=1) == random.label
    np.testing.assert_array_equal(random.without_attack.min(axis=1) > 0, right)


def test_some_of_the_examples() -> None:
    margins = random_table(20, 4)
    rows = np.array([17, 2, 2])
    some = margins.take(rows)
    assert len(some) == 3
    np.testing.assert_array_equal(some.index, margins.index[rows])
    np.testing.assert_array_equal(some.without_attack, margins.without_attack[rows])
    np.testing.assert_array_equal(some.attacked, margins.attacked[rows])
    assert some.info == margins.info


def test_saving_replaces_the_whole_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    random_table(50, 4).save(path)
    random_table(20, 3).save(path)
    assert len(Margins.load(path)) == 20
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.parquet"]


def test_size_of_a_table(tmp_path: Path) -> None:
    """Half precision takes 400 kB for two matrices of 10,000 x 10; an infinite column and exponents compress."""
    random_table(10_000, 10).save(tmp_path / "m.parquet")
    assert (tmp_path / "m.parquet").stat().st_size < 350_000


# -- files that are not margin matrices -------------------------------------------------------------------


def test_absent_files(tmp_path: Path) -> None:
    assert "no such file" in complaint(tmp_path / "gone.parquet")


def test_directory_is_not_a_table(tmp_path: Path) -> None:
    complaint(tmp_path)


def test_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    random_table(40, 4).save(path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "is not a margin matrix" in complaint(path)


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    random_table(12, 3).save(path)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    refused = []
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.integers(len(damaged), size=random.integers(1, 4)):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        try:
            found = Margins.load(path)
        except InputError as error:
            refused.append(str(error))
        else:
            assert found.natural.shape == found.attacked.shape == (len(found.label), found.num_classes)
    assert len(refused) > 30
    assert not any("\n" in message for message in refused)


def written(path: Path, **changes: object) -> Path:
    """A table of two examples of three classes, with some columns replaced; None leaves a column out."""
    matrix = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(6, np.float16)), 3)
    columns = {"index": pa.array([0, 1]), "label": pa.array([0, 2]), "natural": matrix, "margin": matrix}
    info = changes.pop("info", {"schema": SCHEMA})
    columns = {name: column for name, column in {**columns, **changes}.items() if column is not None}
    metadata = None if info is None else {"classwise.margins": json.dumps(info)}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return path


SMALLER = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4, np.float16)), 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"info": None}, "classwise.margins"),
        ({"info": [1]}, "expected schema classwise/margins/1"),
        ({"info": {}}, "expected schema classwise/margins/1"),
        ({"info": {"schema": "classwise/margins/9"}}, "expected schema classwise/margins/1"),
        ({"natural": None}, "natural"),
        ({"label": None}, "label"),
        ({"natural": SMALLER}, "two matrices of one shape"),
        ({"natural": pa.array([0.0, 1.0])}, "is not a margin matrix"),
        ({"margin": pa.array([[0.0, 1.0], [2.0]])}, "is not a margin matrix"),
        ({"label": pa.array([0, 3])}, "labels outside 0..2"),
        ({"label": pa.array([-1, 0])}, "labels outside 0..2"),
        ({"label": pa.array(["cat", "dog"])}, "label is not a column of integers"),
        ({"label": pa.array([0, None])}, "label is not a column of integers"),
        ({"index": pa.array([0.0, 0.5])}, "index is not a column of integers"),
    ],
)
def test_foreign_tables(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    assert Margins.load(written(tmp_path / "right.parquet")).natural.shape == (2, 3)
    assert said in complaint(written(tmp_path / "m.parquet", **changes))


def test_metadata_that_is_not_json(tmp_path: Path) -> None:
    path = written(tmp_path / "m.parquet")
    pq.write_table(pq.read_table(path).replace_schema_metadata({"classwise.margins": "{"}), path)
    assert "is not a margin matrix" in complaint(path)
