"""ONNX models, run by onnxruntime on the CPU, without gradients."""

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
"""The largest protocol buffer in bytes."""


class OnnxModel(nn.Module):
    """An onnxruntime session as a module without parameters."""

    has_gradients = False
    fingerprint: Tensor
    """A digest of the file, which distinguishes models without weights."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if not path.is_file():
            raise InputError(f"model 'onnx:{path}': no such file")
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path} has {path.stat().st_size} bytes; an ONNX file has at most {LARGEST}")
        runtime = optional("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # errors are exceptions; nothing is printed
        try:
            self._session: Any = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has many exception classes
            raise InputError(f"{path} is not an ONNX model that onnxruntime can run: {one_line(error, 160)}") from error
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type != "tensor(float)":
            inputs_text = ", ".join(f"{one.type} {one.shape}" for one in inputs)
            raise InputError(
                f"{path} has the inputs {inputs_text[:120]}; expected one batch of images, tensor(float) in NCHW"
            )
        self.path, self.input = path, inputs[0].name
        batch = inputs[0].shape[0]
        self.batch = batch if isinstance(batch, int) and batch > 0 else None
        """The batch size, if it is fixed."""
        fingerprint = bytes.fromhex(digest(path.read_bytes()))
        self.register_buffer("fingerprint", torch.tensor(list(fingerprint), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        logits: Tensor = _Session.apply(x, self)  # type: ignore[no-untyped-call]
        return logits

    def run(self, images: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
        """Return the first output, computed in several batches if the batch size is fixed."""
        size = self.batch or len(images)
        parts = []
        for start in range(0, len(images), size):
            part = images[start : start + size]
            short = size - len(part)
            padded = np.concatenate([part, np.repeat(part[-1:], short, axis=0)]) if short else part
            parts.append(np.asarray(self._session.run(None, {self.input: padded})[0])[: len(part)])
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))


class _Session(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: OnnxModel) -> Tensor:
        ctx.path = model.path
        return model.run(x.detach().to("cpu", torch.float32).contiguous().numpy()).to(x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InputError(f"onnx:{ctx.path} has no gradients: use an attack without gradients, such as square")
