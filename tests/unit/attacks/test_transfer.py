"""Transfer: images equal those of the attack on the substitute, the model is not queried, and the repr is stable."""

# B batch, K classes

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import classwise as cw
from classwise.attacks import ATTACKS, CWL2, FGSM, PGD, TemperaturePGD, Transfer
from classwise.attacks.autoattack import AutoAttack
from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.core.streams import ExampleNoise
from classwise.core.threat import Norm, Threat
from classwise.core.types import AttackCall
from each import for_each


class Net(nn.Module):
    """A model with batch norm and dropout, whose state an attack could change."""

    def __init__(self, channels: int = 1, num_classes: int = 4, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(channels, 8, 3, padding=1)
            self.bn = nn.BatchNorm2d(8)
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(8, num_classes)
        self.asked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += len(x)
        return self.head(self.drop(self.bn(self.conv(x)).relu().mean((2, 3))))


def batch(size: int, channels: int = 1, num_classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(size, channels, 6, 5, generator=random), torch.randint(num_classes, (size,), generator=random)


@pytest.mark.parametrize("crafter", [PGD(steps=3), PGD(steps=2, restarts=3, norm="L2"), FGSM()], ids=repr)
def test_images_equal_those_of_the_attack_on_the_substitute(crafter: PGD | FGSM) -> None:
    x, y = batch(9)
    model, substitute = Net(seed=0), Net(seed=1)
    threat = Threat.parse(0.1, crafter.norm or "Linf")
    scale = torch.linspace(0, 2, 9)
    index = torch.arange(20, 29)
    attack = Transfer(substitute=substitute, attack=crafter).within(threat)
    found, effort = attack.run(AttackCall(model, x, y, eps_scale=scale, generator=ExampleNoise(5, index)))
    expected = crafter.within(threat)(substitute, x, y, eps_scale=scale, generator=ExampleNoise(5, index))
    # A second projection rounds again.
    assert torch.allclose(found, expected, atol=1e-7, rtol=0)
    assert not torch.equal(found[1:], x[1:])
    assert not effort.forwards.any()
    assert not effort.backwards.any()
    assert model.asked == 1  # for the number of its classes
    again = attack(model, x, y, eps_scale=scale, generator=torch.Generator().manual_seed(0))
    drawn = crafter.within(threat)(substitute, x, y, eps_scale=scale, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(again, drawn, atol=1e-7, rtol=0)


@given(
    size=st.integers(1, 5),
    channels=st.sampled_from([1, 3]),
    num_classes=st.integers(2, 6),
    eps=st.floats(1e-3, 1.0),
    norm=st.sampled_from(["Linf", "L2"]),
    scales=st.lists(st.floats(0.0, 3.0), min_size=5, max_size=5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=15, deadline=None)
def test_stays_in_ball_and_box(
    size: int, channels: int, num_classes: int, eps: float, norm: Norm, scales: list[float], seed: int
) -> None:
    x, y = batch(size, channels, num_classes, seed)
    attack = Transfer(substitute=Net(channels, num_classes, seed=1), attack="pgd:steps=2", eps=eps, norm=norm)
    x_adv = attack(Net(channels, num_classes), x, y, eps_scale=torch.tensor(scales[:size]))
    assert attack.threat.ball(x, torch.tensor(scales[:size])).contains(x_adv).all()
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1


def test_does_not_depend_on_batching() -> None:
    x, y = batch(7)
    x, model, index = x.double(), Net(seed=0).double(), torch.arange(100, 107)
    attack = Transfer(substitute=Net(seed=1).double(), attack=PGD(steps=2, restarts=2), eps=0.1)
    whole = attack(model, x, y, generator=ExampleNoise(3, index))
    for i in (4, 0, 6):
        part = slice(i, i + 1)
        alone = attack(model, x[part], y[part], generator=ExampleNoise(3, index[part]))
        assert torch.allclose(alone, whole[part], atol=1e-12, rtol=0)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_both_models_are_restored(context: type) -> None:
    x, y = batch(4)
    models = [Net(seed=0).train(), Net(seed=1).train()]
    for model in models:
        model.drop.eval()
        model(x).sum().backward()
    states = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    gradients = [[parameter.grad.clone() for parameter in model.parameters()] for model in models]
    with context():
        found = Transfer(substitute=models[1], attack="pgd:steps=2", eps=0.1)(models[0], x.clone(), y.clone())
    assert not torch.equal(found, x)
    for model, state, gradient in zip(models, states, gradients, strict=True):
        assert [module.training for module in (model, model.bn, model.drop)] == [True, True, False]
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradient, strict=True))
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_models_of_different_types() -> None:
    x, y = batch(4)
    double = Transfer(substitute=Net(seed=1).double(), attack="fgsm", eps=0.1)(Net(), x, y)
    single = Transfer(substitute=Net(seed=1), attack="fgsm", eps=0.1)(Net().double(), x, y)
    assert double.dtype == single.dtype == torch.float32
    assert torch.allclose(double, single)


def test_the_repr_contains_a_digest_of_the_weights() -> None:
    one, same, other = (repr(Transfer(substitute=Net(seed=seed))) for seed in (1, 1, 2))
    assert one == same != other
    assert "substitute=Net@" in one
    assert "0x" not in one
    assert "\n" not in one
    trained = Net(seed=1)
    with torch.no_grad():
        trained.head.bias += 1e-6
    assert repr(Transfer(substitute=trained)) != one
    named = Transfer(substitute="runs/standard", attack="pgd:steps=7")
    assert "substitute=runs/standard" in repr(named)
    assert "steps=7" in repr(named)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("transfer:substitute=runs/a", Transfer(substitute="runs/a", attack=PGD())),
        (
            "transfer:substitute=runs/a@last,attack=pgd:steps=100:step_size=2/255,eps=8/255",
            Transfer(substitute="runs/a@last", attack=PGD(steps=100, step_size=2 / 255), eps="8/255"),
        ),
        (
            "transfer:attack=temperature-pgd:inv_t=2+5,substitute=models.py:make",
            Transfer(substitute="models.py:make", attack=TemperaturePGD(inv_t=(2.0, 5.0))),
        ),
        (
            "transfer:substitute=resnet18,weights=a.safetensors",
            Transfer(substitute="resnet18", weights="a.safetensors"),
        ),
    ],
)
def test_specs(spec: str, expected: Transfer) -> None:
    assert build("attack", ATTACKS, spec) == expected


