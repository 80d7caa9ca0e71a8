"""Processes that share a batch give the results of one process: gradients, statistics, noise, batch norms."""

# B batch, K classes

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.core.streams import PartNoise
from classwise.core.types import ClassControls, ClassStats, Objective, Policy
from classwise.data import share_of
from classwise.objectives import Free, Madry, Mart, Standard, Trades
from classwise.policies import FAAL, Uniform
from classwise.training.distributed import SINGLE, ProcessGroup
from classwise.training.engine import Engine
from classwise.training.model_views import SynchronizedNorm
from classwise.training.weight_perturbation import WeightPerturbation

K, BATCH = 4, 11  # which two or three processes cannot share evenly
CPU = torch.device("cpu")
ATTACK = PGD(eps=0.1, steps=3, step_size=0.05)


class Net(nn.Module):
    """Two kinds of batch norm, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5)
        self.linear, self.flat_norm = nn.Linear(20, 6), nn.BatchNorm1d(6, affine=False, momentum=None)
        self.head = nn.Linear(6, K)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.tanh(self.flat_norm(self.linear(x.flatten(1)))))


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.rand(BATCH, 2, 4, 4, generator=random, dtype=torch.float64), torch.arange(BATCH) % K


def controls() -> ClassControls:
    steps = torch.linspace(0.5, 2, K)
    return ClassControls(weight_nat=steps, weight_adv=steps.flip(0), eps_scale=steps.sqrt(), beta_scale=steps)


CASES: dict[str, tuple[Objective, Policy, WeightPerturbation | None]] = {
    "standard": (Standard(), Uniform(), None),
    "madry": (Madry(attack=ATTACK), Uniform(), None),
    "trades": (Trades(attack=PGD(eps=0.1, steps=3, step_size=0.05, loss="kl", start="gaussian")), Uniform(), None),
    "mart": (Mart(attack=ATTACK), Uniform(), None),
    "restarts": (Madry(attack=PGD(eps=0.1, steps=2, restarts=2)), Uniform(), None),
    "free": (Free(attack=PGD(eps=0.1, steps=1)), Uniform(), None),
    "faal": (Madry(attack=ATTACK), FAAL(), None),
    "awp": (Madry(attack=ATTACK), Uniform(), WeightPerturbation(gamma=0.1)),
}


def step(case: str, group: ProcessGroup) -> dict[str, Tensor]:
    """Weights, gradients, loss and statistics after one step."""
    objective, policy, awp = CASES[case]
    torch.manual_seed(0)
    model = Net().double()
    engine = Engine(
        model=model,
        objective=objective,
        policy=policy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        average=None,
        precision="fp32",
        clip=None,
        awp=awp,
        group=group,
    )
    x, y = batch()
    mine = share_of(BATCH, group.share)
    generator = torch.Generator().manual_seed(2)
    noise = PartNoise(generator, torch.arange(mine.start, mine.stop), BATCH) if group.size > 1 else generator
    stats, loss = engine.step(x[mine], y[mine], controls(), noise)
    stats = group.sum_stats(stats)
    left = {f"weights.{name}": value for name, value in model.state_dict().items()}
    left |= {f"gradient.{name}": value.grad for name, value in model.named_parameters() if value.grad is not None}
    return left | {"loss": loss, "stats.loss": stats.loss, "stats.confusion": stats.confusion_adv, "stats.n": stats.n}


def norms() -> dict[str, nn.modules.batchnorm._BatchNorm]:
    made = {
        "plain": nn.BatchNorm2d(3),
        "cumulative": nn.BatchNorm2d(3, momentum=None),
        "bare": nn.BatchNorm2d(3, affine=False),
        "forgetful": nn.BatchNorm2d(3, track_running_stats=False),
    }
    for norm in made.values():
        if norm.affine:
            nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
            nn.init.normal_(norm.bias, generator=torch.Generator().manual_seed(1))
    return {name: norm.double() for name, norm in made.items()}


def normalize(norm: nn.Module, inner: nn.modules.batchnorm._BatchNorm, where: slice, size: int) -> dict[str, Tensor]:
    """Outputs, gradients and running statistics of a norm after two batches far from zero."""
    random = torch.Generator().manual_seed(3)
    left: dict[str, Tensor] = {}
    for number in range(2):
        whole = 1000 + torch.randn(size, 3, 2, 2, generator=random, dtype=torch.float64)
        weights = torch.randn(size, 3, 2, 2, generator=random, dtype=torch.float64)
        x = whole[where].requires_grad_()
        out = norm(x)
        (out * weights[where]).sum().backward()
        assert x.grad is not None
        left |= {f"rows.out{number}": out.detach(), f"rows.back{number}": x.grad}
    return left | {f"buffers.{name}": value for name, value in inner.named_buffers()}


def work(rank: int, size: int, folder: str) -> None:
    """Compute everything that is compared, in one of several processes."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    group = ProcessGroup(rank, size, CPU)
    left: dict[str, Any] = {case: step(case, group) for case in CASES}
    left["norms"] = {}
    for name, norm in norms().items():
        left["norms"][name] = normalize(SynchronizedNorm(norm, group), norm, share_of(7, group.share), 7)
    ranks = torch.tensor([float(rank)])
    file = Path(folder) / "written first"
    with group.main_first():
        left["first"] = (rank == 0) != file.exists()
        file.touch()
    left["on_main"] = (group.on_main(lambda: rank == 0), group.on_main(lambda: rank != 0))
    left["joined"] = group._gather(torch.arange(BATCH)[share_of(BATCH, group.share)])
    left["weighted"] = group.weighted(ranks.mean(), rank + 1)
    torch.save(left, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each of two or three processes."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    mp.spawn(work, args=(size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


@pytest.mark.parametrize("case", CASES)
def test_processes_have_equal_results(ranks: list[dict[str, Any]], case: str) -> None:
    for name, value in ranks[0][case].items():
        assert all(torch.equal(rank[case][name], value) for rank in ranks), name


# Of several starts, one process draws the later ones for what is left of the batch, several for all of it.
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"restarts"}))
def test_step_equals_that_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    alone = step(case, SINGLE)
    for rank in ranks:
        assert rank[case].keys() == alone.keys()
        for name, value in alone.items():
            assert torch.allclose(rank[case][name].double(), value.double(), atol=1e-12, rtol=1e-9), name
    assert float(alone["gradient.conv.weight"].abs().max()) > 1e-4


