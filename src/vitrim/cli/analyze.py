"""``vitrim analyze``: a report on the effects of reductions on tokens and features."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli.options import (
    BatchSize,
    DataOptions,
    Dtype,
    Limit,
    Machine,
    MethodsBesideDense,
    Reading,
    Setup,
    Weights,
    Workers,
    whole_numbers,
)
from vitrim.cli.output import Output
from vitrim.errors import VitrimError
from vitrim.progress import progress

if TYPE_CHECKING:
    from vitrim.report import Report


@dataclass(frozen=True, kw_only=True)
class Models(Weights):
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="model, as for `vitrim eval`; with --compare: two or more reports"),
    ] = None
    more: Annotated[
        list[str] | None,
        typer.Option("--model", help="a further model, run with the same methods on the same images; may repeat"),
    ] = None

    def every(self) -> list[str]:
        if not self.names:
            raise VitrimError("give a model and --data, or stored records with --from")
        if len(self.names) > 1:
            raise VitrimError(f"give one model, not {', '.join(self.names)}: further ones go behind --model")
        return [*self.names, *(self.more or ())]


@dataclass(frozen=True, kw_only=True)
class AnalysedImages(Reading):
    source: Annotated[
        str | None, typer.Option("--data", help="images with labels, as for `vitrim eval`; not with --from")
    ] = None
    limit: Limit = None
    data_option: DataOptions = None


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions(Setup):
    only: Annotated[
        str | None,
        typer.Option(
            help="families with commas: patterns, depth, counts, features, loss; or those that run the model again: "
            "sensitivity, attention, router, tsne, throughput (and loss, if named); or all; default: those of one pass",
        ),
    ] = None
    sizes: Annotated[
        str | None, typer.Option(help="throughput: pixels per side, with commas; default: the model's")
    ] = None
    blocks: Annotated[
        str | None, typer.Option(help="attention, router: blocks to draw, from 0, with commas, e.g. 2,5,8,11")
    ] = None
    formats: Annotated[str, typer.Option("--format", help="of the files in figures/: png, svg, or png,svg")] = "png"
    batch_size: BatchSize = 32
    dtype: Dtype = "fp32"
    workers: Workers = 0


def analyze(
    context: typer.Context,
    *,
    models: Models,
    images: AnalysedImages,
    methods: MethodsBesideDense = None,
    stored: Annotated[
        list[Path] | None, typer.Option("--from", help="analyse this stored record, without model and data; may repeat")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="compare finished analyses; MODEL is then their folders")
    ] = False,
    out: Annotated[Path, typer.Option(help="folder for the report, its tables, figures and records")],
    how: AnalysisOptions,
    machine: Machine,
    output: Output,
) -> None:
    """Analyse which patches are kept and merged, and effects on features.

    All methods run on the same batches, in one pass over the data. The report is index.html in --out. --from recreates
    it from the records, without model or data. If the pass is interrupted, the partial results are analysed.
    """
    with progress("loading the analysis"):
        from vitrim.core.registry import parse_methods

        configs = parse_methods(methods or ())
        from vitrim.analysis.analyze import analyze as run
        from vitrim.analysis.analyze import analyze_records, compare_analyses
        from vitrim.analysis.families import chosen
        from vitrim.measure.inputs import ScoredData
        from vitrim.results import Pictures

    pixels = whole_numbers(how.sizes, "--sizes takes whole numbers of pixels with commas, e.g. 224,384", least=1) or ()
    drawn = whole_numbers(how.blocks, "--blocks takes whole numbers with commas, e.g. 2,5") or ()
    chosen(how.only, pixels, drawn)

    if compare or stored:
        _check_alone(
            context, "--compare reads finished analyses" if compare else "--from analyses stored records", compare
        )
        folder: dict[str, Any] = {"out": out, "only": how.only, "formats": how.formats.split(",")}
        again = compare_analyses(models.names or (), **folder) if compare else analyze_records(stored or (), **folder)
        output.finish(again)
        return
    every = models.every()
    if images.source is None:
        raise VitrimError("give the images to analyse the model on with --data")
    stopped: list[Report] = []
    try:
        with progress(f"loading {every[0]}") as signs:
            machine.start()
            report = run(
                models.spec(every, "ScoredModel", device=machine.device, dtype=how.dtype),
                configs,
                images.spec(images.source, ScoredData, batch_size=how.batch_size, workers=how.workers),
                out=Pictures(out, how.formats.split(",")),  # type: ignore[arg-type]
                only=how.only,
                sizes=pixels,
                blocks=drawn,
                seed=machine.seed,
                on_progress=signs.move,
                on_report=stopped.append,
            )
        stopped.append(report)
    finally:  # after the progress line
        for found in stopped:
            output.finish(found)


def _check_alone(context: typer.Context, doing: str, compare: bool) -> None:
    """Refuse what is given on the command line and has no effect without a model."""
    # Options that the command reads without a model too; all others on the command line are mistakes.
    read = {"out", "only", "formats", "sizes", "blocks", "compare", "names" if compare else "stored"}
    read |= {field.name for field in fields(Output)}
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name not in read and source is not None and source.name == "COMMANDLINE":
            name = "the model" if option.name == "names" else option.opts[0]
            raise VitrimError(f"{doing}, and runs no model: leave out {name}")
