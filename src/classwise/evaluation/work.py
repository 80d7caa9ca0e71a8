"""The work of an evaluation: columns of verdicts filled batch by batch, each batch judged and saved as it comes."""

# B batch, K classes, N examples

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.accelerate import give_back
from classwise.attacks.losses import margin
from classwise.core.errors import InputError
from classwise.core.model_calls import blamed_on_the_model, device_of, dtype_of, exact, frozen, logits_of
from classwise.core.progress import Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall, Corruption, Effort, MeasuredAttack
from classwise.data import ImageSet, ordered
from classwise.evaluation.batching import in_batches
from classwise.evaluation.fast import Cascade
from classwise.evaluation.gallery import Tried
from classwise.evaluation.probes import QUERIES, choose, examine
from classwise.evaluation.sanity import warnings_of
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.reporting.effort import AttackInfo, ClassEffort, StageInfo
from classwise.reporting.examples import Broken, BrokenExamples, amplification
from classwise.reporting.sanity import Probes
from classwise.storage.files import digest
from classwise.storage.run_directory import RunDirectory
from classwise.storage.verdicts import NATURAL, PENDING, Verdicts

SAVE_SECONDS = 5.0
"""How much work an evaluation may lose when it is killed."""
NATURAL_SAMPLE = 200
"""Images, right and wrong as they come, on which other scales of the input are tried."""
JUDGED = 500
"""Images that a model judges at once: in float32 a GPU may need gigabytes for three times as many."""
SHOWN = 6
"""Broken examples of the weakest class that are shown."""
NOTE_SECONDS = 1.0
"""How often a long batch says that it is alive."""


def predict(model: nn.Module, x: Tensor) -> Ints:
    """The labels a model gives to images, in plain float32 and evaluation mode."""
    return np.asarray(answers(model, x).argmax(1).cpu())


def answers(model: nn.Module, x: Tensor) -> Tensor:
    """The logits (B, K) it gives."""
    with blamed_on_the_model("on clean or attacked images"), torch.no_grad(), frozen(model), exact(x.device):
        logits = torch.cat([logits_of(model(part)) for part in torch.split(x.to(dtype_of(model)), JUDGED)])
    if not bool(logits.isfinite().all()):
        raise InputError("the model answers with NaN or infinite logits: there is no prediction to judge")
    return logits


@dataclass(frozen=True, slots=True)
class Parts:
    """What an attack is made of, under the names of their columns. A single attack has neither."""

    variants: Mapping[str, MeasuredAttack]
    stages: Mapping[str, MeasuredAttack]
    units: Mapping[str, MeasuredAttack]
    """What really runs: the variants, the stages, or the attack itself."""

    @classmethod
    def of(cls, key: str, attack: MeasuredAttack, num_classes: int) -> Parts:
        """Take an attack apart."""
        name = key.partition(":")[0]
        variants = {f"{name}:{which}": variant for which, variant in attack.variants().items()}
        stages = {f"{key}/{which}": stage for which, stage in attack.stages(num_classes).items()}
        return cls(variants, stages, units=variants or stages or {key: attack})


