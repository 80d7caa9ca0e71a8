"""Every registered attack: ball, box, side effects, exact answers on linear models."""

# B batch, K classes

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from classwise.attacks import (
    APGD,
    ATTACKS,
    CWL2,
    CWPGD,
    FAB,
    FGSM,
    NES,
    PGD,
    SPSA,
    AutoAttack,
    BallAttack,
    CosinePGD,
    CWLinf,
    Fast,
    NAttack,
    Square,
    TemperaturePGD,
    Transfer,
)
from classwise.attacks.losses import divergence, dlr, log_odds, margin
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Threat
from each import for_each

TABLE = [
    APGD(steps=7),
    APGD(steps=6, loss="dlr", restarts=2),
    APGD(steps=6, loss="margin", target="most-likely", eot=2),
    AutoAttack(attacks=("square", "fab-t", "apgd-t", "apgd-ce"), steps=6, queries=20),
    CosinePGD(steps=7),
    CosinePGD(steps=6, target="all", restarts=2),
    CWL2(search_steps=2, steps=12, initial_c=1),
    CWLinf(search_steps=2, steps=12),
    CWPGD(steps=3),
    FAB(steps=3),
    FAB(steps=3, target="all", restarts=2),
    Fast(),
    FGSM(),
    FGSM(start="uniform"),
    PGD(steps=3),
    PGD(steps=3, loss="kl", start="gaussian"),
    PGD(steps=3, loss="margin", start="zero"),
    PGD(steps=2, restarts=3),
    NAttack(iterations=4, population=20),
    NAttack(iterations=4, population=20, reward="first-member"),
    NES(iterations=5, population=20),
    SPSA(iterations=5, population=20),
    Square(queries=60),
    Square(queries=60, loss="ce"),
    TemperaturePGD(steps=3, inv_t=10.0),
]


class Net(nn.Module):
    """A model with batch norm and dropout, whose state an attack could change."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.bn(self.conv(x)).relu().mean((2, 3))))


class Linear(nn.Module):
    """Logits W x + b: the worst case in a ball has a closed form."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(weight.shape[1], weight.shape[0])
        self.layer.weight.data, self.layer.bias.data = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


def batch(size: int, channels: int, side: int, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(size, channels, side, side, generator=random)
    return x, torch.randint(num_classes, (size,), generator=random)


def test_table_covers_the_registry() -> None:
    # A transfer needs a substitute that fits the model: test_transfer.py has these tests for it.
    assert {type(attack) for attack in TABLE} == set(ATTACKS.values()) - {Transfer}


@pytest.mark.parametrize("attack", TABLE, ids=repr)
@given(
    size=st.integers(1, 7),
    channels=st.sampled_from([1, 3]),
    side=st.integers(2, 9),
    num_classes=st.integers(2, 12),
    eps=st.floats(1e-3, 1.0),
    norm=st.sampled_from(["Linf", "L2"]),
    scales=st.none() | st.lists(st.floats(0.0, 3.0), min_size=7, max_size=7),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=15, deadline=None)
def test_stays_in_ball_and_box(
    attack: BallAttack,
    size: int,
    channels: int,
    side: int,
    num_classes: int,
    eps: float,
    norm: str,
    scales: list[float] | None,
    seed: int,
) -> None:
    x, y = batch(size, channels, side, num_classes, seed)
    scale = None if scales is None else torch.tensor(scales[:size])
    norm = norm if norm in attack.norms else attack.norms[0]
    threat = Threat.parse(eps, norm)
    x_adv = attack.within(threat)(Net(channels, num_classes), x, y, eps_scale=scale)
    delta = (x_adv - x).double().flatten(1)
    radius = eps * (torch.ones(size) if scale is None else scale).double()
    distance = delta.abs().amax(1) if norm == "Linf" else delta.norm(dim=1)
    assert (distance <= radius + 1e-6).all()
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1
    assert x_adv.shape == x.shape
    assert not x_adv.requires_grad


@for_each("attack", TABLE, ids=repr)
def test_the_model_is_restored(attack: BallAttack) -> None:
    torch.manual_seed(0)
    model = Net(3, 5)
    x, y = batch(6, 3, 6, 5, 0)
    model.train()
    model.drop.eval()
    model.conv.bias.requires_grad_(False)
    model(x).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    x_before, global_before = x.clone(), torch.get_rng_state()

    attack.within(Threat.parse("8/255", attack.norms[0]))(model, x, y, generator=torch.Generator().manual_seed(0))

    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, gradients[name])
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), global_before)


