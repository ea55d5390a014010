"""``vitrim bench``: what reducing gains in time on this machine, against what its MACs promise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vitrim.cli import common
from vitrim.errors import VitrimError, unknown

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from vitrim.config import MethodConfig
    from vitrim.data import ImageDataset
    from vitrim.profiling.latency import Budget, FloatArray

    Row = dict[str, Any]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DENSE = "dense"
COLUMNS = ("method", "images/s", "p50 ms", "p95 ms", "peak MiB", "speed-up", "q1-q3", "promised", "ratio")
WIDTH = 120
COMPILED_VARIANTS = 1000


def bench(
    model: common.Model,
    method: common.Methods,
    # the design writes `--batch-size 1 8 32`: an option takes one value, so the others arrive here
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    batch_size: Annotated[
        list[str] | None, typer.Option("--batch-size", "-b", help="e.g. 8, or 1,8,32; may repeat  [default: 1,8,32]")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="fp32, bf16, fp16, or several; may repeat  [default: fp32]")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile every model, dense too")] = False,
    device: common.Device = "cpu",
    threads: common.Threads = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="time every model at least so often")] = 10,
    min_seconds: Annotated[float, typer.Option("--min-seconds", min=0.0, help="and at least so long")] = 1.0,
    images: Annotated[
        str | None, typer.Option("--images", help="parquet file or folder of images; default: random images")
    ] = None,
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
    _quiet_profiler()
    sizes = _batch_sizes(batch_size or ["1", "8", "32"], more or [])
    dtypes = _dtypes(dtype or ["fp32"])
    methods = _methods(method)

    import torch

    from vitrim.profiling.latency import Budget, reduced_copy

    budget = Budget(min_rounds=repeats, min_seconds=min_seconds, max_rounds=max(repeats, Budget.max_rounds))
    selected = common.select_device(device)
    common.set_threads(threads)
    torch.manual_seed(seed)
    host = common.create_model(
        model,
        pretrained=pretrained,
        checkpoint=checkpoint,
        options=common.parse_options(model_option),
        device=selected,
    )
    for config in methods.values():
        reduced_copy(host, config)  # what does not fit must say so before the first minute of timing
    dataset = _open_images(host, images, max(sizes)) if images else None

    out = common.console(json)
    if not out.is_terminal:
        out.width = max(out.width, WIDTH)  # in a file or pipe, the 80 columns that rich assumes would fold the numbers
    weights = "pretrained" if pretrained else str(checkpoint) if checkpoint else "random"
    rows: list[Row] = []
    record = {
        "command": "bench",
        "environment": common.environment(device=device, dtype=",".join(dtypes), seed=seed),
        "weights": weights,
        "images": images or "random",
        "rows": rows,
    }
    _print_notes(out, methods, images)
    try:
        for name in dtypes:
            host = host.to(getattr(torch, DTYPES[name]))
            for size in sizes:
                with one_line_errors(f"batch {size}, {name}"):
                    batch = random_images(host, size, seed) if dataset is None else _first_batch(dataset, size)
                    batch = batch.to(selected, getattr(torch, DTYPES[name]))
                    found = measure(host, methods, batch, compiled=compiled, budget=budget)
                setting = {"model": model, "batch_size": size, "dtype": name, "compiled": compiled}
                found = [{**setting, **row} for row in found]
                print_setting(out, found)
                rows += found
                if json != "-":
                    common.write_json(json, record)  # after every setting: the next may exhaust the machine
    finally:
        if json == "-" and rows:
            common.write_json(json, record)


# ---- one setting -----------------------------------------------------------------------------------------------------


def measure(
    model: nn.Module,
    methods: Mapping[str, MethodConfig],
    images: Tensor,
    *,
    compiled: bool = False,
    budget: Budget | None = None,
) -> list[Row]:
    """Speed and peak memory of a dense model and its reductions at one batch size and dtype, in one interleaved run.

    Args:
        model: an unreduced host in eval mode; it is not changed.
        methods: configs by the name that the rows should carry.
        images: (B, C, H, W) on the device and in the dtype of the model.
        compiled: compile all of them with torch.compile in its default mode.
        budget: how long to time.

    Returns:
        One row for the dense model with the faster attention kernel (method "dense"), then one per method, each with
        ``method, dense_kernel, dense_p50_ms`` (by kernel), ``images_per_second, latency_ms`` (p50, p95, min, iqr),
        ``rounds, peak_memory_mib`` (None where it cannot be measured), ``speedup, speedup_q1, speedup_q3,
        promised_speedup`` (dense MACs over reduced MACs) and ``ratio`` (speedup over promised_speedup).

    Raises:
        VitrimError: a method does not fit the model.

    Example:
        >>> import timm, torch
        >>> from vitrim.cli.bench import measure
        >>> from vitrim.profiling.latency import Budget
        >>> from vitrim.registry import parse_method
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
        >>> rows = measure(model, {"tome:r=1": parse_method("tome:r=1")}, torch.zeros(1, 3, 32, 32),
        ...                budget=Budget(min_rounds=1, min_seconds=0.0))
        >>> [row["method"] for row in rows]
        ['dense', 'tome:r=1']
    """
    import torch

    from vitrim.profiling.latency import dense_copies, fastest, reduced_copy, summarise, time_interleaved
    from vitrim.profiling.memory import peak_memory_mib

    promised = {name: promised_speedup(model, config, images) for name, config in methods.items()}
    kernels = dense_copies(model)
    models = {_dense_name(kernel): dense for kernel, dense in kernels.items()}
    models |= {name: reduced_copy(model, config) for name, config in methods.items()}
    with torch.inference_mode(), _compilation(compiled):
        if compiled:
            models = {name: torch.compile(candidate) for name, candidate in models.items()}  # type: ignore[misc]
        runs: dict[str, Callable[[], object]] = {name: partial(candidate, images) for name, candidate in models.items()}
        times = time_interleaved(runs, images.device, budget)
        kernel = fastest({name: times[_dense_name(name)] for name in kernels}, kernels)
        peaks = {name: peak_memory_mib(runs[name], images.device) for name in [_dense_name(kernel), *methods]}
    facts = {
        "dense_kernel": kernel,
        "dense_p50_ms": {name: summarise(times[_dense_name(name)]).p50_ms for name in kernels},
    }
    return [
        {"method": label, **facts, **_row(times, name, _dense_name(kernel), len(images), peaks[name], promise)}
        for label, name, promise in [
            (DENSE, _dense_name(kernel), 1.0),
            *((name, name, promised[name]) for name in methods),
        ]
    ]


def _dense_name(kernel: str) -> str:
    return f"{DENSE} ({kernel})"


def _row(
    times: Mapping[str, FloatArray], name: str, dense: str, batch_size: int, peak_mib: float | None, promised: float
) -> Row:
    from vitrim.profiling.latency import images_per_second, paired_speedup, summarise

    latency = summarise(times[name])
    speedup = paired_speedup(times[dense], times[name])
    return {
        "images_per_second": images_per_second(batch_size, latency.p50_ms),
        "latency_ms": {
            "p50": latency.p50_ms,
            "p95": latency.p95_ms,
            "min": latency.min_ms,
            "iqr": latency.iqr_ms,
        },
        "rounds": len(times[name]),
        "peak_memory_mib": peak_mib,
        "speedup": speedup.median,
        "speedup_q1": speedup.q1,
        "speedup_q3": speedup.q3,
        "promised_speedup": promised,
        "ratio": speedup.median / promised,
    }


def promised_speedup(model: nn.Module, method: MethodConfig, images: Tensor) -> float:
    """Dense MACs over the MACs under ``method``: the speed-up if time were proportional to MACs.

    Counted on all of ``images`` (B, C, H, W) where counts depend on them, else on one.
    """
    from vitrim.profiling.macs import profile
    from vitrim.registry import make_method

    sample = images if method.adaptive else images[:1]
    dense, reduced = (profile(model, config, sample).macs.total for config in (make_method("none"), method))
    return dense / reduced


@contextmanager
def _compilation(compiled: bool) -> Iterator[None]:
    """torch.compile for many variants of one model.

    Its cache is per source line, so the dense and all reduced models share one: with the usual limit of 8 entries the
    ninth would silently run uncompiled. What earlier settings compiled is forgotten, because a second batch size
    would else be compiled for any size.
    """
    if not compiled:
        yield
        return
    import torch
    import torch._dynamo

    torch.compiler.reset()
    limits = {"recompile_limit": COMPILED_VARIANTS, "accumulated_recompile_limit": COMPILED_VARIANTS}
    with torch._dynamo.config.patch(limits):
        yield


@contextmanager
def one_line_errors(setting: str) -> Iterator[None]:
    """Turn running out of memory, and a dtype that the device cannot compute in, into a `VitrimError`."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise VitrimError(f"out of memory at {setting}; settings finished before are kept") from error
    except RuntimeError as error:
        message = str(error)
        if "can't allocate memory" in message:
            raise VitrimError(f"out of memory at {setting}; settings finished before are kept") from error
        if "not implemented for" in message:
            problem = message.strip().splitlines()[0]
            raise VitrimError(f"cannot run at {setting}: {problem}; settings finished before are kept") from error
        raise


