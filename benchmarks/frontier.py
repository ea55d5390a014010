"""Loss on held-out photographs over milliseconds: dense models on every engine in every precision, methods on the best.

    python benchmarks/frontier.py make --model vit_tiny_patch16_224 --checkpoint VIT_TINY.safetensors \\
        --speeds speeds_vit_tiny.json --calibration TRAINING_PHOTOS --data HELD_OUT_PHOTOS --folder frontier/vit_tiny
    python benchmarks/frontier.py time --model vit_tiny_patch16_224 --checkpoint VIT_TINY.safetensors \\
        --data HELD_OUT_PHOTOS --folder frontier/vit_tiny
    python benchmarks/frontier.py draw --folder frontier/vit_tiny --folder frontier/deit_tiny --figure frontier.png
    python benchmarks/frontier.py table --folder frontier/vit_tiny --folder frontier/deit_tiny

`make` takes settings of methods, and what they lose, from a record of `photographs.py speeds` or `cuts`, which are in
PyTorch in fp32. It writes a file of each in OpenVINO for every batch size, where a method has a fixed graph, and of the
dense model on every engine in every precision, and scores these; ranges of activations are found on TRAINING_PHOTOS. It
goes on where it stopped. `time` times all in turn at each batch size, methods without a fixed graph in PyTorch: run it
on a machine that does nothing else. With `--like FOLDER` it takes the times of equal settings from a model of the same
architecture, such as DeiT-T for ViT-Ti, and times the others beside the fastest dense model. `draw` makes the picture,
and says what is fastest at a loss of at most one and two points more than the fastest dense file. `table` prints what
every method loses at 1.1, 1.25, 1.5 and 2 times the speed of the fastest dense model, on lines between its timed
settings. Losses are top-1 of the dense model in PyTorch in fp32 minus that of the row, with the standard error of the
mean over images; what is fastest is chosen and scored on the same photographs, so it is the best of some.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from script import at_speed, from_shell, write_json
from vitrim.core.registry import parse_method
from vitrim.data import batches, eval_transform, load_images
from vitrim.engines.engine import Engine, FileEngine, engines_named
from vitrim.loading import ModelSpec
from vitrim.measure.bench import in_dtype
from vitrim.measure.copies import reduced_copy
from vitrim.measure.latency import Budget, paired_speedup, summarise, time_interleaved
from vitrim.measure.machine import environment, set_threads
from vitrim.measure.records import DENSE
from vitrim.plots import style

SIZES = (1, 8)
SPEEDS = (1.1, 1.25, 1.5, 2.0)
ORDERED_BY = 1.5
NOWHERE = (1.0, 0.0, False)
"""Order of methods that do not reach that speed: last."""
CALIBRATED = 64
IN_VIEW = 1.8
"""Times the fastest dense model's time that the picture shows."""
SHAPES_OF_DENSE = ("o", "s", "D", "P", "*", "X", "v", "^", "<")
SCORED_IN = 8
"""Images per batch of the files that are scored."""