class Work:
    """What is left to decide. Verdicts are filled in place and saved as they come."""

    def __init__(
        self,
        model: nn.Module,
        searcher: nn.Module,
        images: ImageSet,
        verdicts: Verdicts,
        threat: Threat,
        batch_size: int,
        seed: int,
        directory: RunDirectory | None,
        fingerprint: str,
        progress: Progress,
    ) -> None:
        self.model, self.searcher = model, searcher
        self.images, self.verdicts, self.threat = images, verdicts, threat
        self.batch_size, self.seed, self.progress = batch_size, seed, progress
        self.directory, self.fingerprint = directory, fingerprint
        self.device = device_of(model)
        self.saved = time.monotonic()
        self.open = np.ones(len(verdicts), dtype=bool)
        """(N,) which examples are to be decided; the others wait."""
        self.cascades: dict[str, Cascade] = {}
        self.fitted: int | None = None
        """The batch that memory allowed, where the one asked for did not fit."""
        self.effort: dict[str, dict[str, Any]] = (
            {} if directory is None else directory.read()["evaluation"].get("effort", {})
        )

    def natural(self) -> None:
        """Predictions on the untouched images."""

        def fill(batch: Ints) -> None:
            self.verdicts.natural[batch] = predict(self.model, self._images(batch)[0])

        self._each(NATURAL, self.open & (self.verdicts.natural == PENDING), fill)
        self.save()  # from here on there is something to continue from

    def attack(self, key: str, attack: MeasuredAttack, parts: Parts) -> None:
        """Predictions under one attack, of the examples that are classified correctly when untouched."""
        columns = self.verdicts.attacks
        if parts.variants:
            for name, variant in parts.variants.items():
                self._search(name, variant, self.verdicts.natural, columns[name])
            columns[key][:] = columns[self.strongest(parts)]
        elif parts.stages:
            whoms = {name: attack.selects(name.removeprefix(f"{key}/")) for name in parts.stages}
            cascade = self.cascades[key] = Cascade(parts.stages, whoms, self.verdicts, self.seed)
            before = self.verdicts.natural
            for name, stage in parts.stages.items():
                whom = cascade.whom(name, before, self.warnings)
                self._search(name, stage, before, self.verdicts.stages[name], whom)
                before = self.verdicts.stages[name]
            columns[key][:] = before
        else:
            self._search(key, attack, self.verdicts.natural, columns[key])

    def strongest(self, parts: Parts) -> str:
        """The variant that leaves the fewest survivors, the first of equals."""
        return min(parts.variants, key=lambda name: int(self.verdicts.survived(name).sum()))

    def corrupt(self, key: str, corruption: Corruption) -> None:
        """Predictions on corrupted images."""
        column = self.verdicts.corrupted[key]
        stream = int(digest(str(self.seed), repr(corruption))[:15], 16)

        def fill(batch: Ints) -> None:
            x, _, index = self._images(batch)
            column[batch] = predict(self.model, corruption(x, generator=ExampleNoise(stream, index)))

        self._each(key, self.open & (column == PENDING), fill)

    def _search(self, key: str, attack: MeasuredAttack, before: Ints, column: Ints, whom: Bools | None = None) -> None:
        """Fill a column by attacking what an earlier one left, or some of it; the rest stays as it is there."""
        forwards = self.verdicts.forwards.setdefault(key, np.zeros(len(column), dtype=np.int64))
        backwards = self.verdicts.backwards.setdefault(key, np.zeros(len(column), dtype=np.int64))
        margins = self.verdicts.margins.setdefault(key, np.full(len(column), np.nan, dtype=np.float32))
        attacked = before == self.verdicts.label
        attacked = attacked if whom is None else attacked & whom
        effort = self.effort.setdefault(key, {"rejected": 0, "seconds": 0.0})
        effort["attacked"] = int(attacked.sum())
        column[~attacked & (column == PENDING)] = before[~attacked & (column == PENDING)]

        def fill(batch: Ints) -> None:
            began = time.perf_counter()
            x, y, index = self._images(batch)
            x_adv, spent = self._attacked(key, attack, x, y, index)
            inside = self.threat.ball(x).contains(x_adv)
            logits = answers(self.model, torch.where(inside[:, None, None, None], x_adv, x))
            column[batch], margins[batch] = logits.argmax(1).cpu(), margin(y)(logits).cpu()
            forwards[batch], backwards[batch] = spent.forwards.cpu(), spent.backwards.cpu()
            effort["rejected"] += int((~inside).sum())
            effort["seconds"] = round(effort["seconds"] + time.perf_counter() - began, 3)

        self._each(key, attacked & (column == PENDING), fill)

    def _attacked(self, key: str, attack: MeasuredAttack, x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, Effort]:
        """Some examples under an attack, the same whenever it is asked for, and what it cost."""
        stream = int(digest(str(self.seed), repr(attack))[:15], 16)
        searcher = self.searcher if attack.uses_optimized_copy else self.model
        with blamed_on_the_model(f"under {key}"), self._audible(searcher):
            return attack.run(AttackCall(searcher, x, y, generator=ExampleNoise(stream, index)))

    def gallery(self, label: int, parts: Mapping[str, Parts], classes: list[str]) -> BrokenExamples | None:
        """A few examples of a class that attacks broke, broken once more to be shown. None where there are none."""
        verdicts = self.verdicts
        amplify = amplification(self.threat.norm, self.threat.eps)
        standing = self.open & (verdicts.label == label) & (verdicts.natural == label)
        found: list[Broken] = []
        total = 0
        self.progress.start("examples", SHOWN)
        for unit, attack in [unit for part in parts.values() for unit in part.units.items()]:
            fell = standing & ~np.isin(verdicts.predictions(unit), (label, PENDING))
            total += int(fell.sum())
            standing = standing & ~fell
            rows = np.flatnonzero(fell)[: SHOWN - len(found)]
            if not len(rows):
                continue
            x, y, index = self._images(rows)
            x_adv, _ = self._attacked(unit, attack, x, y, index)
            before, after = answers(self.model, x), answers(self.model, x_adv)
            tried = Tried.each(index, y, x, x_adv, before, after, self.threat.norm)
            found += [Broken(**one.facts(classes, amplify), attack=unit) for one in tried]
            self.progress.advance(len(rows))
        self.progress.finish()
        return BrokenExamples(name=classes[label], broken=total, amplify=amplify, examples=found) if found else None

    def account(
        self,
        key: str,
        spec: str,
        attack: MeasuredAttack,
        parts: Parts,
        classes: list[str],
    ) -> AttackInfo:
        """What an attack was and what it cost, in all and by class."""
        verdicts = self.verdicts
        units = list(parts.units)
        passes = {
            "forwards": np.sum([verdicts.forwards[unit] for unit in units], axis=0),
            "backwards": np.sum([verdicts.backwards[unit] for unit in units], axis=0),
        }
        attacked = verdicts.survived(NATURAL)
        cascade = self.cascades.get(key)
        before = [NATURAL, *parts.stages]
        return AttackInfo(
            spec=spec,
            settings=repr(attack),
            attacked=int(attacked.sum()),
            rejected=sum(self.effort[unit]["rejected"] for unit in units),
            seconds=round(sum(self.effort[unit]["seconds"] for unit in units), 3),
            **{name: int(counts.sum()) for name, counts in passes.items()},
            by_class=[
                ClassEffort(
                    label=label,
                    name=name,
                    attacked=int((attacked & (verdicts.label == label)).sum()),
                    **{which: int(counts[verdicts.label == label].sum()) for which, counts in passes.items()},
                )
                for label, name in enumerate(classes)
            ],
            stages=[
                StageInfo(
                    name=name.removeprefix(f"{key}/"),
                    settings=repr(stage),
                    whom=attack.selects(name.removeprefix(f"{key}/")),
                    broke=int(verdicts.survived(before[number]).sum() - verdicts.survived(name).sum()),
                    forwards=int(verdicts.forwards[name].sum()),
                    backwards=int(verdicts.backwards[name].sum()),
                    **self.effort[name],
                )
                for number, (name, stage) in enumerate(parts.stages.items())
            ],
            strongest=self.strongest(parts) if parts.variants else None,
            audit=None if cascade is None else cascade.audit(self.warnings),
        )

    @cached_property
    def probes(self) -> Probes | InputError | None:
        """Short experiments on a few of the examples that the attacks had to work on; or why there are none."""
        label = self.verdicts.label
        rows = choose(label, self.verdicts.survived(NATURAL))
        if not len(rows):
            return None
        x, y, index = self._images(rows)
        some = np.linspace(0, len(label) - 1, min(NATURAL_SAMPLE, len(label)), dtype=int)
        natural, names, _ = self._images(some)
        audited = any(cascade.audits for cascade in self.cascades.values())  # by Square too, with many more queries
        try:
            return examine(
                self.model,
                x,
                y,
                index=index,
                threat=self.threat,
                seed=self.seed,
                queries=0 if audited else QUERIES,
                natural=(natural, names),
                batch_size=self.batch_size,
                progress=self.progress,
            )
        except InputError as error:  # verdicts can be reached; a model that stumbles over a probe does not undo them
            return error
        except torch.OutOfMemoryError:
            return InputError("there is no memory for the probes")

    def warnings(self) -> list[str]:
        """What the probes warn of."""
        if isinstance(self.probes, InputError):
            return ["not-probed"]
        return [] if self.probes is None else warnings_of(self.probes)

    def save(self) -> None:
        """Put what is decided on disk."""
        if self.directory is not None:
            self.directory.note("evaluation", effort=self.effort)
            self.verdicts.save(self.directory.verdicts, self.fingerprint)
            self.saved = time.monotonic()

    def _each(self, task: str, pending: Bools, fill: Callable[[Ints], None]) -> None:
        """Fill what is pending in a column batch by batch, in smaller ones where memory does not hold them."""

        def smaller(size: int) -> None:
            self.batch_size = self.fitted = size
            give_back(self.searcher)

        in_batches(task, pending, self.batch_size, fill, self._saved, smaller, self.progress)

    def _images(self, rows: Ints) -> tuple[Tensor, Tensor, Tensor]:
        return next(ordered(self.images, self.verdicts.index[rows], len(rows), self.device))

    @contextmanager
    def _audible(self, searcher: nn.Module) -> Iterator[None]:
        """Say now and then how far the attack on a batch is: a thorough one takes minutes for it."""
        passes, spoke = 0, time.monotonic()

        def say(*_: object) -> None:
            nonlocal passes, spoke
            passes += 1
            if time.monotonic() - spoke > NOTE_SECONDS:
                spoke = time.monotonic()
                self.progress.advance(0, f"pass {passes} over this batch")

        handle = searcher.register_forward_hook(say)
        try:
            yield
        finally:
            handle.remove()

    def _saved(self) -> None:
        """Save now and then."""
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()
