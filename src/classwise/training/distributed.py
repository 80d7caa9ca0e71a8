"""Training of one model by several processes, each on its share of every batch.

Together the processes compute what one process computes: the same images in the same batches, the same noise, batch
norm over the whole batch, one gradient, statistics of all examples. Results differ only because sums are rounded in
another order. ``torchrun`` starts and numbers the processes. Process 0, the main process, writes files, shows progress
and warns.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from classwise.core.types import ClassStats, LossTerms


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes of a training and the rank of the current one."""

    rank: int
    size: int
    device: torch.device
    """The device on which this process computes and communicates."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and warns."""
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        """The number of this process's share of every batch, and the number of shares."""
        return self.rank, self.size

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block in the main process first, so that the others can read the files it writes.

        If it fails in the main process, the others exit without a message.
        """
        if not self.is_main:
            if self._broadcast(True):
                raise SystemExit(2)
            yield
            return
        failed = True
        try:
            yield
            failed = False
        finally:
            self._broadcast(failed)

    def on_main(self, work: Callable[[], bool]) -> bool:
        """Call ``work`` in the main process alone and return its result in all. Failures are as in ``main_first``."""
        result = False
        with self.main_first():
            if self.is_main:
                result = work()
        return self._broadcast(result)

    def _broadcast(self, value: bool) -> bool:
        """Return the main process's value."""
        if self.size == 1:
            return value
        shared = torch.tensor(int(value), device=self.device)
        dist.broadcast(shared, src=0)
        return bool(shared)

    def weighted(self, mean: Tensor, count: int) -> Tensor:
        """Weight this process's mean over ``count`` examples, so that the results of all processes sum to the mean."""
        if self.size == 1:
            return mean
        total = mean.detach().new_full((), count)
        dist.all_reduce(total)
        return mean * (count / total)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size == 1:
            return
        by_dtype = defaultdict(list)
        for tensor in tensors:
            by_dtype[tensor.dtype].append(tensor.detach())
        for group in by_dtype.values():
            flat = torch.cat([tensor.flatten() for tensor in group])
            dist.all_reduce(flat)
            for tensor, total in zip(group, torch.split(flat, [tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def sum_stats(self, stats: ClassStats) -> ClassStats:
        """Sum class statistics over all processes in place, and return them on the CPU."""
        self.sum([getattr(stats, part.name) for part in fields(stats)])
        return stats.cpu()

    def gather(self, terms: LossTerms, y: Tensor) -> tuple[LossTerms, Tensor]:
        """Return the terms and labels of the whole batch, without gradients."""
        if self.size == 1:
            return terms, y
        values = {part.name: getattr(terms, part.name) for part in fields(terms)}
        rows: dict[str, Any] = {name: self._gather(value) for name, value in values.items() if torch.is_tensor(value)}
        return replace(terms, **rows), self._gather(y)

    def _gather(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all processes by rank."""
        sizes = torch.zeros(self.size, dtype=torch.int64, device=rows.device)
        sizes[self.rank] = len(rows)
        dist.all_reduce(sizes)
        # all_gather needs parts of one size; shares differ by at most one row.
        padded = torch.cat([rows.detach(), rows.new_zeros(int(sizes.max()) - len(rows), *rows.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)])


SINGLE = ProcessGroup(0, 1, torch.device("cpu"))


def differentiable_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes. The gradient is the sum of the gradients of all processes' results."""
    result: Tensor = _Sum.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradient)


@contextmanager
def process_group(device: torch.device) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started, or a group of one; leave together when all have finished."""
    initialized = dist.is_available() and dist.is_initialized()
    if not initialized and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield replace(SINGLE, device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not initialized:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size(), device)
        dist.barrier()
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ConnectionError(errno.ECONNRESET, "another process of this training has ended") from error
        raise
    finally:
        if not initialized:
            dist.destroy_process_group()
