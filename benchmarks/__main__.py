"""``python -m benchmarks``: this tool and its peers in one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from classwise.cli.console import ERR, ConsoleProgress, guarded, say, say_json, table

if TYPE_CHECKING:
    from torch import nn

    from benchmarks.result import Bench
    from classwise.data import ImageSet

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure this tool and its peers in one run.")

Rounds = Annotated[int, typer.Option(help="Measurements of everybody, after one warm-up round.")]
Peers = Annotated[bool, typer.Option("--peers", help="Also measure the others.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: a GPU where there is one]")]
Out = Annotated[Path | None, typer.Option(help="Directory for bench.json, bench.md and bench.svg.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@bench.command("evaluate")
@guarded
def evaluate(
    model: Annotated[str | None, typer.Option(help="As in classwise evaluate. [default: trained on the spot]")] = None,
    weights: Annotated[Path | None, typer.Option(help="safetensors, or .pt read as weights only.")] = None,
    data: Annotated[str | None, typer.Option(help="As in classwise evaluate. [default: digits]")] = None,
    eps: Annotated[str | None, typer.Option(help="Radius. [default: the attack's, else 8/255; 0.2 on digits]")] = None,
    norm: Annotated[str | None, typer.Option(help="Linf or L2. [default: the attack's, else Linf]")] = None,
    images: Annotated[int, typer.Option(help="So many of the test images, taken evenly.")] = 500,
    batch_size: Annotated[int | None, typer.Option(help="The same for everybody. [default: what fits]")] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="May be repeated. [default: pgd:steps=20,start=zero]")
    ] = None,
    rounds: Rounds = 5,
    peers: Peers = False,
    seed: Annotated[int, typer.Option(help="Of the attacks' random starts.")] = 0,
    engine: Annotated[str, typer.Option(help="auto, eager or compiled, as in classwise evaluate.")] = "auto",
    device: Device = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time attacks; with --peers beside torchattacks, foolbox, ART and AutoAttack, where they are installed."""
    from benchmarks.evaluate import bench_evaluation
    from classwise.api.resolve import checked_engine
    from classwise.core.devices import pick_device
    from classwise.evaluation.suite import read_attack, read_suite

    place = pick_device(device)
    attacks = attack or ["pgd:steps=20,start=zero"]
    if model is None and eps is None and all(read_attack(one).eps is None for one in attacks):
        eps = "0.2"
    suite = read_suite(attacks, eps, norm)
    loaded, found, name = _subject(model, weights, data)
    loaded = loaded.to(place)
    _finish(
        lambda: bench_evaluation(
            loaded,
            found,
            suite,
            name=name,
            count=images,
            batch_size=batch_size,
            rounds=rounds,
            peers=peers,
            seed=seed,
            engine=checked_engine(engine),
            progress=ConsoleProgress(),
        ),
        out,
        as_json,
    )


@bench.command("train")
@guarded
def train(
    recipe: Annotated[str, typer.Option(help="A recipe's name or a TOML file.")] = "digits/trades",
    override: Annotated[list[str] | None, typer.Option("-o", "--override", help="key=value; may be repeated.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps of everybody in a round.")] = 10,
    rounds: Rounds = 5,
    peers: Annotated[bool, typer.Option("--peers", help="Also measure the style of published code.")] = False,
    device: Device = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time training steps; with --peers beside plain float32 PyTorch as published code has it (TRADES, Madry)."""
    from benchmarks.train import bench_training
    from classwise.config.recipes import load_recipe, parse_overrides
    from classwise.core.devices import pick_device
    from classwise.training.plan import make_plan

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


@bench.command("growth")
@guarded
def growth(rounds: Rounds = 5, device: Device = None, out: Out = None, as_json: Json = False) -> None:
    """Fit how time and memory of an attack grow with images, classes, image size and steps."""
    from benchmarks.growth import bench_growth
    from classwise.core.devices import pick_device

    place = pick_device(device)
    _finish(lambda: bench_growth(place, rounds=rounds, progress=ConsoleProgress()), out, as_json)


def _subject(model: str | None, weights: Path | None, data: str | None) -> tuple[nn.Module, ImageSet, str]:
    """The model and the images, and what the model is called."""
    from benchmarks.subject import trained_digits
    from classwise.core.errors import InputError
    from classwise.data import load_data
    from classwise.models.load import load_model

    if model is None and (weights is not None or data is not None):
        raise InputError("--weights and --data go with --model: without one a small network is trained on digits")
    if model is None:
        return trained_digits(), load_data("digits", split="test"), "digits-cnn"
    if data is None:
        raise InputError(f"model {model!r} needs --data: what is it to be attacked on?")
    images = load_data(data, split="test", progress=ConsoleProgress())
    known = None if images.classes is None else len(images.classes)
    loaded = load_model(model, weights=weights, num_classes=known, in_channels=images.images.shape[1])
    return loaded, images, model


def _finish(measure: Callable[[], Bench], out: Path | None, as_json: bool) -> None:
    """Measure, write and show. What was measured before an interruption is written and shown too."""
    from benchmarks.save import check_place, save

    if out is not None:
        check_place(out)
    try:
        found = measure()
    except KeyboardInterrupt:
        ERR.print("interrupted before the first round was complete: there is no result")
        raise typer.Exit(130) from None
    if out is not None:
        save(found, out)
    if as_json:
        say_json(found.model_dump(mode="json", by_alias=True))
    else:
        _show(found)
        if out is not None:
            say(f"\nfiles: {out / 'bench.md'}, bench.svg, bench.json")
    if found.interrupted:
        raise typer.Exit(130)


def _show(found: Bench) -> None:
    for position, one in enumerate(found.tables()):
        if position:
            say("")
        table(one.title, one.columns, one.rows)
        say(one.about)
        if one.foot:
            say(one.foot)
    for note in found.notes:
        say(f"note: {note}")


if __name__ == "__main__":
    bench()
