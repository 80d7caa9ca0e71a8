"""The training loop: reproducible, resumable with bit-identical results, and with correct metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import classwise as cw
from classwise.attacks import PGD
from classwise.config.recipes import Recipe, load_recipe
from classwise.core.errors import Diverged, InputError
from classwise.core.progress import Progress
from classwise.data import load_data, to_float
from classwise.training.checkpoint import load_state
from classwise.training.engine import check_precision

QUICK: dict[str, Any] = {"epochs": 3, "attack": {"steps": 2}, "validation_per_class": 5, "ema": 0.9}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_state(directory / "checkpoints" / "last.pt")


def same(one: Any, two: Any) -> bool:
    """Bitwise equality of nested containers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def without_times(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "history": [{**record, "seconds": None} for record in state["history"]]}


@pytest.mark.parametrize("recipe", ["digits/standard", "digits/madry", "digits/trades", "digits/wat"])
def test_resumed_equals_uninterrupted(tmp_path: Path, stop_after: Callable[[int], Progress], recipe: str) -> None:
    cw.train(recipe, out=tmp_path / "whole", **QUICK)
    with pytest.raises(KeyboardInterrupt):
        cw.train(recipe, out=tmp_path / "cut", progress=stop_after(23), **QUICK)
    assert load_state(tmp_path / "cut" / "checkpoints" / "last.pt")["epoch"] == 1
    torch.manual_seed(12345)  # intermediate random numbers must not matter
    cw.train(recipe, out=tmp_path / "cut", resume=True, **QUICK)
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert same(without_times(whole), without_times(cut))
    for name in ("best.safetensors", "last.safetensors"):
        paths = [tmp_path / run / "checkpoints" / name for run in ("whole", "cut")]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_killed_process_resumes_to_the_same_weights(tmp_path: Path) -> None:
    overrides = ["-o", "epochs=4", "-o", "attack.steps=4", "-o", "validation_per_class=5"]
    base = [sys.executable, "-m", "classwise", "train", "digits/wat", *overrides, "--device", "cpu", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*base, str(tmp_path / "whole")], check=True, capture_output=True, env=environment)

    process = subprocess.Popen([*base, str(tmp_path / "cut")], stderr=subprocess.DEVNULL, env=environment)
    first = tmp_path / "cut" / "checkpoints" / "last.pt"
    deadline = time.monotonic() + 120
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert load_state(first)["epoch"] < 4
    subprocess.run([*base, str(tmp_path / "cut"), "--resume"], check=True, capture_output=True, env=environment)
    assert same(without_times(weights(tmp_path / "whole")), without_times(weights(tmp_path / "cut")))


def test_same_seed_same_weights_other_seed_other_weights(tmp_path: Path) -> None:
    states = []
    for number, seed in enumerate([0, 0, 1]):
        cw.train("digits/madry", out=tmp_path / str(number), seed=seed, **QUICK)
        states.append(weights(tmp_path / str(number))["model"])
    assert same(states[0], states[1])
    assert not same(states[0], states[2])


