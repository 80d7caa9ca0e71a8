"""``python -m benchmarks``: benchmarks of this package against other libraries, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from torch import nn

from benchmarks.evaluate import bench_evaluation
from benchmarks.growth import bench_growth
from benchmarks.models import digits_net
from benchmarks.result import Bench, check_place
from benchmarks.train import bench_training
from classwise.cli.console import ConsoleProgress, guarded, print_error
from classwise.config.recipes import load_recipe, parse_overrides
from classwise.core.choices import EngineName
from classwise.core.devices import pick_device
from classwise.core.errors import InputError, unknown
from classwise.data import ImageSet, load_data
from classwise.evaluation.perturbations import read_attack, read_perturbations
from classwise.models.load import load_model
from classwise.training.plan import make_plan

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Benchmark this package against other libraries.")

Rounds = Annotated[int, typer.Option(help="Number of timed rounds, after one warm-up round.")]
Peers = Annotated[bool, typer.Option("--peers", help="Also measure other libraries.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: a GPU if available]")]
Out = Annotated[Path | None, typer.Option(help="Directory for bench.json, bench.md and bench.svg.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command("evaluate")
@guarded
def evaluate(
    model: Annotated[str | None, typer.Option(help="Model spec. [default: a small network, trained first]")] = None,
    weights: Annotated[Path | None, typer.Option(help="safetensors file, or .pt file with weights only.")] = None,
    data: Annotated[str | None, typer.Option(help="Data spec. [default: digits]")] = None,
    eps: Annotated[str | None, typer.Option(help="Radius. [default: the attack's, else 8/255; 0.2 on digits]")] = None,
    norm: Annotated[str | None, typer.Option(help="Linf or L2. [default: the attack's, else Linf]")] = None,
    images: Annotated[int, typer.Option(help="Number of test images (evenly spaced).")] = 500,
    batch_size: Annotated[int, typer.Option(help="Images per batch, for all libraries.")] = 250,
    attack: Annotated[
        list[str] | None, typer.Option(help="Attack spec; may be repeated. [default: pgd:steps=20,start=zero]")
    ] = None,
    rounds: Rounds = 5,
    peers: Peers = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    engine: Annotated[str, typer.Option(help="auto, eager or compiled.")] = "auto",
    device: Device = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time attacks; with --peers also those of torchattacks, foolbox, ART and AutoAttack, if installed."""
    place = pick_device(device)
    attacks = attack or ["pgd:steps=20,start=zero"]
    if model is None and eps is None and all(read_attack(one).eps is None for one in attacks):
        eps = "0.2"
    suite = read_perturbations(attacks, eps, norm)
    loaded, found, name = _subject(model, weights, data)
    _finish(
        lambda: bench_evaluation(
            loaded.to(place),
            found,
            suite,
            name=name,
            count=images,
            batch_size=batch_size,
            rounds=rounds,
            peers=peers,
            seed=seed,
            engine=_engine(engine),
            progress=ConsoleProgress(),
        ),
        out,
        as_json,
    )


@app.command("train")
@guarded
def train(
    recipe: Annotated[str, typer.Option(help="Recipe name or TOML file.")] = "digits/trades",
    override: Annotated[list[str] | None, typer.Option("-o", "--override", help="key=value; may be repeated.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps per round.")] = 10,
    rounds: Rounds = 5,
    peers: Annotated[bool, typer.Option("--peers", help="Also measure code in the style of published code.")] = False,
    device: Device = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time training steps; with --peers also TRADES or Madry in plain PyTorch, in the style of published code."""
    changes = parse_overrides(override or [])
    read = load_recipe(recipe, changes)
    plan = make_plan(read, pick_device(device), ConsoleProgress())
    _finish(
        lambda: bench_training(
            plan,
            objective=str(read.objective["name"]),
            overrides=changes,
            steps=steps,
            rounds=rounds,
            peers=peers,
            progress=ConsoleProgress(),
        ),
        out,
        as_json,
    )


@app.command("growth")
@guarded
def growth(rounds: Rounds = 5, device: Device = None, out: Out = None, as_json: Json = False) -> None:
    """Fit the growth of an attack's time and memory with images, classes, image size and steps."""
    place = pick_device(device)
    _finish(lambda: bench_growth(place, rounds=rounds, progress=ConsoleProgress()), out, as_json)


def _subject(model: str | None, weights: Path | None, data: str | None) -> tuple[nn.Module, ImageSet, str]:
    """Return the model, the images, and the name of the model."""
    if model is None and (weights is not None or data is not None):
        raise InputError("--weights and --data require --model; without it, a small network is trained on digits")
    if model is None:
        return digits_net(), load_data("digits", split="test"), "digits-cnn"
    if data is None:
        raise InputError(f"model {model!r} requires --data, the images to attack")
    images = load_data(data, split="test", progress=ConsoleProgress())
    classes = None if images.classes is None else len(images.classes)
    loaded = load_model(model, weights=weights, num_classes=classes, in_channels=images.images.shape[1])
    return loaded, images, model


def _finish(measure: Callable[[], Bench], out: Path | None, as_json: bool) -> None:
    """Measure, write and print. An interruption keeps the complete rounds."""
    if out is not None:
        check_place(out)
    try:
        found = measure()
    except KeyboardInterrupt:
        print_error("interrupted before the first round was complete: there is no result")
        raise typer.Exit(130) from None
    if out is not None:
        found.save(out)
    typer.echo(json.dumps(found.content, ensure_ascii=False) if as_json else found.markdown)
    if out is not None and not as_json:
        typer.echo(f"files: {out / 'bench.md'}, bench.svg, bench.json")
    if found.content["interrupted"]:
        raise typer.Exit(130)


def _engine(engine: str) -> EngineName:
    """Return an engine by its name."""
    if engine not in get_args(EngineName):
        raise unknown("engine", engine, get_args(EngineName))
    return cast(EngineName, engine)


if __name__ == "__main__":
    app()
