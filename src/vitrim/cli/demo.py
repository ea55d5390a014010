"""``vitrim demo``: the main job, offline, in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from vitrim.evaluation import Row

Out = Annotated[Path, typer.Option("--out", help="folder for demo.json and the two figures")]


def demo(
    out: Out = Path("vitrim-demo"),
    threads: common.Threads = None,
    seed: common.Seed = 0,
    json: common.Json = None,
) -> None:
    """Reduce a small ViT on real handwritten digits, measure DeiT-S on this machine, draw both. Offline."""
    try:
        from vitrim.demo import run
    except ModuleNotFoundError as error:
        raise VitrimError(f"the demo needs {error.name}: pip install 'vitrim[demo]'") from error
    console = common.console(json)
    common.set_threads(threads)
    with console.status("evaluating the digits model under every method"):
        digits = run.evaluate_digits(seed)
    with console.status(f"timing {run.SPEED_MODEL}, batch {run.SPEED_BATCH}, dense against tome and atm"):
        speed = run.measure_speed(seed=seed)
    record = {
        "command": "demo",
        "environment": common.environment(seed=seed),
        "digits": [{"model": "digits_vit", **row.record()} for row in digits],
        "speed": speed,
    }
    common.write_json(str(out / "demo.json"), record)
    with console.status("drawing"):
        figures = run.draw(digits, out)
    print_results(console, digits, speed)
    console.print("written: " + ", ".join(str(path) for path in (out / "demo.json", *figures)))
    common.write_json(json, record)


def print_results(console: Any, digits: list[Row], speed: list[dict[str, Any]]) -> None:
    """One table: accuracy against MACs above, time against MACs below."""
    dense = sum(digits[0].gmacs.values())
    rows = [
        [
            "digits ViT",
            row.method,
            f"{100 * row.top1:.1f}",
            f"{100 * row.agreement:.1f}",
            f"{100 * (1 - sum(row.gmacs.values()) / dense):.0f}",
            "",
            "",
            "",
        ]
        for row in digits
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
    title = (
        f"{digits[0].images} held-out handwritten digits, no retraining; then the speed of DeiT-S geometry here "
        f"(batch {speed[0]['batch_size']}, {speed[0]['dtype']}, random weights)"
    )
    common.print_table(console, title, columns, rows)