def test_training_restores_the_callers_random_state(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    cw.train("digits/standard", out=tmp_path / "run", epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_metrics_can_be_recomputed_from_weights(tmp_path: Path) -> None:
    """The validation metrics of the last line are recomputed from saved weights and indices."""
    run = cw.train("digits/trades", out=tmp_path, epochs=2, validation_per_class=8)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    indices = json.loads((tmp_path / "validation.json").read_text())["indices"]
    data = load_data("digits", split="train").take(np.array(indices))
    assert np.bincount(data.labels).tolist() == [8] * 10
    model = run.load("last")
    with torch.no_grad():
        predicted = model(to_float(data.images)).argmax(1).numpy()
    right = predicted == data.labels
    assert lines[-1]["validation"]["natural"]["overall"] == pytest.approx(100 * right.mean(), abs=1e-3)
    by_class = [100 * right[data.labels == k].mean() for k in range(10)]
    assert lines[-1]["validation"]["natural"]["by_class"] == pytest.approx(by_class, abs=1e-3)
    assert lines[-1]["train"]["n"] == [102] * 10
    assert lines[-1]["validation"]["n"] == [8] * 10
    assert lines[-1]["validation"]["robust"]["overall"] < lines[-1]["validation"]["natural"]["overall"]


def test_validation_images_are_never_trained_on_and_never_test_images(tmp_path: Path) -> None:
    cw.train("digits/standard", out=tmp_path, epochs=1)
    held_out = set(json.loads((tmp_path / "validation.json").read_text())["indices"])
    train, test = load_data("digits", split="train"), load_data("digits", split="test")
    assert len(held_out) == 250
    assert held_out <= set(range(len(train)))
    assert len(train) + len(test) == 1797
    images = {image.tobytes() for image in train.images}
    # scikit-learn's digits contain a few identical scans; all other images must be new.
    assert sum(image.tobytes() in images for image in test.images) <= 2


def test_best_is_the_epoch_with_the_best_score(tmp_path: Path) -> None:
    run = cw.train("digits/madry", out=tmp_path, epochs=5, attack={"steps": 2}, select="worst")
    scores = [record["score"] for record in run.outcome.history]
    assert run.outcome.best_epoch == int(np.argmax(scores)) + 1
    worst = [record["validation"]["robust"]["worst"]["value"] for record in run.outcome.history]
    assert scores == pytest.approx([value / 100 for value in worst], abs=1e-5)
    best, last = run.load("best").state_dict(), run.load("last").state_dict()
    assert same(dict(best), dict(last)) == (run.outcome.best_epoch == 5)


def test_wat_changes_the_weights_and_records_them(tmp_path: Path) -> None:
    run = cw.train("digits/wat", out=tmp_path, **{**QUICK, "policy": {"name": "wat", "eta": 0.5}})
    first, second, third = (record["controls"] for record in run.outcome.history)
    assert first == {}
    assert np.mean(second["weight_nat"]) == pytest.approx(1, abs=1e-5)
    assert np.std(third["weight_nat"]) > 0.01
    losses = np.zeros(11)
    for record in run.outcome.history[:2]:
        by_class = np.add(record["validation"]["loss_nat"], np.multiply(6.0, record["validation"]["loss_adv"]))
        losses += np.append(by_class, by_class.mean())
    shares = np.exp(0.5 * losses) / np.exp(0.5 * losses).sum()
    assert third["weight_nat"] == pytest.approx(10 * shares[:10] + shares[10], abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")
def test_divergence_stops_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    sgd = {"name": "sgd", "lr": 0.05}
    cw.train("digits/standard", out=tmp_path, epochs=2, optimizer=sgd, schedule="constant")
    state = load_state(tmp_path / "checkpoints" / "last.pt")
    state["model"]["conv1.weight"].mul_(float("nan"))
    from classwise.training.checkpoint import save_state

    state.pop("schema")
    state["epoch"] = 1
    save_state(tmp_path / "checkpoints" / "last.pt", state)
    with pytest.raises(Diverged, match=r"diverged in epoch 2 \(loss nan\); the last good checkpoint is .*last.pt"):
        cw.train("digits/standard", out=tmp_path, epochs=2, optimizer=sgd, schedule="constant", resume=True)


def test_exploding_loss_stops(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="training diverged in epoch"):
        cw.train("digits/standard", out=tmp_path, epochs=10, optimizer="sgd:lr=100", schedule="constant")


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    """SGD without momentum moves by lr times the clipped norm at most."""
    recipe = {"optimizer": "sgd:lr=1,momentum=0,weight_decay=0", "schedule": "constant", "batch_size": 10_000}
    cw.train("digits/standard", out=tmp_path / "a", epochs=1, clip=1e-3, **recipe)
    cw.train("digits/standard", out=tmp_path / "b", epochs=2, clip=1e-3, **recipe)
    one, two = weights(tmp_path / "a")["model"], weights(tmp_path / "b")["model"]
    moved = torch.sqrt(sum(((one[name] - two[name]) ** 2).sum() for name in one))
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


def test_bf16_trains_or_raises(tmp_path: Path) -> None:
    settings = {"epochs": 6, "attack": {"steps": 2}, "precision": "bf16", "eps": "0.05"}
    try:
        check_precision("bf16", torch.device("cpu"))
    except InputError:
        with pytest.raises(InputError, match="precision = 'bf16' does not work on this CPU"):
            cw.train("digits/madry", out=tmp_path, device="cpu", **settings)
        assert not list(tmp_path.iterdir())
        return
    run = cw.train("digits/madry", out=tmp_path, device="cpu", **settings)
    assert run.outcome.history[-1]["validation"]["natural"]["overall"] > 60
    assert all(value.dtype == torch.float32 for value in weights(tmp_path)["model"].values())


def test_averaged_weights_are_validated_and_saved(tmp_path: Path) -> None:
    """After two one-batch epochs the average is d · w_1 + (1 - d) · w_2 with d = min(0.75, 1 / 10)."""
    settings = {"ema": 0.75, "batch_size": 10_000, "optimizer": "sgd:lr=0.5", "schedule": "constant"}
    cw.train("digits/standard", out=tmp_path / "one", epochs=1, **settings)
    run = cw.train("digits/standard", out=tmp_path / "two", epochs=2, **settings)
    one, two = weights(tmp_path / "one")["model"], weights(tmp_path / "two")["model"]
    saved = run.load("last").state_dict()
    for name in one:
        assert torch.allclose(saved[name], 0.1 * one[name] + 0.9 * two[name], atol=1e-6)
    assert not torch.equal(saved["conv1.weight"], two["conv1.weight"])


def test_validation_uses_the_validation_attack(tmp_path: Path) -> None:
    """Robust validation accuracy is under ``validation_attack``, whatever the objective."""
    run = cw.train("digits/standard", out=tmp_path, epochs=3, validation_attack="pgd:steps=1,step_size=1e-6,start=zero")
    last = run.outcome.history[-1]["validation"]
    assert last["robust"]["overall"] == last["natural"]["overall"]


def test_recipe_object_and_overrides(tmp_path: Path) -> None:
    recipe = load_recipe("digits/wat", {"epochs": 1, "objective.beta": 3})
    assert isinstance(recipe, Recipe)
    run = cw.train(recipe, out=tmp_path, seed=4)
    asked = json.loads((tmp_path / "run.json").read_text())["training"]["asked"]
    assert (asked["seed"], asked["objective"]["beta"], run.recipe.seed) == (4, 3, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"objective": "tradse"}, "unknown objective 'tradse': did you mean 'trades'?"),
        ({"policy": "wta"}, "unknown policy 'wta': did you mean 'wat'?"),
        ({"policy": "wat:etta=1"}, "did you mean 'eta'?"),
        ({"objective": {"name": "trades", "attack": "pgd"}}, "objective.attack cannot be set"),
        ({"attack": {"step": 3}}, "did you mean 'steps'?"),
        ({"eps": 0}, "eps must be a positive number, got 0"),
        ({"eps": -0.1}, "eps must be a positive number, got -0.1"),
        ({"epochs": 0}, "epochs = 0: must be at least 1"),
        ({"epoch": 3}, "did you mean 'epochs'?"),
        ({"select": "test"}, "select = 'test'"),
        ({"validation_per_class": 200}, "class"),
        ({"model": "resnet81"}, "unknown model 'resnet81': did you mean 'resnet18'?"),
        ({"data": "digit"}, "did you mean 'digits'?"),
        ({"optimizer": "sgd:lr=0"}, "lr must be positive, got 0.0"),
        ({"ema": 1}, "ema = 1: must be less than 1"),
        ({"optimizer": "adam:weight_decay=-1"}, "weight_decay must not be negative, got -1.0"),
        ({"optimizer": "sgd:momentum=0,nesterov=true"}, "nesterov needs a momentum above 0"),
        ({"objective": "trades:beta=-1"}, "beta must not be negative, got -1.0"),
        ({"schedule": "step:gamma=-1"}, "gamma must be positive, got -1.0"),
        ({"schedule": "cosine:warmup=-1"}, "warmup must not be negative, got -1.0"),
        ({"augment": {"crop": 8}}, "augment.crop = 8 must be smaller than the image (8 pixels)"),
        ({"seed": 10**23}, "seed"),
        ({"model": "small-cnn"}, "the model fails on images of 1x8x8"),
        ({"attack": {"norm": "L2"}}, "attack 'PGD' sets norm = L2, but runs with norm = Linf"),
    ],
)
def test_bad_recipes_start_nothing(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        cw.train("digits/wat", out=tmp_path / "run", **overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("nn.Sequential(nn.Flatten(), nn.Linear(64, 7))", "the model has 7 outputs, but digits has 10 classes"),
        ("nn.Sequential(nn.Flatten(), nn.Linear(64, 20))", "the model has 20 outputs, but digits has 10 classes"),
        ("nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()", "training requires a float32 model"),
        ("nn.Flatten()", "no trainable parameter"),
        ("nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)", "no trainable parameter"),
        ("nn.Sequential(nn.Flatten(), nn.Linear(9, 10))", "the model fails on images of 1x8x8"),
    ],
)
def test_models_that_cannot_be_trained_start_nothing(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"from torch import nn\ndef net():\n    return {code}\n")
    with pytest.raises(InputError, match=message):
        cw.train("digits/madry", out=tmp_path / "run", model=f"{tmp_path}/mine.py:net", epochs=1)
    assert not (tmp_path / "run").exists()


