"""``vitrim eval``: accuracy of reduced models next to the dense model, on a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrim.cli.options import (
    Data,
    Dtype,
    Files,
    Machine,
    MethodsBesideDense,
    Model,
    PageScoring,
    Setup,
    Sizes,
)
from vitrim.cli.output import Output
from vitrim.progress import is_first_process, progress

if TYPE_CHECKING:
    from vitrim.report import Report


@dataclass(frozen=True, kw_only=True)
class Evaluating(Setup):
    dtype: Dtype = "fp32"
    out: Annotated[Path | None, typer.Option(help="save partial results in this folder, every half minute")] = None
    resume: Annotated[bool, typer.Option("--resume", help="continue from the results in --out")] = False
    decisions: Annotated[Path | None, typer.Option(help="write every token's decisions to this folder")] = None
    predictions: Annotated[
        Path | None,
        typer.Option(
            help="write labels, and every model's predictions and probabilities, to this file (.csv, .parquet)"
        ),
    ] = None


def evaluate(
    *,
    model: Model,
    sizes: Sizes,
    data: Data,
    methods: MethodsBesideDense = None,
    files: Files,
    scoring: PageScoring,
    how: Evaluating,
    machine: Machine,
    output: Output,
) -> None:
    """Score reduced models next to the dense model on labelled images. Accuracy, agreement, cosine, MACs, tokens.

    MODEL may be an exported file, or a retriever of pages such as ColPali. All methods run on the same batches, in one
    pass; if it is interrupted, partial results are kept. Several processes share the batches: accelerate launch -m
    vitrim eval ...
    """
    reports: list[Report] = []
    try:
        with progress(f"loading {model.name}") as signs:
            from vitrim.measure import evaluation
            from vitrim.results import ScoredResults

            machine.start()
            report = evaluation.evaluate(
                model.spec(
                    files.model(model.name),
                    "ScoredModel",
                    device=machine.device,
                    dtype=how.dtype,
                    img_sizes=sizes.given,
                ),
                files.beside(methods),
                scoring.read(data),
                out=ScoredResults(how.out, how.resume, decisions=how.decisions, predictions=how.predictions),
                seed=machine.seed,
                on_progress=signs.move,
                on_report=reports.append,
            )
        reports.append(report)
    finally:
        for found in reports if is_first_process() else []:
            output.finish(found)
            for file in found.files:
                output.print(f"{'predictions' if file == how.predictions else 'decisions'}: {file}")
