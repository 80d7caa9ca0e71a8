"""PGD of this package beside torchattacks and foolbox: the same model, images, start and steps, in one run.

Runs are interleaved and the median is taken; what counts are the ratios. The robust accuracies must agree.

    make bench
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.data import load_data, to_float
from classwise.models import digits_cnn, small_cnn

EPS, STEP_SIZE, STEPS, ROUNDS = 0.1, 0.02, 40, 5
Attack = Callable[[Tensor, Tensor], Tensor]


def contenders(model: nn.Module) -> dict[str, Attack]:
    """The same attack by everybody."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import foolbox
        import torchattacks

    ours = PGD(eps=EPS, step_size=STEP_SIZE, steps=STEPS, start="zero")
    theirs = torchattacks.PGD(model, eps=EPS, alpha=STEP_SIZE, steps=STEPS, random_start=False)
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    fools = foolbox.attacks.LinfPGD(abs_stepsize=STEP_SIZE, steps=STEPS, random_start=False)
    return {
        "classwise": lambda x, y: ours(model, x, y),
        "torchattacks": lambda x, y: theirs(x, y),
        "foolbox": lambda x, y: fools.run(bounded, x, y, epsilon=EPS),
    }


def trained(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """A little training, so that there is something to attack."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def measure(name: str, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Print a table for one model."""
    attacks = contenders(model)
    times: dict[str, list[float]] = {key: [] for key in attacks}
    robust = {}
    for _ in range(ROUNDS):
        for key, attack in attacks.items():
            began = time.perf_counter()
            x_adv = attack(x, y)
            times[key].append(time.perf_counter() - began)
            with torch.no_grad():
                robust[key] = 100 * (model(x_adv).argmax(1) == y).float().mean().item()
    ours = statistics.median(times["classwise"])
    print(f"{name}, PGD-{STEPS} on {len(x)} images, {torch.get_num_threads()} threads, median of {ROUNDS}")
    for key, seconds in times.items():
        median = statistics.median(seconds)
        print(f"  {key:13} {median:7.3f} s   {median / ours:5.2f} × ours   robust accuracy {robust[key]:.1f}%")


def main() -> None:
    """Digits by a tiny network, and the same digits enlarged to 28 × 28 by TRADES' MNIST network."""
    torch.manual_seed(0)
    data = load_data("digits", split="test")
    x, y = to_float(data.images), torch.from_numpy(data.labels.copy())
    measure("digits-cnn", trained(digits_cnn(), x, y), x, y)
    large = nn.functional.interpolate(x[:250], size=(28, 28), mode="bilinear")
    measure("small-cnn", trained(small_cnn(), large, y[:250]), large, y[:250])


if __name__ == "__main__":
    main()
