"""``vitrim export``: a model, reduced or not, as a file that runs without vitrim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.bench import progress
from vitrim.cli.options import MAX_BATCH, Compute, Images, Limit, Model
from vitrim.cli.output import Output, write_json
from vitrim.errors import VitrimError

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
Precision = Annotated[
    str, typer.Option("--precision", "--dtype", help="fp32, fp16, bf16, or int8 with --images: as far as --to has it")
]
Preprocess = Annotated[
    bool, typer.Option("--preprocess", help="take uint8 images (batch, height, width, 3) and normalise in the graph")
]
Check = Annotated[
    int, typer.Option("--check", min=0, max=MAX_BATCH, help="images to compare file and model on; 0: none")
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
    precision: Precision = "fp32",
    preprocess: Preprocess = False,
    check: Check = 64,
    freeze: Freeze = False,
    capacity: Capacity = None,
    bench: Bench = False,
    images: Images,
    limit: Limit = None,
    compute: Compute,
    output: Output,
) -> None:
    """Write a model, dense or reduced, as a file that needs no vitrim. ONNX Runtime, OpenVINO or torch run it.

    A file that does not give the same top-1, and logits within 1e-4, at batch 1, 2 and all that is left of --check
    images is not kept. Methods whose counts depend on the images need --freeze or --capacity.
    """
    images_at_once = _batch(batch)
    if method is not None and len(method) > 1:
        raise VitrimError(f"a file holds one method, got {len(method)}: {', '.join(method)}")
    from vitrim.exporting.exported import sidecar
    from vitrim.exporting.writing import export as write
    from vitrim.report import show

    output.spare(sidecar(out))
    with progress() as tell:
        file = write(
            model.name,
            method[0] if method else None,
            out,
            to=to,
            batch=images_at_once,
            opset=opset,
            precision=precision,
            preprocess=preprocess,
            size=size,
            check=check,
            freeze=freeze,
            capacity=capacity,
            bench=bench,
            images=images.source,
            **images.reading,
            limit=limit,
            **model.arguments,
            seed=compute.seed,
            threads=compute.threads,
            on_progress=tell,
        )
    assert file.report is not None
    show(output.console(), file.report)
    write_json(output.json, file.report.record)


def _batch(text: str) -> int | None:
    """Parse ``dynamic`` or a number."""
    if text == "dynamic":
        return None
    if not text.isdecimal() or len(text) > 10 or int(text) < 1:
        raise VitrimError(f"unexpected --batch '{text}': write dynamic, or the only size of a batch, 1 or more")
    return int(text)
