"""The findings of `vitrim.optimize` for a reader: its sentence, its table, its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitrim import style
from vitrim.engines.engine import Engine
from vitrim.measure.evaluation_report import unseen
from vitrim.measure.neighbours import NeighbourLoss
from vitrim.measure.speed_report import engine_of
from vitrim.report import DENSE, Table
from vitrim.tuning.optimize_race import Candidate, Race

SPOKEN = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "aoti": "AOTInductor"}
"""Names of engines in sentences."""

THIRDS = {"search": "1st", "selection": "2nd", "check": "3rd"}


# ---- the sentence ----------------------------------------------------------------------------------------------------


def in_words(
    race: Race, dense: Candidate, chosen: Candidate | None, score: Mapping[str, float], speedup: float | None = None
) -> str:
    """The sentence of the report: times, the speed-up over PyTorch, and the loss on the last third, ``score``.

    ``chosen`` is the reduced file; None if reducing does not pay, or if ``speedup`` is not reached.
    """
    spoken = SPOKEN.get(dense.engine.label, dense.engine.label)
    times = (
        f"{race.rows[0]['p50_ms']:.1f} ms per batch of {race.batch_size} as you run it now (PyTorch, fp32); "
        f"{dense.row['p50_ms']:.1f} with {spoken} in {dense.engine.precision}"
    )
    loss = f"{_change_in_words(race, score)} on {_images_in_words(score)}"
    if chosen is None:
        why = "reducing tokens does not pay here within the bound" if speedup is None else _reached(race, speedup)
        return f"{times}, {dense.row['speedup']:.1f} times as fast, {loss}; {why}, so the file is of the dense model"
    ratio = chosen.row["speedup"] * dense.row["speedup"]  # over the dense file, times its speed-up over PyTorch
    return (
        f"{times}; {chosen.row['p50_ms']:.1f} with {chosen.name} ({100 * chosen.row['saved']:.0f} % of the MACs "
        f"saved): {ratio:.1f} times as fast, {loss}{_alternative(race, chosen)}"
    )


def _alternative(race: Race, chosen: Candidate) -> str:
    """The smaller image without a method, which ``chosen`` is compared with; empty if there is none."""
    plain = race.plain
    if plain is None or plain is chosen:
        return ""
    why = "" if race.plain_fits else ", which exceeded the bound on other images,"
    return (
        f"; {plain.setting.size} px without a method{why} would give {plain.row['speedup']:.2f} times the speed of the "
        f"dense file at {_change_in_words(race, plain.row)}, and this gives {chosen.row['speedup']:.2f} at "
        f"{_change_in_words(race, chosen.row)}, on the images it was chosen by (standard errors "
        f"{100 * plain.row['loss_error']:.1f} and {100 * chosen.row['loss_error']:.1f})"
    )


def _reached(race: Race, speedup: float) -> str:
    """The speed over the dense file that was reached instead of ``speedup``."""
    asked = f"{speedup:g} times the speed of the dense file"
    row = race.fastest
    if row is None or row["speedup"] <= 1.0:
        return f"{asked} is not reached: no setting here is faster than it"
    return f"{asked} is not reached: the fastest setting here, {row['method']}, has {row['speedup']:.2f} times"


def _change_in_words(race: Race, score: Mapping[str, float]) -> str:
    if isinstance(race.loss, NeighbourLoss):
        metric = "recall@1" if race.loss.labels else "the dense model's neighbours"
    else:
        metric = "top-1" if race.loss.labels else "agreement"
    points = 100 * score["loss"]
    return f"{abs(points):.1f} points of {metric} {'fewer' if points >= 0 else 'more'}"


def _images_in_words(score: Mapping[str, float]) -> str:
    most = unseen(score["loss"], score["loss_error"], round(score["images"]))
    error = f"standard error {100 * score['loss_error']:.1f}"
    known = error if most is None else f"none changed: below {most:.1f}, at 95 %"
    return f"{score['images']:.0f} images not searched on ({known})"


# ---- the table -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of all timings, fastest first, and the chosen file last."""
    *timed, last = rows
    dense = {engine_of(row): row["speedup"] for row in timed if row["method"] == DENSE}

    def speeds(row: Mapping[str, Any]) -> tuple[str, str]:
        own = f"{row['speedup']:.2f} ({row['speedup_q1']:.2f}-{row['speedup_q3']:.2f})"
        if row["method"] == DENSE:
            return own, ""
        return f"{row['speedup'] * dense[engine_of(row)]:.2f}", own

    cells = [
        (
            f"{row['method']} on {engine_of(row)}" if row["method"] == DENSE else row["method"],
            f"{row['p50_ms']:.2f}",
            *speeds(row),
            f"{100 * row['saved']:.0f}",
            loss_cell(row),
            THIRDS[row["scored_on"]],
        )
        for row in [*sorted(timed, key=lambda row: row["p50_ms"]), last]
    ]
    return Table("optimize", "", ("model", "ms", "over PyTorch", "over dense", "MACs saved %", "loss", "of"), cells)