def test_python_takes_the_usual_spec_and_paths() -> None:
    attack = Transfer(substitute=Path("runs/a"), attack="pgd:steps=3,step_size=0.1")
    assert attack.attack == PGD(steps=3, step_size=0.1)
    loaded = attack.with_models(lambda spec, weights: Net(seed=len(spec)))
    assert isinstance(loaded.substitute, Net)
    assert loaded.with_models(lambda spec, weights: Net()) is loaded


def test_threat_is_taken_from_transfer_or_its_attack() -> None:
    assert Transfer(substitute=Net(), attack=PGD(eps="4/255")).threat.text == "4/255"
    assert Transfer(substitute=Net(), attack=CWL2(), eps=0.5).threat == Threat.parse(0.5, "L2")
    within = Transfer(substitute=Net()).within(Threat.parse("8/255", "L2"))
    assert (within.threat, within.attack_on_substitute.threat) == (Threat.parse("8/255", "L2"),) * 2


def test_variants_and_stages_are_those_of_the_attack_on_the_substitute() -> None:
    grid = Transfer(substitute=Net(), attack="temperature-pgd:inv_t=2+5")
    assert {name: part.attack for name, part in grid.variants().items()} == TemperaturePGD(inv_t=(2.0, 5.0)).variants()
    assert all(isinstance(part, Transfer) for part in grid.variants().values())
    ensemble = AutoAttack(attacks=("square", "apgd-ce"))
    parts = Transfer(substitute=Net(), attack=ensemble).stages(4)
    assert {name: part.attack for name, part in parts.items()} == ensemble.stages(4)
    assert len(parts) == 2


@for_each(
    ("settings", "message"),
    [
        ({}, "transfer needs a substitute"),
        ({"substitute": Net(), "weights": "a.pt"}, "weights need a substitute given by a model spec"),
        ({"substitute": Net(), "attack": Transfer(substitute=Net())}, "got another transfer"),
        ({"substitute": Net(), "attack": "pdg"}, "unknown attack 'pdg': did you mean 'pgd'?"),
        ({"substitute": Net(), "attack": "pgd:stesp=3"}, "did you mean 'steps'?"),
        ({"substitute": Net(), "attack": "pgd:20"}, "settings are key=value"),
        ({"substitute": 7}, "substitute = 7"),
        ({"substitute": Net(), "attack": CWL2(), "norm": "Linf"}, "CWL2 supports L2 only: for Linf use cw-linf"),
        (
            {"substitute": Net(), "attack": PGD(eps=0.2), "eps": 0.1},
            "'PGD' sets eps = 0.2, but runs with eps = 0.1",
        ),
        ({"substitute": "runs/standard"}, "the substitute 'runs/standard' is not loaded"),
        ({"substitute": Net(num_classes=5)}, "the substitute has 5 outputs, but the model has 4"),
        (
            {"substitute": Net(channels=3)},
            "the substitute does not accept these images: the model fails on images of 1x6x5",
        ),
    ],
)
def test_invalid_settings_raise_a_one_line_error(settings: dict[str, object], message: str) -> None:
    x, y = batch(2)
    with pytest.raises(InputError) as caught:
        Transfer(**{"eps": 0.1, **settings})(Net(), x, y)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_evaluation_loads_the_substitute_and_does_not_query_the_model(tmp_path: Path) -> None:
    for name, seed in (("standard", 0), ("other", 1)):
        cw.train("digits/standard", out=tmp_path / name, epochs=2, seed=seed)
    target, substitute = str(tmp_path / "standard"), str(tmp_path / "other")
    keywords = {"data": "digits", "eps": 0.15, "per_class": 5, "device": "cpu"}
    spec = f"transfer:substitute={substitute},attack=pgd:steps=5:start=zero"
    report = cw.evaluate(target, attacks=[spec, "pgd:steps=5,start=zero"], out=tmp_path / "out", **keywords)
    module = cw.models.load.load_model(substitute)
    direct = Transfer(substitute=module, attack=PGD(steps=5, start="zero"))
    same = cw.evaluate(target, attacks=[direct], **keywords)
    assert (report.verdicts.attacks["transfer"] == same.verdicts.attacks["transfer"]).all()
    assert report["natural"].overall.value > report["transfer"].overall.value > report["pgd"].overall.value
    weights = str(tmp_path / "other" / "checkpoints" / "best.safetensors")
    by_file = f"transfer:substitute=digits-cnn,weights={weights},attack=pgd:steps=5:start=zero"
    again = cw.evaluate(target, attacks=[by_file], **keywords)
    assert (again.verdicts.attacks["transfer"] == same.verdicts.attacks["transfer"]).all()
    # An evaluation is identified by the weights, and resumes for any path to them.
    cw.evaluate(target, attacks=[direct, "pgd:steps=5,start=zero"], out=tmp_path / "out", resume=True, **keywords)
