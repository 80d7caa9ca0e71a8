"""Several processes that train one model, each on its share of every batch.

Together they do what one would: the same images in the same batches, the same noise, batch norms over the whole batch,
one gradient, statistics of all. What comes out differs by the rounding of sums in another order. ``torchrun`` starts
them and tells each its number; the first one leads: it writes, shows and says.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from classwise.core.types import ClassStats, LossTerms

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Team:
    """The processes of a training, as seen by one of them."""

    rank: int
    size: int
    device: torch.device
    """Where this process computes, and through which it speaks with the others."""

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        """Which piece of everything is this process's, and of how many."""
        return self.rank, self.size

    def first(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, done by the leader before the others: what it leaves on disk, they find there.

        Where it fails, nobody else begins.
        """
        done: list[T] = []

        def lead() -> bool:
            done.append(work())
            return True

        self.leaders(lead)
        return done[0] if self.leads else work()

    def leaders(self, work: Callable[[], bool]) -> bool:
        """What ``work`` gives, done by the leader alone. Where it fails it says so, and the others end in silence."""
        if self.size == 1:
            return work()
        failed = torch.tensor(-1, device=self.device)
        answer = failed.clone()
        try:
            if self.leads:
                answer = torch.tensor(int(work()), device=self.device)
        finally:
            dist.broadcast(answer, src=0)
        if answer == failed:
            raise SystemExit(2)
        return bool(answer)

    def weighted(self, mean: Tensor, count: int) -> Tensor:
        """A mean over so many examples as this process's part of the mean over those of all."""
        if self.size == 1:
            return mean
        total = mean.detach().new_full((), count)
        dist.all_reduce(total)
        return mean * (count / total)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each by its sum over all processes."""
        if self.size == 1:
            return
        alike = defaultdict(list)
        for tensor in tensors:
            alike[tensor.dtype].append(tensor.detach())
        for some in alike.values():
            flat = torch.cat([tensor.flatten() for tensor in some])
            dist.all_reduce(flat)
            for tensor, total in zip(some, torch.split(flat, [tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def total(self, stats: ClassStats) -> ClassStats:
        """The statistics of all, on the host."""
        self.add([getattr(stats, part.name) for part in fields(stats)])
        return stats.cpu()

    def everybodys(self, terms: LossTerms, y: Tensor) -> tuple[LossTerms, Tensor]:
        """The terms and labels of the whole batch, without a gradient."""
        if self.size == 1:
            return terms, y
        found = {part.name: getattr(terms, part.name) for part in fields(terms)}
        parts: dict[str, Any] = {name: self._joined(value) for name, value in found.items() if torch.is_tensor(value)}
        return replace(terms, **parts), self._joined(y)

    def _joined(self, rows: Tensor) -> Tensor:
        """The rows of all, one process after the other."""
        sizes = torch.zeros(self.size, dtype=torch.int64, device=rows.device)
        sizes[self.rank] = len(rows)
        dist.all_reduce(sizes)
        # Pieces must be of one size for this, and differ by one row at most.
        padded = torch.cat([rows.detach(), rows.new_zeros(int(sizes.max()) - len(rows), *rows.shape[1:])])
        pieces = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(pieces, padded)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes.tolist(), strict=True)])


ALONE = Team(0, 1, torch.device("cpu"))


def sum_of_all(tensor: Tensor) -> Tensor:
    """The sum over all processes, with a gradient: every process's result hangs on every process's part."""
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
def assembled(device: torch.device) -> Iterator[Team]:
    """The processes that were started together, or this one alone. Nobody leaves before all are done."""
    begun = dist.is_available() and dist.is_initialized()
    if not begun and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield replace(ALONE, device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not begun:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Team(dist.get_rank(), dist.get_world_size(), device)
        dist.barrier()
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ConnectionError(errno.ECONNRESET, "another process of this training has ended") from error
        raise
    finally:
        if not begun:
            dist.destroy_process_group()
