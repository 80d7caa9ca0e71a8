"""Malicious files that run code, exhaust memory or never end are refused in one line at low cost."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import classwise as cw
from classwise.core.errors import InputError
from classwise.models import DigitsCNN
from classwise.models.load import load_model
from classwise.models.weights_file import check_unfolding

MEGABYTES, SECONDS = 150, 20
"""What refusing all these files may take at most, beside what Python and torch take."""

MEASURED = """
import sys, time
from pathlib import Path
from classwise.models.load import load_model
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
before, began = peak(), time.monotonic()
for path in sys.argv[1:]:
    try:
        load_model("digits-cnn", weights=path)
    except ValueError as error:
        print(error)
print(peak() - before, time.monotonic() - began)
"""


def archive(path: Path, change: dict[str, bytes] | None = None, *, replaced: bytes | None = None) -> None:
    """The output of ``torch.save`` for a small network, with other entries or rewritten."""
    buffer = io.BytesIO()
    torch.save(DigitsCNN().state_dict(), buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            is_pickle = replaced is not None and name.endswith("data.pkl")
            target.writestr(name, replaced if is_pickle else source.read(name))
        for name, content in (change or {}).items():
            target.writestr(name, content)


def test_rewritten_archive_is_read(tmp_path):
    archive(tmp_path / "weights.pt")
    load_model("digits-cnn", weights=tmp_path / "weights.pt")


@pytest.mark.parametrize("name", ["../../escaped", "/etc/escaped", "archive/../../escaped", "..\\escaped"])
def test_entries_outside_of_the_archive_are_refused(tmp_path, name):
    archive(tmp_path / "weights.pt", {name: b"x"})
    with pytest.raises(InputError, match="is outside of the archive"):
        load_model("digits-cnn", weights=tmp_path / "weights.pt")
    assert not list(tmp_path.parent.rglob("escaped"))


def test_overlapping_entries_are_refused(tmp_path):
    """An archive with many directory entries that refer to the same bytes."""
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("archive/data.pkl", bytes(100_000))
        for number in range(40):
            copied = zipfile.ZipInfo(f"archive/data/{number}")
            first = target.infolist()[0]
            copied.CRC, copied.file_size, copied.compress_size = first.CRC, first.file_size, first.compress_size
            copied.header_offset = first.header_offset
            target.filelist.append(copied)
    with pytest.raises(InputError, match="its entries overlap"):
        load_model("digits-cnn", weights=path)


def bomb(path: Path) -> None:
    """An archive of less than a megabyte with an entry of 400."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("archive/version", b"3", zipfile.ZIP_STORED)
        with target.open("archive/data.pkl", "w", force_zip64=True) as entry:
            for _ in range(100):
                entry.write(bytes(1 << 22))
    assert path.stat().st_size < 1_000_000


def large(path: Path) -> None:
    """A valid file with a tensor of 300 megabytes, which is memory-mapped and not read."""
    torch.save({"conv1.weight": torch.zeros(75_000_000)}, path)


