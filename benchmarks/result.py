"""What a bench found: the contents of ``bench.json``, and the tables and bars drawn from it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from pydantic import Field

from benchmarks.chart import Bar, Group
from benchmarks.tables import interval, memory, plain, ratio, seconds
from classwise.reporting.estimates import Estimate, share
from classwise.reporting.part import Part
from classwise.reporting.report import ThreatInfo
from classwise.reporting.tables import Table

OURS = "classwise"
"""The first of all contenders, and the measure of the others."""


class Spread(Part):
    """Several measurements of one thing."""

    median: float
    low: float
    high: float
    values: list[float]
    """In the order they were taken."""


class Bench(Part):
    """What every bench says of itself."""

    device: str
    hardware: dict[str, Any]
    versions: dict[str, str]
    rounds: int
    """Complete ones, after the warm-up round."""
    interrupted: bool = False
    notes: list[str] = Field(default_factory=list)
    """Who was left out and why, and what else a reader must know."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """The numbers as text."""

    @abstractmethod
    def groups(self) -> list[Group]:
        """The times as bars."""

    @property
    def how(self) -> str:
        """How often it was measured and where, in words."""
        ended = " (interrupted)" if self.interrupted else ""
        gpu = self.hardware.get("gpu") if self.device.startswith("cuda") else None
        place = gpu or f"CPU threads: {self.hardware.get('threads')}"
        return f"median of {self.rounds} interleaved rounds{ended} after a warm-up; {place}"


class AttackEntry(Part):
    """One contender's attack."""

    name: str
    version: str | None
    seconds: Spread
    ratio: float
    """Its median over ours: above 1 it is slower than we are."""
    warm_up: float
    """Seconds of the first call, which also makes what is made once."""
    forwards: int
    backwards: int
    """Images through the model and gradients back to images, by hooks on the model, in the warm-up round."""
    peak_bytes: int | None
    """Memory beyond what was in use before, in the warm-up round."""
    robust: Estimate
    """Accuracy left, in percent, by the same check for everybody."""
    rejected: int
    """Its results that lay outside the ball or the box, and got no credit."""


class AttackCase(Part):
    """One attack by everybody."""

    spec: str
    settings: str
    entries: list[AttackEntry]


class EvaluationBench(Bench):
    """Attacks side by side."""

    schema_: Literal["classwise/bench-evaluate/1"] = Field("classwise/bench-evaluate/1", alias="schema")
    model: str
    data: str
    images: int
    batch_size: int
    threat: ThreatInfo
    natural: Estimate
    cases: list[AttackCase]

    def tables(self) -> list[Table]:
        threat = f"{self.threat.norm} eps = {self.threat.eps_text}"
        columns = ["", "seconds", "min–max", "× ours", "forwards", "backwards", "peak memory", "robust, % [95%]"]
        return [
            Table(
                title=case.spec,
                about=f"{self.model}, {self.images} images of {self.data} in batches of {self.batch_size}, {threat}; "
                f"natural accuracy {share(self.natural)}; {self.how}",
                columns=[*columns, "outside", "warm-up, s"],
                rows=[
                    [
                        entry.name,
                        seconds(entry.seconds.median),
                        interval(entry.seconds),
                        ratio(entry.ratio),
                        f"{entry.forwards:,}",
                        f"{entry.backwards:,}",
                        memory(entry.peak_bytes),
                        share(entry.robust),
                        f"{entry.rejected:,}",
                        seconds(entry.warm_up),
                    ]
                    for entry in case.entries
                ],
            )
            for case in self.cases
        ]

    def groups(self) -> list[Group]:
        return [
            Group(
                title=f"{case.spec}, {self.images} images of {self.data}",
                bars=[bar(entry.name, entry.seconds, entry.ratio) for entry in case.entries],
            )
            for case in self.cases
        ]


class TrainingEntry(Part):
    """One contender's training steps."""

    name: str
    step: Spread
    """Seconds a step."""
    epoch: float
    """Seconds an epoch, extrapolated from the median step."""
    ratio: float
    warm_up: float
    """Seconds of the whole warm-up round."""
    peak_bytes: int | None
    loss: float | None
    """Mean over all steps, of the warm-up round too; None if it diverged."""