class Place:
    """The folder of one model, with its rows: one per method, engine and precision."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "rows.json"
        self.record: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {"rows": []}

    def row(self, method: str | None, engine: Engine) -> dict[str, Any]:
        """The row of a method on an engine."""
        like = {"method": method or DENSE, "engine": engine.label, "precision": engine.precision}
        for row in self.record["rows"]:
            if all(row[key] == value for key, value in like.items()):
                return row  # type: ignore[no-any-return]
        self.record["rows"].append(like)
        return like

    def save(self, **facts: Any) -> None:
        """Write the rows."""
        self.record |= facts
        write_json(self.path, self.record)

    def ready(self, model: nn.Module, method: str | None, engine: Engine, images: Tensor, given: Tensor | None) -> Any:
        """A call of the method on the engine for batches like ``images``; files are kept."""
        own = self.folder / (method or DENSE).replace(":", "-")
        own.mkdir(parents=True, exist_ok=True)
        made = in_dtype(model if method is None else reduced_copy(model, parse_method(method)), engine.dtype)
        run = engine.prepare(made, images.to(engine.dtype), own, given)
        return lambda batch: run(batch.to(engine.dtype)).float()


def dense_engines() -> list[Engine]:
    """All there are."""
    found, _ = engines_named(["eager", "onnxruntime", "openvino"], ["fp32", "bf16", "int8"])
    return found


def engine_of(method: str) -> Engine:
    """OpenVINO in fp32, in which losses are known, or PyTorch for a method without a fixed graph."""
    (openvino, eager), _ = engines_named(["openvino", "eager"], ["fp32"])
    return openvino if openvino.obstacle(parse_method(method), 8) is None else eager


def read(source: str, model: nn.Module, limit: int | None, size: int) -> list[tuple[Tensor, Tensor]]:
    """Whole batches of photographs with labels."""
    dataset = load_images(source)
    dataset.transform = eval_transform(model)
    return [batch for batch in batches(dataset, size, limit=limit) if len(batch[0]) == size]


def make(model: nn.Module, place: Place, arguments: argparse.Namespace) -> None:
    """Write all files, and fill in what every row loses."""
    given = torch.cat([images for images, _ in read(arguments.calibration, model, CALIBRATED, SCORED_IN)])
    data = read(arguments.data, model, arguments.limit, SCORED_IN)
    labels = torch.cat([own for _, own in data])
    with torch.inference_mode():
        like = torch.cat([model(images).argmax(1) for images, _ in data])
        place.save(model=arguments.model, top1=(like == labels).double().mean().item(), images=len(labels))
        for engine in dense_engines():
            row = place.row(None, engine)
            if "loss" not in row:
                run = place.ready(model, None, engine, data[0][0], given)
                found = torch.cat([run(images).argmax(1) for images, _ in data])
                change = (like == labels).double() - (found == labels).double()
                row |= {"loss": change.mean().item(), "loss_error": (change.std() / len(change) ** 0.5).item()}
                row["agreement"] = (found == like).double().mean().item()
                place.save()
                print(f"dense on {engine}: {100 * row['loss']:+.1f} +- {100 * row['loss_error']:.1f}", flush=True)
        for scored in json.loads(arguments.speeds.read_text())["rows"]:
            if scored["method"] != DENSE:
                row = place.row(scored["method"], engine_of(scored["method"]))
                row |= {"loss": -scored["change"] / 100, "loss_error": scored["error"] / 100}
        place.save()
        for row in [] if arguments.like else list(place.record["rows"]):  # so that `time` only opens files
            method = None if row["method"] == DENSE else row["method"]
            (engine,), _ = engines_named([row["engine"]], [row["precision"]])
            for size in arguments.batch_size if isinstance(engine, FileEngine) else ():
                place.ready(model, method, engine, data[0][0][:size], given)


def timed(model: nn.Module, place: Place, arguments: argparse.Namespace) -> None:
    """Fill in milliseconds per batch, all in turn, dense models in every round."""
    for size in arguments.batch_size:
        key = f"batch {size}"
        if arguments.like:
            known = Place(arguments.like)
            for row in place.record["rows"]:
                for other in known.record["rows"]:
                    if all(other[name] == row[name] for name in ("method", "engine", "precision")):
                        row[key] = other[key]
        ((images, _),) = read(arguments.data, model, size, size)
        asked = [row for row in place.record["rows"] if key not in row]
        dense = [row for row in place.record["rows"] if row["method"] == DENSE]
        if arguments.like:
            dense = [min(dense, key=lambda row: row[key]["ms"])]
        with torch.inference_mode():
            calls = {}
            for row in [*dense, *(row for row in asked if row not in dense)]:
                method = None if row["method"] == DENSE else row["method"]
                (engine,), _ = engines_named([row["engine"]], [row["precision"]])
                run = place.ready(model, method, engine, images, None)
                calls[_key(row)] = partial(run, images)
            # the slow eager models decide how long it takes: as few rounds as quartiles need
            times = time_interleaved(calls, budget=Budget(arguments.rounds, 0.0, max_rounds=arguments.rounds))
        fastest = min(dense, key=lambda row: summarise(times[_key(row)]).p50_ms)
        for row in asked:
            ratio = paired_speedup(times[_key(fastest)], times[_key(row)])
            row[key] = {
                "ms": summarise(times[_key(row)]).p50_ms, "speedup": [ratio.q1, ratio.median, ratio.q3]
            }  # fmt: skip
        place.save(environment=environment(), fastest={**place.record.get("fastest", {}), str(size): _key(fastest)})
        print(f"batch {size}: fastest dense is {' '.join(_key(fastest)[1:])}", flush=True)


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["method"], row["engine"], row["precision"]


def draw(places: list[Place], figure: Path | None) -> None:
    """The picture, and for each model, batch size and bound the fastest setting."""
    every = [row["method"] for place in places for row in place.record["rows"] if row["method"] != DENSE]
    names = list(dict.fromkeys(style.method_of(method) for method in every))
    shades, shapes = style.colours(names), style.markers(names)
    drawn, axes = style.panels(len(SIZES) * len(places), across=len(SIZES), size=(4.8, 3.4), above=0.6)
    for axis, (place, size) in zip(axes, ((place, size) for place in places for size in SIZES), strict=True):
        rows = {(row["method"], row["engine"], row["precision"]): row for row in place.record["rows"]}
        key = f"batch {size}"
        fastest, model = tuple(place.record["fastest"][str(size)]), place.record["model"]
        edge, far = IN_VIEW * rows[fastest][key]["ms"], []
        dense = [row for row in rows.values() if row["method"] == DENSE]
        for row, shape in zip(dense, SHAPES_OF_DENSE, strict=False):
            name = f"{row['engine']} {row['precision']}"
            axis.plot(
                row[key]["ms"], 100 * row["loss"], shape, color=style.DENSE_COLOUR, markersize=7, linestyle="none",
                markerfacecolor="white", markeredgewidth=1.4, zorder=4, label=f"dense, {name}",
            )  # fmt: skip
            if row[key]["ms"] > edge:
                far.append(f"{name}: {row[key]['ms']:.0f} ms")
        if far:
            text = "not in view: " + ", ".join(far)
            axis.text(0.98, 0.96, text, transform=axis.transAxes, ha="right", va="top", fontsize=style.SMALL)
        for name in names:
            own = sorted(
                (row for row in rows.values() if style.method_of(row["method"]) == name), key=lambda row: row[key]["ms"]
            )
            axis.errorbar(
                [row[key]["ms"] for row in own], [100 * row["loss"] for row in own],
                yerr=[100 * row["loss_error"] for row in own], color=shades[name], marker=shapes[name], markersize=4,
                linewidth=1.2, elinewidth=0.6, label=f"{name} ({own[0]['engine']})",
            )  # fmt: skip
        axis.axvline(rows[fastest][key]["ms"], color=style.DENSE_COLOUR, linewidth=0.7, linestyle=":")
        axis.axhline(0.0, color=style.DENSE_COLOUR, linewidth=0.7, linestyle=":")
        axis.set_xlim(0.45 * rows[fastest][key]["ms"], edge)
        axis.set_ylim(-2, 12)
        axis.set_title(f"{model}, batch {size}", fontsize=style.TITLE)
        axis.set_xlabel("ms per batch", fontsize=style.TEXT)
        axis.set_ylabel("loss of top-1, points", fontsize=style.TEXT)
        print(
            f"\n{place.record['model']}, batch {size}: dense {' '.join(fastest[1:])} {rows[fastest][key]['ms']:.1f} ms"
        )
        for bound in (1.0, 2.0):
            good = [row for row in rows.values() if 100 * (row["loss"] - rows[fastest]["loss"]) <= bound]
            best = min(good, key=lambda row: row[key]["ms"])
            print(
                f"  at most {bound:g} points more: {best['method']} {best['engine']} {best['precision']} "
                f"{best[key]['ms']:.1f} ms, {best[key]['speedup'][1]:.2f} times dense, "
                f"{100 * best['loss']:+.1f} +- {100 * best['loss_error']:.1f}"
            )
    handles, _ = axes[0].get_legend_handles_labels()
    style.below(drawn, handles, across=4)
    if figure is not None:
        style.save(drawn, figure)


def table(places: list[Place], size: int) -> None:
    """Losses of every method at equal speed, a table in Markdown per model, least at 1.5 times first."""
    key = f"batch {size}"
    for place in places:
        own: dict[str, list[dict[str, Any]]] = {}
        for row in place.record["rows"]:
            if row["method"] != DENSE and key in row:
                own.setdefault(row["method"].partition(":")[0], []).append(row)
        cells = {name: [_loss_at(rows, key, speed) for speed in SPEEDS] for name, rows in own.items()}
        print(f"\n| {place.record['model']} | {' | '.join(f'{speed:g} times' for speed in SPEEDS)} |")
        print(f"|{'---|' * (1 + len(SPEEDS))}")
        for name in sorted(cells, key=lambda name: cells[name][SPEEDS.index(ORDERED_BY)] or NOWHERE):
            print(f"| `{name}` | {' | '.join(map(_cell, cells[name]))} |")


def _loss_at(rows: list[dict[str, Any]], key: str, speed: float) -> tuple[float, float, bool] | None:
    """The loss of a method at a speed, its error, and True if the mildest setting that was timed is faster.

    That of the mildest setting then, and else on the line between two timed settings, which is rather above the losses,
    as these bend upwards. None where no setting is as fast.
    """
    points = sorted((row["loss"], row["loss_error"], row[key]["speedup"][1]) for row in rows)
    if points[0][2] > speed:
        return (*points[0][:2], True)
    loss = at_speed([(loss, fast) for loss, _, fast in points], speed)
    error = at_speed([(error, fast) for _, error, fast in points], speed)
    return None if loss is None or error is None else (loss, error, False)


def _cell(found: tuple[float, float, bool] | None) -> str:
    if found is None:
        return "-"
    return f"{0.0 - 100 * found[0]:+.1f} ± {100 * found[1]:.1f}{' *' if found[2] else ''}"


def main() -> None:
    """Make, time, draw or print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=["make", "time", "draw", "table"])
    parser.add_argument("--folder", action="append", type=Path, required=True, help="of a model; may repeat")
    parser.add_argument("--model")
    parser.add_argument("--checkpoint")
    parser.add_argument("--calibration", help="photographs on which int8 finds the ranges of activations")
    parser.add_argument("--data", help="held-out photographs")
    parser.add_argument("--speeds", type=Path, help="of `make`: a record of photographs.py speeds or cuts")
    parser.add_argument("--like", type=Path, help="the folder of a model of the same architecture that was timed")
    parser.add_argument("--limit", type=int)
    parser.add_argument(
        "--batch-size",
        type=int,
        action="append",
        help="may repeat (default: 1 and 8); the table has the largest",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    arguments.batch_size = arguments.batch_size or list(SIZES)
    set_threads(arguments.threads)
    places = [Place(folder) for folder in arguments.folder]
    if arguments.step == "draw":
        draw(places, arguments.figure)
        return
    if arguments.step == "table":
        table(places, max(arguments.batch_size))
        return
    model = ModelSpec(arguments.model, checkpoint=arguments.checkpoint).load().model.eval()
    (make if arguments.step == "make" else timed)(model, places[0], arguments)


if __name__ == "__main__":
    from_shell(main)