@for_each("attack", TABLE, ids=repr)
def test_the_model_is_restored_after_an_error(attack: BallAttack) -> None:
    model = Net(3, 5).train()
    with pytest.raises(RuntimeError):
        attack.within(Threat.parse("8/255", attack.norms[0]))(model, torch.rand(2, 7, 4, 4), torch.tensor([0, 1]))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@for_each("attack", TABLE, ids=repr)
@for_each("context", [torch.no_grad, torch.inference_mode])
def test_works_with_gradients_disabled(attack: BallAttack, context: type) -> None:
    torch.manual_seed(0)
    model = Net(3, 5)
    x, y = batch(6, 3, 6, 5, 0)
    bounded = attack.within(Threat.parse("8/255", attack.norms[0]))
    expected = bounded(model, x, y, generator=torch.Generator().manual_seed(1))
    with context():
        found = bounded(model, x.clone(), y.clone(), generator=torch.Generator().manual_seed(1))
    assert torch.equal(found, expected)
    assert not torch.equal(found, x)


@for_each("attack", TABLE, ids=repr)
def test_does_not_depend_on_batching(attack: BallAttack) -> None:
    torch.manual_seed(0)
    model = Net(1, 4).double()
    x, y = batch(7, 1, 6, 4, 0)
    x = x.double()
    index = torch.arange(100, 107)
    bounded = attack.within(Threat.parse(0.1, attack.norms[0]))
    whole = bounded(model, x, y, generator=ExampleNoise(3, index))
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    parts = [bounded(model, x[i : i + 1], y[i : i + 1], generator=ExampleNoise(3, index[i : i + 1])) for i in order]
    assert torch.allclose(torch.cat(parts), whole[order], atol=1e-12, rtol=0)


@for_each("attack", TABLE, ids=repr)
def test_raises_its_own_loss(attack: BallAttack) -> None:
    torch.manual_seed(0)
    model = Net(3, 5).eval()
    x, _ = batch(64, 3, 6, 5, 0)
    with torch.no_grad():
        y = model(x).argmax(1)  # an attack may leave misclassified images unchanged
        losses = {"margin": margin(y), "dlr": dlr(y), "kl": divergence(model(x))}
        loss = losses.get(getattr(attack, "loss", "ce"), log_odds(y))
        (scale,) = getattr(attack, "inv_t", (1.0,))
        bounded = attack.within(Threat.parse(0.1, attack.norms[0]))
        x_adv = bounded(model, x, y, generator=torch.Generator().manual_seed(0))
        before, after = loss(scale * model(x)), loss(scale * model(x_adv))
    assert (after > before).float().mean() > 0.9


