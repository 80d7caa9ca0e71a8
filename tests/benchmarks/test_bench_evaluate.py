"""Attacks side by side: the same work for everybody, counted, and judged by one check."""

# B batch, K classes, N images

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classwise as cw
from benchmarks import peers
from benchmarks.evaluate import Arena, Contender, Judged, bench_evaluation, compete
from benchmarks.result import EvaluationBench
from classwise.attacks import PGD
from classwise.core.errors import InputError
from classwise.core.progress import SILENT
from classwise.core.threat import Threat
from classwise.data import ImageSet
from classwise.evaluation.suite import read_suite
from classwise.evaluation.work import predict

N, CLASSES, SIDE, EPS = 12, 10, 6, 0.02
CHECKS = {"art": 2}
"""Forward passes an image that a library makes on its own account: ART reports its success to its log."""


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    head = nn.Linear(8 * SIDE * SIDE, CLASSES)
    head.weight.data *= 4  # sensitive enough to be broken
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), head).eval()


class Wordy(nn.Module):
    """Answers with a dictionary, which no library but ours understands."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.layers(x)}


def images_for(model: nn.Module, n: int = N) -> ImageSet:
    """Images with the labels that the model gives them, but for the last two."""
    x = torch.rand(n, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    labels = predict(model, x)
    labels[-2:] = (labels[-2:] + 1) % CLASSES
    return ImageSet(name="noise", split="test", images=x.numpy(), labels=labels, classes=tuple("abcdefghij"))


def run(model: nn.Module, spec: str, **settings: Any) -> EvaluationBench:
    settings = {"eps": EPS, "rounds": 1, "peers": True, "batch_size": 5} | settings
    suite = read_suite([spec], settings.pop("eps"))
    return bench_evaluation(model, images_for(model), suite, name="net", **settings)


@pytest.mark.parametrize("make", [network, Wordy], ids=["Sequential", "answers in a dictionary"])
@pytest.mark.parametrize("start", ["zero", "uniform"])
def test_passes_of_pgd_are_the_closed_form_for_everybody(make: Callable[[], nn.Module], start: str) -> None:
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
def test_from_the_image_itself_everybody_reaches_what_pgd_by_hand_reaches(norm: str) -> None:
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


def arena_of(model: nn.Module, clock: Callable[[], float] = lambda: 0.0, **settings: Any) -> Arena:
    data = images_for(model)
    given: dict[str, Any] = {
        "images": data,
        "index": torch.arange(N),
        "x": torch.from_numpy(data.images),
        "y": torch.from_numpy(data.labels),
        "threat": Threat.parse(EPS),
        "num_classes": CLASSES,
        "batch_size": 5,
        "seed": 0,
    }
    return Arena(model=model, clock=clock, **(given | settings))


class Ticking:
    """A clock that runs on by one second at every look: each run takes a second."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def planted(arena: Arena, answers: Mapping[str, Callable[[], Tensor]]) -> dict[str, Any]:
    """What a competition of planted peers says of each, ours first."""
    ours = arena.ours(PGD(eps=EPS, steps=3, start="zero"))
    others = [Contender(name=name, version=None, modules=(), run=answer) for name, answer in answers.items()]
    notes: list[str] = []
    entries = compete(arena, [ours, *others], 2, "bench", SILENT, notes)
    return {entry.name: entry for entry in entries} | {"notes": notes}


