"""``vitrim eval``: accuracy of reduced models next to the dense one, on a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.options import BatchSize, Data, Dtype, Machine, MethodsBesideDense, Model, Workers, parse_options
from vitrim.cli.output import Output, is_first_process, progress_bar

Out = Annotated[Path | None, typer.Option("--out", help="keep what is gathered in this folder, every half minute")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from what is in --out")]
ProtocolChanges = Annotated[
    list[str] | None,
    typer.Option("--protocol", help="of segmentation, key=value: mode, window, stride, size, side, flip; may repeat"),
]
DecisionsFolder = Annotated[
    Path | None,
    typer.Option("--decisions", help="write where every token went into this folder, one .npz per method"),
]

PredictionsFile = Annotated[
    Path | None,
    typer.Option(
        "--predictions",
        help="write the label and every model's prediction and its probability into this file, .csv or .parquet, a row "
        "per image",
    ),
]


def evaluate(
    *,
    model: Model,
    data: Data,
    methods: MethodsBesideDense = None,
    batch_size: BatchSize = 32,
    dtype: Dtype = "fp32",
    workers: Workers = 0,
    out: Out = None,
    resume: Resume = False,
    decisions: DecisionsFolder = None,
    predictions: PredictionsFile = None,
    protocol: ProtocolChanges = None,
    machine: Machine,
    output: Output,
) -> None:
    """Score reduced models next to the dense one on labelled images. Accuracy, agreement, cosine, MACs, tokens.

    All methods see the same batches, in one pass over the data. If it stops half-way, what was gathered is kept. Many
    processes share the batches: accelerate launch -m vitrim eval ...
    """
    from vitrim.measure import evaluation
    from vitrim.report import Report

    reports: list[Report] = []
    try:
        with progress_bar() as progress:
            report = evaluation.evaluate(
                model.name,
                methods,
                data.source,
                task=data.task,
                **data.reading,
                data_options=parse_options(data.data_option, "data option"),
                limit=data.limit,
                protocol=parse_options(protocol, "protocol option"),
                **model.arguments,
                batch_size=batch_size,
                dtype=dtype,
                workers=workers,
                **machine.arguments,
                out=out,
                resume=resume,
                decisions=decisions,
                predictions=predictions,
                on_progress=progress,
                on_stop=reports.append,
            )
        reports.append(report)
    finally:
        for found in reports if is_first_process() else []:
            output.finish(found)
            for file in found.files:
                output.print(f"{'predictions' if file == predictions else 'decisions'}: {file}")
