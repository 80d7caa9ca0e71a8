"""Start and end of a training: warm starts, excluded classes, extra images, patience, the guard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import classwise as cw
from classwise.attacks import PGD
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.core.types import ClassStats
from classwise.data import Batches, ImageSet, MixedBatches, load_data, to_float
from classwise.storage.run_directory import RunDirectory
from classwise.training.data import pseudo_labeled
from classwise.training.epoch import check_stopping
from classwise.training.plan import Plan, make_plan
from classwise.training.state import TrainingState
from each import for_each

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"epochs": 2, "attack": {"steps": 2}, "validation_per_class": 5}


def plan_for(recipe: str = "digits/madry", **changes: Any) -> Plan:
    return make_plan(load_recipe(recipe, {**QUICK, **changes}), CPU)


def refused(recipe: str = "digits/madry", **changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        plan_for(recipe, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Where it starts


def test_warm_start_loads_best_weights(tmp_path: Path) -> None:
    run = cw.train("digits/madry", out=tmp_path / "first", **QUICK)
    best = load_file(run.directory / "checkpoints" / "best.safetensors")
    for start in (str(run.directory), str(run.directory / "checkpoints" / "best.safetensors")):
        found = plan_for(start=start).model.state_dict()
        assert all(torch.equal(found[name], best[name]) for name in best)
    cold = plan_for().model.state_dict()
    assert not all(torch.equal(cold[name], best[name]) for name in best)
    last = load_file(run.directory / "checkpoints" / "last.safetensors")
    found = plan_for(start=f"{run.directory}@last").model.state_dict()
    assert all(torch.equal(found[name], last[name]) for name in last)


def test_invalid_warm_start_is_one_line_error(tmp_path: Path) -> None:
    assert "nowhere.safetensors' is neither a run directory" in refused(start=str(tmp_path / "nowhere.safetensors"))
    assert "neither a run directory" in refused(start=str(tmp_path))
    run = cw.train("digits/madry", out=tmp_path / "run", **QUICK)
    assert refused(start=str(run.directory), model="resnet18")


def test_warm_start_keeps_the_validation_split(tmp_path: Path) -> None:
    """Another seed would select other images, most of which that run was trained on."""
    run = cw.train("digits/madry", out=tmp_path / "run", **QUICK)
    first, cold = plan_for(), plan_for(seed=1)
    assert set(cold.validation) & set(first.train)
    for start in (str(run.directory), f"{run.directory}@last"):
        warm = plan_for(seed=1, start=start)
        assert warm.validation.tolist() == first.validation.tolist()
        assert warm.train.tolist() == first.train.tolist()
    weights = str(run.directory / "checkpoints" / "best.safetensors")
    assert plan_for(seed=1, start=weights).validation.tolist() == cold.validation.tolist()
    assert len(plan_for(seed=1, start=str(run.directory), validation_per_class=0, select="last").validation) == 0
    nothing = {**QUICK, "validation_per_class": 0, "select": "last"}
    all_of_them = cw.train("digits/madry", out=tmp_path / "all", **nothing)
    assert plan_for(seed=1, start=str(all_of_them.directory)).validation.tolist() == cold.validation.tolist()
    (run.directory / "validation.json").write_text('{"indices": [0, 5000]}')
    assert "does not list indices of held-out images below 1100" in refused(start=str(run.directory))


def test_without_class_keeps_other_labels() -> None:
    plan, whole = plan_for(**{"data.without_class": 5}), plan_for()
    assert plan.num_classes == 10
    for rows, every in ((plan.train, whole.train), (plan.validation, whole.validation)):
        assert set(plan.images.labels[rows]) == set(range(10)) - {5}
        assert rows.tolist() == [row for row in every if whole.images.labels[row] != 5]
    assert "class 11 does not exist: expected 0 to 9" in refused(**{"data.without_class": 11})
    assert "unknown class 'cat'" in refused(**{"data.without_class": "cat"})


def test_excluded_class_is_never_predicted(tmp_path: Path) -> None:
    run = cw.train("digits/standard", out=tmp_path / "run", **{**QUICK, "epochs": 4, "data.without_class": 3})
    test = load_data("digits", split="test")
    predicted = run.load("last")(to_float(test.images)).argmax(1)
    assert (predicted == 3).sum() == 0
    assert run.outcome.history[-1]["validation"]["n"][3] == 0


# Extra images


def images(count: int, shift: int = 0) -> ImageSet:
    data = np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1) + np.zeros((1, 1, 2, 2), dtype=np.uint8)
    return ImageSet(images=data + np.uint8(shift), labels=np.arange(count) % 3, name="counted", split="train")


def batches(of: ImageSet, size: int, seed: int, **options: Any) -> Batches:
    return Batches(of, None, batch_size=size, device="cpu", generator=torch.Generator().manual_seed(seed), **options)


def test_mixed_batches_are_half_extra_images() -> None:
    mixed = MixedBatches(batches(images(12), 4, 0), batches(images(5, shift=100), 2, 1, drop_last=True))
    seen = []
    for x, y, index in mixed:
        assert x.shape == (6, 1, 2, 2)
        pixels = (x[:, 0, 0, 0] * 255).round().long()
        assert (pixels[:4] < 12).all()
        assert (pixels[4:] >= 100).all()
        assert torch.equal(index[:4], pixels[:4])
        assert torch.equal(index[4:] - 12, pixels[4:] - 100)
        assert torch.equal(y, torch.where(pixels < 100, pixels, pixels - 100) % 3)
        seen += pixels[:4].tolist()
    assert sorted(seen) == list(range(12))
    assert len(mixed) == 3


def test_mixed_epoch_depends_on_generators_only() -> None:
    """A resumed run therefore sees the same extra images."""

    def epoch(skip: bool) -> list[int]:
        one, two = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        sources = [
            Batches(images(n), None, batch_size=2, device="cpu", generator=generator, drop_last=True)
            for n, generator in ((8, one), (7, two))
        ]
        if skip:
            list(MixedBatches(*sources))
            one.manual_seed(0)
            two.manual_seed(1)
        return [int(row) for _, _, index in MixedBatches(*sources) for row in index]

    assert epoch(skip=True) == epoch(skip=False)


def test_pseudo_labels(tmp_path: Path) -> None:
    run = cw.train("digits/standard", out=tmp_path / "labeler", **{**QUICK, "epochs": 6})
    model, data = run.load(), load_data("digits", split="train")
    nameless = ImageSet(images=data.images, labels=np.zeros_like(data.labels), name="nameless", split="train")
    model.train()
    labeled = pseudo_labeled(model, nameless, data.classes)
    assert model.training
    assert labeled.classes == data.classes
    assert (labeled.labels == data.labels).mean() > 0.9
    expected = model.eval()(to_float(data.images[:50])).argmax(1)
    assert labeled.labels[:50].tolist() == expected.tolist()


def test_self_training_excludes_validation_images_and_checks_shapes(tmp_path: Path) -> None:
    labeler = cw.train("digits/standard", out=tmp_path / "labeler", **QUICK)
    extra = {"data.extra": "digits", "data.labeler": str(labeler.directory)}
    plan = plan_for("digits/trades", **extra)
    assert plan.extra is not None
    assert len(plan.extra) == len(plan.train)  # the same images, less those that are held out
    held_out = {image.tobytes() for image in plan.images.images[plan.validation]}
    assert not any(image.tobytes() in held_out for image in plan.extra.images)
    cw.train("digits/trades", out=tmp_path / "run", **{**QUICK, "epochs": 1, **extra})
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert sum(record["train"]["n"]) > 1.8 * len(plan.train)
    code = "import numpy as np\ndef make(split):\n    return np.zeros((9, 3, 8, 8), np.float32), np.arange(9) % 3\n"
    (tmp_path / "other.py").write_text(code)
    assert "extra images are (3, 8, 8)" in refused(**{"data.extra": f"{tmp_path / 'other.py'}:make"})
    assert "data.labeler labels extra images" in refused(**{"data.labeler": str(labeler.directory)})


# Where it ends


def test_patience_ends_training(tmp_path: Path) -> None:
    changes = {**QUICK, "epochs": 40, "patience": 2, "optimizer": {"name": "sgd", "lr": 1e-12}}
    run = cw.train("digits/standard", out=tmp_path / "run", **changes)
    assert (run.outcome.epochs, run.outcome.best_epoch) == (3, 1)
    assert run.outcome.ended == "no improvement (patience = 2)"
    again = cw.train("digits/standard", out=tmp_path / "run", resume=True, **changes)
    assert again.outcome.epochs == 3


def verdicts(right: int) -> ClassStats:
    made = ClassStats.zeros(10)
    made.n_adv += 10
    made.correct_adv += right
    return made


def training(tmp_path: Path, **guard: Any) -> TrainingState:
    plan = plan_for(guard=guard, ema=0.9)
    directory = RunDirectory(tmp_path / "run")
    directory.claim("training", "x", {}, resume=False)
    made = TrainingState(plan, directory)
    made.start(resume=False)
    made.best = (1, 0.0)
    return made


def test_guard_stops_training(tmp_path: Path) -> None:
    one = training(tmp_path, drop=0.2)
    check_stopping(one, verdicts(5))
    check_stopping(one, verdicts(3))  # two tenths: not more than allowed
    assert one.ended is None
    with pytest.warns(
        UserWarning, match=r"overfitting in epoch 0: robust accuracy fell from 50.0 to 20.0; training stops"
    ):
        check_stopping(one, verdicts(2))
    assert one.ended is not None


def test_guard_goes_back_with_more_attack_steps(tmp_path: Path) -> None:
    one = training(tmp_path, drop=0.2, action="back")
    model, average = one.engine.model, one.engine.average
    assert average is not None
    check_stopping(one, verdicts(5))
    good = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.on_step(model)
    one.controls = one.controls.uniform(3)
    check_stopping(one, verdicts(4))  # worse, but no collapse: the best epoch is unchanged
    with pytest.warns(UserWarning, match="goes back to the most robust epoch, with 2 times the attack steps"):
        check_stopping(one, verdicts(1))
    assert one.ended is None
    assert average.model is not None
    for found in (model, average.model):
        assert all(torch.equal(value, good[name]) for name, value in found.state_dict().items())
    assert one.controls.num_classes == 10
    attack = one.engine.objective.attack
    assert isinstance(attack, PGD)
    assert (attack.steps, attack.step_size) == (4, None)
    one.save()
    other = TrainingState(one.plan, one.directory)
    other.start(resume=True)
    assert other.engine.objective == one.engine.objective
    assert other.best_robust == 0.5


def test_guard_gives_up_after_four_times(tmp_path: Path) -> None:
    one = training(tmp_path, drop=0.2, action="back")
    check_stopping(one, verdicts(5))
    for times in (2, 4, 8, 16):
        with pytest.warns(UserWarning, match=f"with {times} times the attack steps"):
            check_stopping(one, verdicts(1))
    with pytest.warns(UserWarning, match="training stops"):
        check_stopping(one, verdicts(1))
    assert one.ended is not None
    assert one.engine.objective.attack.steps == 32  # type: ignore[attr-defined]


@for_each(
    ("changes", "message"),
    [
        ({"validation_per_class": 0}, "select = 'robust+worst' needs validation images"),
        ({"validation_per_class": 0, "select": "last", "policy": "wat"}, "policy 'wat' needs validation images"),
        ({"validation_per_class": 0, "select": "last", "patience": 3}, "patience needs validation images"),
        ({"validation_per_class": 0, "select": "last", "fawa": {}}, "fawa needs validation images"),
        ({"validation_per_class": 0, "select": "last", "guard": {}}, "guard needs validation images"),
        ({"fawa": {}, "ema": 0.9}, "fawa and ema both average the weights"),
        ({"fawa": {"treshold": 0.2}}, "did you mean 'threshold'"),
        ({"awp": {"gamma": -1}}, "gamma must be positive"),
        ({"guard": {"drop": 20}}, "drop must be a fraction between 0 and 1, got 20"),
        ({"guard": {"action": "pray"}}, "action = 'pray': must be 'stop' or 'back'"),
        ({"data.withot_class": 3}, "did you mean 'without_class'"),
    ],
)
def test_impossible_recipes_start_nothing(changes: dict[str, Any], message: str) -> None:
    assert message in refused(**changes)


def test_without_validation_the_last_epoch_is_the_best(tmp_path: Path) -> None:
    run = cw.train("digits/madry", out=tmp_path / "run", **{**QUICK, "validation_per_class": 0, "select": "last"})
    assert run.outcome.best_epoch == run.outcome.epochs == 2
    assert run.outcome.history[-1]["validation"]["robust"] is None
    checkpoints = run.directory / "checkpoints"
    assert (checkpoints / "best.safetensors").read_bytes() == (checkpoints / "last.safetensors").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [{"awp": {"gamma": 0.01}}, {"fawa": {"threshold": 0.0, "begin": 2}}, {"objective": "free", "attack": {}}],
    ids=["awp", "fawa", "free"],
)
def test_resumed_equals_uninterrupted_with(
    tmp_path: Path, stop_after: Callable[[int], Progress], changes: dict[str, Any]
) -> None:
    settings = {**QUICK, "epochs": 3, **changes}
    cw.train("digits/madry", out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        cw.train("digits/madry", out=tmp_path / "cut", progress=stop_after(30), **settings)
    cw.train("digits/madry", out=tmp_path / "cut", resume=True, **settings)
    for name in ("best.safetensors", "last.safetensors"):
        paths = [tmp_path / run / "checkpoints" / name for run in ("whole", "cut")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
