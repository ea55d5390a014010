"""``vitrim demo``: the main job, offline, in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.setup import Compute, Record
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from vitrim.measure.records import Row

Out = Annotated[Path, typer.Option("--out", help="folder for demo.json and the figures")]
Cifar10 = Annotated[
    str | None,
    typer.Option(
        "--cifar10", help="your copy of CIFAR-10 (parquet files or folders): also show the shipped model on it"
    ),
]


def demo(*, out: Out = Path("vitrim-demo"), cifar10: Cifar10 = None, compute: Compute, record: Record) -> None:
    """Reduce a small ViT on real handwritten digits, measure DeiT-S on this machine, draw both. Offline."""
    kept = Record(json=str(out / "demo.json"))
    try:
        from vitrim.demo import run
        from vitrim.measure.machine import environment
    except ModuleNotFoundError as error:
        raise VitrimError(f"the demo needs {error.name}: pip install 'vitrim[demo]'") from error
    console = record.console()
    compute.start()
    exhibits = {"digits": run.digits()} | ({} if cifar10 is None else {"cifar10": run.photos(cifar10)})
    rows = {}
    for key, exhibit in exhibits.items():
        with console.status(f"evaluating the {exhibit.name} under every method"):
            rows[key] = run.evaluate_exhibit(exhibit, compute.seed)
    with console.status(f"timing {run.SPEED_MODEL}, batch {run.SPEED_BATCH}, dense against tome and atm"):
        speed = run.measure_speed(seed=compute.seed)
    found = {
        "environment": environment(seed=compute.seed),
        **{key: [{"model": exhibits[key].name, **row} for row in measured] for key, measured in rows.items()},
        "speed": speed,
    }
    kept.write("demo", **found)
    with console.status("drawing"):
        figures = [path for key, exhibit in exhibits.items() for path in run.draw(exhibit, rows[key], out)]
    print_results(console, {exhibits[key].name: measured for key, measured in rows.items()}, speed)
    console.print("written: " + ", ".join(str(path) for path in (out / "demo.json", *figures)))
    record.write("demo", **found)


def print_results(console: Any, found: dict[str, list[Row]], speed: list[dict[str, Any]]) -> None:
    """Print one table: accuracy against MACs above, time against MACs below."""
    rows = [
        [
            name,
            row.method,
            f"{100 * row['top1']:.1f}",
            f"{100 * row['agreement']:.1f}",
            f"{100 * (1 - sum(row['gmacs'].values()) / sum(measured[0]['gmacs'].values())):.0f}",
            "",
            "",
            "",
        ]
        for name, measured in found.items()
        for row in measured
    ]
    rows += [
        [
            "DeiT-S",
            row["method"],
            "",
            "",
            f"{100 * (1 - 1 / row['promised_speedup']):.0f}",
            f"{row['images_per_second']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['promised_speedup']:.2f}",
        ]
        for row in speed
    ]
    columns = ["model", "method", "top-1 %", "as dense %", "fewer MACs %", "images/s", "speed-up", "promised"]
    images = ", ".join(f"{name} on {measured[0]['images']} images" for name, measured in found.items())
    title = (
        f"{images} it never saw, no retraining; then the speed of DeiT-S geometry here "
        f"(batch {speed[0]['batch_size']}, {speed[0]['dtype']}, random weights)"
    )
    common.print_table(console, title, columns, rows)
