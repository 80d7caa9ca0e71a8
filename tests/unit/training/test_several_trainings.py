"""Several interleaved trainings give the results of single trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import classwise as cw
from classwise.config.recipes import load_recipe
from classwise.core.errors import Diverged, InputError
from classwise.core.progress import Progress

WORKERS = pytest.mark.parametrize("workers", [1, 2])
SHORT: dict[str, Any] = {"epochs": 2, "validation_per_class": 10, "batch_size": 200}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "checkpoints" / "last.safetensors")


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


@WORKERS
def test_parallel_training_equals_single_training(tmp_path: Path, workers: int) -> None:
    recipes = {
        tmp_path / "a": load_recipe("digits/trades", {**SHORT, "seed": 0}),
        tmp_path / "b": load_recipe("digits/trades", {**SHORT, "seed": 1}),
        tmp_path / "c": load_recipe("digits/wat", {**SHORT, "epochs": 1}),
    }
    before = torch.get_rng_state()
    runs = cw.train_together(recipes, workers=workers)
    assert torch.equal(torch.get_rng_state(), before)
    assert [run.directory for run in runs] == list(recipes)
    assert [run.outcome.epochs for run in runs] == [2, 2, 1]
    for run, recipe in zip(runs, recipes.values(), strict=True):
        alone = cw.train(recipe, out=tmp_path / f"alone-{run.directory.name}")
        assert same(run.directory, alone.directory)
        mine, theirs = run.outcome.history, alone.outcome.history
        assert [record["loss"] for record in mine] == [record["loss"] for record in theirs]
    assert not same(runs[0].directory, runs[1].directory)


@WORKERS
def test_parallel_training_resumes(tmp_path: Path, stop_after: Callable[[int], Progress], workers: int) -> None:
    recipes = {tmp_path / str(seed): load_recipe("digits/trades", {**SHORT, "seed": seed}) for seed in (0, 1)}
    steps = len(range(0, 1000, 200)) * 3
    with pytest.raises(KeyboardInterrupt):
        cw.train_together(recipes, workers=workers, progress=stop_after(steps))
    runs = cw.train_together(recipes, workers=workers, resume=True)
    for run, recipe in zip(runs, recipes.values(), strict=True):
        alone = cw.train(recipe, out=tmp_path / f"alone-{run.directory.name}")
        assert same(run.directory, alone.directory)


@WORKERS
def test_diverged_run_does_not_stop_others(tmp_path: Path, workers: int) -> None:
    wild = {**SHORT, "optimizer": {"name": "sgd", "lr": 1e6}}
    recipes = {
        tmp_path / "wild": load_recipe("digits/standard", wild),
        tmp_path / "tame": load_recipe("digits/standard", SHORT),
    }
    with pytest.raises(Diverged):
        cw.train_together(recipes, workers=workers)
    assert weights(tmp_path / "tame")
    assert not (tmp_path / "wild" / "checkpoints" / "last.safetensors").exists()


def test_no_recipe_is_one_line_error() -> None:
    with pytest.raises(InputError, match="no recipe to train"):
        cw.train_together({})
