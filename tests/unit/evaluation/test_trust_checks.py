"""Trust checks: probes, and findings for models with masked gradients and for models without."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.nn import functional as F

import classwise as cw
from classwise.core.model_calls import dtype_of
from classwise.core.threat import Threat
from classwise.data import load_data, ordered, to_float
from classwise.evaluation.trust.findings import LEVEL, derive_findings
from classwise.evaluation.trust.probes import LARGEST_SAMPLE, SAMPLE, SHOWN, STEPS, choose, examine
from classwise.models.load import load_model
from classwise.models.normalize import NORMALIZATIONS
from classwise.reporting.sanity import Finding, Probes, Sanity
from classwise.storage.verdicts import Verdicts

DIGITS = [f"digit {k}" for k in range(10)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    """Models without masked gradients, after standard and after adversarial training."""
    root = tmp_path_factory.mktemp("runs")
    cw.train("digits/standard", out=root / "standard", epochs=6)
    cw.train("digits/madry", out=root / "madry", epochs=12, attack={"steps": 3})
    return {name: load_model(str(root / name)) for name in ("standard", "madry")}


def pixels() -> tuple[Tensor, Tensor]:
    data = load_data("digits", split="test")
    return to_float(data.images), torch.from_numpy(data.labels)


def probe(model: nn.Module, eps: str = "0.2", norm: str = "Linf", **options: object) -> Probes:
    """Run the probes as an evaluation does."""
    torch.manual_seed(0)  # for randomized models
    x, y = pixels()
    with torch.no_grad():
        right = (model(x.to(dtype_of(model))).argmax(1) == y).numpy()
    rows = choose(y.numpy(), right)
    given = {"index": torch.arange(len(x))[rows], "threat": Threat.parse(eps, norm), "natural": (x[:200], y[:200])}
    return examine(model, x[rows], y[rows], **(given | options))  # type: ignore[arg-type]


def findings(probes: Probes, eps: str = "0.2") -> dict[str, Finding]:
    label = np.arange(10)
    survivors = Verdicts(index=label, label=label, natural=label, attacks={"pgd": label})
    found = derive_findings(survivors, Threat.parse(eps), rejected={}, classes=DIGITS, probes=probes).findings
    assert len({finding.code for finding in found}) == len(found)
    return {finding.code: finding for finding in found}


class Around(nn.Module):
    """A model with a transformation before and after it."""

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[Tensor], Tensor] = lambda x: x,
        after: Callable[[Tensor], Tensor] = lambda z: z,
    ) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.model(self.before(x)))


# Honest models


@pytest.mark.parametrize(("eps", "norm"), [("0.1", "Linf"), ("0.2", "Linf"), ("0.6", "L2")])
@pytest.mark.parametrize("name", ["standard", "madry"])
def test_no_warnings_for_models_without_masking(models: dict[str, nn.Module], name: str, eps: str, norm: str) -> None:
    probes = probe(models[name], eps, norm)
    assert findings(probes).keys() <= {"smooth-output"}  # a suggestion about the attack, not a defect of the model
    losses = [part.log_odds for part in probes.steps]
    assert losses == sorted(losses)
    assert probes.radii[-1].broken == probes.n >= 38
    assert [part.label for part in probes.by_class] == list(range(10))


def test_double_precision_gives_the_same_probes(models: dict[str, nn.Module]) -> None:
    exact, usual = probe(deepcopy(models["madry"]).double()), probe(models["madry"])
    assert exact.by_class == usual.by_class
    assert exact.rounding < 1e-9 < usual.rounding
    assert findings(exact) == findings(usual)


@pytest.mark.parametrize("name", ["trades", "wat"])
def test_no_findings_for_cifar_models(name: str, real_data: Path, real_checkpoints: Path) -> None:
    model = load_model("resnet18", weights=real_checkpoints / f"cifar10_resnet18_{name}.safetensors")
    data = load_data("cifar10", split="test")
    x, y, index = next(ordered(data, np.arange(60), 60))
    with torch.no_grad():
        right = (model(x).argmax(1) == y).numpy()
    rows = choose(y.numpy(), right)[::3]
    sample = {"index": index[rows], "threat": Threat.parse("8/255"), "natural": (x, y), "queries": 20}
    probes = examine(model, x[rows], y[rows], **sample)
    assert findings(probes) == {}
    assert probes.radii[-1].broken == probes.n
    assert probes.normalization is not None
    assert probes.normalization.n == 60


# Planted ones


class Sine(nn.Module):
    """Shattered gradients: an invisible ripple whose slope is forty times that of the model."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.02 * torch.sin(2000 * x)