@given(
    seed=st.integers(0, 2**16),
    num_classes=st.sampled_from([2, 3, 10]),
    norm=st.sampled_from(["Linf", "L2"]),
    eps=st.floats(0.01, 0.2),
)
@settings(max_examples=25, deadline=None)
def test_two_class_linear_model_is_broken_exactly_where_it_can_be(
    seed: int, num_classes: int, norm: str, eps: float
) -> None:
    """For two classes every gradient loss maximizes the margin, whose maximum in the ball is known.

    For images well inside the box, the maximum is margin + eps · ‖w_1 - w_0‖_dual. With more classes the same holds
    for the best single wrong class, which bounds the result of any attack.
    """
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_classes, 16, generator=random, dtype=torch.float64)
    bias = torch.randn(num_classes, generator=random, dtype=torch.float64)
    model = Linear(weight, bias)
    x = 0.3 + 0.4 * torch.rand(20, 1, 4, 4, generator=random, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1)
        gaps = weight[None] - weight[y][:, None]
        dual = gaps.abs().sum(2) if norm == "Linf" else gaps.norm(dim=2)
        logits = model(x)
        reachable = logits - logits.gather(1, y[:, None]) + eps * dual
        reachable = reachable.scatter(1, y[:, None], -torch.inf).amax(1)
    attack = PGD(eps=eps, norm=norm, steps=60, loss="margin", start="zero")
    x_adv = attack(model, x, y, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        reached = margin(y)(model(x_adv))
    assert (reached <= reachable + 1e-9).all()
    if num_classes == 2:
        assert torch.allclose(reached, reachable, atol=1e-6)
        for kind in (PGD, TemperaturePGD):
            other = kind(eps=eps, norm=norm, steps=60, start="zero")
            with torch.no_grad():
                assert torch.allclose(margin(y)(model(other(model, x, y))), reachable, atol=1e-6)
        if norm == "Linf":  # one step of size eps reaches the corner
            with torch.no_grad():
                assert torch.allclose(margin(y)(model(FGSM(eps=eps)(model, x, y))), reachable, atol=1e-9)


def test_per_example_radii_are_respected_exactly() -> None:
    weight = torch.tensor([[1.0, -1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    model = Linear(weight, torch.zeros(2))
    x = torch.full((3, 1, 2, 2), 0.5)
    y = torch.zeros(3, dtype=torch.long)
    scale = torch.tensor([0.0, 1.0, 2.0])
    x_adv = FGSM(eps=0.1)(model, x, y, eps_scale=scale)
    expected = 0.1 * scale[:, None] * torch.tensor([-1.0, 1.0, -1.0, -1.0])
    assert torch.allclose((x_adv - x).flatten(1), expected, atol=1e-7)


def test_restarts_help_and_do_not_change_broken_examples() -> None:
    model = Linear(torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(4))
    x, _ = batch(200, 1, 4, 4, 1)
    with torch.no_grad():
        y = model(x).argmax(1)

    def broken(restarts: int) -> tuple[Tensor, Tensor]:
        attack = PGD(eps=0.2, steps=1, step_size=0.02, restarts=restarts)
        x_adv = attack(model, x, y, generator=ExampleNoise(0, torch.arange(200)))
        with torch.no_grad():
            return x_adv, model(x_adv).argmax(1) != y

    once, broken_once = broken(1)
    often, broken_often = broken(8)
    assert broken_often.sum() > broken_once.sum()
    assert torch.equal(often[broken_once], once[broken_once])


def test_temperature_of_one_is_pgd() -> None:
    torch.manual_seed(0)
    model = Net(3, 5)
    x, y = batch(6, 3, 6, 5, 0)
    plain = PGD(eps="8/255")(model, x, y, generator=ExampleNoise(0, torch.arange(6)))
    tempered = TemperaturePGD(eps="8/255", inv_t=1.0)(model, x, y, generator=ExampleNoise(0, torch.arange(6)))
    assert torch.equal(plain, tempered)


@pytest.mark.parametrize("attack", [PGD(eps=0.3), TemperaturePGD(eps=0.3, inv_t=300.0)], ids=repr)
def test_confident_models_are_broken_as_well_as_others(attack: BallAttack) -> None:
    """Multiplying the logits changes no prediction, but float32 cross-entropy would saturate and the attack would
    fail.
    """
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    x, _ = batch(100, 1, 4, 3, 0)
    survived = []
    for scale in (1.0, 1e4):
        model = Linear(scale * weight, torch.zeros(3))
        with torch.no_grad():
            y = model(x).argmax(1)
            x_adv = attack(model, x, y, generator=ExampleNoise(0, torch.arange(100)))
            survived.append(int((model(x_adv).argmax(1) == y).sum()))
    assert survived[0] < 50
    assert survived[1] <= survived[0] + 1


def test_losses_match_their_definitions() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([0, 3, 1, 2, 0])
    for i, (z, r, label) in enumerate(zip(logits.tolist(), other.tolist(), y.tolist(), strict=True)):
        exp = [torch.tensor(v, dtype=torch.float64).exp().item() for v in z]
        p = [e / sum(exp) for e in exp]
        exp_r = [torch.tensor(v, dtype=torch.float64).exp().item() for v in r]
        q = [e / sum(exp_r) for e in exp_r]
        kl = sum(a * (torch.tensor(a).log() - torch.tensor(b).log()).item() for a, b in zip(q, p, strict=True))
        rival = max(v for k, v in enumerate(z) if k != label)
        assert margin(y)(logits)[i].item() == pytest.approx(rival - z[label])
        assert log_odds(y)(logits)[i].item() == pytest.approx(math.log((1 - p[label]) / p[label]))
        assert divergence(other)(logits)[i].item() == pytest.approx(kl, abs=1e-6)


def test_non_finite_gradients_fall_back_to_the_natural_image() -> None:
    class Poisoned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(1)[:, :3]
            return torch.where(flat.sum(1, keepdim=True) > 1.5, flat / 0 * 0, flat)

    x = torch.tensor([[0.9, 0.9, 0.9, 0.1], [0.1, 0.2, 0.3, 0.4]]).view(2, 1, 2, 2)
    x_adv = PGD(eps=0.01, steps=2, start="zero")(Poisoned(), x, torch.tensor([0, 1]))
    assert x_adv.isfinite().all()
    assert torch.equal(x_adv[0], x[0])


@for_each(
    ("spec", "message"),
    [
        ("pgd:steps=0", "steps = '0': must be at least 1"),
        ("pgd:step_size=-0.1", "step_size = '-0.1': must be greater than 0"),
        ("pgd:restarts=0", "restarts = '0': must be at least 1"),
        ("pgd:loss=kl,start=zero", "needs start=uniform or gaussian"),
        ("pgd:loss=hinge", "loss = 'hinge': must be 'ce', 'margin', 'dlr' or 'kl'"),
        ("pgd:stesp=3", "did you mean 'steps'?"),
        ("pgd:steps=many", "steps = 'many': must be an integer"),
        ("pgd:steps", "settings are key=value"),
        ("pdg", "unknown attack 'pdg': did you mean 'pgd'?"),
        ("temperature-pgd:inv_t=0", "inv_t = '0': must be greater than 0"),
        ("pgd:eps=0", "eps must be a positive number, got 0"),
        ("pgd:norm=L7", "norm = 'L7'"),
    ],
)
def test_invalid_specs_raise_a_one_line_error(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        build("attack", ATTACKS, spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PGD(loss="cee"), "PGD: loss = 'cee': must be 'ce', 'margin', 'dlr' or 'kl'"),  # type: ignore[arg-type]
        (lambda: PGD(start="foo"), "PGD: start = 'foo'"),  # type: ignore[arg-type]
        (lambda: PGD(steps=1.5), "PGD: steps = 1.5"),  # type: ignore[arg-type]
        (lambda: FGSM(step_size=-1.0), "step_size = -1.0: must be greater than 0"),
        (lambda: PGD(norm="L7"), "PGD: norm = 'L7'"),  # type: ignore[arg-type]
    ],
)
def test_invalid_settings_of_objects_raise_a_one_line_error(make: Callable[[], BallAttack], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)


def test_objects_convert_as_specs_do() -> None:
    assert PGD(steps="3", step_size="2/255") == PGD(steps=3, step_size=2 / 255)  # type: ignore[arg-type]


def test_specs_reach_the_fields() -> None:
    attack = build("attack", ATTACKS, "pgd:steps=100,step_size=2/255,loss=margin,restarts=2")
    assert attack == PGD(steps=100, step_size=2 / 255, loss="margin", restarts=2)


def test_a_second_radius_must_equal_the_first() -> None:
    with pytest.raises(InputError, match="has no radius"):
        PGD()(Net(3, 5), torch.rand(1, 3, 4, 4), torch.tensor([0]))
    with pytest.raises(InputError, match="in one place"):
        PGD(eps="4/255").within(Threat.parse("8/255"))
    assert PGD(eps="8/255").within(Threat.parse("8/255")).threat.text == "8/255"
    with pytest.raises(InputError, match="expected one label per image, got 1 labels for 2 images"):
        PGD(eps="8/255")(Net(3, 5), torch.rand(2, 3, 4, 4), torch.tensor([0]))
