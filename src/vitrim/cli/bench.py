"""``vitrim bench``: the speed-up of reduction on this machine, against the speed-up that its MACs promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli.options import MAX_REPEATS, MAX_SECONDS, Files, Machine, MethodsBesideDense, Model, RunOn, Setup, Sizes
from vitrim.cli.output import Output
from vitrim.errors import VitrimError
from vitrim.progress import progress

if TYPE_CHECKING:
    from vitrim.measure.speed_report import SpeedReport


@dataclass(frozen=True, kw_only=True)
class TimingOptions(Setup):
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="eager, compile (with frozen weights and without), onnxruntime, openvino, aoti, torch.export, or "
            "several; may repeat; default: eager",
        ),
    ] = None
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            "--dtype",
            help="fp32, bf16, fp16, int8, or several: every engine runs in what it supports; may repeat; default: fp32",
        ),
    ] = None
    repeats: Annotated[int, typer.Option(min=1, max=MAX_REPEATS, help="least number of rounds")] = 10
    min_seconds: Annotated[float, typer.Option(min=0.0, max=MAX_SECONDS, help="least time per model")] = 1.0

    def arguments(self, *, compiled: bool = False) -> dict[str, Any]:
        """The arguments of the function; ``compiled``: only torch.compile in its default mode."""
        from vitrim.engines.engine import Compiled
        from vitrim.measure.latency import Budget

        lists = {"engine": words(self.engine, "--engine"), "precision": words(self.precision, "--precision")}
        # More rounds than the usual most may be asked for.
        budget = Budget(self.repeats, self.min_seconds, max_rounds=max(self.repeats, Budget.max_rounds))
        given: dict[str, Any] = {"budget": budget, **{name: values for name, values in lists.items() if values}}
        if compiled:
            names = given.get("precision", ["fp32"])
            given["engine"] = [Compiled(one) for one in names if one in Compiled.precisions]
        return given


def bench(
    *,
    model: Model,
    sizes: Sizes,
    method: MethodsBesideDense = None,
    batch_size: Annotated[
        list[str] | None, typer.Option("--batch-size", "-b", help="e.g. 8, or 1,8,32; may repeat; default: 1,8,32")
    ] = None,
    timing: TimingOptions,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile alone, without frozen weights")] = False,
    slice: Annotated[
        bool,
        typer.Option(
            "--slice",
            help="also time the limit of every static method, a plain slice",
        ),
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="draw the times per image to this file: .png or .svg")] = None,
    files: Files,
    run_on: RunOn,
    machine: Machine,
    output: Output,
) -> None:
    """Time dense and reduced models in turn, on this machine. Compare the speed-up with the promise of the MACs.

    The baseline is the dense model with the faster of fused and unfused attention, on the fastest engine, measured in
    the same run. Speed-up is the median of the ratios within each round, with quartiles; peak memory is the allocation
    of one forward pass. For a vision-language model, prefill is timed: tower, connector and language model on a batch
    of prompts, which reduction shortens; with --new-tokens also an answer.
    """
    if compiled and timing.engine is not None:
        raise VitrimError("--compile is torch.compile and nothing else: leave it out, and give --engine compile")
    counts = numbers(batch_size, "--batch-size")
    given_model = files.model(model.name)
    out = output.console()
    found: list[SpeedReport] = []

    def on_report(report: SpeedReport) -> None:
        found[:] = [report]
        signs.clear()
        for part in report.setting(-1) if report.tables else report.notes:
            out.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
        if report.rows and not output.on_stdout:
            output.write(**report.record)  # after every setting, as the next may run out of memory

    try:
        with progress(f"loading {model.name}") as signs:
            from vitrim import style
            from vitrim.measure.bench import bench as time_

            given = timing.arguments(compiled=compiled) | ({"batch_size": counts} if counts else {})
            given["budget"] = replace(given["budget"], slice=slice)
            if figure is not None:
                style.check(figure)
            machine.start()
            report = time_(
                model.spec(given_model, "PlacedModel", device=machine.device, img_sizes=sizes.given),
                files.beside(method),
                run_on.inputs(),
                **given,
                seed=machine.seed,
                on_report=on_report,
                on_progress=signs.tell,
            )
            if figure is not None:
                style.save(report.figure, figure)
                output.print(f"figure: {figure}")
    finally:
        if output.on_stdout and found and found[0].rows:
            output.write(**found[0].record)


def words(texts: Sequence[str] | None, what: str) -> list[str]:
    """The distinct values of ``["1", "8,32"]``; none for None."""
    words = [word for text in texts or () for word in text.replace(",", " ").split()]
    if not words and texts is not None:
        raise VitrimError(f"{what} is empty: give at least one value")
    return list(dict.fromkeys(words))


def numbers(texts: Sequence[str] | None, what: str) -> list[int | str]:
    """The values of ``["1", "8,32"]``, as numbers where possible."""
    return [int(size) if size.isdecimal() and len(size) <= 10 else size for size in words(texts, what)]
