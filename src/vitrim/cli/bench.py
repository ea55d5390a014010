"""``vitrim bench``: what reducing gains in time on this machine, against what its MACs promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer

from vitrim.cli import common
from vitrim.errors import VitrimError, unknown
from vitrim.loading import create_model

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from vitrim.core.config import MethodConfig
    from vitrim.data import ImageDataset
    from vitrim.measure.bench import Row

DTYPES = ("fp32", "bf16", "fp16")
COLUMNS = ("method", "images/s", "p50 ms", "p95 ms", "peak MiB", "speed-up", "q1-q3", "promised", "ratio")


def bench(
    model: common.Model,
    method: common.Methods,
    # the design writes `--batch-size 1 8 32`: an option takes one value, so the others arrive here
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    batch_size: Annotated[
        list[str] | None, typer.Option("--batch-size", "-b", help="e.g. 8, or 1,8,32; may repeat; default: 1,8,32")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="fp32, bf16, fp16, or several; may repeat; default: fp32")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile every model, dense too")] = False,
    device: common.Device = "cpu",
    threads: common.Threads = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=common.MAX_REPEATS, help="time every model at least so often")
    ] = 10,
    min_seconds: Annotated[
        float, typer.Option("--min-seconds", min=0.0, max=common.MAX_SECONDS, help="and at least so long")
    ] = 1.0,
    images: Annotated[
        str | None, typer.Option("--images", help="images, as --data of `vitrim eval`; default: random images")
    ] = None,
    split: common.Split = None,
    pretrained: common.Pretrained = False,
    checkpoint: common.Checkpoint = None,
    model_option: common.ModelOptions = None,
    seed: common.Seed = 0,
    json: common.Json = None,
) -> None:
    """Time dense and reduced models in turn, in one run, and compare the speed-up with what the MACs promise.

    Dense is the faster of the model's own fused and unfused attention, measured in the same run. Speed-up is the median
    over rounds of the ratio within a round, with its quartiles; peak memory is what one forward allocates.
    """
    common.check_json(json)
    common.check_images(images, split=split)
    sizes = _batch_sizes(["1", "8", "32"] if batch_size is None else batch_size, more or [])
    dtypes = _dtypes(["fp32"] if dtype is None else dtype)
    methods = {config.describe(): config for config in common.parse_methods(method)}

    import torch

    from vitrim.measure import bench as profiling
    from vitrim.measure.latency import Budget, reduced_copy

    budget = Budget(min_rounds=repeats, min_seconds=min_seconds, max_rounds=max(repeats, Budget.max_rounds))
    selected = common.select_device(device)
    common.set_threads(threads)
    torch.manual_seed(seed)
    host = create_model(
        model,
        pretrained=pretrained,
        checkpoint=checkpoint,
        options=common.parse_options(model_option),
        device=selected,
    )
    for config in methods.values():
        reduced_copy(host, config)  # what does not fit must say so before the first minute of timing
    dataset = None if images is None else _open_images(host, images, split, max(sizes))

    out = common.console(json)
    weights = common.weights_of(model, pretrained=pretrained, checkpoint=checkpoint)
    rows: list[Row] = []
    record = {
        "command": "bench",
        "environment": common.environment(device=device, dtype=",".join(dtypes), seed=seed),
        "weights": weights,
        "images": images or "random",
        "split": None if dataset is None else dataset.split,
        "rows": rows,
    }
    _print_notes(out, methods, images)
    try:
        for name in dtypes:
            host = host.to(profiling.DTYPES[name])
            for size in sizes:
                with profiling.one_line_errors(f"batch {size}, {name}"):
                    batch = profiling.random_images(host, size, seed) if dataset is None else _batch(dataset, size)
                    batch = batch.to(selected, profiling.DTYPES[name])
                    found = profiling.measure(host, methods, batch, compiled=compiled, budget=budget)
                setting = {"model": model, "batch_size": size, "dtype": name, "compiled": compiled}
                found = [{**setting, **row} for row in found]
                print_setting(out, found)
                rows += found
                if json != "-":
                    common.write_json(json, record)  # after every setting: the next may exhaust the machine
    finally:
        if json == "-" and rows:
            common.write_json(json, record)


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _open_images(model: nn.Module, source: str, split: str | None, count: int) -> ImageDataset:
    """The images of ``source``, at least ``count``, prepared as the model wants them."""
    from vitrim.data import eval_transform, load_images

    dataset = load_images(source, split=split)
    if len(dataset) < count:
        raise VitrimError(f"{source} has {len(dataset)} images, too few for a batch of {count}")
    dataset.transform = eval_transform(model)
    return dataset


def _batch(dataset: ImageDataset, count: int) -> Tensor:
    """(count, C, H, W): images that lie evenly spread in the dataset."""
    from vitrim.data import batches

    images, _ = next(iter(batches(dataset, count, limit=count)))
    return cast("Tensor", images)


def _batch_sizes(texts: Sequence[str], more: Sequence[str]) -> list[int]:
    """``["1", "8,32"]`` as ``[1, 8, 32]``, each once."""
    sizes = []
    given = _words(texts, "--batch-size")
    for text in (*given, *(_words(more, "the argument") if more else ())):
        if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= common.MAX_BATCH:
            what = "batch size" if text in given else "argument"
            raise VitrimError(
                f"unexpected {what} '{text}'; valid batch sizes: whole numbers from 1 to {common.MAX_BATCH}, as in 1,8"
            )
        sizes.append(int(text))
    return list(dict.fromkeys(sizes))


def _dtypes(texts: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(_words(texts, "--dtype")))
    for name in names:
        if name not in DTYPES:
            raise unknown("dtype", name, DTYPES)
    return names


def _words(texts: Sequence[str], what: str) -> list[str]:
    words = [word for text in texts for word in text.replace(",", " ").split()]
    if not words:
        raise VitrimError(f"{what} is empty: give at least one value")
    return words


# ---- output ----------------------------------------------------------------------------------------------------------


def _print_notes(out: Console, methods: Mapping[str, MethodConfig], images: str | None) -> None:
    adaptive = [name for name, config in methods.items() if config.adaptive]
    if adaptive:
        given = f"images of {images}" if images else "random images (give real ones with --images)"
        out.print(
            f"{', '.join(adaptive)}: token counts depend on the images; speed and promise are those of {given}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def print_setting(out: Console, rows: Sequence[Row]) -> None:
    """The table of one setting, dense first, and below it the methods that do not pay, in words."""
    dense = rows[0]
    slower = [f"{name}: {p50:.2f} ms" for name, p50 in dense["dense_p50_ms"].items() if name != dense["dense_kernel"]]
    kernel = f"dense is {dense['dense_kernel']} attention" + "".join(f" ({text})" for text in slower)
    heading = f"{dense['model']}, {setting_text(dense)}; {kernel}; rounds: {dense['rounds']}"
    out.print(heading, highlight=False, markup=False, soft_wrap=True)
    common.print_table(out, "", COLUMNS, [_cells(row) for row in rows])
    for row in rows[1:]:
        for line in verdicts(row, dense):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
    out.print()


def setting_text(row: Row) -> str:
    """ "batch 8, bf16" or "batch 8, bf16, compiled"."""
    return f"batch {row['batch_size']}, {row['dtype']}" + (", compiled" if row["compiled"] else "")


def _cells(row: Row) -> list[str]:
    latency, peak = row["latency_ms"], row["peak_memory_mib"]
    return [
        row["method"],
        f"{row['images_per_second']:.1f}",
        f"{latency['p50']:.2f}",
        f"{latency['p95']:.2f}",
        "-" if peak is None else f"{peak:.1f}",
        f"{row['speedup']:.2f}",
        f"{row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}",
        f"{row['promised_speedup']:.2f}",
        f"{row['ratio']:.2f}",
    ]


def verdicts(row: Row, dense: Row) -> list[str]:
    """What is wrong with reducing at this setting, in words; nothing where it pays.

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
    if row["speedup"] < 1.0:
        speed = f"{row['speedup']:.2f}x the speed of dense ({row['dense_kernel']})"
        lines.append(f"{row['method']} does not pay {where}: {speed}, {promise}")
    elif row["speedup_q1"] <= 1.0:
        spread = f"its quartiles {row['speedup_q1']:.2f}-{row['speedup_q3']:.2f} include 1"
        lines.append(f"{row['method']} shows no clear gain {where}: {row['speedup']:.2f}x, but {spread}, {promise}")
    peak, dense_peak = row["peak_memory_mib"], dense["peak_memory_mib"]
    if peak is not None and dense_peak is not None and peak > 1.01 * dense_peak:  # 1%: its bookkeeping
        lines.append(f"{row['method']} needs more memory than dense {where}: {peak:.2f} against {dense_peak:.2f} MiB")
    return lines
