"""``vitrim bench``: what reducing gains in time on this machine, against what its MACs promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli.options import MAX_REPEATS, MAX_SECONDS, Files, Machine, MethodsBesideDense, Model, RunOn, Setup
from vitrim.cli.output import Output
from vitrim.errors import VitrimError
from vitrim.progress import progress

if TYPE_CHECKING:
    from vitrim.speed.words import SpeedReport

BatchSizes = Annotated[
    list[str] | None, typer.Option("--batch-size", "-b", help="e.g. 8, or 1,8,32; may repeat; default: 1,8,32")
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision", "--dtype",
        help="fp32, bf16, fp16, int8, or several: every engine runs in those that it has; may repeat; default: fp32",
    ),
]  # fmt: skip
Figure = Annotated[Path | None, typer.Option("--figure", help="draw the times per image into this file: .png or .svg")]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        help="eager, compile (with frozen weights and without), onnxruntime, openvino, aoti, torch.export, or several; "
        "may repeat; default: eager",
    ),
]
Compiled = Annotated[
    bool, typer.Option("--compile", help="torch.compile every model, dense too, and nothing else; see --engine")
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, max=MAX_REPEATS, help="time every model at least so often")]
MinSeconds = Annotated[float, typer.Option("--min-seconds", min=0.0, max=MAX_SECONDS, help="and at least so long")]


@dataclass(frozen=True, kw_only=True)
class TimingOptions(Setup):
    """The engines and precisions to time, and for how long."""

    engine: Engines = None
    precision: Precisions = None
    repeats: Repeats = 10
    min_seconds: MinSeconds = 1.0

    def arguments(self) -> dict[str, Any]:
        """The arguments of the function behind a command."""
        from vitrim.measure.latency import Budget

        lists = {"engine": words(self.engine, "--engine"), "precision": words(self.precision, "--precision")}
        most = max(self.repeats, Budget.max_rounds)
        budget = Budget(self.repeats, self.min_seconds, max_rounds=most)
        return {"budget": budget, **{name: values for name, values in lists.items() if values}}


def bench(
    *,
    model: Model,
    method: MethodsBesideDense = None,
    batch_size: BatchSizes = None,
    timing: TimingOptions,
    compiled: Compiled = False,
    figure: Figure = None,
    files: Files,
    run_on: RunOn,
    machine: Machine,
    output: Output,
) -> None:
    """Time dense and reduced models in turn, on this machine. Compare the speed-up with what the MACs promise.

    Dense is the faster of the model's own fused and unfused attention, on the fastest of the engines, measured in the
    same run. Speed-up is the median over rounds of the ratio within a round, with its quartiles; peak memory is what
    one forward allocates. Of a vision-language model, prefill is timed: tower, connector and language model on a batch
    of prompts, from which reduced models leave out the image tokens that are gone; with --new-tokens an answer, too.
    """
    if compiled and timing.engine is not None:
        raise VitrimError("--compile is torch.compile and nothing else: leave it out, and give --engine compile")
    counts = sizes(batch_size, "--batch-size")
    given_model = files.model(model.name)
    if not method and not files.file and run_on.select is None and isinstance(given_model, str):
        raise VitrimError(
            "-m METHOD is missing: say what to time next to the dense model, e.g. -m tome:keep_rate=0.7; "
            "`vitrim list methods` names all"
        )
    out = output.console()
    found: list[SpeedReport] = []

    def on_report(report: SpeedReport) -> None:
        found[:] = [report]
        signs.clear()
        for part in report.setting(-1) if report.tables else report.notes:
            out.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
        if report.rows and not output.on_stdout:
            output.write(**report.record)  # after every setting: the next may exhaust the machine

    try:
        with progress(f"loading {model.name}") as signs:
            from vitrim.plots import style
            from vitrim.speed.bench import bench as time_
            from vitrim.speed.engines import Compiled as InDefaultMode

            given = timing.arguments() | ({"batch_size": counts} if counts else {})
            if compiled:
                names = given.get("precision", ["fp32"])
                given["engine"] = [InDefaultMode(one) for one in names if one in InDefaultMode.precisions]
            if figure is not None:
                style.check(figure)
            machine.start()
            report = time_(
                model.spec(given_model, device=machine.device),
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
    """The values of ``["1", "8,32"]``, each once; none where nothing is given."""
    words = [word for text in texts or () for word in text.replace(",", " ").split()]
    if not words and texts is not None:
        raise VitrimError(f"{what} is empty: give at least one value")
    return list(dict.fromkeys(words))


def sizes(texts: Sequence[str] | None, what: str) -> list[int | str]:
    """The values of ``["1", "8,32"]`` as numbers, as far as they are some."""
    return [int(size) if size.isdecimal() and len(size) <= 10 else size for size in words(texts, what)]