@pytest.mark.parametrize("name", list(norms()))
def test_batch_norm_is_over_the_whole_batch(ranks: list[dict[str, Any]], name: str) -> None:
    norm = norms()[name]
    alone = normalize(norm, norm, slice(0, 7), 7)
    found = [rank["norms"][name] for rank in ranks]
    for key, value in alone.items():
        together = torch.cat([one[key] for one in found]) if key.startswith("rows") else found[0][key]
        assert torch.allclose(together.double(), value.double(), atol=1e-9, rtol=1e-9), key
        if not key.startswith("rows"):
            assert all(torch.equal(one[key], together) for one in found)


def test_evaluation_mode_does_not_communicate() -> None:
    """Fails on communication: there is no other process."""
    norm = norms()["plain"].eval()
    x = torch.rand(2, 3, 2, 2, dtype=torch.float64)
    before = copy.deepcopy(norm.state_dict())
    assert torch.equal(SynchronizedNorm(norm, ProcessGroup(0, 2, CPU)).eval()(x), norm(x))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_main_process_is_first_and_its_result_is_shared(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["first"]
        assert rank["on_main"] == (True, False)
        assert rank["joined"].tolist() == list(range(BATCH))
    # Means 0, 1, 2 of 1, 2, 3 examples.
    total = sum(range(1, len(ranks) + 1))
    expected = sum(number * (number + 1) for number in range(len(ranks))) / total
    assert sum(float(rank["weighted"]) for rank in ranks) == pytest.approx(expected)


def test_single_process_does_not_communicate() -> None:
    terms = Standard().terms(Net().double().eval(), *(batch()[0],) * 2, batch()[1])
    loss, stats = terms.nat.mean(), ClassStats.of(terms, batch()[1], K)
    assert SINGLE.weighted(loss, 3) is loss
    assert SINGLE.gather(terms, batch()[1])[0] is terms
    assert torch.equal(SINGLE.sum_stats(stats).n, stats.n)
    failing: Callable[[], bool] = lambda: bool(1 / 0)  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        SINGLE.on_main(failing)
