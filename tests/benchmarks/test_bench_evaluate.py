"""Benchmark of attacks: equal work, counted passes, and one check for all results."""

# B batch, K classes, N images

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import classwise as cw
from benchmarks import peers
from benchmarks.evaluate import Arena, Judged, bench_evaluation, entries_of
from benchmarks.measure import Clock, compete
from benchmarks.result import Bench
from classwise.attacks import PGD
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.data import ImageSet
from classwise.evaluation.perturbations import read_perturbations

N, CLASSES, SIDE, EPS = 12, 10, 6, 0.02
CHECKS = {"art": 2}
"""Forward passes per image that a library adds: ART logs its success."""


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    head = nn.Linear(8 * SIDE * SIDE, CLASSES)
    head.weight.data *= 4  # sensitive enough to be broken
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), head).eval()


class Wordy(nn.Module):
    """Returns a dictionary, which only our library supports."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.layers(x)}


def images_for(model: nn.Module, n: int = N) -> ImageSet:
    """Images with the labels that the model predicts; the last two are wrong."""
    x = torch.rand(n, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(x)
    labels = (output["logits"] if isinstance(output, dict) else output).argmax(1).numpy()
    labels[-2:] = (labels[-2:] + 1) % CLASSES
    return ImageSet(name="noise", split="test", images=x.numpy(), labels=labels, classes=tuple("abcdefghij"))


def read(bench: Bench) -> Any:
    """The content of ``bench.json`` with attributes for keys."""
    return json.loads(json.dumps(bench.content), object_hook=lambda found: SimpleNamespace(**found))


def run(model: nn.Module, spec: str, **settings: Any) -> Any:
    settings = {"eps": EPS, "rounds": 1, "peers": True, "batch_size": 5} | settings
    suite = read_perturbations([spec], settings.pop("eps"))
    return read(bench_evaluation(model, images_for(model), suite, name="net", **settings))


@pytest.mark.parametrize("make", [network, Wordy], ids=["Sequential", "answers in a dictionary"])
@pytest.mark.parametrize("start", ["zero", "uniform"])
def test_every_library_makes_the_same_passes(make: Callable[[], nn.Module], start: str) -> None:
    steps = 4
    found = run(make(), f"pgd:steps={steps},step_size=0.006,start={start}")
    installed = [name for name in peers.PEERS["pgd"] if find_spec(name)]
    entries = found.cases[0].entries
    assert [entry.name for entry in entries] == ["classwise", *installed]
    for entry in entries:
        assert entry.forwards == N * (steps + CHECKS.get(entry.name, 0)), entry.name
        assert entry.backwards == N * steps, entry.name
        assert entry.rejected == 0


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_every_library_reaches_the_accuracy_of_pgd_by_hand(norm: str) -> None:
    model = network()
    eps, step_size = (EPS, 0.006) if norm == "Linf" else (0.1, 0.03)
    found = run(model, f"pgd:steps=6,step_size={step_size},start=zero,norm={norm}", eps=eps)
    data = images_for(model)
    x, y = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    x_adv = x.clone()
    for _ in range(6):
        x_adv.requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(x_adv), y, reduction="sum"), x_adv)
        norms = gradient.flatten(1).norm(dim=1)[:, None, None, None]
        x_adv = x_adv.detach() + step_size * (gradient.sign() if norm == "Linf" else gradient / norms)
        delta = x_adv - x
        length = delta.flatten(1).norm(dim=1)[:, None, None, None]
        delta = delta.clamp(-eps, eps) if norm == "Linf" else delta * (eps / length).clamp_max(1)
        x_adv = (x + delta).clamp(0, 1)
    survivors = (model(x).argmax(1) == y) & (model(x_adv).argmax(1) == y)
    expected = 100 * survivors.double().mean().item()
    assert 0 < expected < found.natural.value == pytest.approx(100 * (N - 2) / N, abs=1e-3)
    for entry in found.cases[0].entries:
        assert entry.robust.value == pytest.approx(expected, abs=1e-3), entry.name


def arena_of(model: nn.Module, **settings: Any) -> Arena:
    data = images_for(model)
    given: dict[str, Any] = {
        "images": data,
        "index": torch.arange(N),
        "x": torch.from_numpy(data.images),
        "y": torch.from_numpy(data.labels),
        "threat": Threat.parse(EPS),
        "batch_size": 5,
    }
    return Arena(model=model, **(given | settings))


class HandClock:
    """A clock that is advanced by the measured work."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def contest(
    arena: Arena, runs: Mapping[str, Callable[[], Tensor]], rounds: int = 2, clock: Clock | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Entries of contenders by name, and the notes; all but classwise may fail."""
    others = set(runs) - {"classwise"}
    found, notes = compete(
        runs, rounds, device=arena.x.device, check=arena.judge, optional=others, clock=clock or count().__next__
    )
    return {entry["name"]: SimpleNamespace(**entry) for entry in entries_of(found, N)}, notes


def planted(arena: Arena, answers: Mapping[str, Callable[[], Tensor]]) -> tuple[dict[str, Any], list[str]]:
    """Entries of our PGD and of contenders that return fixed images."""
    run, _ = arena.ours(PGD(eps=EPS, steps=3, start="zero"))
    return contest(arena, {"classwise": run, **answers})


def test_results_outside_the_ball_are_rejected_by_the_benchmark() -> None:
    model = network()
    arena = arena_of(model)
    x, y = arena.x, arena.y
    far = PGD(eps=0.9, steps=10)(model, x, y)
    halves = torch.where(torch.arange(N)[:, None, None, None] % 2 == 0, far, x)
    found, _ = planted(
        arena,
        {
            "far": lambda: far,
            "half": lambda: halves,
            "nan": lambda: torch.full_like(x, torch.nan),
            "unchanged": lambda: x,
            "out of the box": lambda: x - EPS - 0.05,
        },
    )
    assert (model(far).argmax(1) == y).sum() == 0  # a break without the check
    natural = 100 * (N - 2) / N
    for name, rejected in {"far": N, "half": N // 2, "nan": N, "unchanged": 0, "out of the box": N}.items():
        assert found[name].robust["value"] == pytest.approx(natural, abs=1e-3), name
        assert found[name].rejected == rejected, name
    assert found["classwise"].robust["value"] < natural


def test_misclassified_images_are_never_robust() -> None:
    model = network()
    arena = arena_of(model, threat=Threat.parse(1.0))
    by_class = {int(label): image for image, label in zip(arena.x, model(arena.x).argmax(1), strict=True)}
    assert set(arena.y.tolist()) <= set(by_class)
    kind = torch.stack([by_class[label] for label in arena.y.tolist()])
    assert (model(kind).argmax(1) == arena.y).all()
    assert arena.judge(kind) == Judged(robust=N - 2, rejected=0)


def test_a_failing_library_is_left_out_in_one_line() -> None:
    def fail() -> Tensor:
        raise RuntimeError("first line\nsecond line")

    model = network()
    arena = arena_of(model)
    found, notes = planted(arena, {"falls": fail, "small": lambda: arena.x[:3], "stands": lambda: arena.x})
    assert set(found) == {"classwise", "stands"}
    assert notes == [
        "falls is left out: RuntimeError: first line second line",
        "small is left out: InputError: returned (3, 1, 6, 6); expected images of shape (12, 1, 6, 6)",
    ]


def test_medians_and_ratios_by_an_injected_clock() -> None:
    clock = HandClock()
    arena = arena_of(network())

    def contender(*durations: float) -> Callable[[], Tensor]:
        left = iter(durations)

        def attack() -> Tensor:
            clock.now += next(left)
            return arena.x

        return attack

    found, _ = contest(arena, {"a": contender(50, 2, 4, 3), "b": contender(9, 6, 6.6, 7)}, 3, clock)
    a, b = found["a"], found["b"]
    assert (a.warm_up, a.seconds["median"], a.seconds["low"], a.seconds["high"], a.ratio) == (50, 3, 2, 4, 1)
    assert b.seconds["values"] == pytest.approx([6, 6.6, 7])
    assert (b.warm_up, b.ratio) == (9, pytest.approx(2.2))


def test_an_attack_of_several_parts_is_a_whole_evaluation() -> None:
    model = network()
    for spec in ("autoattack:attacks=apgd-ce+square,steps=3,queries=4", "temperature-pgd:steps=2,inv_t=1+5"):
        entry = run(model, spec, peers=False).cases[0].entries[0]
        report = cw.evaluate(model, images_for(model), attacks=[spec], eps=EPS, batch_size=5)
        (info,) = report.attacks.values()
        assert entry.robust.value == report[spec.partition(":")[0]].overall.value, spec
        assert (entry.forwards, entry.backwards) == (info.forwards, info.backwards), spec


@pytest.mark.skipif(not find_spec("pyautoattack"), reason="pyautoattack is not installed")
def test_ensemble_uses_our_budget() -> None:
    steps = 6
    spec = f"autoattack:attacks=apgd-ce,steps={steps}"
    entries = {entry.name: entry for entry in run(network(), spec).cases[0].entries}
    theirs = entries["pyautoattack"]
    assert N - 2 <= theirs.backwards <= N * (steps + 1)
    assert theirs.robust.value == pytest.approx(entries["classwise"].robust.value, abs=100 / N + 1e-3)


def test_a_peer_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    found = run(network(), "pgd:steps=2,start=zero")
    assert found.notes == [f"{name} is left out: not installed" for name in ("torchattacks", "foolbox", "art")]
    assert [entry.name for entry in found.cases[0].entries] == ["classwise"]


def test_unsupported_settings_leave_a_library_out() -> None:
    for spec, note in (
        ("pgd:steps=2,loss=margin", "its PGD supports only"),
        ("pgd:steps=2,restarts=2", "its PGD supports only"),
        ("pgd:steps=2,start=gaussian", "its PGD supports only"),
        ("fgsm", "no peer is known for FGSM"),
    ):
        found = run(network(), spec)
        assert [entry.name for entry in found.cases[0].entries] == ["classwise"], spec
        assert [note in line for line in found.notes] == [True] * len(found.notes), spec
        assert found.notes, spec


def test_the_model_keeps_its_state_and_has_no_gradients() -> None:
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run(model, "pgd:steps=2,start=zero")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not model._forward_pre_hooks


def test_images_are_evenly_spaced() -> None:
    model = network()
    suite = read_perturbations(["fgsm"], EPS)
    few = partial(bench_evaluation, model, images_for(model, 40), suite, name="net", rounds=1)
    assert read(few(count=4)).images == 4
    assert read(few(count=1000)).images == 40
    assert read(few(count=4)).natural.value == 75.0  # of four, the last is one of the two wrong ones


def test_bad_settings() -> None:
    for settings, message in (
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"count": 0}, "images must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ):
        with pytest.raises(InputError, match=message):
            run(network(), "fgsm", **settings)


def test_corruptions_are_refused() -> None:
    model = network()
    suite = read_perturbations(["corruptions"], EPS)
    with pytest.raises(InputError, match="a benchmark measures one or several attacks"):
        bench_evaluation(model, images_for(model), suite, name="net")


def test_random_starts_are_the_same_in_every_round() -> None:
    """Counts and accuracy of the warm-up round hold for the timed rounds."""
    arena = arena_of(network())
    ours, _ = arena.ours(PGD(eps=EPS, steps=2, step_size=0.002))
    assert torch.equal(ours(), ours())
    assert not torch.equal(ours(), arena.x)
