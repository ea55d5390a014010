"""``vitrim bench``: what reducing gains in time on this machine, against what its MACs promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vitrim.cli import common
from vitrim.cli.setup import Images, Machine, Model, Prompt, Record
from vitrim.cli.speeds import print_notes, print_setting
from vitrim.errors import VitrimError, one_line_errors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitrim.core.method import MethodConfig
    from vitrim.data import ImageDataset
    from vitrim.measure.latency import Budget
    from vitrim.measure.records import Row
    from vitrim.speed.engines import Engine

DTYPES = ("fp32", "bf16", "fp16")


BatchSizes = Annotated[
    list[str] | None, typer.Option("--batch-size", "-b", help="e.g. 8, or 1,8,32; may repeat; default: 1,8,32")
]
Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", help="fp32, bf16, fp16, or several; may repeat; default: fp32")
]
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
    engine: Engines = None,
    compiled: Compiled = False,
    repeats: Repeats = 10,
    min_seconds: MinSeconds = 1.0,
    prompt: Prompt,
    images: Images,
    machine: Machine,
    record: Record,
) -> None:
    """Time dense and reduced models in turn, in one run, and compare the speed-up with what the MACs promise.

    Dense is the faster of the model's own fused and unfused attention, on the fastest of the engines, measured in the
    same run. Speed-up is the median over rounds of the ratio within a round, with its quartiles; peak memory is what
    one forward allocates. Of a vision-language model, prefill is timed: tower, connector and language model on a batch
    of prompts, from which reduced models leave out the image tokens that are gone.
    """
    sizes = _batch_sizes(["1", "8", "32"] if batch_size is None else batch_size)
    dtypes = _dtypes(["fp32"] if dtype is None else dtype)
    methods = {config.describe(): config for config in common.parse_methods(method)}
    engines = _engines(engine, compiled)

    from vitrim.measure.latency import Budget
    from vitrim.measure.profile import untrained_counts, untrained_notes

    budget = Budget(min_rounds=repeats, min_seconds=min_seconds, max_rounds=max(repeats, Budget.max_rounds))
    host = prompt.around(model.load(machine.select()), images.source)
    _check(host, methods, engines, dtypes)
    dataset = _open(images, host, max(sizes))
    out = record.console()
    rows: list[Row] = []
    untrained = untrained_counts(host, methods.values())
    found = {
        "environment": machine.environment(",".join(dtypes)),
        "weights": model.weights,
        "untrained": untrained,
        "images": images.source or "random",
        "split": None if dataset is None else dataset.split,
        "rows": rows,
    }
    print_notes(out, host, methods, engines, images.source, machine.seed)
    for note in untrained_notes(untrained):
        out.print(note, highlight=False, markup=False, soft_wrap=True)
    try:
        for name, size in product(dtypes, sizes):
            setting = {"model": model.name, "batch_size": size, "dtype": name}
            measured = _measure(host, methods, dataset, setting, engines, budget, machine.seed)
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
    engines: Sequence[Engine],
    budget: Budget,
    seed: int,
) -> list[Row]:
    """Measure one setting on images of ``dataset`` or random ones. Leaves ``host`` in the dtype of the setting.

    Raises:
        VitrimError: the machine has too little memory, or cannot compute in this dtype.
    """
    from vitrim.measure.records import Row
    from vitrim.speed import bench as profiling

    size, name = setting["batch_size"], setting["dtype"]
    host.to(profiling.DTYPES[name])
    device = next(host.parameters()).device
    with one_line_errors(f"batch {size}, {name}"):
        batch = profiling.random_images(host, size, seed) if dataset is None else _batch(dataset, size)
        batch = batch.to(device, profiling.DTYPES[name])
        rows = profiling.measure(host, methods, batch, engines=engines, budget=budget)
    return [Row(row.method, {**setting, **row}) for row in rows]


def _engines(texts: Sequence[str] | None, compiled: bool) -> list[Engine]:
    """The engines by name, eager PyTorch if none is given.

    Raises:
        VitrimError: both ways to ask for torch.compile, or as `vitrim.speed.engines.engines_named`.
    """
    if compiled and texts is not None:
        raise VitrimError("--compile is torch.compile and nothing else: leave it out, and give --engine compile")
    names = ["eager"] if texts is None else list(dict.fromkeys(_words(texts, "--engine")))
    from vitrim.speed import engines

    return [engines.Compiled()] if compiled else engines.engines_named(names)


def _check(
    host: nn.Module, methods: Mapping[str, MethodConfig], engines: Sequence[Engine], dtypes: Sequence[str]
) -> None:
    """Refuse what does not fit or cannot run before the first minute of timing."""
    from vitrim.measure.latency import reduced_copy
    from vitrim.speed.bench import DTYPES, check_engines

    for name in dtypes:
        check_engines(engines, methods, host, next(host.parameters()).device, DTYPES[name])
    for config in methods.values():
        reduced_copy(host, config)


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
