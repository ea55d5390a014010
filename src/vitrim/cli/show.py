"""``vitrim show``: one picture per image of what methods leave of it, block by block."""

from __future__ import annotations

from collections.abc import Mapping
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
    whole_numbers,
)
from vitrim.cli.output import Output
from vitrim.cli.progress import progress
from vitrim.errors import VitrimError

Files = Annotated[list[Path] | None, typer.Argument(metavar="IMAGE", help="image files, or folders that images lie in")]
Source = Annotated[str | None, typer.Option("--data", help="instead, images as for `vitrim eval`")]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="so many images only, spread evenly; default: 8 of --data")
]
Out = Annotated[Path, typer.Option("--out", help="folder for the pictures, one per image")]
PICTURES = Path("pictures")
Blocks = Annotated[
    str | None, typer.Option("--blocks", help="columns, from 0, with commas; default: those that change tokens")
]
Format = Annotated[str, typer.Option("--format", help="of the pictures: png or svg")]


def show(
    *,
    model: Model,
    files: Files = None,
    source: Source = None,
    limit: Limit = None,
    reading: Reading,
    data_option: DataOptions = None,
    methods: MethodsBesideDense = None,
    select: Select = None,
    out: Out = PICTURES,
    blocks: Blocks = None,
    format: Format = "png",
    machine: Machine,
    output: Output,
) -> None:
    """Draw what methods leave of images, block by block. One picture per image, a row per method.

    Each row names the prediction and the cost beside those of the dense model; methods that rank patches have their
    scores below, as heat maps. Models for segmentation and detection need --data with masks or boxes. Of a
    vision-language model: which patches the language model gets, with --select or without.
    """
    takes = "--blocks takes numbers of blocks with commas, e.g. 0,3,11"
    columns = None if blocks is None else whole_numbers(blocks, takes)
    with progress(f"loading {model.name}", "pictures") as signs:
        from vitrim.plots import show as plots
        from vitrim.report import Results

        drawn: list[Mapping[str, Any]] = []

        def on_progress(row: Mapping[str, Any]) -> None:
            drawn.append(row)
            signs.clear()
            output.print(*_lines(row))
            signs.move(len(drawn))

        if (source is None) == (not files):
            raise VitrimError("give the images to show: files or folders, or a dataset with --data; not both")
        machine.start()
        report = plots.show(
            model.spec(model.name, device=machine.device),
            methods or (),
            reading.spec(files if source is None else source, data_option=data_option, limit=limit),
            blocks=columns,
            select=select,
            out=Results(out, formats=format),
            seed=machine.seed,
            on_progress=on_progress,
        )
    output.write(**report.record)


def _lines(row: Mapping[str, Any]) -> list[str]:
    """The file of a picture, and the predictions that are in it.

    Example:
        >>> _lines({"image": "image 0", "file": "pictures/image_0.png", "dense": "cat (90 %)", "topk": "dog (60 %)"})
        ['wrote pictures/image_0.png', '  dense: cat (90 %); topk: dog (60 %)']
    """
    found = "; ".join(f"{name}: {text}" for name, text in row.items() if name not in ("image", "file"))
    return [f"wrote {row['file']}", f"  {found}"]
