"""``vitrim compare``: what methods lose and how much time they save, in one table and one picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli.bench import Engines, MinSeconds, Precisions, Repeats, budget_of, sizes, words
from vitrim.cli.evaluate import ProtocolChanges
from vitrim.cli.options import BatchSize, Data, Files, Machine, MethodsBesideDense, Model, Workers, parse_options
from vitrim.cli.output import Output
from vitrim.cli.progress import progress
from vitrim.report import show

if TYPE_CHECKING:
    from vitrim.speed.compare import Comparison

At = Annotated[
    list[str] | None, typer.Option("--at", help="batch sizes to time, e.g. 8, or 1,8; may repeat; default: 1,8")
]
Figure = Annotated[
    Path | None, typer.Option("--figure", help="draw loss over time per image into this file: .png or .svg")
]


def compare(
    *,
    model: Model,
    data: Data,
    method: MethodsBesideDense = None,
    files: Files,
    batch_size: BatchSize = 32,
    at: At = None,
    engine: Engines = None,
    precision: Precisions = None,
    repeats: Repeats = 10,
    min_seconds: MinSeconds = 1.0,
    workers: Workers = 0,
    protocol: ProtocolChanges = None,
    figure: Figure = None,
    machine: Machine,
    output: Output,
) -> None:
    """Compare methods by what they lose and by the time they take. Measured as `vitrim eval` and `vitrim bench` do.

    In the end it says of every method whether it pays, and which loses least for its time. Accuracy is that of all
    images; time is measured on some of them, dense and reduced models in turn.
    """
    lists = {"at": sizes(at, "--at"), "engine": words(engine, "--engine"), "precision": words(precision, "--precision")}
    given: dict[str, Any] = {name: values for name, values in lists.items() if values}
    changes = parse_options(protocol, "protocol option")
    found: list[Comparison] = []

    def on_report(report: Comparison) -> None:
        found[:] = [report]
        if not output.on_stdout:
            output.write(**report.record)  # after every setting: the next may exhaust the machine

    try:
        with progress(f"loading {model.name}") as signs:
            from vitrim.plots import style
            from vitrim.speed.compare import compare as measure

            if figure is not None:
                style.check(figure)
            machine.start()
            measure(
                model.spec(model.name, device=machine.device),
                files.beside(method),
                data.read(protocol=changes, batch_size=batch_size, workers=workers),
                **given,
                budget=budget_of(repeats, min_seconds),
                seed=machine.seed,
                on_report=on_report,
                on_progress=signs.tell,
            )
            if figure is not None:
                style.save(found[0].figure, figure)
                found[0].files.append(figure)
    finally:  # hours of work are not lost
        if found:
            show(output.console(), found[0])
            output.print(*(f"figure: {file}" for file in found[0].files))
            if output.on_stdout:
                output.write(**found[0].record)
