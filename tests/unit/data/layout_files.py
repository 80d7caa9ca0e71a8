"""Data sets in their published layouts, written byte by byte by code that is independent of the readers."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image


def random_images(count: int, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_cifar_binary(
    path: Path, images: np.ndarray, labels: Sequence[int], coarse: Sequence[int] | None = None
) -> None:
    """Label (after the coarse one), 1024 red, 1024 green, 1024 blue bytes, row by row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for i, image in enumerate(images):
            if coarse is not None:
                file.write(bytes([coarse[i]]))
            file.write(bytes([labels[i]]))
            for plane in range(3):
                for row in range(32):
                    file.write(bytes(image[plane, row].tolist()))


def write_cifar_python(path: Path, images: np.ndarray, labels: Sequence[int], key: bytes, protocol: int = 2) -> None:
    """A pickle as Python 2 wrote it, with bytes for keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {
        b"batch_label": b"training batch 1 of 5",
        key: [int(label) for label in labels],
        b"data": np.ascontiguousarray(images.reshape(len(images), 3072)),
        b"filenames": [b"image.png"] * len(images),
    }
    path.write_bytes(pickle.dumps(held, protocol=protocol))


def write_idx(path: Path, values: np.ndarray) -> None:
    """Magic number, lengths of the dimensions (big-endian), bytes; gzipped where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (
        struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_svhn(path: Path, images: np.ndarray, labels: Sequence[int]) -> None:
    """X[row, column, channel, i] and y[i, 0], compressed, with 10 for the digit 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.empty((32, 32, 3, len(images)), dtype=np.uint8)
    for i, image in enumerate(images):
        for channel in range(3):
            x[:, :, channel, i] = image[channel]
    y = np.array([[10 if label == 0 else label] for label in labels], dtype=np.uint8)
    scipy.io.savemat(path, {"X": x, "y": y}, do_compression=True)


def write_stl10(folder: Path, split: str, images: np.ndarray, labels: Sequence[int]) -> None:
    """Planes column by column; labels from 1."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{split}_X.bin").open("wb") as file:
        for image in images:
            for plane in range(3):
                for column in range(96):
                    file.write(bytes(image[plane, :, column].tolist()))
    (folder / f"{split}_y.bin").write_bytes(bytes(label + 1 for label in labels))


def save_image(path: Path, image: np.ndarray) -> None:
    """PNG bytes under any name; formats are detected by content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(path, format="PNG")


def write_tiny_imagenet(folder: Path, wnids: Sequence[str], train: np.ndarray, val: np.ndarray) -> None:
    """One training and one validation image of each class, with wnids.txt in the given order."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    lines = []
    for i, wnid in enumerate(wnids):
        save_image(folder / "train" / wnid / "images" / f"{wnid}_0.JPEG", train[i])
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t63\t63\n")
        save_image(folder / "val" / "images" / f"val_{i}.JPEG", val[i])
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    save_image(folder / "test" / "images" / "test_0.JPEG", train[0])