class TrainingBench(Bench):
    """Training steps side by side."""

    schema_: Literal["classwise/bench-train/1"] = Field("classwise/bench-train/1", alias="schema")
    recipe: str
    overrides: dict[str, Any]
    steps: int
    batch_size: int
    attack_steps: int | None
    steps_per_epoch: int
    entries: list[TrainingEntry]

    def tables(self) -> list[Table]:
        inner = "no attack" if self.attack_steps is None else f"{self.attack_steps} attack steps"
        return [
            Table(
                title=f"training {self.recipe}",
                about=f"{self.steps} training steps a round, batches of {self.batch_size}, {inner}; {self.how}",
                columns=["", "s a step", "min–max", "× ours", "s an epoch*", "peak memory", "mean loss", "warm-up, s"],
                rows=[
                    [
                        entry.name,
                        seconds(entry.step.median),
                        interval(entry.step),
                        ratio(entry.ratio),
                        seconds(entry.epoch),
                        memory(entry.peak_bytes),
                        "diverged" if entry.loss is None else f"{entry.loss:.4f}",
                        seconds(entry.warm_up),
                    ]
                    for entry in self.entries
                ],
                foot=f"* extrapolated: the median step times {self.steps_per_epoch}; validation is not in it",
            )
        ]

    def groups(self) -> list[Group]:
        return [
            Group(
                title=f"{self.recipe}, one training step of {self.batch_size} images",
                bars=[bar(entry.name, entry.step, entry.ratio) for entry in self.entries],
            )
        ]


class Slope(Part):
    """The exponent of a power law, fitted; None where there is nothing to fit."""

    value: float
    low: float
    high: float


class GrowthEntry(Part):
    """How cost grows with one quantity."""

    quantity: str
    sizes: list[int]
    seconds: list[Spread]
    peak_bytes: list[Spread | None]
    time_slope: Slope | None
    memory_slope: Slope | None


class GrowthBench(Bench):
    """Time and memory as powers of what they depend on."""

    schema_: Literal["classwise/bench-growth/1"] = Field("classwise/bench-growth/1", alias="schema")
    attack: str
    base: dict[str, int]
    """The size of everything that is not varied."""
    entries: list[GrowthEntry]

    def tables(self) -> list[Table]:
        base = ", ".join(f"{name} {size}" for name, size in self.base.items())
        return [
            Table(
                title="growth of cost",
                about=f"{self.attack}; what is not varied: {base}; {self.how}",
                columns=["quantity", "sizes", "seconds", "time ~ size^ [95%]", "peak memory", "memory ~ size^ [95%]"],
                rows=[
                    [
                        entry.quantity,
                        ", ".join(map(str, entry.sizes)),
                        ", ".join(seconds(found.median) for found in entry.seconds),
                        _slope(entry.time_slope),
                        ", ".join(memory(None if found is None else found.median) for found in entry.peak_bytes),
                        _slope(entry.memory_slope),
                    ]
                    for entry in self.entries
                ],
            )
        ]

    def groups(self) -> list[Group]:
        return [
            Group(
                title=f"{entry.quantity}: time grows as size^{_slope(entry.time_slope)}",
                bars=[bar(f"{size}", found) for size, found in zip(entry.sizes, entry.seconds, strict=True)],
            )
            for entry in self.entries
        ]


def bar(name: str, found: Spread, times: float | None = None) -> Bar:
    """A measurement as a bar, with its ratio to ours where there is one."""
    return Bar(
        name=name,
        value=found.median,
        low=found.low,
        high=found.high,
        text=f"{seconds(found.median)} s",
        ratio="" if times is None else f"{ratio(times)} ×",
        ours=name == OURS,
    )


def _slope(slope: Slope | None) -> str:
    return "–" if slope is None else f"{plain(slope.value)} [{plain(slope.low)}, {plain(slope.high)}]"
