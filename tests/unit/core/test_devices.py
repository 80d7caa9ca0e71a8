"""Errors of the choice of a device name the device and the reason."""

from __future__ import annotations

import pytest
import torch

from classwise.core.devices import pick_device
from classwise.core.errors import InputError


@pytest.mark.parametrize("device", ["gpu", "tpu9", "cuda:x"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(InputError) as caught:
        pick_device(device)
    assert str(caught.value) == f"unknown device {device!r}; expected cpu, cuda or cuda:N"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_gpu() -> None:
    built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    reason = "PyTorch found no GPU" if built else "this PyTorch build has no CUDA support"
    with pytest.raises(InputError) as caught:
        pick_device("cuda:1")
    assert str(caught.value) == f"device 'cuda:1' is not available: {reason}; expected cpu, cuda or cuda:N"


def test_unavailable_device() -> None:
    with pytest.raises(InputError, match=r"^device 'meta' is not available: .*; expected cpu, cuda or cuda:N$"):
        pick_device("meta")