# ---- inputs ----------------------------------------------------------------------------------------------------------


def random_images(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Standard normal images (count, C, H, W), float32 on the CPU, of the size and channels that ``model`` takes."""
    import torch

    patches: Any = model.patch_embed
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, patches.proj.in_channels, *patches.img_size, generator=generator)


def _open_images(model: nn.Module, source: str, count: int) -> ImageDataset:
    """The images of ``source``, at least ``count``, prepared as the model wants them."""
    from vitrim.data import eval_transform, load_images

    dataset = load_images(source)
    if len(dataset) < count:
        raise VitrimError(f"{source} has {len(dataset)} images, too few for a batch of {count}")
    dataset.transform = eval_transform(model)
    return dataset


def _first_batch(dataset: ImageDataset, count: int) -> Tensor:
    """(count, C, H, W): images that lie evenly spread in the dataset."""
    from vitrim.data import batches

    images, _ = next(iter(batches(dataset, count, limit=count)))
    return cast("Tensor", images)


def _batch_sizes(texts: Sequence[str], more: Sequence[str]) -> list[int]:
    """``["1", "8,32"]`` as ``[1, 8, 32]``, each once."""
    sizes = []
    for text in _words([*texts, *more]):
        if not text.isdecimal() or int(text) < 1:
            what = "batch size" if text in _words(texts) else "argument"
            raise VitrimError(f"unexpected {what} '{text}'; valid batch sizes: whole numbers from 1, e.g. 1,8,32")
        sizes.append(int(text))
    return list(dict.fromkeys(sizes))


def _dtypes(texts: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(_words(texts)))
    for name in names:
        if name not in DTYPES:
            raise unknown("dtype", name, DTYPES)
    return names


def _words(texts: Sequence[str]) -> list[str]:
    words = [word for text in texts for word in text.replace(",", " ").split()]
    if not words:
        raise VitrimError("an option is empty: give at least one value")
    return words


def _methods(texts: Sequence[str]) -> dict[str, MethodConfig]:
    """The methods by the text that names them in every record."""
    methods: dict[str, MethodConfig] = {}
    for config in common.parse_methods(texts):
        if config.describe() in methods:
            raise VitrimError(f"method {config.describe()} is given twice")
        methods[config.describe()] = config
    return methods


def _quiet_profiler() -> None:
    """Keep notes of torch's profiler, which measures peak memory, off the screen. Only before torch is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


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
