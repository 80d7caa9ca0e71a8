"""``classwise data``: prepare data sets and describe their contents."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from classwise.cli.console import ConsoleProgress, guarded, say, say_json, table
from classwise.cli.parameters import Command, Group, Json, option, output
from classwise.core.errors import InputError

if TYPE_CHECKING:
    from classwise.data import ImageSet

LISTED = 30
"""Maximum number of classes that are all listed; of more, those with the fewest and the most images."""
ENDS = 5

data = typer.Typer(
    cls=Group, no_args_is_help=True, rich_markup_mode=None, help="Prepare data sets and describe their contents."
)


@data.command("prepare", cls=Command)
@guarded
def prepare(
    name: Annotated[
        str,
        typer.Argument(help="Data set name, optionally with settings, e.g. cifar10:without=cat.", metavar="DATA"),
    ],
    folder: Annotated[
        Path | None,
        option("Directory with the published files. [default: CLASSWISE_DATA, else the hub]", "DIR", "--from"),
    ] = None,
) -> None:
    """Read, check and cache a data set, and record its directory.

    Examples:
      classwise data prepare cifar10 --from /data/cifar-10-batches-py
    """
    from classwise.data.load import prepare
    from classwise.reporting.formatting import plain

    found, missing = prepare(name, None if folder is None else folder.expanduser(), ConsoleProgress())
    for split, images in found.items():
        size = "x".join(map(str, images.images.shape[1:]))
        say(f"{plain(name)}/{split}: {len(images)} images of {size} in {len(images.classes or ())} classes")
    for line in missing:
        say(f"missing: {plain(line)}")


@data.command("info", cls=Command)
@guarded
def info(
    name: Annotated[str, typer.Argument(help="Data set name, folder:PATH, or FILE.py:FACTORY.", metavar="DATA")],
    split: Annotated[str, option("Data split.", "SPLIT")] = "test",
    out: Annotated[Path | None, output("Directory for info.json and sheet.png, a sheet of sample images.")] = None,
    as_json: Json = False,
) -> None:
    """Show the origin, image size, channel statistics and images per class of a data set.

    Examples:
      classwise data info digits --out digits-info
    """
    from classwise.data.describe import describe
    from classwise.data.load import load_data, source_of
    from classwise.data.objects import Factory
    from classwise.reporting.formatting import plain

    source = source_of(name, split)
    images = load_data(name, split=split, progress=ConsoleProgress())
    origin = name if isinstance(source, Factory) else source.origin()
    statistics = describe(images)
    classes = list(images.classes or map(str, range(len(statistics.counts))))
    facts = {
        "name": images.name,
        "split": images.split,
        "from": origin,
        "n": len(images),
        "shape": list(images.images.shape[1:]),
        "dtype": str(images.images.dtype),
        "mean": list(statistics.mean),
        "std": list(statistics.std),
        "digest": images.digest(),
        "classes": [
            {"label": label, "class": name, "n": int(statistics.counts[label])} for label, name in enumerate(classes)
        ],
    }
    if out is not None:
        _save(out.expanduser(), facts, images, [plain(name) for name in classes])
    if as_json:
        say_json(facts)
        return
    _show(facts)
    if out is not None:
        say(f"\nsheet: {out / 'sheet.png'}")


def _save(out: Path, facts: dict[str, Any], images: ImageSet, names: list[str]) -> None:
    from classwise.data.describe import contact_sheet
    from classwise.storage.files import atomic, write_json

    try:
        write_json(out / "info.json", facts)
        with atomic(out / "sheet.png") as temporary:
            contact_sheet(images, names).save(temporary, format="PNG")
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror or error}") from error


def _show(facts: dict[str, Any]) -> None:
    from classwise.reporting.formatting import plain

    channels, height, width = facts["shape"]
    say(f"{plain(facts['name'])}/{facts['split']}: {facts['n']} images, {channels}x{height}x{width} {facts['dtype']}")
    say(f"from: {plain(facts['from'])}")
    for name in ("mean", "std"):
        say(f"{name} of the channels: {', '.join(f'{value:.4f}' for value in facts[name])}")
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