def test_batch_norm_and_a_last_batch_of_one(tmp_path: Path) -> None:
    code = "nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))"
    (tmp_path / "mine.py").write_text(f"from torch import nn\ndef net():\n    return {code}\n")
    settings = {"model": f"{tmp_path}/mine.py:net", "epochs": 1, "batch_size": 849, "validation_per_class": 25}
    run = cw.train("digits/standard", out=tmp_path / "run", **settings)
    assert sum(run.outcome.history[0]["train"]["n"]) == 849


@pytest.mark.parametrize("content", [b"", b"some text", b"PK\x03\x04 torn"])
def test_damaged_checkpoint_is_one_line_error(tmp_path: Path, content: bytes) -> None:
    cw.train("digits/standard", out=tmp_path, epochs=1)
    (tmp_path / "checkpoints" / "last.pt").write_bytes(content)
    with pytest.raises(InputError, match=r"last\.pt is damaged: delete the run directory and train again$") as caught:
        cw.train("digits/standard", out=tmp_path, epochs=1, resume=True)
    assert "\n" not in str(caught.value)


def test_checkpoint_of_another_run_is_one_line_error(tmp_path: Path) -> None:
    from classwise.training.checkpoint import save_state

    cw.train("digits/standard", out=tmp_path, epochs=1)
    save_state(tmp_path / "checkpoints" / "last.pt", {"epoch": 1})
    with pytest.raises(InputError, match=r"last\.pt does not match this run: KeyError"):
        cw.train("digits/standard", out=tmp_path, epochs=1, resume=True)


