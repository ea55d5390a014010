"""``vitrim show``: pictures of the remaining tokens of images, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrim.cli.options import (
    DataOptions,
    Machine,
    MethodsBesideDense,
    Model,
    Reading,
    Select,
    Setup,
    whole_numbers,
)
from vitrim.cli.output import Output
from vitrim.errors import VitrimError
from vitrim.progress import progress

PICTURES = Path("pictures")


@dataclass(frozen=True, kw_only=True)
class PictureOptions(Setup):
    out: Annotated[Path, typer.Option(help="folder for the pictures, one per image")] = PICTURES
    blocks: Annotated[
        str | None, typer.Option(help="columns, from 0, with commas; default: those that change tokens")
    ] = None
    format: Annotated[str, typer.Option(help="of the pictures: png or svg")] = "png"


@dataclass(frozen=True, kw_only=True)
class ImagesToShow(Reading):
    files: Annotated[list[Path] | None, typer.Argument(metavar="IMAGE", help="image files, or folders of images")] = (
        None
    )
    source: Annotated[str | None, typer.Option("--data", help="a dataset instead, as for `vitrim eval`")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="number of images, spread evenly; default: 8 of --data")] = (
        None
    )
    data_option: DataOptions = None

    def read(self) -> Any:
        if (self.source is None) == (not self.files):
            raise VitrimError("give the images to show: files or folders, or a dataset with --data; not both")
        return self.spec(self.files if self.source is None else self.source)


def show(
    *,
    model: Model,
    images: ImagesToShow,
    methods: MethodsBesideDense = None,
    select: Select = None,
    pictures: PictureOptions,
    machine: Machine,
    output: Output,
) -> None:
    """Draw the remaining tokens of images, block by block. One picture per image, a row per method.

    Each row names prediction and cost, compared with the dense model; methods that rank patches also have heat maps of
    their scores. Models for segmentation and detection need --data with masks or boxes. For a vision-language model,
    pictures show the patches that the language model reads.
    """
    columns = whole_numbers(pictures.blocks, "--blocks takes numbers of blocks with commas, e.g. 0,3,11")
    with progress(f"loading {model.name}", "pictures") as signs:
        from vitrim.plots import show as plots
        from vitrim.results import Pictures

        drawn: list[Mapping[str, Any]] = []

        def on_progress(row: Mapping[str, Any]) -> None:
            drawn.append(row)
            signs.clear()
            output.print(*_lines(row))
            signs.move(len(drawn))

        machine.start()
        report = plots.show(
            model.spec(model.name, "PlacedModel", device=machine.device),
            methods or (),
            images.read(),
            blocks=columns,
            select=select,
            out=Pictures(pictures.out, [pictures.format]),  # type: ignore[list-item]
            seed=machine.seed,
            on_progress=on_progress,
        )
    output.print(*(f"note: {note}" for note in report.notes))
    output.write(**report.record)


def _lines(row: Mapping[str, Any]) -> list[str]:
    """The file of a picture, and its predictions.

    Example:
        >>> _lines({"image": "image 0", "file": "pictures/image_0.png", "dense": "cat (90 %)", "topk": "dog (60 %)"})
        ['wrote pictures/image_0.png', '  dense: cat (90 %); topk: dog (60 %)']
    """
    found = "; ".join(f"{name}: {text}" for name, text in row.items() if name not in ("image", "file"))
    return [f"wrote {row['file']}", f"  {found}"]