def test_points_outside_the_ball_get_no_credit() -> None:
    model = network()
    arena = arena_of(model, Ticking())
    x, y = arena.x, arena.y
    far = PGD(eps=0.9, steps=10)(model, x, y)
    halves = torch.where(torch.arange(N)[:, None, None, None] % 2 == 0, far, x)
    found = planted(
        arena,
        {
            "far": lambda: far,
            "half": lambda: halves,
            "nan": lambda: torch.full_like(x, torch.nan),
            "untouched": lambda: x,
            "out of the box": lambda: x - EPS - 0.05,
        },
    )
    assert (model(far).argmax(1) == y).sum() == 0  # it would have been a triumph
    natural = 100 * (N - 2) / N
    for name, rejected in {"far": N, "half": N // 2, "nan": N, "untouched": 0, "out of the box": N}.items():
        assert found[name].robust.value == pytest.approx(natural, abs=1e-3), name
        assert found[name].rejected == rejected, name
    assert found["classwise"].robust.value < natural


def test_putting_right_what_is_wrong_untouched_is_no_robustness() -> None:
    model = network()
    arena = arena_of(model, Ticking(), threat=Threat.parse(1.0))
    by_class = {int(label): image for image, label in zip(arena.x, model(arena.x).argmax(1), strict=True)}
    assert set(arena.y.tolist()) <= set(by_class)
    kind = torch.stack([by_class[label] for label in arena.y.tolist()])
    assert (model(kind).argmax(1) == arena.y).all()
    assert arena.judge(kind) == Judged(robust=N - 2, rejected=0)


def test_who_fails_is_left_out_in_one_line_and_the_others_go_on() -> None:
    def fail() -> Tensor:
        raise RuntimeError("first line\nsecond line")

    model = network()
    arena = arena_of(model, Ticking())
    found = planted(arena, {"falls": fail, "small": lambda: arena.x[:3], "stands": lambda: arena.x})
    assert set(found) == {"classwise", "stands", "notes"}
    assert found["notes"] == [
        "falls is left out: RuntimeError: first line second line",
        "small is left out: InputError: returned (3, 1, 6, 6); expected images of shape (12, 1, 6, 6)",
    ]


def test_medians_and_ratios_by_an_injected_clock() -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    arena = arena_of(network(), clock)

    def contender(name: str, *durations: float) -> Contender:
        left = iter(durations)

        def attack() -> Tensor:
            clock.now += next(left)
            return arena.x

        return Contender(name=name, version="1", modules=(), run=attack)

    rivals = [contender("a", 50, 2, 4, 3), contender("b", 9, 6, 6.6, 7)]
    a, b = compete(arena, rivals, 3, "bench", SILENT, [])
    assert (a.warm_up, a.seconds.median, a.seconds.low, a.seconds.high, a.ratio) == (50, 3, 2, 4, 1)
    assert b.seconds.values == pytest.approx([6, 6.6, 7])
    assert (b.warm_up, b.ratio) == (9, pytest.approx(2.2))


@pytest.mark.parametrize(
    "spec",
    ["autoattack:attacks=apgd-ce+square,steps=3,queries=4", "temperature-pgd:steps=2,inv_t=1+5"],
    ids=["stages", "variants"],
)
def test_an_attack_of_several_parts_runs_as_in_an_evaluation(spec: str) -> None:
    model = network()
    entry = run(model, spec, peers=False).cases[0].entries[0]
    report = cw.evaluate(model, images_for(model), attacks=[spec], eps=EPS, batch_size=5)
    (info,) = report.attacks.values()
    assert entry.robust.value == report[spec.partition(":")[0]].overall.value
    assert entry.backwards == info.backwards
    # The check of what each part left is a pass of its own, and so is the look at the untouched images.
    checks = sum(stage.attacked for stage in info.stages) or 2 * info.attacked
    assert entry.forwards == info.forwards + N + checks


@pytest.mark.skipif(not find_spec("pyautoattack"), reason="pyautoattack is not installed")
def test_the_ensemble_is_given_our_budget() -> None:
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


@pytest.mark.parametrize(
    ("spec", "note"),
    [
        ("pgd:steps=2,loss=margin", "its PGD is untargeted"),
        ("pgd:steps=2,restarts=2", "its PGD is untargeted"),
        ("pgd:steps=2,start=gaussian", "its PGD is untargeted"),
        ("fgsm", "no peer is known for FGSM"),
    ],
)
def test_another_attack_is_not_passed_off_as_the_same(spec: str, note: str) -> None:
    found = run(network(), spec)
    assert [entry.name for entry in found.cases[0].entries] == ["classwise"]
    assert found.notes
    assert all(note in line for line in found.notes)


def test_the_model_is_given_back_without_gradients_or_changed_statistics() -> None:
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run(model, "pgd:steps=2,start=zero")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not model._forward_pre_hooks


def test_images_are_taken_evenly() -> None:
    model = network()
    suite = read_suite(["fgsm"], EPS)
    few = partial(bench_evaluation, model, images_for(model, 40), suite, name="net", rounds=1)
    assert few(count=4).images == 4
    assert few(count=1000).images == 40
    assert few(count=4).natural.value == 75.0  # the last two of forty are wrong, and the last of four is one of them


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"count": 0}, "images must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(network(), "fgsm", **settings)


def test_corruptions_are_no_attacks() -> None:
    model = network()
    suite = read_suite(["corruptions"], EPS)
    with pytest.raises(InputError, match="a bench measures attacks"):
        bench_evaluation(model, images_for(model), suite, name="net")


def test_random_starts_are_the_same_in_every_round() -> None:
    """So what the warm-up round counted and judged holds for the rounds that were timed."""
    arena = arena_of(network())
    ours = arena.ours(PGD(eps=EPS, steps=2, step_size=0.002))
    assert torch.equal(ours.run(), ours.run())
    assert not np.array_equal(ours.run(), arena.x)
