from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.core.errors import InputError
from classwise.storage.verdicts import NATURAL, PENDING, WORST_CASE, Verdicts


def table(**columns: list[int]) -> Verdicts:
    """Build verdicts from columns: label, natural, and every other name is an attack."""
    arrays = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    label, natural = arrays.pop("label"), arrays.pop("natural")
    return Verdicts(index=100 + np.arange(len(label)), label=label, natural=natural, attacks=arrays)


@pytest.fixture
def small() -> Verdicts:
    """Survivor, naturally wrong, broken by the first attack, by the second, by both."""
    return table(
        label=[0, 1, 2, 0, 1],
        natural=[0, 2, 2, 0, 1],
        fgsm=[0, 2, 1, 0, 0],
        pgd=[0, 2, 2, 2, 2],
    )


def test_worst_case_is_the_first_break(small):
    assert small.keys == [NATURAL, "fgsm", "pgd"]
    assert small.predictions(WORST_CASE).tolist() == [0, 2, 1, 2, 0]
    assert small.survived().tolist() == [True, False, False, False, False]
    assert small.survived(NATURAL).tolist() == [True, False, True, True, True]
    assert small.survived("pgd").tolist() == [True, False, True, False, False]
    assert small.broken_by == [None, NATURAL, "fgsm", "pgd", "fgsm"]
    assert len(small) == 5
    assert small.complete


def test_without_attacks_the_worst_case_is_natural():
    verdicts = table(label=[0, 1], natural=[0, 0])
    assert verdicts.predictions(WORST_CASE).tolist() == [0, 0]
    assert verdicts.broken_by == [None, NATURAL]
    assert verdicts.complete


def test_pending_is_neither_survived_nor_broken():
    verdicts = Verdicts.pending(np.arange(3), np.array([0, 1, 2]), ["pgd"])
    assert not verdicts.complete
    assert not verdicts.survived().any()
    assert verdicts.broken_by == [None, None, None]

    verdicts.natural[:] = [0, 0, 2]
    assert not verdicts.complete
    assert verdicts.broken_by == [None, NATURAL, None]

    verdicts.attacks["pgd"][:] = [1, 0, PENDING]
    assert not verdicts.complete
    assert verdicts.broken_by == ["pgd", NATURAL, None]

    verdicts.attacks["pgd"][2] = 2
    assert verdicts.complete
    assert verdicts.survived().tolist() == [False, False, True]


def test_pending_columns_are_not_shared():
    verdicts = Verdicts.pending(np.arange(2), np.array([0, 1]), ["fgsm", "pgd"])
    verdicts.natural[0] = 1
    verdicts.attacks["fgsm"][1] = 0
    assert verdicts.attacks["pgd"].tolist() == [PENDING, PENDING]


