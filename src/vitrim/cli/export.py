"""``vitrim export``: a model, reduced or not, as a file that runs without vitrim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrim.cli import common
from vitrim.cli.setup import Compute, Images, Limit, Model, Record
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from vitrim.core.method import MethodConfig
    from vitrim.data import ImageDataset
    from vitrim.exporting import Exported
    from vitrim.measure.records import Row

FITTED = 512
"""Images for fixed counts where --limit does not say."""
COLUMNS = ("method", "engine", "images/s", "p50 ms", "p95 ms", "speed-up", "q1-q3", "promised", "ratio", "over eager")

Method = Annotated[
    list[str] | None,
    typer.Option("--method", "-m", help="name:key=value,key=value, e.g. tome:r=13, or @FILE; default: dense"),
]
Out = Annotated[Path, typer.Option("--out", help="the file; its metadata lie beside it as FILE.json")]
To = Annotated[
    str | None, typer.Option("--to", help="onnx, pt2 (torch.export), openvino or aoti; default: by the suffix of --out")
]
Batch = Annotated[str, typer.Option("--batch", help="dynamic: batches of any size, or the only size, e.g. 8")]
Opset = Annotated[int, typer.Option("--opset", help="version of the ONNX operators, 18 to 23")]
Size = Annotated[
    int | None, typer.Option("--image-size", min=1, max=4096, help="side of the images; default: the model's own")
]
Dtype = Annotated[str, typer.Option("--dtype", help="of the weights: fp32 or fp16")]
Preprocess = Annotated[
    bool, typer.Option("--preprocess", help="take uint8 images (batch, height, width, 3) and normalise in the graph")
]
Check = Annotated[
    int, typer.Option("--check", min=0, max=common.MAX_BATCH, help="images to compare file and model on; 0: none")
]
Freeze = Annotated[
    bool, typer.Option("--freeze", help="adaptive methods: fixed counts, the means over --images, for every image")
]
Capacity = Annotated[
    float | None,
    typer.Option("--capacity", help="adaptive methods: slots per block, enough for this share of --images, e.g. 0.99"),
]
Bench = Annotated[bool, typer.Option("--bench", help="time eager and exported, dense and reduced, at batch 1 and 8")]


def export(
    *,
    model: Model,
    method: Method = None,
    out: Out,
    to: To = None,
    batch: Batch = "dynamic",
    opset: Opset = 20,
    size: Size = None,
    dtype: Dtype = "fp32",
    preprocess: Preprocess = False,
    check: Check = 64,
    freeze: Freeze = False,
    capacity: Capacity = None,
    bench: Bench = False,
    images: Images,
    limit: Limit = None,
    compute: Compute,
    record: Record,
) -> None:
    """Write a model, dense or reduced, for ONNX Runtime, OpenVINO or torch, and compare it with the model.

    A file that does not give the same top-1, and logits within 1e-4, at batch 1, 2 and all that is left of --check
    images is not kept. Methods whose counts depend on the images need --freeze or --capacity.
    """
    images_at_once = _batch(batch)
    common.check_choice("dtype", dtype, ("fp32", "fp16"))
    if method is not None and len(method) > 1:
        raise VitrimError(f"a file holds one method, got {len(method)}: {', '.join(method)}")
    (config,) = common.parse_methods(method) if method else (None,)
    _check_options(config, freeze, capacity, images, limit)
    from vitrim.exporting.format import format_named
    from vitrim.exporting.writing import export as write
    from vitrim.measure.machine import environment

    format_named(to, out).check()
    compute.start()
    host = model.load()
    dataset = _open(images, host)
    _check_images(dataset, host, size, check, images_at_once, fixing=freeze or capacity is not None)
    config = _fixed(host, config, dataset, limit, freeze, capacity, model.learned)
    reduced = _learned(host, config, model)
    count = max(check, images_at_once or 1)
    given = check if dataset is None or check == 0 else _images(dataset, host, count, preprocess)
    file = write(
        host if reduced is None else reduced, config if reduced is None else None, out,
        to=to, batch=images_at_once, opset=opset, dtype=dtype, preprocess=preprocess, size=size,  # type: ignore[arg-type]
        check=given, name=model.name, classes=_classes(dataset, host),
    )  # fmt: skip
    console = record.console()
    _show(console, file)
    rows = list(_timed(host, reduced, config, file, console, compute.seed)) if bench else []
    facts = {"path": str(file.path), "bytes": file.bytes, "inputs": file.inputs, **file.metadata}
    record.write("export", environment=environment(seed=compute.seed), weights=model.weights, file=facts, rows=rows)


def _batch(text: str) -> int | None:
    """Parse ``dynamic`` or a number."""
    if text == "dynamic":
        return None
    if not text.isdecimal() or len(text) > 10 or int(text) < 1:
        raise VitrimError(f"unexpected --batch '{text}': write dynamic, or the only size of a batch, 1 or more")
    return int(text)


def _check_options(
    config: MethodConfig | None, freeze: bool, capacity: float | None, images: Images, limit: int | None
) -> None:
    """Refuse, before any work, ways to fixed counts without a method that needs them or without images."""
    asked = freeze or capacity is not None
    option = "--freeze" if freeze else "--capacity"
    if freeze and capacity is not None:
        raise VitrimError("give either --freeze or --capacity, not both")
    if capacity is not None and not 0.0 < capacity <= 1.0:
        raise VitrimError(f"--capacity {capacity} must be above 0 and at most 1: the share of images that fit")
    if asked and config is None:
        raise VitrimError(f"{option} is for a method that adapts to the images: give one with -m")
    if asked and images.source is None:
        raise VitrimError(f"{option} finds counts on images: give --images too")
    if limit is not None and not asked:
        raise VitrimError("--limit says on how many images --freeze and --capacity find counts: give one of them")


def _open(images: Images, model: nn.Module) -> ImageDataset | None:
    from vitrim.data import eval_transform

    dataset = images.open()
    if dataset is not None:
        dataset.transform = eval_transform(model)
    return dataset


def _check_images(
    dataset: ImageDataset | None, model: nn.Module, size: int | None, check: int, batch: int | None, *, fixing: bool
) -> None:
    """Refuse, before counts are found and anything is exported, images that do not fit the file or are too few.

    Raises:
        VitrimError: in one line.
    """
    from vitrim.core.registry import host_of

    if dataset is None or not (fixing or check):
        return
    if size is not None:
        _, rows, columns = host_of(model).facts(model).input_size
        if (size, size) != (rows, columns):
            raise VitrimError(
                f"--images are prepared at the model's own {rows} x {columns}, not at --image-size {size}: make the "
                f"model of that size, e.g. --model-option img_size={size} (timm), or leave --images out"
            )
    if check and batch is not None and len(dataset) < batch:
        raise VitrimError(
            f"{dataset.source} has {len(dataset)} images, too few to compare a file for batches of {batch}: give more, "
            "or --check 0"
        )


def _fixed(
    model: nn.Module,
    config: MethodConfig | None,
    dataset: ImageDataset | None,
    limit: int | None,
    freeze: bool,
    capacity: float | None,
    learned: Path | None,
) -> MethodConfig | None:
    """The method with fixed counts, where they are asked for: under the parameters of its own that a run learned."""
    if config is None or dataset is None or not (freeze or capacity is not None):
        return config
    from vitrim.data import batches
    from vitrim.exporting import static

    found = (batch for batch, _ in batches(dataset, 32, limit=limit or FITTED))
    return (
        static.freeze(model, config, found, learned=learned)
        if capacity is None
        else static.bound(model, config, found, quantile=capacity, learned=learned)
    )


def _learned(model: nn.Module, config: MethodConfig | None, options: Model) -> nn.Module | None:
    """A copy reduced with the parameters that the run of the model learned for the method; None if there are none."""
    from vitrim.core.reduce import reduce_, saved_method
    from vitrim.measure.latency import shared_copy

    if config is None or options.learned is None or config.name != saved_method(options.learned):
        return None
    reduced = shared_copy(model)
    reduce_(reduced, config).load_parameters(options.learned)
    return reduced


def _images(dataset: ImageDataset, model: nn.Module, count: int, as_bytes: bool) -> Tensor:
    """(count, C, H, W) images spread over the dataset, or (count, H, W, C) uint8."""
    from vitrim.core.registry import ask
    from vitrim.data import batches
    from vitrim.exporting.program import as_read

    images: Tensor
    images, _ = next(iter(batches(dataset, min(count, len(dataset)), limit=count)))
    return as_read(images, ask(model).preprocessing(model)) if as_bytes else images


def _classes(dataset: ImageDataset | None, model: nn.Module) -> list[str] | None:
    """The names of the model's classes: its own, else those of the images if they have as many."""
    from vitrim.core.registry import ask

    host = ask(model)
    every = (host.class_names(model), None if dataset is None else dataset.class_names)
    return next((list(names) for names in every if names and len(names) == host.num_classes(model)), None)


