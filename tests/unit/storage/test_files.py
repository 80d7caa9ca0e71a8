from __future__ import annotations

import hashlib
import json
import os
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.core.errors import InputError
from classwise.storage.files import atomic, digest, digest_json, json_text, read_json, write_json, write_text


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_writes_into_place(tmp_path):
    path = tmp_path / "new" / "folder" / "file.txt"
    with atomic(path) as temporary:
        assert temporary.parent == path.parent
        assert not path.exists()
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert names(path.parent) == ["file.txt"]


def test_atomic_replaces_only_at_the_end(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_failed_write_keeps_the_old_file(tmp_path, failure):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write_half() -> None:
        with atomic(path) as temporary:
            temporary.write_text("ne")
            raise failure

    with pytest.raises(failure):
        write_half()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_directory_is_not_replaced(tmp_path):
    with pytest.raises(InputError) as caught:
        write_text(tmp_path, "text")
    assert str(caught.value) == f"{tmp_path} is a directory; pass the path of a file"
    assert names(tmp_path) == []


def test_failed_write_creates_no_file(tmp_path):
    def write_nothing() -> None:
        with atomic(tmp_path / "file.txt"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_nothing()
    assert names(tmp_path) == []


def test_a_writer_that_replaces_the_temporary_file(tmp_path):
    # As do libraries that write to a temporary file first.
    with atomic(tmp_path / "file.txt") as temporary:
        other = tmp_path / "other"
        other.write_text("whole")
        other.replace(temporary)
    assert (tmp_path / "file.txt").read_text() == "whole"
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX systems")
def test_file_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file.txt", "x")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.txt").stat().st_mode) == 0o640


def test_text_is_utf8(tmp_path):
    write_text(tmp_path / "file.txt", "ρ ≥ 0\n")
    assert (tmp_path / "file.txt").read_bytes() == "ρ ≥ 0\n".encode()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=json_values)
@settings(deadline=None, max_examples=40)
def test_json_round_trip(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "file.json"
    write_json(path, value)
    assert read_json(path) == json.loads(path.read_text(encoding="utf-8")) == value


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, {"a": object()}])
def test_invalid_json_value_keeps_the_old_file(tmp_path, value):
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, value)
    assert read_json(path) == {"old": 1}
    assert names(tmp_path) == ["file.json"]


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe", b"PAR1\x00"])
def test_unreadable_json(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not readable JSON") as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_json(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_json(tmp_path / "none.json")


def test_digest_is_blake2b_of_the_parts_and_their_lengths():
    expected = hashlib.blake2b(
        (1).to_bytes(8, "little") + b"a" + (3).to_bytes(8, "little") + "ρb".encode(), digest_size=16
    ).hexdigest()
    assert digest("a", "ρb") == digest(b"a", "ρb".encode()) == expected


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
@settings(deadline=None, max_examples=100)
def test_digest_depends_on_part_boundaries(first, second):
    assert (digest(*first) == digest(*second)) == (first == second)


def test_digest_of_arrays_counts_bytes():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert digest(memoryview(array)) == digest(array.tobytes())
    assert digest(memoryview(array)) != digest(memoryview(array + 1))


def test_digest_of_json_ignores_the_order_of_keys():
    assert digest_json({"a": 1, "b": [1, 2]}) == digest_json({"b": [1, 2], "a": 1})
    assert digest_json({"a": 1, "b": [1, 2]}) != digest_json({"a": 1, "b": [2, 1]})
    assert digest_json({"a": "1"}) != digest_json({"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest_json(float("nan"))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_text_round_trip(value: object) -> None:
    assert json.loads(json_text(value)) == value


def test_a_row_of_a_matrix_is_a_line() -> None:
    text = json_text({"matrix": [[0] * 1000] * 1000})
    assert text.count("\n") == 1003
    assert len(text) < 3.1 * 1000 * 1000


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": [{"b": float("nan")}]}])
def test_json_rejects_nan(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text(value)