def loss_cell(row: Mapping[str, Any]) -> str:
    most = unseen(row["loss"], row["loss_error"], row["images"])
    return f"{100 * row['loss']:.1f} ± {100 * row['loss_error']:.1f}" if most is None else f"< {most:.1f}"


def meaning(engine: Engine) -> list[str]:
    """Explanations of the columns; methods run on ``engine``."""
    return [
        "ms: median of a batch; over PyTorch: speed-up over the model in PyTorch in fp32; over dense: over the dense "
        f"file on {engine}, where methods run; in brackets quartiles, where both were timed in one run",
        "loss: points and their standard error, or, where no image changed, what it is below (at 95 %), on the third "
        "of the images under 'of'; the last row is the chosen file",
    ]


# ---- the figure ------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Any:
    """A figure of loss in points over milliseconds per batch: stars are dense models, dots methods, a circle the file.

    Error bars are standard errors of the loss.
    """
    figure, (axis,) = style.panels(1, across=1, size=(6.4, 4.4), above=1.0)
    *timed, last = rows
    names = list(dict.fromkeys(row["method"] for row in timed if row["method"] != DENSE))
    shades, shapes = style.colours(names), style.markers(names)
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    end = max(row["p50_ms"] for row in rows)
    stars = sorted((row for row in timed if row["method"] == DENSE), key=lambda row: row["p50_ms"])
    for place, row in enumerate(stars):
        at = row["p50_ms"], 100 * row["loss"]
        axis.plot(*at, "*", markersize=12, color=style.DENSE_COLOUR, linestyle="none")
        # alternate above and below, and put slow ones to the left, so that names do not overlap
        side = "right" if at[0] > 0.7 * end else "left"
        offset = (-6 if side == "right" else 6), (7 if place % 2 == 0 else -14)
        axis.annotate(engine_of(row), at, xytext=offset, textcoords="offset points", fontsize=style.SMALL, ha=side)
    for row in timed:
        colour = shades.get(row["method"], style.DENSE_COLOUR)
        shape = shapes.get(row["method"], "")
        axis.errorbar(
            [row["p50_ms"]], [100 * row["loss"]], yerr=[100 * row["loss_error"]], color=colour, marker=shape,
            linestyle="none", elinewidth=0.8,
        )  # fmt: skip
    axis.plot([last["p50_ms"]], [100 * last["loss"]], "o", markersize=16, fillstyle="none", color=style.DENSE_COLOUR)
    axis.axhline(0.0, color=style.DENSE_COLOUR, linewidth=0.7, linestyle=":")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(labelsize=style.TEXT)
    axis.set_xlabel(f"ms per batch of {facts['batch_size']}, median", fontsize=style.TEXT)
    axis.set_ylabel("loss, points", fontsize=style.TEXT)
    axis.set_title(f"{facts['model']}: circled is the file, on images not searched on", fontsize=style.TITLE)
    style.stars_and_dots(figure, shades, shapes, across=1 if len(max(names, key=len, default="")) > 40 else 2)
    return figure
