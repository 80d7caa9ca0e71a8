"""Fine-tuning of the whole network for two epochs, by one of two methods.

``faal``: fairness-aware adversarial learning (Zhang et al., CVPR 2024). The cross-entropy on adversarial images is
weighted by the worst distribution of the classes near the uniform one, batch by batch (``classwise.policies.faal``),
with adversarial weight perturbation.

``spectral``: confusional spectral regularization (Jin et al., ICLR 2025). With p the softmax output, x' the adversarial
image of x and k' the class predicted for x', the loss of an example is

    0.7 * CE(x, y) + 6 * KL(p(x) || p(x')) + 0.3 * M[y, k'] * CE(x', y).

Let C be the matrix of the shares of class y that are predicted as class k under attack, with a diagonal of zeros, and
u, v its top singular vectors. Then M = u v^T, rescaled linearly to [0.01, 2.01]: pairs that contribute most to the
spectral norm of the confusion have the largest weights. C is that of the training images in the epoch before; for the
first epoch, that of the validation images under the original model.

Both train by ``classwise.training`` on the images of the model's own training where they are known, else on four
fifths of the given images. Nothing is selected: the result is the model of the last epoch.

**Deviations**

* ``faal``: see ``classwise.policies.faal``. The authors choose one of two epochs on test images; here it is the last.
* ``spectral``: the authors' code multiplies the logit of the true class by 0.9 before the loss, which raises negative
  logits; here the logit is unchanged. The code also monitors the natural accuracy of one test class; this
  implementation does not.
* Learning rates are the papers', 0.01 divided by ten at half time (``faal``) and 0.001 (``spectral``), with SGD. A
  model trained with another optimizer may need another learning rate.
* Images are not augmented unless ``crop`` or ``flip`` are set: the augmentation of the original training is not known
  here.
"""

# B batch, K classes

from __future__ import annotations

import copy
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.attacks import PGD
from classwise.attacks.losses import divergence
from classwise.config.spec import Number
from classwise.core.errors import InputError, unknown
from classwise.core.model_calls import both, device_of, dtype_of
from classwise.core.streams import ExampleNoise
from classwise.core.types import ClassControls, ClassStats, LossTerms, Objective, Policy, Task
from classwise.data import ordered
from classwise.evaluation.inputs import count_classes
from classwise.evaluation.judge import predict
from classwise.metrics.counts import Ints
from classwise.models.weights import load_weights
from classwise.objectives import Madry
from classwise.policies import FAAL
from classwise.repairs.fit import FOLDS, assigned
from classwise.repairs.methods.base import Case, Images, Repaired
from classwise.repairs.methods.head_sam import at_least_one
from classwise.storage.run_directory import RunDirectory
from classwise.training.data import Phase
from classwise.training.loop import Job, fit
from classwise.training.optimizers import SGD
from classwise.training.plan import Plan
from classwise.training.schedules import Constant, MultiStep
from classwise.training.weight_perturbation import WeightPerturbation

