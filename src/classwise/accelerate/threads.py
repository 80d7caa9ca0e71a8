"""How many threads a model is worth on a CPU.

Threads meet after every layer. Where a layer is microseconds of work, two are hardly faster than one (an epoch of
digits in 0.36 instead of 0.42 s), and when another program holds the core of one of them, all wait for its turn: on a
busy machine that epoch took 1 to 44 s by two threads and 1.2 s by one.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from classwise.core.model_calls import frozen

SINGLE_THREAD_OPERATIONS = 50_000_000
"""Operations of a pass over a batch, below which one thread does them."""


def choose_threads(model: nn.Module, image: Tensor, batch_size: int) -> int:
    """One for little work on a CPU, else as many as torch has; what the user set is kept.

    ``image`` is a batch of one. The choice hangs on sizes alone and never on the clock: sums may differ in their last
    bits by the number of threads.
    """
    little = image.device.type == "cpu" and operations(model, image) * batch_size < SINGLE_THREAD_OPERATIONS
    return 1 if little and "OMP_NUM_THREADS" not in os.environ else torch.get_num_threads()


def operations(model: nn.Module, x: Tensor) -> int:
    """Multiplications and additions of the convolutions and linear layers in a pass over some images."""
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
