"""``vitrim compare``: accuracy and latency of methods, in one table and one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrim.cli.bench import TimingOptions, numbers
from vitrim.cli.options import Data, Files, Machine, MethodsBesideDense, Model, Scoring, Sizes
from vitrim.cli.output import Output
from vitrim.progress import progress
from vitrim.report import show

if TYPE_CHECKING:
    from vitrim.measure.comparison import Comparison


def compare(
    *,
    model: Model,
    sizes: Sizes,
    data: Data,
    method: MethodsBesideDense = None,
    files: Files,
    at: Annotated[
        list[str] | None, typer.Option(help="batch sizes to time, e.g. 8, or 1,8; may repeat; default: 1,8")
    ] = None,
    timing: TimingOptions,
    scoring: Scoring,
    figure: Annotated[
        Path | None, typer.Option(help="draw loss over time per image to this file: .png or .svg")
    ] = None,
    machine: Machine,
    output: Output,
) -> None:
    """Compare methods by loss and latency. Measured as by `vitrim eval` and `vitrim bench`.

    The output ends with a verdict per method. Accuracy is on all images, time on some of them, dense and reduced in
    turn.
    """
    batches = numbers(at, "--at")
    found: list[Comparison] = []

    def on_report(report: Comparison) -> None:
        found[:] = [report]
        if not output.on_stdout:
            output.write(**report.record)  # after every setting, as the next may run out of memory

    try:
        with progress(f"loading {model.name}") as signs:
            from vitrim import style
            from vitrim.measure.compare import compare as measure

            given = timing.arguments() | ({"at": batches} if batches else {})
            if figure is not None:
                style.check(figure)
            machine.start()
            measure(
                model.spec(model.name, "PlacedModel", device=machine.device, img_sizes=sizes.given),
                files.beside(method),
                scoring.read(data),
                **given,
                seed=machine.seed,
                on_report=on_report,
                on_progress=signs.tell,
            )
            if figure is not None:
                style.save(found[0].figure, figure)
                found[0].files.append(figure)
    finally:  # also print partial results
        if found:
            show(output.console(), found[0])
            output.print(*(f"figure: {file}" for file in found[0].files))
            if output.on_stdout:
                output.write(**found[0].record)