def padded(x: Tensor) -> Tensor:
    """Random resizing and padding."""
    top, left = torch.randint(0, 2, (2,)).tolist()
    return F.pad(F.interpolate(x, size=(7, 7), mode="bilinear"), (left, 1 - left, top, 1 - top))


def standardised(x: Tensor) -> Tensor:
    """Normalizes each image separately, which is undefined for images of one color."""
    return 0.4 + 0.3 * (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)


PLANTED: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, str]]] = {
    "rounded input": (
        lambda model: Around(model, before=lambda x: (8 * x).round() / 8),
        {"zero-gradient": "warning", "unreached": "warning", "black-box-wins": "warning", "unmoved": "info"},
    ),
    "large logits": (lambda model: Around(model, after=lambda z: 1e4 * z), {"saturated": "warning"}),
    "steep output": (
        lambda model: Around(model, after=lambda z: torch.tanh(200 * (z - z.mean(1, True))) + 1e-3 * z.detach()),
        {"zero-gradient": "warning", "unreached": "warning", "black-box-wins": "warning"},
    ),
    "random padding": (lambda model: Around(model, before=padded), {"random-answers": "error"}),
    "shattered": (
        lambda model: Around(model, before=Sine()),
        {"misleading-gradient": "warning", "loss-does-not-rise": "warning", "black-box-wins": "warning"},
    ),
    "turned gradient": (
        lambda model: Around(model, before=lambda x: 2 * x.detach() - x),
        {"misleading-gradient": "warning", "loss-does-not-rise": "warning", "unreached": "warning"},
    ),
    "NaN gradient": (
        lambda model: Around(model, before=lambda x: x + 0 * (x - x.detach()).abs().sqrt()),
        {"zero-gradient": "warning", "unreached": "warning"},
    ),
    "batch statistics": (
        lambda model: Around(model, before=lambda x: 0.3 + 0.3 * F.batch_norm(x, None, None, training=True)),
        {"batch-dependent": "warning"},
    ),
    "probabilities": (lambda model: Around(model, after=lambda z: z.softmax(1)), {"probabilities": "warning"}),
    "bytes expected": (lambda model: Around(model, before=lambda x: x / 255), {"missing-normalization": "warning"}),
    "image standardised": (
        lambda model: Around(model, before=standardised),
        {"not-finite-beyond": "info"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_defects_are_found(models: dict[str, nn.Module], name: str) -> None:
    plant, expected = PLANTED[name]
    found = {code: finding.severity for code, finding in findings(probe(plant(models["standard"]))).items()}
    assert expected.items() <= found.items()
    if "warning" not in expected.values() and "error" not in expected.values():
        assert found == expected


def test_log_probabilities_and_straight_through_rounding(models: dict[str, nn.Module]) -> None:
    """Log-probabilities are equivalent to logits; straight-through rounding is found, because its gradient is not
    the model's.
    """
    model = models["standard"]
    assert findings(probe(Around(model, after=lambda z: z.log_softmax(1)))) == {}
    through = Around(model, before=lambda x: x + ((16 * x).round() / 16 - x).detach())
    assert {code: found.severity for code, found in findings(probe(through)).items()} == {"unmoved": "info"}


@pytest.mark.parametrize("how", ["no gradient", "shattered"])
def test_findings_name_the_masked_classes(models: dict[str, nn.Module], how: str) -> None:
    class Masked(nn.Module):
        """Has zero gradients where it predicts class 3 or 5."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.ripple = model, Sine()

        def forward(self, x: Tensor) -> Tensor:
            logits = self.model(x)
            hidden = logits.detach() if how == "no gradient" else self.model(self.ripple(x))
            return torch.where(torch.isin(logits.argmax(1), torch.tensor([3, 5]))[:, None], hidden, logits)

    found = findings(probe(Masked(models["standard"])))
    code = {"no gradient": "zero-gradient", "shattered": "misleading-gradient"}[how]
    assert found[code].severity == "warning"
    assert "8 of 40 natural images (digit 3: 4 of 4, digit 5: 4 of 4)" in found[code].text
    assert {tuple(finding.labels) for finding in found.values()} == {(3, 5)}


def test_randomness_without_label_changes_is_a_warning(models: dict[str, nn.Module]) -> None:
    noisy = Around(models["standard"], after=lambda z: z + 0.01 * torch.rand_like(z))
    found = findings(probe(noisy))["random-answers"]
    assert found.severity == "warning"
    assert "0 of 40 labels change" in found.text


def test_logits_that_are_not_finite(models: dict[str, nn.Module]) -> None:
    """Within the ball this is a warning."""

    def poisoned(z: Tensor) -> Tensor:
        return z.masked_fill(z.argmax(1, keepdim=True) == 3, torch.nan)

    model = Around(models["standard"], after=poisoned)
    x, y = pixels()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).numpy() & (y != 3).numpy()
    rows = choose(y.numpy(), right)
    probes = examine(model, x[rows], y[rows], index=torch.as_tensor(rows), threat=Threat.parse("0.3"))
    assert probes.output.not_finite > 0
    assert findings(probes)["not-finite"].severity == "warning"
    assert Probes.model_validate_json(probes.model_dump_json()) == probes


@pytest.mark.parametrize("undone", [False, True])
def test_missing_or_double_normalization_is_named(undone: bool) -> None:
    """A model that works at one scale of the images only: the label is their brightness, in steps of a tenth."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in NORMALIZATIONS["cifar10"])

    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            read = (x - mean) / std if undone else x * std + mean
            return -(read.mean((1, 2, 3))[:, None] - torch.arange(10) / 10 - 0.05).abs()

    y = torch.arange(60) % 10
    x = (y / 10 + 0.05)[:, None, None, None].expand(-1, 3, 4, 4).clone()
    right = Reader()(x).argmax(1) == y
    sample = {"index": torch.arange(60)[right], "threat": Threat.parse("8/255"), "queries": 0}
    probes = examine(Reader(), x[right], y[right], natural=(x, y), **sample)
    assert probes.normalization is not None
    assert (probes.normalization.best, probes.normalization.undone) == ("the normalization of cifar10", undone)
    assert probes.normalization.best_correct == probes.normalization.n == 60
    assert probes.black_box is None
    code = "double-normalization" if undone else "missing-normalization"
    what = f"the normalization of cifar10{' undone' if undone else ''}"
    better = f"the model classifies 60 instead of {int(right.sum())} of 60 images correctly (p < 0.001)"
    assert findings(probes)[code].text.startswith(f"With {what} {better}")


# The measurements against what is known


class Linear(nn.Module):
    """Two classes, separated by w · x + b."""

    def __init__(self, weight: Tensor, bias: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), bias

    def forward(self, x: Tensor) -> Tensor:
        score = x.flatten(1) @ self.weight + self.bias
        return torch.stack([score, -score], 1)


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_probes_of_a_linear_model_are_exact(norm: str) -> None:
    """An image is broken within a radius exactly if its score is below radius · dual norm of w, away from the box."""
    random = torch.Generator().manual_seed(0)
    model = Linear(torch.randn(16, generator=random, dtype=torch.float64), 0.0).requires_grad_(False)
    x = 0.45 + 0.1 * torch.rand(40, 1, 4, 4, generator=random, dtype=torch.float64)
    with torch.no_grad():
        model.bias = -float((x.flatten(1) @ model.weight).median())
        scores = model(x)[:, 0]
    y = (scores < 0).long()
    eps = 0.003 if norm == "Linf" else 0.01
    dual = model.weight.abs().sum() if norm == "Linf" else model.weight.norm()
    probes = examine(model, x, y, index=torch.arange(40), threat=Threat.parse(eps, norm), queries=0)
    radii = [part.eps for part in probes.radii]
    whole = 1.0 if norm == "Linf" else 4.0
    assert radii == pytest.approx([*(eps * 4**k for k in range(8) if eps * 4**k < whole), whole])
    within = [int((scores.abs() < radius * dual).sum()) for radius in radii[:2]]
    assert [part.broken for part in probes.radii[:2]] == within
    assert 0 < within[0] < within[1]
    assert probes.radii[-1].broken == 40
    if norm == "Linf":  # ten steps of a quarter of the radius end in the corner, where the margin has grown most
        grown = probes.steps[-1].margin - float((-2 * scores.abs()).mean())
        assert grown == pytest.approx(2 * eps * float(dual), rel=1e-5)
    by_class = {part.label: part for part in probes.by_class}
    assert [by_class[k].n for k in (0, 1)] == [int((y == k).sum()) for k in (0, 1)]
    survived = scores.abs() >= eps * dual
    assert [by_class[k].survived for k in (0, 1)] == [int((survived & (y == k)).sum()) for k in (0, 1)]
    assert findings(probes) == {}
    # 1 gradient and 7 forward passes for all; climbs for all, twice for what survives, and at every further radius.
    left = [40, 40 - within[0], 40 - within[0], *(40 - part.broken for part in probes.radii[:-1])]
    assert probes.backwards == 40 + STEPS * sum(left)
    assert probes.forwards == 8 * 40 + (STEPS + 1) * sum(left)


def test_batch_size_does_not_change_probes(models: dict[str, nn.Module]) -> None:
    whole, parts = probe(models["madry"]), probe(models["madry"], batch_size=7)
    rounded = {"steps", "company", "tremor", "output", "repeated"}
    ahead = {"forwards"}  # a smaller batch leaves room for queries ahead of time, some of them in vain
    assert parts.model_dump(exclude=rounded | ahead) == whole.model_dump(exclude=rounded | ahead)
    for one, other in zip(whole.steps, parts.steps, strict=True):
        assert one.log_odds == pytest.approx(other.log_odds, rel=1e-4)
    assert [part.step for part in whole.steps] == list(SHOWN)


def test_probes_of_a_single_image(models: dict[str, nn.Module]) -> None:
    x, y = pixels()
    probes = examine(models["standard"], x[:1], y[:1], index=torch.tensor([0]), threat=Threat.parse("0.1"))
    assert (probes.n, probes.company.n, probes.company.difference) == (1, 0, None)
    assert findings(probes) == {}


def test_probes_do_not_change_the_model(models: dict[str, nn.Module]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.3), models["standard"]).train()
    model(pixels()[0][:20])  # other statistics than the initial ones
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    x, y = pixels()
    with torch.inference_mode():
        probes = examine(model, x[:20], y[:20], index=torch.arange(20), threat=Threat.parse("0.1"))
    assert probes.repeated.difference == 0
    assert all(module.training for module in model)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


@given(labels=st.lists(st.integers(0, 150), min_size=1, max_size=600), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_probe_sample_is_balanced(labels: list[int], seed: int) -> None:
    label = np.array(labels)
    allowed = np.random.default_rng(seed).random(len(label)) < 0.7
    rows = choose(label, allowed)
    assert allowed[rows].all()
    assert len(np.unique(rows)) == len(rows) <= LARGEST_SAMPLE
    present = np.unique(label[allowed])
    if len(present) <= LARGEST_SAMPLE:
        each = max(SAMPLE, len(present)) // max(len(present), 1)
        expected = [min(each, int((allowed & (label == k)).sum())) for k in present]
        assert [int((label[rows] == k).sum()) for k in present] == expected
    else:
        assert len(np.unique(label[rows])) == LARGEST_SAMPLE


# The rules


def honest(**changes: object) -> Probes:
    """Probes without findings, of ten classes with ten images each, with the given changes."""
    x, y = torch.rand(100, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 2
    model = Linear(torch.tensor([1.0, 2.0, -1.0, 0.5]), 0.0)
    probes = examine(model, x, y, index=torch.arange(100), threat=Threat.parse("0.1"), queries=0)
    part = probes.by_class[0].model_copy(
        update={"n": 10, "zero_gradient": 0, "misled": 0, "slack": 0, "one_step": 0, "unreached": 0, "black_box": 0}
    )
    by_class = [part.model_copy(update={"label": label}) for label in range(10)]
    return probes.model_copy(update={"by_class": by_class, **changes})


@pytest.mark.parametrize("field", ["misled", "slack", "one_step", "unreached", "black_box"])
def test_rules_follow_the_binomial_test(field: str) -> None:
    """More than the accepted fraction, over all images or in one class of ten."""
    clean = honest()

    def accused(counts: list[int]) -> bool:
        by_class = [part.model_copy(update={field: k}) for part, k in zip(clean.by_class, counts, strict=True)]
        return bool(findings(clean.model_copy(update={"by_class": by_class})))

    def p_value(count: int, n: int) -> float:
        return float(binomtest(count, n, 0.05, alternative="greater").pvalue)

    for total in range(30):
        spread = [total // 10 + (k < total % 10) for k in range(10)]
        assert accused(spread) == (p_value(total, 100) < LEVEL)
    for count in range(7):
        assert accused([count] + [0] * 9) == (p_value(count, 10) < LEVEL / 10)


def test_few_zero_gradients_are_an_info_finding() -> None:
    clean = honest()
    first = clean.by_class[0].model_copy(update={"zero_gradient": 1})
    found = findings(clean.model_copy(update={"by_class": [first, *clean.by_class[1:]]}))["zero-gradient"]
    assert (found.severity, found.labels) == ("info", [0])
    assert "1 of 100 natural images (digit 0: 1 of 10)" in found.text


def table(**survivors: list[int]) -> Verdicts:
    """A hundred images of each of five classes; the first images of each class survive an attack, by the given
    numbers.
    """
    label = np.repeat(np.arange(5), 100)
    rank = np.tile(np.arange(100), 5)

    def column(counts: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.where(rank < np.array(counts)[label], label, (label + 1) % 5)

    attacks = {key: column(counts) for key, counts in survivors.items()}
    return Verdicts(index=np.arange(500), label=label, natural=column([90] * 5), attacks=attacks)


@pytest.mark.parametrize(
    ("pgd", "square", "labels"),
    [
        ([50, 40, 30, 45, 50], [60, 55, 45, 50, 60], None),  # as on robust models
        ([3, 2, 0, 4, 1], [0, 0, 0, 0, 1], None),  # few survive, and any attack breaks them
        ([50, 40, 30, 45, 50], [46, 36, 26, 40, 45], None),  # a little ahead
        ([85, 80, 80, 88, 84], [30, 20, 25, 10, 30], []),  # masked
        ([50, 40, 85, 45, 50], [60, 55, 45, 50, 60], [2]),  # one class masked
    ],
)
def test_leading_black_box_attacks(pgd: list[int], square: list[int], labels: list[int] | None) -> None:
    verdicts = table(pgd=pgd, square=square)
    options = {"rejected": {}, "classes": ["ant", "bee", "cat", "dog", "elk"]}
    threat = Threat.parse("8/255")
    found = derive_findings(verdicts, threat, black_box={"pgd": False, "square": True}, **options).findings
    expected = [] if labels is None else [("black-box-wins", labels)]
    assert [(finding.code, finding.labels) for finding in found] == expected
    if labels:
        told = "Without gradients, square broke 40 of 450 images (cat: 40 of 90) more than pgd did"
        assert found[0].text.startswith(told)
    for black_box in ({"pgd": False, "square": False}, {"square": True}, {}):
        assert not derive_findings(verdicts, threat, black_box=black_box, **options).findings


def test_leading_black_box_stages() -> None:
    """A stage attacks the survivors of previous stages; examples broken earlier do not count for it."""
    verdicts = table(suite=[20] * 5)
    first, second = ([85] * 5, [20] * 5)
    stages = {"suite/apgd": table(one=first).attacks["one"], "suite/square": table(one=second).attacks["one"]}
    verdicts = replace(verdicts, stages=stages)
    black_box = {"suite/apgd": False, "suite/square": True}
    found = derive_findings(verdicts, Threat.parse("8/255"), black_box=black_box, rejected={}).findings
    assert [finding.code for finding in found] == ["black-box-wins"]
    assert "suite/square broke 325 of 450 images more than suite/apgd did" in found[0].text


def test_findings_from_verdicts() -> None:
    verdicts = table(pgd=[0] * 5)
    sanity = derive_findings(verdicts, Threat.parse("0.031"), rejected={"pgd": 7, "cw": 0}, trained_on_images=True)
    assert [(finding.severity, finding.code) for finding in sanity.findings] == [
        ("error", "trained-on-these"),
        ("warning", "rejected"),
        ("info", "rounded-eps"),
        ("info", "nothing-survived"),
    ]
    assert [finding.severity for finding in sanity.at_least("warning")] == ["error", "warning"]
    assert [finding.code for finding in sanity.at_least("error")] == ["trained-on-these"]


def test_probes_round_trip_through_json(models: dict[str, nn.Module]) -> None:
    sanity = Sanity(probes=probe(models["standard"]), findings=[Finding(severity="info", text="well")])
    assert Sanity.model_validate_json(sanity.model_dump_json()) == sanity


class Shield(nn.Module):
    """Correct at the image and after a single step of the full radius, but not in between."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        moved = (x.mean((1, 2, 3)) - 0.5).abs()
        margin = 1 - 3 * (-((moved - self.eps / 2) / (self.eps / 4)).square()).exp() + 0.1 * x[:, 0, 0, 0]
        return torch.stack([margin, torch.zeros_like(margin)], 1)


def test_overfitting_to_single_steps_is_found() -> None:
    """Probes of a model that overfits to FGSM: one step of the full radius proves nothing."""
    x = 0.5 + 0.01 * torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    report = cw.evaluate(Shield(0.2), (x, torch.zeros(60, dtype=torch.int64)), attacks=["fgsm", "pgd"], eps=0.2)
    assert report["fgsm"].overall.value == 100
    assert report["pgd"].overall.value < 20
    codes = [finding.code for finding in report.sanity.findings if finding.severity == "warning"]
    assert "single-step-shield" in codes


def test_low_confidence_is_found(models: dict[str, nn.Module]) -> None:
    """Ten numbers of mean zero and length one: the first is farthest above the others, √(10/9), if these are alike."""
    probes = probe(Around(models["madry"], after=lambda z: F.normalize(z - z.mean(1, True), dim=1)))
    assert probes.output.surest is not None
    assert 0.1 < probes.output.surest <= 1 / (1 + 9 * math.exp(-math.sqrt(10 / 9)))
    finding = findings(probes)["unsure"]
    assert finding.severity == "info"
    assert f"images is {100 * probes.output.surest:.0f}%" in finding.text
    honest = probe(models["madry"])
    assert honest.output.surest is not None
    assert honest.output.surest > 0.8
    assert "unsure" not in findings(honest)


@pytest.mark.parametrize(("sharpness", "smooth"), [(1e-3, True), (100.0, False)])
def test_smooth_outputs_are_found(sharpness: float, smooth: bool) -> None:
    """Four logits of one pixel t, starting at 0.5: 0 for the label, 10 t - 6.99 for one wrong class, -10 t - 9 for two
    others that are never predicted. With a smooth softmax, cross-entropy ascends the sum of the three wrong logits,
    which decreases with t, and fails; the margin ascends the first wrong class, which is predicted from t = 0.699 on.
    With a sharp softmax, both ascend the first wrong class.
    """

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            t = x.flatten(1)[:, :1]
            others = -10 * t - 9
            return sharpness * torch.cat([0 * t, 10 * t - 6.99, others, others], 1)

    x, y = torch.full((40, 1, 1, 1), 0.5), torch.zeros(40, dtype=torch.int64)
    probes = examine(Flat(), x, y, index=torch.arange(40), threat=Threat.parse("0.2"), queries=0)
    assert probes.by_class[0].smooth == (40 if smooth else 0)
    assert ("smooth-output" in findings(probes)) == smooth
    assert probes.by_class[0].survived == 0
