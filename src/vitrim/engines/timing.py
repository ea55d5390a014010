"""An exported file timed beside the model it was made from: eager and exported, dense and reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vitrim.core.registry import ask
from vitrim.engines.copies import dense_copies
from vitrim.engines.exported import Exported
from vitrim.engines.formats.base import as_array
from vitrim.engines.program import Program
from vitrim.measure.latency import Budget, fastest, paired_speedup, speed_row, time_interleaved
from vitrim.measure.records import Row
from vitrim.report import DENSE, Table

EAGER = "eager"


def time_exported(
    model: nn.Module,
    reduced: nn.Module,
    dense: Exported,
    exported: Exported,
    images: Tensor,
    budget: Budget | None = None,
) -> list[Row]:
    """Time a model eager and exported, dense and reduced, in turn on the same images.

    Eager dense uses the faster attention kernel of the host.

    Args:
        reduced: the model, reduced as exported.
        dense, exported: their files (`vitrim.engines.writing.dense_file`).
        images: (B, ...) as the file takes them.

    Returns:
        Four rows, ``engine`` eager and the file's, each dense and reduced, with ``latency_ms, images_per_second,
        speedup, speedup_q1, speedup_q3`` (over dense on the same engine), ``over_eager`` (over eager dense),
        ``promised_speedup`` (dense MACs over reduced MACs) and ``ratio`` (speedup over promised_speedup).
    """
    known = exported.metadata
    array = as_array(images)
    preprocessing = ask(reduced).preprocessing(reduced) if known["input"]["dtype"] == "uint8" else None
    copies = {f"{EAGER} {kernel}": copy for kernel, copy in dense_copies(model).items()}
    runs: dict[str, Callable[[], object]] = {
        **{name: partial(Program(copy, preprocessing).eval(), images) for name, copy in copies.items()},
        "eager reduced": partial(Program(reduced, preprocessing).eval(), images),
        "exported dense": dense.on(array),
        "exported reduced": exported.on(array),
    }
    with torch.inference_mode():
        times = time_interleaved(runs, "cpu", budget)
    base = fastest(times, copies)
    promise = known["dense_gmacs"] / known["gmacs"]
    rows = []
    for engine, name, run, against, promised in (
        (EAGER, DENSE, base, base, 1.0),
        (EAGER, known["method"], "eager reduced", base, promise),
        (exported.engine, DENSE, "exported dense", "exported dense", 1.0),
        (exported.engine, known["method"], "exported reduced", "exported dense", promise),
    ):
        threads = torch.get_num_threads() if engine == EAGER else exported.threads or torch.get_num_threads()
        facts = {"engine": engine, "batch_size": len(images), "threads": threads}
        numbers = speed_row(times[run], times[against], len(images), promised)
        over = {"over_eager": paired_speedup(times[base], times[run]).median}
        rows.append(Row(name, {**facts, **numbers, **over}))
    return rows


def noise(file: Exported, count: int, seed: int) -> Tensor:
    """Random images of one batch, as the file takes them."""
    shape = (count, *(int(side) for side in file.shape[1:]))
    images = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (images * 64 + 128).clamp(0, 255).to(torch.uint8) if file.metadata["input"]["dtype"] == "uint8" else images


def table(rows: Sequence[Row]) -> Table:
    """The rows of one batch size."""
    first = rows[0]
    title = f"batch {first['batch_size']}, threads: {first['threads']}, rounds: {first['rounds']}"
    cells = [
        {
            "method": row["method"],
            "engine": row["engine"],
            "images/s": f"{row['images_per_second']:.1f}",
            "p50 ms": f"{row['latency_ms']['p50']:.2f}",
            "p95 ms": f"{row['latency_ms']['p95']:.2f}",
            "speed-up": f"{row['speedup']:.2f}",
            "q1-q3": f"{row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}",
            "promised": f"{row['promised_speedup']:.2f}",
            "ratio": f"{row['ratio']:.2f}",
            "over eager": f"{row['over_eager']:.2f}",
        }
        for row in rows
    ]
    texts = [tuple(each.values()) for each in cells]
    return Table(f"batch_{first['batch_size']}", title, tuple(cells[0]), texts, text_columns=2)
