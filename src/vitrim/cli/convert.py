"""``vitrim convert``: weights from PyTorch's format to safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.output import Output


def convert(
    *,
    source: Annotated[Path, typer.Argument(metavar="IN.pth", help="a checkpoint of torch.save")],
    target: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="the file to write")],
    key: Annotated[
        str | None, typer.Option(help="the weights to convert, if several, e.g. model_ema; dots for nested keys")
    ] = None,
    output: Output,
) -> None:
    """Write the weights of a .pth file as safetensors. Keeps the names, and executes nothing in the file."""
    from vitrim.weights import convert_weights

    output.spare(source)
    count, values = convert_weights(source, target, key=key)
    output.console().print(f"{target}: {count} tensors, {values:,} values", highlight=False)
    output.write("convert", file=str(target), tensors=count, values=values)