def test_plan_has_no_field_for_test_data() -> None:
    """Plan and phases have no field for another data set, except extra images, or for the name of a split."""
    from dataclasses import fields

    from classwise.training.data import Phase
    from classwise.training.plan import Plan

    held = [f for kind in (Plan, Phase) for f in fields(kind)]
    assert [f.name for f in held if "ImageSet" in str(f.type)] == ["extra", "images"]
    assert not [f.name for f in held if "split" in f.name or "test" in f.name]


def test_attack_defaults_are_those_of_the_papers() -> None:
    from classwise.objectives import Trades

    assert Trades().attack == PGD(steps=10, loss="kl", start="gaussian")
    assert Trades().beta == 6


def test_trains_the_users_own_model_on_the_users_own_data(tmp_path: Path) -> None:
    code = """
import torch
def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
def data(split):
    random = torch.Generator().manual_seed(len(split))
    y = torch.arange(90) % 3
    x = torch.rand(90, 1, 4, 4, generator=random) * 0.5
    x[torch.arange(90), 0, y, y] += 0.5
    return x, y
"""
    (tmp_path / "mine.py").write_text(code)
    model, data = f"{tmp_path}/mine.py:net", f"{tmp_path}/mine.py:data"
    settings = {"epochs": 20, "eps": "0.05", "validation_per_class": 5, "optimizer": "adam:lr=0.1"}
    run = cw.train("digits/madry", out=tmp_path / "run", model=model, data=data, **settings)
    report = cw.evaluate(str(run.directory), data, attacks=["pgd:steps=3"], eps="0.05")
    assert report["natural"].overall.value > 80
    assert len(report["pgd"].by_class) == 3
