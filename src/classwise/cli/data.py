"""``classwise data``: get a data set ready, and see what is in it."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from classwise.cli.console import ConsoleProgress, guarded, say, say_json, table
from classwise.core.errors import InputError
from classwise.reporting.formatting import plain
from classwise.storage.files import atomic, write_json

if TYPE_CHECKING:
    from classwise.data import ImageSet

LISTED = 30
"""Up to so many classes are all listed; of more, those with the fewest and the most images."""
ENDS = 5

data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Get data sets ready, and see what is in them.")

Name = Annotated[str, typer.Argument(help="A data set, perhaps with settings, as cifar10 or cifar10:without=cat.")]


@data.command("prepare")
@guarded
def prepare(
    name: Name,
    folder: Annotated[
        Path | None,
        typer.Option("--from", help="A folder that holds it, as published. [default: CLASSWISE_DATA, else the hub]"),
    ] = None,
) -> None:
    """Read, check and cache a data set. Its folder is known from then on."""
    from classwise.data.load import prepare as prepared

    found, missing = prepared(name, None if folder is None else folder.expanduser(), ConsoleProgress())
    for split, images in found.items():
        size = "x".join(map(str, images.images.shape[1:]))
        say(f"{plain(name)}/{split}: {len(images)} images of {size} in {len(images.classes or ())} classes")
    for line in missing:
        say(f"not there: {plain(line)}")


@data.command("info")
@guarded
def info(
    name: Annotated[str, typer.Argument(help="A data set, folder:PATH, or file.py:factory.")],
    split: Annotated[str, typer.Option(help="Which part of the data.")] = "test",
    out: Annotated[Path | None, typer.Option(help="Directory for info.json and a sheet of images, sheet.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show what a data set holds: images of each class, size, channel means and deviations, where it comes from."""
    from classwise.data.describe import describe
    from classwise.data.load import load_data, source_of
    from classwise.data.sources import Factory

    source = source_of(name, split)
    images = load_data(name, split=split, progress=ConsoleProgress())
    origin = name if isinstance(source, Factory) else source.origin()
    found = describe(images)
    classes = list(images.classes or map(str, range(len(found.counts))))
    facts = {
        "name": images.name,
        "split": images.split,
        "from": origin,
        "n": len(images),
        "shape": list(images.images.shape[1:]),
        "dtype": str(images.images.dtype),
        "mean": list(found.mean),
        "std": list(found.std),
        "digest": images.digest(),
        "classes": [
            {"label": label, "class": named, "n": int(found.counts[label])} for label, named in enumerate(classes)
        ],
    }
    if out is not None:
        _save(out.expanduser(), facts, images, [plain(named) for named in classes])
    if as_json:
        say_json(facts)
        return
    _show(facts)
    if out is not None:
        say(f"\nsheet: {out / 'sheet.png'}")


def _save(out: Path, facts: dict[str, Any], images: ImageSet, names: list[str]) -> None:
    from classwise.data.describe import contact_sheet

    try:
        write_json(out / "info.json", facts)
        with atomic(out / "sheet.png") as temporary:
            contact_sheet(images, names).save(temporary, format="PNG")
    except OSError as error:
        raise InputError(f"cannot write into {out}: {error.strerror or error}") from error


def _show(facts: dict[str, Any]) -> None:
    channels, height, width = facts["shape"]
    say(f"{plain(facts['name'])}/{facts['split']}: {facts['n']} images, {channels}x{height}x{width} {facts['dtype']}")
    say(f"from: {plain(facts['from'])}")
    for what in ("mean", "std"):
        say(f"{what} of the channels: {', '.join(f'{value:.4f}' for value in facts[what])}")
    classes = facts["classes"]
    counts = sorted(one["n"] for one in classes)
    say(f"{len(classes)} classes of {counts[0]} to {counts[-1]} images, median {median(counts):g}\n")
    shown = classes
    if len(classes) > LISTED:
        by_count = sorted(classes, key=lambda one: (one["n"], one["label"]))
        shown = [*by_count[:ENDS], None, *by_count[-ENDS:]]
    rows = [
        ["...", "", ""] if one is None else [plain(one["class"]), str(one["label"]), str(one["n"])] for one in shown
    ]
    table("classes" if shown is classes else "fewest first", ["class", "label", "n"], rows)
