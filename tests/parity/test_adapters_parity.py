"""Attacks of torchattacks, foolbox, ART and AutoAttack through the adapters, against direct calls of the libraries."""

# B batch, K classes

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classwise as cw
from classwise.attacks import FGSM, PGD
from classwise.attacks.adapters import ForeignAttack, as_attack
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from classwise.core.types import AttackCall
from each import for_each

# numpy 2 warns of the way ART reads a tensor in its own code
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

EPS = 0.03
SIZE, CLASSES = 8, 10


class Tally(torch.autograd.Function):
    """The identity; counts gradients per example."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, who: Tensor, counts: Tensor) -> Tensor:
        ctx.who, ctx.counts = who, counts
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.counts.index_add_(0, ctx.who, torch.ones_like(ctx.who))
        return gradient, None, None


class Witness(nn.Module):
    """A first layer that identifies every image by its first pixel, 0.1 apart, and counts passes per example.

    No later layer uses that pixel, so its gradient is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.backwards = torch.zeros(SIZE, dtype=torch.int64), torch.zeros(SIZE, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        who = (10 * x.detach()[:, 0, 0, 0]).round().long() - 1
        self.forwards.index_add_(0, who, torch.ones_like(who))
        mask = torch.ones_like(x[0])
        mask[0, 0, 0] = 0
        return Tally.apply(x, who, self.backwards) * mask


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    conv, head = nn.Conv2d(3, 12, 3, padding=1), nn.Linear(12 * 64, CLASSES)
    head.weight.data *= 8  # sensitive enough to be broken, and to distinguish the images
    return nn.Sequential(Witness(), conv, nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Dropout(), head).eval()


class Plain(nn.Module):
    """The same network as a custom module, because ART splits a Sequential into layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Wordy(Plain):
    """Returns a dictionary, which only our library supports."""

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.layers(x)}


def batch(model: nn.Module, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Images and the model's predictions as labels, so that attacks act on every image."""
    x = 0.1 + 0.8 * torch.rand(SIZE, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    x[:, 0, 0, 0] = 0.1 * torch.arange(1, SIZE + 1)
    with torch.no_grad():
        return x[:size], model(x)[:size].argmax(1)


def noise(size: int = SIZE, seed: int = 0) -> ExampleNoise:
    return ExampleNoise(seed, torch.arange(100, 100 + size))


@dataclass(frozen=True)
class Case:
    """An attack of another library, and its usual call."""

    id: str
    library: str
    make: Callable[[Any, nn.Module], Any]
    by_hand: Callable[[Any, Any, nn.Module, Tensor, Tensor], Any]
    name: str
    norm: str = "Linf"
    stated: str | None = str(EPS)
    bound: bool = True
    passes: tuple[int, int] | None = None
    """Forward and backward passes of every example, where they are known beforehand."""


def torchattack(name: str, passes: tuple[int, int] | None = None, **settings: Any) -> Case:
    settings = {"eps": EPS} | settings
    return Case(
        id=f"torchattacks.{name}",
        library="torchattacks",
        make=lambda library, model: getattr(library, name)(model, **settings),
        by_hand=lambda library, attack, model, x, y: attack(x, y),
        name=f"torchattacks.{name}",
        norm="L2" if name.endswith("L2") else "Linf",
        stated=str(settings["eps"]),
        passes=passes,
    )


def foolbox_attack(name: str, full: str, norm: str, passes: tuple[int, int] | None = None, **settings: Any) -> Case:
    def by_hand(library: Any, attack: Any, model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return attack(library.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=EPS)[1]

    return Case(
        id=f"foolbox.{name}",
        library="foolbox",
        make=lambda library, model: getattr(library.attacks, name)(**settings),
        by_hand=by_hand,
        name=f"foolbox.{full}",
        norm=norm,
        stated=None,
        bound=False,
        passes=passes,
    )


def classifier(model: nn.Module, **settings: Any) -> Any:
    from art.estimators.classification import PyTorchClassifier

    settings = {"clip_values": (0, 1), "device_type": "cpu"} | settings
    return PyTorchClassifier(model, loss=nn.CrossEntropyLoss(), input_shape=(3, 8, 8), nb_classes=CLASSES, **settings)


def art_attack(name: str, norm: str = "Linf", **settings: Any) -> Case:
    def make(library: Any, model: nn.Module) -> Any:
        from art.attacks import evasion

        return getattr(evasion, name)(classifier(model), eps=EPS, norm=2 if norm == "L2" else np.inf, **settings)

    return Case(
        id=f"art.{name} {norm}",
        library="art",
        make=make,
        by_hand=lambda library, attack, model, x, y: attack.generate(x.numpy(), y.numpy()),
        name=f"art.{name}",
        norm=norm,
    )


def auto_attack(library: str) -> Case:
    def make(library: Any, model: nn.Module) -> Any:
        settings = {"norm": "Linf", "eps": EPS, "version": "custom", "seed": 3, "device": "cpu"}
        names = ["apgd-ce", "apgd-t", "fab-t", "square"]
        which = {"attacks": names} if library.__name__ == "pyautoattack" else {"attacks_to_run": names}
        attack = library.AutoAttack(model, **settings, **which)
        attack.verbose = False
        attack.apgd.n_iter = attack.apgd_targeted.n_iter = attack.fab.n_iter = 3
        attack.apgd.n_restarts, attack.square.n_queries, attack.fab.n_target_classes = 1, 10, 2
        return attack

    def by_hand(library: Any, attack: Any, model: nn.Module, x: Tensor, y: Tensor) -> Any:
        found = attack.run_standard_evaluation(x, y)
        return found[0] if isinstance(found, tuple) else found

    return Case(id=library, library=library, make=make, by_hand=by_hand, name=f"{library}.AutoAttack")


CASES = [
    torchattack("PGD", passes=(5, 5), steps=5, alpha=0.01),
    torchattack("FGSM", passes=(1, 1)),
    torchattack("PGDL2", passes=(5, 5), steps=5, eps=0.5),
    torchattack("EOTPGD", passes=(6, 6), steps=3, eot_iter=2),  # passes the same tensor twice
    torchattack("Square", n_queries=20, norm="Linf"),
    torchattack("FAB", steps=3, n_classes=CLASSES, multi_targeted=True, norm="Linf"),
    Case(
        id="torchattacks.MultiAttack",
        library="torchattacks",
        make=lambda library, model: library.MultiAttack(
            [library.FGSM(model, eps=EPS), library.PGD(model, eps=EPS, steps=3)]
        ),
        by_hand=lambda library, attack, model, x, y: attack(x, y),
        name="torchattacks.MultiAttack",
    ),
    # one pass more than steps: foolbox checks for success
    foolbox_attack("LinfPGD", "LinfProjectedGradientDescentAttack", "Linf", passes=(6, 5), steps=5),
    foolbox_attack("L2PGD", "L2ProjectedGradientDescentAttack", "L2", passes=(6, 5), steps=5),
    foolbox_attack("L2FMNAttack", "L2FMNAttack", "L2", passes=(6, 5), steps=5),
    art_attack("ProjectedGradientDescent", eps_step=0.01, max_iter=4, num_random_init=2, batch_size=3, verbose=False),
    art_attack("FastGradientMethod", norm="L2", batch_size=5),
    art_attack("SquareAttack", max_iter=10, verbose=False),
    auto_attack("pyautoattack"),
    auto_attack("autoattack"),
]


def load(name: str) -> Any:
    with warnings.catch_warnings():  # warnings of the library's own imports
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture(params=CASES, ids=lambda case: case.id)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def library(case: Case) -> Any:
    return load(case.library)


def ours(case: Case, thing: Any) -> ForeignAttack:
    """Return the attack within its stated threat; attacks without one are given a radius."""
    attack = as_attack(thing)
    assert isinstance(attack, ForeignAttack)
    return attack.within(Threat.parse(case.stated or EPS, case.norm))


def seed() -> None:
    torch.manual_seed(7)
    np.random.seed(7)


@for_each("kind", [layers, Plain])
@for_each("size", [1, SIZE])
def test_results_equal_a_direct_call_of_the_library(
    case: Case, library: Any, kind: Callable[[], nn.Module], size: int
) -> None:
    model = kind().eval()
    x, y = batch(model, size)
    thing = case.make(library, model)
    seed()
    expected = torch.as_tensor(case.by_hand(library, thing, model, x.clone(), y.clone()))
    seed()
    found = ours(case, case.make(library, model))(model, x, y)
    assert torch.equal(found, expected)
    assert size == 1 or not torch.equal(found, x)  # some return unbroken images unchanged


@for_each("kind", [layers, Plain])
def test_passes_equal_those_the_model_counts(case: Case, library: Any, kind: Callable[[], nn.Module]) -> None:
    model = kind().eval()
    x, y = batch(model)
    (witness,) = [module for module in model.modules() if isinstance(module, Witness)]
    thing = case.make(library, model)
    witness.forwards.zero_()
    _, effort = ours(case, thing).run(AttackCall(model, x, y, generator=noise()))
    assert torch.equal(effort.forwards, witness.forwards)
    assert torch.equal(effort.backwards, witness.backwards)
    assert effort.forwards.min() > 0
    if case.passes is not None:
        assert (effort.forwards.tolist(), effort.backwards.tolist()) == tuple([n] * SIZE for n in case.passes)


def test_the_same_stream_gives_the_same_images(case: Case, library: Any) -> None:
    model = Plain().eval()
    x, y = batch(model)
    thing = case.make(library, model)
    attack = ours(case, thing)
    text, before = repr(attack), torch.get_rng_state()
    first = attack(model, x, y, generator=noise())
    torch.rand(5)
    again = attack(model, x, y, generator=noise())
    fresh = ours(case, case.make(library, model))
    assert torch.equal(first, again)
    assert torch.equal(first, fresh(model, x, y, generator=noise()))
    assert text == repr(ours(case, thing)) == repr(fresh)
    assert " at 0x" not in text
    torch.set_rng_state(before)
    attack(model, x, y, generator=noise())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_is_restored(case: Case, library: Any) -> None:
    model = Plain()
    x, y = batch(model.eval())
    thing = case.make(library, model)  # ART sets modes when it is built
    model.train()
    model.layers[5].eval()
    model.layers[6].bias.requires_grad_(False)
    model(x).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes, flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    clean = x.clone()
    attack = ours(case, thing)

    def unchanged() -> None:
        assert [m.training for m in model.modules()] == modes
        assert [p.requires_grad for p in model.parameters()] == flags
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(parameter.grad, gradient)
        assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
        assert torch.equal(x, clean)

    attack(model, x, y, generator=noise())
    unchanged()
    with pytest.raises(Exception, match=r"size|shape|channels|stride|dimension"):
        attack(model, x[:, :1], y, generator=noise())  # one channel, where the model takes three
    unchanged()


@for_each("kind", [Wordy, lambda: Plain().double(), lambda: Wordy().double()])
def test_output_format_and_dtype_of_the_model_do_not_matter(
    case: Case, library: Any, kind: Callable[[], nn.Module]
) -> None:
    """Verdicts as on a plain model in single precision; the images differ by rounding."""
    plain, model = Plain().eval(), kind().eval()
    x, y = batch(plain)
    expected = ours(case, case.make(library, plain))(plain, x, y, generator=noise())
    found = ours(case, case.make(library, model))(model, x, y, generator=noise())
    assert found.dtype == x.dtype
    with torch.no_grad():
        assert torch.equal(plain(found).argmax(1), plain(expected).argmax(1))


def test_the_stated_threat_is_recognized(case: Case, library: Any) -> None:
    model = Plain().eval()
    attack = as_attack(case.make(library, model))
    assert isinstance(attack, ForeignAttack)
    assert (attack.name, attack.norm, attack.eps) == (case.name, case.norm, case.stated)
    with pytest.raises(InputError, match=f"^attack '{case.name}' sets norm = "):
        attack.within(Threat.parse(EPS, "L2" if case.norm == "Linf" else "Linf"))
    if case.stated is not None:
        with pytest.raises(InputError, match=f"'{case.name}' sets eps = {case.stated}, but runs with eps = 4/255"):
            attack.within(Threat.parse("4/255", case.norm))


def test_another_model_is_refused(case: Case, library: Any) -> None:
    model, other = Plain().eval(), Plain().eval()
    x, y = batch(model)
    attack = ours(case, case.make(library, other))
    if case.bound:
        with pytest.raises(InputError, match="was built on a different model") as caught:
            attack(model, x, y)
        assert "'transfer'" in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        attack(model, x, y)


def test_unsupported_scales_and_targets_are_refused(case: Case, library: Any) -> None:
    model = Plain().eval()
    x, y = batch(model)
    attack = ours(case, case.make(library, model))
    with pytest.raises(InputError, match="does not support eps_scale"):
        attack(model, x, y, eps_scale=torch.ones(SIZE))
    if case.library != "foolbox":
        with pytest.raises(InputError, match="does not support targets"):
            attack(model, x, y, targets=(y + 1) % CLASSES)


def test_targeted_attacks_receive_targets() -> None:
    model = Plain().eval()
    x, y = batch(model)
    targets = (y + 1) % CLASSES

    def margin(x: Tensor) -> float:
        with torch.no_grad():
            return float(model(x).log_softmax(1).gather(1, targets[:, None]).mean())

    torchattacks, foolbox = load("torchattacks"), load("foolbox")
    load("art")
    from art.attacks.evasion import ProjectedGradientDescent

    theirs = torchattacks.PGD(model, eps=EPS, steps=5)
    theirs.set_mode_targeted_by_label(quiet=True)
    things = [theirs, ProjectedGradientDescent(classifier(model), eps=EPS, eps_step=0.01, targeted=True, verbose=False)]
    for thing in things:
        attack = as_attack(thing).within(Threat.parse(EPS))
        with pytest.raises(InputError, match="is targeted and needs targets"):
            attack(model, x, y)
        assert margin(attack(model, x, y, targets=targets)) > margin(x) + 0.1
    attack = as_attack(foolbox.attacks.LinfPGD(steps=5, rel_stepsize=0.3)).within(Threat.parse(EPS))
    assert margin(attack(model, x, y, targets=targets)) > margin(x) + 0.1


def test_results_outside_the_ball_are_not_projected() -> None:
    """Attacks without a radius perturb as far as needed."""
    torchattacks = load("torchattacks")
    model = Plain().eval()
    x, y = batch(model)
    thing = torchattacks.DeepFool(model, steps=30)
    found = as_attack(thing).within(Threat.parse(1e-4, "L2"))(model, x, y)
    assert torch.equal(found, thing(x, y))
    assert not Threat.parse(1e-4, "L2").ball(x).contains(found).any()


def test_preprocessing_is_refused() -> None:
    torchattacks = load("torchattacks")
    load("art")
    from art.attacks.evasion import FastGradientMethod

    model = Plain().eval()
    x, y = batch(model)
    theirs = torchattacks.FGSM(model, eps=EPS)
    theirs.set_normalization_used(mean=[0.5] * 3, std=[0.2] * 3)
    for thing in (theirs, FastGradientMethod(classifier(model, preprocessing=(0.5, 0.2)), eps=EPS)):
        with pytest.raises(InputError, match="preprocesses images"):
            as_attack(thing)(model, x, y)


@pytest.mark.parametrize("name", ["torchattacks", "pyautoattack", "autoattack"])
def test_attacks_seeded_by_the_clock_are_reproducible(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(name)
    model = Plain().eval()
    x, y = batch(model)
    found, texts = [], []
    for clock in (1.0, 2e9):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        if name == "torchattacks":
            thing = library.AutoAttack(model, eps=EPS, version="rand", n_classes=CLASSES)
            for part in thing._autoattack.attacks:
                part.steps = 2
        else:
            which = {"attacks" if name == "pyautoattack" else "attacks_to_run": ["apgd-ce"]}
            thing = library.AutoAttack(model, eps=EPS, version="custom", device="cpu", **which)
            thing.apgd.n_iter = 2
        attack = as_attack(thing)
        found.append(attack(model, x, y, generator=noise()))
        texts.append(repr(attack))
    assert torch.equal(found[0], found[1])
    assert texts[0] == texts[1]


def test_the_method_forward_and_single_attacks_of_autoattack() -> None:
    """AutoAttack is often built on ``model.forward`` instead of the model, and its parts can be used alone.

    They may have been built for another device than that of the model now.
    """
    load("pyautoattack")
    from pyautoattack import AutoAttack
    from pyautoattack.autopgd_base import APGDAttack
    from pyautoattack.square import SquareAttack

    model = Plain().eval()
    x, y = batch(model)
    whole = AutoAttack(model.forward, eps=EPS, version="custom", attacks=["apgd-ce"], seed=0, device="cuda")  # type: ignore[arg-type]
    whole.apgd.n_iter = 3
    parts = APGDAttack(model, n_iter=3, eps=EPS, seed=0), SquareAttack(model, n_queries=5, eps=EPS, seed=0)
    for thing in (whole, *parts):
        found, effort = as_attack(thing).within(Threat.parse(EPS)).run(AttackCall(model, x, y))
        assert Threat.parse(EPS).ball(x).contains(found).all()
        assert effort.forwards.min() >= 3


def test_the_device_of_the_model_may_have_changed() -> None:
    torchattacks = load("torchattacks")
    model = Plain().eval()
    x, y = batch(model)
    thing = torchattacks.FGSM(model, eps=EPS)
    expected = thing(x, y)
    thing.set_device(torch.device("meta"))
    assert torch.equal(as_attack(thing)(model, x, y), expected)
    assert thing.device == torch.device("meta")


def test_norms_of_torchattacks_are_recognized() -> None:
    torchattacks = load("torchattacks")
    model = Plain().eval()
    names = {"PGD": "Linf", "BIM": "Linf", "MIFGSM": "Linf", "TPGD": "Linf", "PGDL2": "L2", "CW": "L2", "JSMA": "L0"}
    for name, norm in (names | {"APGD": "Linf", "DeepFool": "L2", "GN": None}).items():
        assert as_attack(getattr(torchattacks, name)(model)).norm == norm, name
    mixed = torchattacks.MultiAttack([torchattacks.PGD(model, eps=0.1), torchattacks.PGDL2(model, eps=0.2)])
    assert (as_attack(mixed).norm, as_attack(mixed).eps) == (None, None)


def test_other_objects_of_the_libraries_are_refused() -> None:
    foolbox = load("foolbox")
    load("art")
    model = Plain().eval()
    for thing in (foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), classifier(model), foolbox.attacks.LinfPGD):
        with pytest.raises(InputError, match="is not an attack"):
            as_attack(thing)


# ---- ours there


def test_attacks_of_this_package_run_within_torchattacks() -> None:
    """A bound attack equals that of torchattacks; wrapped in its base class, it works in its ensembles."""
    torchattacks = load("torchattacks")
    model = Plain().eval()
    x, y = batch(model)
    bound = FGSM(eps=EPS).bind(model)
    assert torch.allclose(bound(x, y), torchattacks.FGSM(model, eps=EPS)(x, y), atol=1e-6)

    class Ours(torchattacks.attack.Attack):  # type: ignore[misc, name-defined]
        def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
            return PGD(eps=EPS, steps=10).bind(self.model)(inputs, labels)

    ensemble = torchattacks.MultiAttack([torchattacks.FGSM(model, eps=EPS / 30), Ours("ours", model)])
    weak, both = (model(attack(x, y)).argmax(1) == y for attack in (ensemble.attacks[0], ensemble))
    assert both.sum() < weak.sum()
    assert not (both & ~weak).any()


def test_attacks_of_this_package_run_with_a_foolbox_criterion() -> None:
    foolbox = load("foolbox")
    model = Plain().eval()
    x, y = batch(model)
    x_adv = PGD(eps=EPS, steps=10).bind(model)(x, y)
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    with torch.no_grad():
        survives = (model(x_adv).argmax(1) == y).float().mean().item()
    assert math.isclose(foolbox.utils.accuracy(bounded, x_adv, y), survives, abs_tol=1e-6)
    assert survives < 0.5


# ---- the whole way


def test_evaluation_accepts_attacks_of_all_libraries() -> None:
    torchattacks, foolbox = load("torchattacks"), load("foolbox")
    model = Plain().eval()
    x, y = batch(model)
    fgsm, far = torchattacks.FGSM(model, eps=8 / 255), foolbox.attacks.LinfPGD(steps=5)

    def outside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return 1 - x

    report = cw.evaluate(model, (x, y), attacks=[fgsm, far, outside, "fgsm:eps=8/255"])
    name = "foolbox.LinfProjectedGradientDescentAttack"
    assert set(report.attacks) == {"torchattacks.FGSM", name, "outside", "fgsm"}
    assert report.threat.eps_text == "8/255"
    broken = {key: report[key].overall.value for key in report.attacks}
    by_hand = 100 * float((model(fgsm(x, y)).argmax(1) == y).float().mean())
    assert broken["torchattacks.FGSM"] == pytest.approx(by_hand)
    assert broken["fgsm"] == broken["torchattacks.FGSM"] < 100
    assert broken["outside"] == 100
    assert report.attacks["outside"].rejected == SIZE
    assert report.attacks[name].rejected == 0
    assert (report.attacks[name].forwards, report.attacks[name].backwards) == (6 * SIZE, 5 * SIZE)
    again = cw.evaluate(model, (x, y), attacks=far)
    assert again[name].overall == report[name].overall


def test_evaluation_raises_a_one_line_error() -> None:
    torchattacks = load("torchattacks")
    model = Plain().eval()
    data = batch(model)
    for attacks, message in (
        ([torchattacks.FGSM(Plain().eval())], "was built on a different model"),
        ([torchattacks.FGSM(model, eps=0.1), "fgsm:eps=8/255"], r"different eps \(0\.1, 8/255\)"),
        ([torchattacks.PGDL2(model, eps=0.1), "fgsm:norm=Linf"], r"different norm \(L2, Linf\)"),
        ([torchattacks.FGSM], "is a class"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            cw.evaluate(model, data, attacks=attacks)
        assert "\n" not in str(caught.value)