def claimed_storage(path: Path) -> None:
    """In the older format a pickle says how large its storages are before they come."""
    torch.save({"a": torch.zeros(12_345)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    small, huge = b"M" + struct.pack("<H", 12_345), b"\x8a\x06" + (1 << 40).to_bytes(6, "little")
    assert whole.count(small) >= 2
    path.write_bytes(whole.replace(small, huge))


def sparse(path: Path, size: int) -> None:
    """A sparse file with a tensor of its apparent size."""
    table = {"conv1.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + size)


def header(path: Path, length: int, text: bytes) -> None:
    """A header with a wrong length, or nested without end."""
    path.write_bytes(struct.pack("<Q", length) + text)


def doubled(depth: int) -> bytes:
    """A dictionary whose key is a tuple that contains another tuple twice, which contains another twice, and so on."""
    steps = [b"h" + bytes([step]) + b"\x86q" + bytes([step + 1]) for step in range(depth)]
    return b"\x80\x02})q\x00" + b"".join(steps) + b"K\x01s."


def unfolding(path: Path) -> None:
    """Hashing the key would not end."""
    archive(path, replaced=doubled(200))


def unfolding_of_old(path: Path) -> None:
    """The same in the older format."""
    torch.save({}, path, _use_new_zipfile_serialization=False)
    whole, empty = path.read_bytes(), pickle.dumps({}, 2)
    assert whole.count(empty) == 1
    path.write_bytes(whole.replace(empty, doubled(200)))


DAMAGED = "is damaged or not a weights file; expected safetensors or a state dict written by torch.save"
GREEDY = {
    "bomb.pt": (bomb, "'archive/data.pkl' is compressed or larger than the file"),
    "large.pt": (large, "does not fit the model"),
    "unfolding.pt": (unfolding, "is a pickle that expands to more than"),
    "unfolding-of-old.pt": (unfolding_of_old, "is a pickle that expands to more than"),
    "claimed.pt": (claimed_storage, DAMAGED),
    "four-gigabytes.safetensors": (partial(sparse, size=1 << 32), "does not fit the model"),
    "four-terabytes.safetensors": (partial(sparse, size=1 << 42), DAMAGED),
    "endless.safetensors": (partial(header, length=1 << 62, text=b"{}"), DAMAGED),
    "longer.safetensors": (partial(header, length=90_000_000, text=b" " * 1000), DAMAGED),
    "lists.safetensors": (partial(header, length=2_000_000, text=b"[" * 2_000_000), DAMAGED),
    "tables.safetensors": (partial(header, length=2_000_000, text=b'{"a":' * 400_000), DAMAGED),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of the memory is read as Linux has it")
def test_hostile_files_are_refused_without_using_memory(tmp_path):
    """Read in a process with limited memory and time."""
    for name, (make, _) in GREEDY.items():
        make(tmp_path / name)
    words = [sys.executable, "-c", MEASURED, *(str(tmp_path / name) for name in GREEDY)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
    *lines, measured = done.stdout.splitlines()
    for line, (name, (_, said)) in zip(lines, GREEDY.items(), strict=True):
        assert line.startswith(str(tmp_path / name))
        assert said in line
    grown, seconds = map(float, measured.split())
    assert grown < MEGABYTES
    assert seconds < SECONDS


nested = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
)


@given(nested, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_normal_pickles_are_accepted(value, protocol):
    """Pickles of Python are scanned to the last byte, and shared parts are accepted."""
    stream = io.BytesIO(pickle.dumps([value, value, (value, value)], protocol) + b"more")
    check_unfolding(Path("honest.pt"), stream)
    assert stream.read() == b"more"


@pytest.mark.parametrize(("depth", "refused"), [(22, False), (23, True), (200, True)])
def test_expansion_of_pickles_is_counted(depth, refused):
    """2 ** 22 tuples with their halves are 8 million values, of 10 million allowed."""
    try:
        check_unfolding(Path("doubled.pt"), io.BytesIO(doubled(depth)))
    except InputError:
        assert refused
    else:
        assert not refused


class Hostile:
    """A pickle that calls a function."""

    def __init__(self, *wanted: object) -> None:
        self.wanted = wanted

    def __reduce__(self):
        return self.wanted[0], self.wanted[1:]


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ((os.system, "true"), "posix.system"),
        ((eval, "1"), "eval"),
        ((subprocess.Popen, ["true"]), "Popen"),
        ((pickle.loads, b""), "loads"),
        ((torch.hub.load, "x/y", "z"), "torch.hub.load"),
    ],
    ids=["system", "eval", "Popen", "loads", "hub"],
)
def test_error_names_the_function_that_would_run(tmp_path, wanted, named):
    torch.save({"state_dict": Hostile(*wanted)}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match=rf"is refused: .* loading it would run code \(.*{named}\)"):
        load_model("digits-cnn", weights=tmp_path / "weights.pt")


# -- TorchScript ------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A traced network."""
    torch.manual_seed(2)
    network = DigitsCNN().eval()
    path = tmp_path / "script.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates the format
        torch.jit.save(torch.jit.trace(network, torch.rand(2, 1, 8, 8)), path)
    return path, network


def test_torchscript_requires_trust(script):
    path, network = script
    with pytest.raises(InputError, match="add --trust if you trust its author"):
        load_model(f"torchscript:{path}")
    model = load_model(f"torchscript:{path}", trust=True)
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.allclose(model(x), network(x), atol=1e-6)
    data = (torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    asked = {"attacks": ["fgsm"], "eps": 0.1}
    with pytest.raises(InputError, match="--trust"):
        cw.evaluate(f"torchscript:{path}", data, **asked)
    report = cw.evaluate(f"torchscript:{path}", data, trust=True, **asked)
    assert report["fgsm"] == cw.evaluate(network, data, **asked)["fgsm"]


def test_torchscript_is_not_accepted_as_weights(script):
    with pytest.raises(InputError, match=r"is a TorchScript program, not weights: .* with --trust"):
        load_model("digits-cnn", weights=script[0])
    with pytest.raises(InputError, match=r"is a TorchScript program, not weights"):
        load_model("digits-cnn", weights=script[0], trust=True)


def test_weights_are_not_accepted_as_torchscript(tmp_path):
    torch.save(DigitsCNN().state_dict(), tmp_path / "weights.pt")
    (tmp_path / "text.pt").write_text("no archive")
    for name in ("weights.pt", "text.pt"):
        with pytest.raises(
            InputError, match=r"is not a TorchScript file; expected a file written by torch\.jit\.save$"
        ):
            load_model(f"torchscript:{tmp_path / name}", trust=True)