How = Literal["faal", "spectral"]
NATURAL, KL, CONFUSED = 0.7, 6.0, 0.3
"""Weights of the three terms of ``spectral``."""
LEAST, MOST = 0.01, 2.01
"""Weights of the pairs of classes that are confused least and most."""


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Adversarial training of the whole network for a few epochs, from its current weights."""

    about: ClassVar[str] = "All layers fine-tuned by FAAL (how=faal) or spectral regularization (how=spectral)"
    uses: ClassVar[Images] = "training"

    how: How = "faal"
    epochs: int = 2
    lr: Number | None = None
    """0.01 for ``faal``, 0.001 for ``spectral`` if not given."""
    momentum: Number = 0.9
    weight_decay: Number = 5e-4
    steps: int = 10
    """Steps of the PGD attack."""
    batch_size: int = 128
    radius: Number = 0.5
    """For ``faal``: maximum distance of the class distribution from the uniform one."""
    awp: Number = 0.005
    """For ``faal``: size of the adversarial weight perturbation; 0: off."""
    crop: int = 0
    """Pixels of zero padding before a random crop back to size."""
    flip: bool = False
    """Mirror half of the images."""

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            raise unknown("way to fine-tune", self.how, get_args(How))
        at_least_one(epochs=self.epochs, batch_size=self.batch_size)
        # Each of these checks its settings.
        _ = self.optimizer, self.perturbation, PGD(steps=self.steps), FAAL(radius=self.radius)

    @property
    def optimizer(self) -> SGD:
        """The optimizer's settings."""
        default = 0.01 if self.how == "faal" else 0.001
        rate = default if self.lr is None else self.lr
        return SGD(lr=rate, momentum=self.momentum, weight_decay=self.weight_decay)

    @property
    def perturbation(self) -> WeightPerturbation | None:
        """Adversarial weight perturbation, if any."""
        return WeightPerturbation(gamma=self.awp) if self.awp and self.how == "faal" else None

    def __call__(self, case: Case) -> Repaired:
        began = time.perf_counter()
        plan = self.plan(case)
        with tempfile.TemporaryDirectory() as folder:
            directory = RunDirectory(Path(folder) / "finetune")
            fit([Job(plan, directory, resume=False)], case.progress)
            model = copy.deepcopy(case.model)
            load_weights(model, directory.checkpoints / "last.safetensors")
        return Repaired(model=model, seconds={"training": round(time.perf_counter() - began, 3)})

    def plan(self, case: Case) -> Plan:
        """The training of a copy of the model."""
        if dtype_of(case.model) != torch.float32:
            raise InputError(f"finetune needs a float32 model, got {dtype_of(case.model)}")
        num_classes, device = count_classes(case.model, case.images), device_of(case.model)
        fast = device.type == "cuda" and case.engine != "eager"
        train, validation = split(case)
        objective, policy = self.method(case, validation, num_classes)
        return Plan(
            name=f"finetune ({self.how})",
            model=copy.deepcopy(case.model).requires_grad_(True),
            phases=(Phase(epochs=self.epochs, images=case.images, batch_size=self.batch_size, crop=self.crop),),
            train=train,
            validation=validation,
            task=Task(classes=case.images.classes or tuple(str(label) for label in range(num_classes))),
            objective=objective,
            policy=policy,
            optimizer=self.optimizer,
            schedule=MultiStep(milestones=(max(1, self.epochs // 2),)) if self.how == "faal" else Constant(),
            epochs=self.epochs,
            flip=self.flip,
            awp=self.perturbation,
            precision="bf16" if fast else "fp32",
            engine="compiled" if fast else "eager",
            select="last",
            validation_attack=PGD(steps=10).within(case.threat),
            seed=case.seed,
            device=device,
        )

    def method(self, case: Case, validation: Ints, num_classes: int) -> tuple[Objective, Policy]:
        """The objective to minimize, and the policy that sets the class weights."""
        if self.how == "faal":
            return Madry(attack=PGD(steps=self.steps).within(case.threat)), FAAL(radius=self.radius)
        attack = replace(Spectral.attack, steps=self.steps).within(case.threat)
        confusion = adversarial_confusion(case, validation, PGD(steps=self.steps).within(case.threat), num_classes)
        pairs = pair_weights(confusion).to(device_of(case.model))
        return Spectral(attack=attack, pairs=pairs), SpectralPairs(pairs=pairs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Spectral(Objective):
    """TRADES with a third term: cross-entropy on adversarial images, weighted by the pair of classes confused."""

    attack: PGD = PGD(steps=10, loss="kl", start="gaussian")
    pairs: Tensor
    """(K, K) weights by true and predicted class; changed in place from epoch to epoch."""

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        logits_nat, logits_adv = both(model, x, x_adv)
        confused = self.pairs[y, logits_adv.argmax(1)] * F.cross_entropy(logits_adv, y, reduction="none")
        return LossTerms(
            nat=NATURAL * F.cross_entropy(logits_nat, y, reduction="none") + CONFUSED * confused,
            adv=divergence(logits_nat)(logits_adv),
            beta=KL,
            logits_nat=logits_nat,
            logits_adv=logits_adv,
        )


@dataclass(kw_only=True)
class SpectralPairs(Policy):
    """Sets the pair weights of ``Spectral`` from the confusion matrix of every epoch."""

    pairs: Tensor

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls | None:
        self.pairs.copy_(pair_weights(train.confusion_adv))
        return None


def pair_weights(confusion: Tensor) -> Tensor:
    """(K, K) weights in [0.01, 2.01] from counts of true by predicted class.

    >>> pair_weights(torch.tensor([[9, 1, 0], [2, 8, 0], [0, 0, 9]])).round(decimals=2)
    tensor([[0.0100, 0.0100, 0.0100],
            [2.0100, 0.0100, 0.0100],
            [0.0100, 0.0100, 0.0100]])
    """
    shares = confusion.double() / confusion.sum(1, keepdim=True).clamp_min(1)
    left, values, right = torch.linalg.svd(shares.fill_diagonal_(0))
    pairs = values[0] * torch.outer(left[:, 0], right[0])
    low, high = pairs.aminmax()
    relative = (pairs - low) / (high - low).clamp_min(torch.finfo(pairs.dtype).tiny)
    weights: Tensor = (LEAST + (MOST - LEAST) * relative).float()
    return weights


def adversarial_confusion(case: Case, index: Ints, attack: PGD, num_classes: int) -> Tensor:
    """(K, K) counts of true by predicted class of some images under attack on the original model."""
    counts = np.zeros(num_classes**2, dtype=np.int64)
    model, size = case.model, case.batch_size or 128
    case.progress.start("confusion under attack", len(index))
    for x, y, rows in ordered(case.images, index, size, device_of(model)):
        x_adv = attack(model, x, y, generator=ExampleNoise(case.seed, rows))
        counts += np.bincount(y.cpu().numpy() * num_classes + predict(model, x_adv), minlength=num_classes**2)
        case.progress.advance(len(y))
    case.progress.finish()
    return torch.from_numpy(counts.reshape(num_classes, num_classes))


def split(case: Case) -> tuple[Ints, Ints]:
    """The images to train on and those to validate on: a fifth of each class if both are the same images."""
    if not np.array_equal(case.train, case.index):
        return case.train, case.index
    fold = assigned(case.images.labels[case.index], FOLDS, case.seed)
    held_out = fold == FOLDS - 1
    return case.index[~held_out], case.index[held_out]
