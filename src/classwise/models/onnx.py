"""Models in ONNX files: asked through onnxruntime, they answer, but no gradient comes back."""

# B batch, C channels, H height, W width, K classes

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.core.errors import InputError, one_line
from classwise.models.optional_packages import optional
from classwise.storage.files import digest

LARGEST = 2**31
"""Bytes; a protocol buffer cannot hold more."""


class OnnxModel(nn.Module):
    """A session of onnxruntime on the CPU behind a module without parameters."""

    has_gradients = False
    fingerprint: Tensor
    """Of the file; what tells two models without weights apart."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if not path.is_file():
            raise InputError(f"model 'onnx:{path}': no such file")
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path} is larger than an ONNX file can be")
        runtime = optional("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # errors come as exceptions; its own lines would be in the way
        try:
            self._session: Any = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a dozen kinds of its own
            raise InputError(f"{path} is not a model that onnxruntime can run: {one_line(error, 160)}") from error
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type != "tensor(float)":
            wanted = ", ".join(f"{one.type} {one.shape}" for one in inputs)
            raise InputError(f"{path} takes {wanted[:120]}; expected one batch of images, tensor(float) of NCHW")
        self.path, self.input = path, inputs[0].name
        batch = inputs[0].shape[0]
        self.batch = batch if isinstance(batch, int) and batch > 0 else None
        """The number of images it takes at a time, where it is fixed."""
        mark = bytes.fromhex(digest(path.read_bytes()))
        self.register_buffer("fingerprint", torch.tensor(list(mark), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        answers: Tensor = _Asked.apply(x, self)  # type: ignore[no-untyped-call]
        return answers

    def ask(self, images: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
        """The first output for these images, in as many batches as it takes."""
        size = self.batch or len(images)
        parts = []
        for start in range(0, len(images), size):
            part = images[start : start + size]
            short = size - len(part)
            padded = np.concatenate([part, np.repeat(part[-1:], short, axis=0)]) if short else part
            parts.append(np.asarray(self._session.run(None, {self.input: padded})[0])[: len(part)])
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))


class _Asked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: OnnxModel) -> Tensor:
        ctx.path = model.path
        return model.ask(x.detach().to("cpu", torch.float32).contiguous().numpy()).to(x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InputError(f"onnx:{ctx.path} has no gradients")