# ---- output ----------------------------------------------------------------------------------------------------------


def _show(out: Console, file: Exported) -> None:
    known = file.metadata
    shape = ", ".join(map(str, file.shape))
    tokens = "" if known["tokens_per_block"] is None else f"; tokens per block: {known['tokens_per_block']}"
    lines = [
        f"{file.path}: {file.format} for {file.engine}, {file.bytes / 2**20:.1f} MiB, {file.nodes} operations",
        f"{known['model']}, {known['method']}: {known['gmacs']:.3f} of {known['dense_gmacs']:.3f} GMACs{tokens}",
        f"input image ({shape}) {known['input']['dtype']}, output {known['output']['name']}",
        f"compared with the model: {known['parity']}" if "parity" in known else "not compared with the model",
    ]
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _timed(
    dense: nn.Module, reduced: nn.Module | None, config: MethodConfig | None, file: Exported, out: Console, seed: int
) -> Iterator[Row]:
    """Time the file at its batch size, or at 1 and 8, and print a table of each."""
    import torch

    from vitrim.exporting.timing import time_exported
    from vitrim.measure.latency import reduced_copy

    if reduced is None:
        reduced = dense if config is None else reduced_copy(dense, config)
    generator = torch.Generator().manual_seed(seed)
    for size in (1, 8) if file.batch is None else (file.batch,):
        shape = (size, *(int(side) for side in file.shape[1:]))
        images = torch.randn(shape, generator=generator)
        if file.metadata["input"]["dtype"] == "uint8":
            images = (images * 64 + 128).clamp(0, 255).to(torch.uint8)
        rows = time_exported(dense, reduced, file, images)
        title = f"batch {size}, threads: {rows[0]['threads']}, rounds: {rows[0]['rounds']}"
        common.print_table(out, title, COLUMNS, [_cells(row) for row in rows], text_columns=2)
        yield from rows


def _cells(row: Row) -> list[str]:
    latency = row["latency_ms"]
    return [
        row["method"],
        row["engine"],
        f"{row['images_per_second']:.1f}",
        f"{latency['p50']:.2f}",
        f"{latency['p95']:.2f}",
        f"{row['speedup']:.2f}",
        f"{row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}",
        f"{row['promised_speedup']:.2f}",
        f"{row['ratio']:.2f}",
        f"{row['over_eager']:.2f}",
    ]
