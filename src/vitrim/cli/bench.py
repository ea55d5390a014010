"""``vitrim bench``: what reducing gains in time on this machine, against what its MACs promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vitrim.cli import common
from vitrim.cli.setup import Images, Machine, Model, Record
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from vitrim.core.config import MethodConfig
    from vitrim.data import ImageDataset
    from vitrim.measure.latency import Budget
    from vitrim.measure.records import Row

DTYPES = ("fp32", "bf16", "fp16")
COLUMNS = ("method", "images/s", "p50 ms", "p95 ms", "peak MiB", "speed-up", "q1-q3", "promised", "ratio")


BatchSizes = Annotated[
    list[str] | None, typer.Option("--batch-size", "-b", help="e.g. 8, or 1,8,32; may repeat; default: 1,8,32")
]
Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", help="fp32, bf16, fp16, or several; may repeat; default: fp32")
]
Compiled = Annotated[bool, typer.Option("--compile", help="torch.compile every model, dense too")]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, max=common.MAX_REPEATS, help="time every model at least so often")
]
MinSeconds = Annotated[
    float, typer.Option("--min-seconds", min=0.0, max=common.MAX_SECONDS, help="and at least so long")
]


def bench(
    *,
    model: Model,
    method: common.Methods,
    batch_size: BatchSizes = None,
    dtype: Dtypes = None,
    compiled: Compiled = False,
    repeats: Repeats = 10,
    min_seconds: MinSeconds = 1.0,
    images: Images,
    machine: Machine,
    record: Record,
) -> None:
    """Time dense and reduced models in turn, in one run, and compare the speed-up with what the MACs promise.

    Dense is the faster of the model's own fused and unfused attention, measured in the same run. Speed-up is the median
    over rounds of the ratio within a round, with its quartiles; peak memory is what one forward allocates.
    """
    sizes = _batch_sizes(["1", "8", "32"] if batch_size is None else batch_size)
    dtypes = _dtypes(["fp32"] if dtype is None else dtype)
    methods = {config.describe(): config for config in common.parse_methods(method)}

    from vitrim.measure.latency import Budget, reduced_copy

    budget = Budget(min_rounds=repeats, min_seconds=min_seconds, max_rounds=max(repeats, Budget.max_rounds))
    host = model.load(machine.select())
    for config in methods.values():
        reduced_copy(host, config)  # what does not fit must say so before the first minute of timing
    dataset = _open(images, host, max(sizes))
    out = record.console()
    rows: list[Row] = []
    found = {
        "environment": machine.environment(",".join(dtypes)),
        "weights": model.weights,
        "images": images.source or "random",
        "split": None if dataset is None else dataset.split,
        "rows": rows,
    }
    _print_notes(out, host, methods, images.source, machine.seed)
    try:
        for name, size in product(dtypes, sizes):
            setting = {"model": model.name, "batch_size": size, "dtype": name, "compiled": compiled}
            measured = _measure(host, methods, dataset, setting, budget, machine.seed)
            print_setting(out, measured)
            rows += measured
            if not record.on_stdout:
                record.write("bench", **found)  # after every setting: the next may exhaust the machine
    finally:
        if record.on_stdout and rows:
            record.write("bench", **found)


def _measure(
    host: nn.Module,
    methods: Mapping[str, MethodConfig],
    dataset: ImageDataset | None,
    setting: Mapping[str, Any],
    budget: Budget,
    seed: int,
) -> list[Row]:
    """Measure one setting on images of ``dataset`` or random ones. Leaves ``host`` in the dtype of the setting.

    Raises:
        VitrimError: the machine has too little memory, or cannot compute in this dtype.
    """
    from vitrim.measure import bench as profiling
    from vitrim.measure.records import Row

    size, name = setting["batch_size"], setting["dtype"]
    host.to(profiling.DTYPES[name])
    device = next(host.parameters()).device
    with profiling.one_line_errors(f"batch {size}, {name}"):
        batch = profiling.random_images(host, size, seed) if dataset is None else _batch(dataset, size)
        batch = batch.to(device, profiling.DTYPES[name])
        rows = profiling.measure(host, methods, batch, compiled=setting["compiled"], budget=budget)
    return [Row(row.method, {**setting, **row}) for row in rows]


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _open(images: Images, model: nn.Module, count: int) -> ImageDataset | None:
    """Open at least ``count`` images, prepared as the model wants them; None for random ones."""
    from vitrim.data import eval_transform

    dataset = images.open()
    if dataset is None:
        return None
    if len(dataset) < count:
        raise VitrimError(f"{images.source} has {len(dataset)} images, too few for a batch of {count}")
    dataset.transform = eval_transform(model)
    return dataset


def _batch(dataset: ImageDataset, count: int) -> Tensor:
    """(count, C, H, W): images spread evenly over the dataset."""
    from vitrim.data import batches

    images, _ = next(iter(batches(dataset, count, limit=count)))
    return cast("Tensor", images)


def _batch_sizes(texts: Sequence[str]) -> list[int]:
    """Parse ``["1", "8,32"]`` into ``[1, 8, 32]``, each once."""
    sizes = []
    for text in _words(texts, "--batch-size"):
        if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= common.MAX_BATCH:
            raise VitrimError(
                f"unexpected batch size '{text}'; valid batch sizes: whole numbers from 1 to {common.MAX_BATCH}, "
                "as in 1,8"
            )
        sizes.append(int(text))
    return list(dict.fromkeys(sizes))


def _dtypes(texts: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(_words(texts, "--dtype")))
    for name in names:
        common.check_choice("dtype", name, DTYPES)
    return names


def _words(texts: Sequence[str], what: str) -> list[str]:
    words = [word for text in texts for word in text.replace(",", " ").split()]
    if not words:
        raise VitrimError(f"{what} is empty: give at least one value")
    return words


# ---- output ----------------------------------------------------------------------------------------------------------


def _print_notes(
    out: Console, host: nn.Module, methods: Mapping[str, MethodConfig], images: str | None, seed: int
) -> None:
    from vitrim.measure.bench import cost_varies

    if cost_varies(host):
        out.print(
            "the work of RoI heads depends on their proposals; these are of the weights and images at hand, what is "
            f"random of which is drawn from seed {seed}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    adaptive = [name for name, config in methods.items() if config.is_adaptive()]
    if adaptive:
        given = f"images of {images}" if images else "random images (give real ones with --images)"
        out.print(
            f"{', '.join(adaptive)}: token counts depend on the images; speed and promise are those of {given}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def print_setting(out: Console, rows: Sequence[Row]) -> None:
    """Print the table of one setting, dense first, and below it, in words, the methods that do not pay."""
    dense = {row.get("part"): row for row in rows if row["method"] == rows[0]["method"]}
    first = rows[0]
    kernels = "; ".join(_kernel_text(row) for row in dense.values())
    heading = f"{first['model']}, {setting_text(first)}; {kernels}; rounds: {first['rounds']}"
    out.print(heading, highlight=False, markup=False, soft_wrap=True)
    columns = COLUMNS if len(dense) == 1 else (COLUMNS[0], "part", *COLUMNS[1:])
    common.print_table(out, "", columns, [_cells(row) for row in rows])
    for row in rows[len(dense) :]:
        for line in verdicts(row, dense[row.get("part")]):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
    out.print()


def _kernel_text(dense: Mapping[str, Any]) -> str:
    """The attention kernel of a dense row, and the times of the others."""
    slower = [f"{name}: {p50:.2f} ms" for name, p50 in dense["dense_p50_ms"].items() if name != dense["dense_kernel"]]
    of = f" {dense['part']}" if "part" in dense else ""
    return f"dense{of} is {dense['dense_kernel']} attention" + "".join(f" ({text})" for text in slower)


def setting_text(row: Mapping[str, Any]) -> str:
    """ "batch 8, bf16" or "batch 8, bf16, compiled"."""
    return f"batch {row['batch_size']}, {row['dtype']}" + (", compiled" if row["compiled"] else "")


def _cells(row: Row) -> list[str]:
    latency, peak = row["latency_ms"], row["peak_memory_mib"]
    return [
        row["method"],
        *([row["part"]] if "part" in row else []),
        f"{row['images_per_second']:.1f}",
        f"{latency['p50']:.2f}",
        f"{latency['p95']:.2f}",
        "-" if peak is None else f"{peak:.1f}",
        f"{row['speedup']:.2f}",
        f"{row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}",
        f"{row['promised_speedup']:.2f}",
        f"{row['ratio']:.2f}",
    ]


def verdicts(row: Mapping[str, Any], dense: Mapping[str, Any]) -> list[str]:
    """The reasons in words why reducing does not pay at this setting; empty where it pays.

    Example:
        >>> dense = {"peak_memory_mib": 9.0}
        >>> row = {"method": "tome:r=8", "batch_size": 1, "dtype": "bf16", "compiled": False, "dense_kernel": "fused",
        ...        "speedup": 0.97, "speedup_q1": 0.95, "speedup_q3": 0.99, "promised_speedup": 1.45,
        ...        "peak_memory_mib": 8.0}
        >>> verdicts(row, dense)
        ['tome:r=8 does not pay at batch 1, bf16: 0.97x the speed of dense (fused), where its MACs promise 1.45x']
    """
    where = f"at {setting_text(row)}"
    promise = f"where its MACs promise {row['promised_speedup']:.2f}x"
    lines: list[str] = []
    if row["method"].partition(":")[0] == "none":
        return lines  # it is there to show what vitrim itself costs
    method = row["method"] + (f" ({row['part']})" if "part" in row else "")
    if row["speedup"] < 1.0:
        speed = f"{row['speedup']:.2f}x the speed of dense ({row['dense_kernel']})"
        lines.append(f"{method} does not pay {where}: {speed}, {promise}")
    elif row["speedup_q1"] <= 1.0:
        spread = f"its quartiles {row['speedup_q1']:.2f}-{row['speedup_q3']:.2f} include 1"
        lines.append(f"{method} shows no clear gain {where}: {row['speedup']:.2f}x, but {spread}, {promise}")
    peak, dense_peak = row["peak_memory_mib"], dense["peak_memory_mib"]
    if peak is not None and dense_peak is not None and peak > 1.01 * dense_peak:  # 1%: its bookkeeping
        lines.append(f"{method} needs more memory than dense {where}: {peak:.2f} against {dense_peak:.2f} MiB")
    return lines
