"""Classifier re-training (cRT; Kang et al., ICLR 2020, Decoupling representation and classifier) on adversarial images.

The body of the network is frozen. Adversarial images x' of the training images are computed once, against the original
model, and their features f(x') are kept. The last linear layer (W, b) is reinitialized and trained on class-balanced
batches of these features:

    min over W, b of  mean_c mean_{i of class c} CE(W f(x'_i) + b, y_i).

**Deviations**

* The paper trains on natural images and does not evaluate under attack. The adversarial images are computed for the
  original layer, not for the new one, so the new layer is usually weaker against a fresh attack than under these
  images.
* The layer starts from zeros instead of random numbers. The loss is convex, so the start has little influence.
* The paper draws the class of every image at random. Here classes alternate: every image of the largest class is used
  once an epoch, and images of smaller classes are repeated. On balanced data an epoch uses every image once.
* The learning rate decays by half a cosine, as in the paper; its value and the batch size are not the paper's. Images
  are not augmented.
"""

# N examples, K classes, D features

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.accelerate import release_memory, search_model
from classwise.attacks import PGD
from classwise.config.spec import Number
from classwise.core.model_calls import device_of
from classwise.core.streams import ExampleNoise
from classwise.data import ordered
from classwise.models.heads import features_of, plain_head
from classwise.repairs.methods.base import Case, Images, Repaired
from classwise.repairs.methods.head_sam import at_least_one
from classwise.training.optimizers import SGD
from classwise.training.schedules import Cosine


@dataclass(frozen=True, kw_only=True)
class Retrain:
    """A new last linear layer, trained on class-balanced features of adversarial images."""

    about: ClassVar[str] = "Last layer retrained on class-balanced features of adversarial images (cRT)"
    uses: ClassVar[Images] = "training"

    epochs: int = 10
    lr: Number = 0.1
    momentum: Number = 0.9
    weight_decay: Number = 5e-4
    steps: int = 10
    """Steps of the PGD attack."""
    batch_size: int = 128

    def __post_init__(self) -> None:
        at_least_one(epochs=self.epochs, batch_size=self.batch_size)
        _ = self.optimizer, PGD(steps=self.steps)  # These check their settings.

    @property
    def optimizer(self) -> SGD:
        """The optimizer's settings."""
        return SGD(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def __call__(self, case: Case) -> Repaired:
        began = time.perf_counter()
        model = copy.deepcopy(case.model)
        head = plain_head(model, case.example)
        with torch.random.fork_rng(devices=[head.weight.device] if head.weight.is_cuda else []):
            torch.manual_seed(case.seed)
            features, labels = self.features(case, model, head)
        trained = self.train(features, labels, head, case.seed)
        with torch.no_grad():
            for parameter, value in zip(head.parameters(), trained.parameters(), strict=True):
                parameter.copy_(value)
        return Repaired(model=model, seconds={"training": round(time.perf_counter() - began, 3)})

    def features(self, case: Case, model: nn.Module, head: nn.Linear) -> tuple[Tensor, Tensor]:
        """(N, D) features of adversarial training images, in float32, and their labels."""
        attack, kept = PGD(steps=self.steps).within(case.threat), []
        size = case.batch_size or self.batch_size
        case.progress.start("features of adversarial images", len(case.train))
        searched = search_model(
            model, next(ordered(case.images, case.train[:size], size, device_of(model)))[0], case.engine
        )
        for x, y, index in ordered(case.images, case.train, size, device_of(model)):
            x_adv = attack(searched, x, y, generator=ExampleNoise(case.seed, index))
            kept.append((features_of(model, head, x_adv)[0].float(), y))
            case.progress.advance(len(y))
        case.progress.finish()
        release_memory(searched)
        return torch.cat([some for some, _ in kept]), torch.cat([y for _, y in kept])

    def train(self, features: Tensor, labels: Tensor, head: nn.Linear, seed: int) -> nn.Linear:
        """A copy of the layer, trained from zeros."""
        layer = copy.deepcopy(head).float().requires_grad_(True)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        optimizer, schedule = self.optimizer.build(layer.parameters()), Cosine()
        generator = torch.Generator().manual_seed(seed)
        for epoch in range(self.epochs):
            order = balanced_order(labels.cpu(), generator).to(labels.device)
            batches = torch.split(order, self.batch_size)
            for number, rows in enumerate(batches):
                for group in optimizer.param_groups:
                    group["lr"] = self.lr * schedule(epoch + number / len(batches), self.epochs)
                optimizer.zero_grad()
                F.cross_entropy(layer(features[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return layer


def balanced_order(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Row numbers of an epoch in which the classes alternate, each class in random order.

    Images of classes smaller than the largest are repeated.
    """
    by_class = [(labels == one).nonzero().squeeze(1) for one in torch.unique(labels)]
    most = max(len(rows) for rows in by_class)
    columns = []
    for rows in by_class:
        orders = [rows[torch.randperm(len(rows), generator=generator)] for _ in range(math.ceil(most / len(rows)))]
        columns.append(torch.cat(orders)[:most])
    return torch.stack(columns, 1).flatten()
