"""The number of CPU threads for a model.

Threads synchronize after every layer. With microseconds of work per layer, two threads are hardly faster than one (an
epoch of digits takes 0.36 s instead of 0.42 s), and if another program occupies the core of one, all wait: on a busy
machine that epoch took 1 to 44 s with two threads and 1.2 s with one.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from classwise.core.model_calls import frozen

SINGLE_THREAD_OPERATIONS = 50_000_000
"""With fewer operations per batch, one thread is used."""


def choose_threads(model: nn.Module, image: Tensor, batch_size: int) -> int:
    """Return 1 for small models on a CPU; otherwise, or if OMP_NUM_THREADS is set, torch's number of threads.

    ``image`` is a batch of one. The choice depends on sizes only, not on timing, because the number of threads changes
    the rounding of sums.
    """
    small = image.device.type == "cpu" and operations(model, image) * batch_size < SINGLE_THREAD_OPERATIONS
    return 1 if small and "OMP_NUM_THREADS" not in os.environ else torch.get_num_threads()


def operations(model: nn.Module, x: Tensor) -> int:
    """Count the multiplications and additions of convolutions and linear layers in a forward pass."""
    total = 0

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        assert isinstance(module.weight, Tensor)
        total += 2 * output.numel() * module.weight[0].numel()

    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad(), frozen(model):
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return total
