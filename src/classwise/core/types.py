"""Shared types: class controls, class statistics, loss terms, and the protocols of attacks, objectives and policies.

A class-wise method is a function from class statistics to class controls. It never sees a model, an attack or a loader,
so every policy composes with every objective.
"""

# B batch, K classes

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.core.errors import InputError, unknown
from classwise.core.fusing import fusible
from classwise.core.streams import Randomness
from classwise.core.threat import Threat


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassControls:
    """The settings that a policy may change per class. Vectors are (K,); 1 means the objective's own value."""

    weight_nat: Tensor
    """Weight of the natural term."""
    weight_adv: Tensor
    """Weight of the adversarial term."""
    eps_scale: Tensor
    """Radius of the training attack relative to eps."""
    beta_scale: Tensor
    """Strength of the robust regularizer relative to beta."""
    sampling: Tensor | None = None
    """Class distribution of batches; None: every example once per epoch."""
    targets: Tensor | None = None
    """(K, K) distribution of the target class of the training attack for each true class; rows sum to 1."""
    temperature_nat: Tensor | None = None
    temperature_adv: Tensor | None = None
    """Temperature of a teacher in the natural and the adversarial term, relative to the objective's; None: 1."""

    @classmethod
    def uniform(cls, num_classes: int) -> ClassControls:
        """Return controls that treat all classes equally."""
        ones = torch.ones(num_classes)
        return cls(weight_nat=ones, weight_adv=ones, eps_scale=ones, beta_scale=ones)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.weight_nat)

    def to(self, device: torch.device) -> ClassControls:
        """Return the controls on another device."""
        present = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(self, **{name: value.to(device) for name, value in present.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a policy knows about a training before it starts."""

    classes: tuple[str, ...]
    """Class names in the order of the labels."""
    beta: float = 1.0
    """Strength of the objective's adversarial term."""

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.classes)

    def label(self, name: str | int) -> int:
        """Return the label of a class given by name or number."""
        text = str(name)
        if text in self.classes:
            return self.classes.index(text)
        if not text.isdecimal():
            raise unknown("class", text, self.classes)
        if int(text) >= self.num_classes:
            raise InputError(f"class {text} does not exist: expected 0 to {self.num_classes - 1}")
        return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """An objective's loss before any reduction. The loss of example i is ``nat_i + beta * adv_i``."""

    nat: Tensor
    """(B,) natural term; zero where an objective has none."""
    adv: Tensor
    """(B,) adversarial term; zero where an objective has none."""
    beta: float
    """Strength of the adversarial term."""
    logits_nat: Tensor | None = None
    """(B, K) logits on natural images, if the objective computes them."""
    logits_adv: Tensor | None = None
    """(B, K) logits on adversarial images, if the objective attacks."""


def reduce(terms: LossTerms, y: Tensor, controls: ClassControls) -> Tensor:
    """Return the mean loss of a batch, weighted by class controls."""
    nat = controls.weight_nat[y] * terms.nat
    adv = controls.weight_adv[y] * controls.beta_scale[y] * terms.adv
    return (nat + terms.beta * adv).mean()


_COUNTS = ("n", "n_nat", "n_adv", "correct_nat", "correct_adv")
_TOTALS = ("loss_nat", "loss_adv", "loss", "ce_nat", "ce_adv")
"""Vectors of ``ClassStats``: counts and sums, in the order of ``_sums_by_class``."""


@dataclass(slots=True, kw_only=True)
class ClassStats:
    """Counts and sums per class: sufficient statistics that merge over batches, shards and ranks by ``+``."""

    n: Tensor
    """(K,) examples seen."""
    n_nat: Tensor
    """(K,) of these, examples with logits on natural images."""
    n_adv: Tensor
    """(K,) of these, examples with logits on adversarial images."""
    correct_nat: Tensor
    correct_adv: Tensor
    loss_nat: Tensor
    """(K,) sum of the natural terms, float64."""
    loss_adv: Tensor
    """(K,) sum of the adversarial terms, without beta, float64."""
    loss: Tensor
    """(K,) sum of the loss, natural plus beta times adversarial, without class weights, float64."""
    confusion_adv: Tensor
    """(K, K) counts by true class and class predicted under attack."""
    softmax_adv: Tensor
    """(K, K) sum of the softmax under attack over the examples of each true class, float64."""
    ce_nat: Tensor
    ce_adv: Tensor
    """(K,) sums of the cross-entropy on natural and on adversarial images, whatever the objective, float64."""

    @classmethod
    def zeros(cls, num_classes: int, device: torch.device | str = "cpu") -> ClassStats:
        """Return statistics of no examples."""

        def count(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def total(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        k = num_classes
        vectors = {name: count(k) for name in _COUNTS} | {name: total(k) for name in _TOTALS}
        return cls(**vectors, confusion_adv=count(k, k), softmax_adv=total(k, k))

    @classmethod
    def of(cls, terms: LossTerms, y: Tensor, num_classes: int) -> ClassStats:
        """Compute the statistics of a batch without synchronizing with the device."""
        sums = _sums_by_class(terms.nat, terms.adv, terms.beta, terms.logits_nat, terms.logits_adv, y, num_classes)
        counts, totals, confusion, softmax = sums
        vectors = dict(zip(_COUNTS + _TOTALS, (*counts, *totals), strict=True))
        return cls(**vectors, confusion_adv=confusion, softmax_adv=softmax)

    def __iadd__(self, other: ClassStats) -> ClassStats:
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        for dtype in (torch.int64, torch.float64):
            mine, theirs = zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True)
            torch._foreach_add_(mine, theirs)
        return self

    def __add__(self, other: ClassStats) -> ClassStats:
        return ClassStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def cpu(self) -> ClassStats:
        """Return the statistics on the CPU, where policies use them."""
        return ClassStats(**{f.name: getattr(self, f.name).cpu() for f in fields(self)})

    @property
    def natural(self) -> Tensor:
        """(K,) natural accuracy as a fraction; NaN for classes without examples."""
        return self.correct_nat / self.n_nat

    @property
    def robust(self) -> Tensor:
        """(K,) robust accuracy as a fraction; NaN for classes without examples."""
        return self.correct_adv / self.n_adv


@fusible
@torch.no_grad()
def _sums_by_class(
    nat: Tensor,
    adv: Tensor,
    beta: float,
    logits_nat: Tensor | None,
    logits_adv: Tensor | None,
    y: Tensor,
    num_classes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum examples by class in one operation: counts, totals, confusion, softmax. Counts are exact in float64."""
    nat, adv = nat.double(), adv.double()
    none, all_ = torch.zeros_like(nat), torch.ones_like(nat)
    shares = guesses = nat.new_zeros(len(y), num_classes)
    n_nat = correct_nat = ce_nat = n_adv = correct_adv = ce_adv = none
    if logits_nat is not None:
        n_nat, correct_nat = all_, (logits_nat.argmax(1) == y).double()
        ce_nat = F.cross_entropy(logits_nat.double(), y, reduction="none")
    if logits_adv is not None:
        predicted, log_p = logits_adv.argmax(1), logits_adv.double().log_softmax(1)
        n_adv, correct_adv = all_, (predicted == y).double()
        ce_adv = -log_p.gather(1, y[:, None]).squeeze(1)
        shares, guesses = log_p.exp(), F.one_hot(predicted, num_classes).double()
    counts = [all_, n_nat, n_adv, correct_nat, correct_adv]
    totals = [nat, adv, nat + beta * adv, ce_nat, ce_adv]
    rows = torch.cat([torch.stack(counts + totals, 1), guesses, shares], 1)
    table = rows.new_zeros(num_classes, rows.shape[1]).index_add_(0, y, rows)
    counted, summed, confusion, softmax = torch.split(table, [5, 5, num_classes, num_classes], 1)
    return counted.T.long().contiguous(), summed.T.contiguous(), confusion.long(), softmax.contiguous()


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of forward and backward passes for each example of a batch."""

    forwards: Tensor
    backwards: Tensor
    """(B,) int64."""

    @classmethod
    def none(cls, size: int, device: torch.device | str = "cpu") -> Effort:
        """Return zero passes for every example."""
        return cls(*torch.zeros(2, size, dtype=torch.int64, device=device))


Selection = Literal["survivors", "nearest", "sample", "doubtful"]
"""Which survivors a stage attacks: all, those nearest to the decision boundary, a sample of each class, or all if the
fallback is triggered."""


@dataclass(frozen=True, slots=True)
class AttackCall:
    """The arguments of one attack: a model, a batch, and settings per example."""

    model: nn.Module
    x: Tensor
    """(B, C, H, W) natural images in [0, 1]."""
    y: Tensor
    """(B,) true labels."""
    _: KW_ONLY
    eps_scale: Tensor | None = None
    """(B,) radius of each example relative to eps; None: 1."""
    generator: Randomness = None
    """A torch generator, or one random stream per example, which makes results independent of the batching."""
    targets: Tensor | None = None
    """Target classes (B,), or class distributions (B, K) to draw them from; None: untargeted."""

    @classmethod
    def under(
        cls, controls: ClassControls, model: nn.Module, x: Tensor, y: Tensor, generator: Randomness = None
    ) -> AttackCall:
        """Return the call of the training attack on a batch, with radius and targets per class from the controls."""
        targets = None if controls.targets is None else controls.targets[y]
        return cls(model, x, y, eps_scale=controls.eps_scale[y], generator=generator, targets=targets)


LoadModel = Callable[[str, str | Path | None], nn.Module]
"""From a model spec and weights to the model."""


class Attack(ABC):
    """Searches the ball around each image for a misclassified point. A frozen dataclass; its repr is its identity."""

    black_box: ClassVar[bool] = False
    """Whether the attack works without gradients of the model."""
    uses_optimized_copy: ClassVar[bool] = True
    """Whether the attack may search an optimized copy of the model."""
    resembles_cascade: ClassVar[bool] = False
    """Whether the search resembles the cascade of ``fast``, so that its success is not evidence against it."""
    has_audit: ClassVar[bool] = False
    """Whether its last stages run only if an audit suggests so, or if the setting ``exhaustive`` is on."""
    eps: float | str | None
    norm: str | None

    @property
    def name(self) -> str:
        """Name in reports."""
        return type(self).__name__

    @property
    @abstractmethod
    def threat(self) -> Threat:
        """The norm and radius of the attack."""

    @property
    def supports_targets(self) -> bool:
        """Whether the attack accepts target classes."""
        return False

    @final
    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        eps_scale: Tensor | None = None,
        generator: Randomness = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return adversarial images for images ``x`` (B, C, H, W) in [0, 1] with labels ``y`` (B,).

        Args:
            eps_scale: (B,) factors on the radius.
            generator: a torch generator, or one random stream per example, which makes the result of an example
                independent of its batch. None uses the global random state.
            targets: target classes (B,), or class distributions (B, K) to draw them from, for attacks that support
                targets.
        """
        return self.run(AttackCall(model, x, y, eps_scale=eps_scale, generator=generator, targets=targets))[0]

    @final
    def bind(self, model: nn.Module) -> Callable[..., Tensor]:
        """Return a function ``attack(x, y)`` that attacks this model, the convention of other libraries."""
        return partial(self, model)

    @abstractmethod
    def run(self, call: AttackCall) -> tuple[Tensor, Effort]:
        """Return adversarial images and the passes through the model that each example took."""

    @abstractmethod
    def within(self, threat: Threat) -> Self:
        """Return the attack limited to this threat. If it has its own norm or radius, they must be equal."""

    def with_models(self, load: LoadModel) -> Self:
        """Return the attack with its additional models loaded, such as a substitute."""
        return self

    def variants(self) -> Mapping[str, Attack]:
        """Return the attacks of a grid, of which the strongest is reported; empty for a single attack."""
        return {}

    def stages(self, num_classes: int) -> Mapping[str, Attack]:
        """Return the attacks of an ensemble, each on the survivors of the previous ones; empty for other attacks."""
        return {}

    def selects(self, stage: str) -> Selection:
        """Return which of the remaining examples a stage attacks."""
        return "survivors"


class Objective(Protocol):
    """Computes the loss terms of a batch, including its adversarial examples."""

    paper: ClassVar[str] = ""
    """The paper, as in ``Zhang et al. 2019``."""
    needs_teacher: ClassVar[bool] = False
    """Whether the setting ``teacher`` is required."""
    has_natural_term: ClassVar[bool] = True
    has_adversarial_term: ClassVar[bool] = True
    """Whether the loss terms ``nat`` and ``adv`` can be nonzero."""

    @property
    def beta(self) -> float:
        """Strength of the adversarial term."""
        return 1.0

    @property
    def teacher(self) -> nn.Module | str | None:
        """The teacher model or its spec, for distillation."""
        return None

    @property
    def supports_targets(self) -> bool:
        """Whether the class control ``targets`` reaches its attack; by default, unless ``perturb`` is overridden."""
        return type(self).perturb is Objective.perturb

    @property
    def used_controls(self) -> frozenset[str]:
        """The class controls that affect the objective."""
        used = {"sampling"}
        if self.has_natural_term:
            used |= {"weight_nat"}
        if self.has_adversarial_term and self.beta:
            used |= {"weight_adv", "beta_scale"}
        if self.attack is not None:
            used |= {"eps_scale"}
            if self.supports_targets and self.attack.supports_targets:
                used |= {"targets"}
        if self.needs_teacher:
            used |= {"temperature_nat", "temperature_adv"}
        return frozenset(used)

    @property
    def replays(self) -> int:
        """Number of updates on each batch."""
        return 1

    @property
    def attack(self) -> Attack | None:
        """The inner maximization, or None for training without one."""

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        controls: ClassControls,
        *,
        generator: Randomness = None,
    ) -> LossTerms:
        """Attack a batch and return its loss terms."""
        return self.under(controls).terms(model, x, self.perturb(model, x, y, controls, generator=generator), y)

    def under(self, controls: ClassControls) -> Objective:
        """Return the objective with controls applied that change its terms; most objectives return themselves."""
        return self

    def perturb(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        controls: ClassControls,
        *,
        generator: Randomness = None,
    ) -> Tensor:
        """Return adversarial images for a batch, with radius and targets per class from the controls."""
        if self.attack is None:
            return x
        return self.attack.run(AttackCall.under(controls, model, x, y, generator))[0]

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        """Return the loss terms of natural images and their adversarial images."""
        raise NotImplementedError

    def again(self, x: Tensor, x_adv: Tensor, y: Tensor, controls: ClassControls) -> Tensor:
        """Return adversarial images for another update on the same batch, from the gradient of the previous update."""
        return x_adv

    def on_epoch(self, model: nn.Module, epoch: int) -> None:
        """Prepare the model for an epoch, counted from 1."""
        return


class Policy(Protocol):
    """Computes class controls from class statistics. Subclasses override the methods that their paper needs."""

    paper: ClassVar[str] = ""
    """The source, as in ``Li & Liu 2023``."""
    turns: ClassVar[tuple[str, ...]] = ()
    """The controls it sets."""
    uses: ClassVar[tuple[str, ...]] = ()
    """The class statistics it uses, as in ``val.robust``."""
    fine_tunes: ClassVar[bool] = False
    """Whether it needs a robust model to start from."""

    def start(self, task: Task) -> ClassControls:
        """Return the controls of the first epoch."""
        return ClassControls.uniform(task.num_classes)

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls | None:
        """Return the controls of the next epoch, or None to keep the current ones. Epochs count from 1."""
        return None

    def on_batch(self, terms: LossTerms, y: Tensor) -> ClassControls | None:
        """Return controls for this batch before its loss is reduced, or None to keep the epoch's.

        If they are computed on the device of ``y`` without synchronization, they become part of the compiled step.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; tensors and plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got {sorted(state)}")
