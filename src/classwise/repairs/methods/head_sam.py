"""DecoSAM (submission to ICLR 2026): class-wise sharpness-aware minimization of the last linear layer, for one epoch.

Let theta be the weight and bias of the last layer, f(x') the features of an adversarial image and L_c the mean
cross-entropy over the images of class c in a batch. Sharpness-aware minimization (Foret et al., ICLR 2021) takes the
gradient at a point of higher loss; here every class has a point of its own:

    g_c = gradient of L_c at theta,
    theta_c = theta + rho * g_c / |g_c|,
    theta <- theta - lr * mean_c (gradient of L_c at theta_c),

the mean over the classes in the batch. The body of the network is frozen, so its features are computed once per batch,
and the gradient of a class is that of a softmax regression, (p - e_y) (f, 1)^T averaged over its images.

**Deviations**

* The submission's settings are not known to us. The defaults are common ones: rho = 0.05 as in sharpness-aware
  minimization, and SGD with lr = 0.01 and momentum 0.9 as in fine-tuning.
* A class without images in a batch is left out of the mean.
* The length |g_c| is taken over weight and bias together.
* The model is in evaluation mode: batch norm uses its running statistics and does not change them. Images are not
  augmented.
"""

# B batch, K classes, D features and a constant one for the bias

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.attacks import PGD
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.data import Batches
from classwise.models.heads import features_of, plain_head
from classwise.repairs.methods.base import Case, Images, Repaired
from classwise.training.optimizers import SGD


@dataclass(frozen=True, kw_only=True)
class HeadSAM:
    """Sharpness-aware training of the last linear layer on adversarial images."""

    about: ClassVar[str] = "Last layer trained by class-wise sharpness-aware minimization (DecoSAM)"
    uses: ClassVar[Images] = "training"

    epochs: int = 1
    lr: Number = 0.01
    momentum: Number = 0.9
    weight_decay: Number = 0.0
    rho: Number = 0.05
    """Length of the ascent step of each class."""
    steps: int = 10
    """Steps of the PGD attack."""
    batch_size: int = 128

    def __post_init__(self) -> None:
        at_least_one(epochs=self.epochs, batch_size=self.batch_size)
        if self.rho < 0:
            raise InputError(f"rho must not be negative, got {self.rho:g}")
        _ = self.optimizer, PGD(steps=self.steps)  # These check their settings.

    @property
    def optimizer(self) -> SGD:
        """The optimizer's settings."""
        return SGD(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def __call__(self, case: Case) -> Repaired:
        began = time.perf_counter()
        model = copy.deepcopy(case.model)
        head, device = plain_head(model, case.example), device_of(model)
        attack = PGD(steps=self.steps).within(case.threat)
        weights = nn.Parameter(joined(head))
        optimizer = self.optimizer.build([weights])
        batches = Batches(
            case.images,
            case.train,
            batch_size=self.batch_size,
            device=device,
            generator=torch.Generator().manual_seed(case.seed),
        )
        noise = torch.Generator(device).manual_seed(case.seed)
        case.progress.start("train the last layer", self.epochs * len(batches))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(case.seed)
            for _ in range(self.epochs):
                for x, y, _ in batches:
                    features, _ = features_of(model, head, attack(model, x, y, generator=noise))
                    if head.bias is not None:
                        features = F.pad(features, (0, 1), value=1.0)
                    weights.grad = sharpness_aware_gradient(weights.detach(), features.float(), y, self.rho)
                    optimizer.step()
                    put_back(weights, head)
                    case.progress.advance()
        case.progress.finish()
        return Repaired(model=model, seconds={"training": round(time.perf_counter() - began, 3)})


def class_gradient(weights: Tensor, features: Tensor, y: Tensor) -> Tensor:
    """(K, D) gradient of the mean cross-entropy by the weights (K, D), on features (B, D)."""
    errors = (features @ weights.T).softmax(1)
    errors[torch.arange(len(y), device=y.device), y] -= 1
    return errors.T @ features / len(y)


def sharpness_aware_gradient(weights: Tensor, features: Tensor, y: Tensor, rho: float) -> Tensor:
    """(K, D) mean over the classes of y of their gradients, each at its own perturbed weights."""
    total, classes = torch.zeros_like(weights), torch.unique(y)
    for one in classes:
        own, labels = features[y == one], y[y == one]
        ascent = class_gradient(weights, own, labels)
        tiny = torch.finfo(ascent.dtype).tiny
        total += class_gradient(weights + rho * ascent / ascent.norm().clamp_min(tiny), own, labels)
    return total / len(classes)


def joined(head: nn.Linear) -> Tensor:
    """(K, D) a float32 copy of the weight; the bias, if any, is the last column."""
    parts = [head.weight] if head.bias is None else [head.weight, head.bias[:, None]]
    return torch.cat([part.detach().float() for part in parts], 1)


def put_back(weights: Tensor, head: nn.Linear) -> None:
    """Write joined weights into their layer."""
    with torch.no_grad():
        head.weight.copy_(weights[:, : head.in_features])
        if head.bias is not None:
            head.bias.copy_(weights[:, -1])


def at_least_one(**settings: int) -> None:
    """Refuse counts below 1."""
    for name, value in settings.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