def test_file_has_the_columns_of_the_contract(small, tmp_path):
    path = tmp_path / "verdicts.parquet"
    small.save(path, "f00d")
    read = pq.read_table(path)
    assert read.column_names == ["index", "label", "natural", "pred:fgsm", "pred:pgd", "robust", "broken_by"]
    assert read.schema.field("robust").type == pa.bool_()
    assert read.schema.field("broken_by").type == pa.string()
    assert all(read.schema.field(name).type == pa.int64() for name in read.column_names[:5])
    assert read.to_pydict() == {
        "index": [100, 101, 102, 103, 104],
        "label": [0, 1, 2, 0, 1],
        "natural": [0, 2, 2, 0, 1],
        "pred:fgsm": [0, 2, 1, 0, 0],
        "pred:pgd": [0, 2, 2, 2, 2],
        "robust": [True, False, False, False, False],
        "broken_by": [None, "natural", "fgsm", "pgd", "fgsm"],
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["verdicts.parquet"]


def test_pending_is_null_in_the_file(small, tmp_path):
    path = tmp_path / "verdicts.parquet"
    small.attacks["fgsm"][[0, 4]] = PENDING
    small.natural[2] = PENDING
    small.save(path, "f00d")
    read = pq.read_table(path).to_pydict()
    assert read["pred:fgsm"] == [None, 2, 1, 0, None]
    assert read["natural"] == [0, 2, None, 0, 1]
    assert read["robust"] == [None, False, None, False, None]


@st.composite
def any_verdicts(draw):
    num_classes, n = draw(st.integers(1, 4)), draw(st.integers(0, 12))
    decided = st.lists(st.integers(0, num_classes - 1), min_size=n, max_size=n)
    maybe = st.lists(st.integers(PENDING, num_classes - 1), min_size=n, max_size=n)
    names = draw(st.lists(st.sampled_from(["fgsm", "pgd", "pgd:steps=100,step_size=1/255"]), unique=True, max_size=3))
    column = draw(st.sampled_from([decided, maybe]))
    return table(label=draw(decided), natural=draw(column), **{name: draw(column) for name in names})


@given(any_verdicts())
@settings(deadline=None, max_examples=150)
def test_robust_means_correct_without_and_under_all_attacks(verdicts):
    columns = [verdicts.natural.tolist(), *(column.tolist() for column in verdicts.attacks.values())]
    for row, label in enumerate(verdicts.label.tolist()):
        answers = [column[row] for column in columns]
        assert verdicts.survived()[row] == all(answer == label for answer in answers)
        wrong = [key for key, answer in zip(verdicts.keys, answers, strict=True) if answer not in (label, PENDING)]
        assert verdicts.broken_by[row] == (wrong[0] if wrong else None)
    assert verdicts.complete == all(PENDING not in column for column in columns)


@given(verdicts=any_verdicts())
@settings(deadline=None, max_examples=50)
def test_round_trip(tmp_path_factory, verdicts):
    path = tmp_path_factory.mktemp("verdicts") / "verdicts.parquet"
    verdicts.save(path, "0123abcd")
    loaded, fingerprint = Verdicts.load(path)
    assert fingerprint == "0123abcd"
    assert loaded.keys == verdicts.keys
    for name in ("index", "label", "natural"):
        assert getattr(loaded, name).dtype == np.int64
        assert getattr(loaded, name).tolist() == getattr(verdicts, name).tolist()
    for key, column in verdicts.attacks.items():
        assert loaded.attacks[key].dtype == np.int64
        assert loaded.attacks[key].tolist() == column.tolist()


def test_loaded_verdicts_can_be_filled_in(tmp_path):
    path = tmp_path / "verdicts.parquet"
    Verdicts.pending(np.arange(2), np.array([0, 1]), ["pgd"]).save(path, "")
    loaded, fingerprint = Verdicts.load(path)
    loaded.natural[:] = [0, 1]
    loaded.attacks["pgd"][:] = [0, 0]
    assert (fingerprint, loaded.broken_by) == ("", [None, "pgd"])


def refused(path) -> str:
    with pytest.raises(InputError) as caught:
        Verdicts.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_missing_file(tmp_path):
    assert refused(tmp_path / "verdicts.parquet").startswith("no such file")


@pytest.mark.parametrize("keep", [0, 7, 0.5, 0.99])
def test_truncated_file(small, tmp_path, keep):
    path = tmp_path / "verdicts.parquet"
    small.save(path, "f00d")
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    assert refused(path) == f"{path} is damaged or not a parquet file; evaluate the model again"


def test_directory(tmp_path):
    assert refused(tmp_path) == f"{tmp_path} is a directory: expected a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_without_permission(small, tmp_path):
    path = tmp_path / "verdicts.parquet"
    small.save(path, "f00d")
    path.chmod(0)
    assert refused(path) == f"{path} cannot be read: permission denied"


@pytest.mark.parametrize("column", ["index", "label", "natural"])
def test_missing_column_is_named(small, tmp_path, column):
    path = tmp_path / "verdicts.parquet"
    small.save(path, "f00d")
    pq.write_table(pq.read_table(path).drop_columns([column]), path)
    assert refused(path).endswith(f"column {column!r} is missing; evaluate the model again")


def test_column_of_strings(small, tmp_path):
    path = tmp_path / "verdicts.parquet"
    words = {"index": [0], "label": [0], "natural": ["cat"], "pred:pgd": [0]}
    pq.write_table(pa.table(words), path)
    assert "is not a table of verdicts" in refused(path)
