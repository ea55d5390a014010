"""``vitrim export``: a dense or reduced model as a file that runs without vitrim."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrim.cli.options import MAX_BATCH, Compute, Images, Limit, Model, Preprocess, Setup
from vitrim.cli.output import Output
from vitrim.errors import VitrimError
from vitrim.progress import progress

if TYPE_CHECKING:
    from vitrim.engines.writing import FileSpec


@dataclass(frozen=True, kw_only=True)
class File(Setup):
    to: Annotated[
        str | None, typer.Option(help="onnx, pt2 (torch.export), openvino or aoti; default: by the suffix of --out")
    ] = None
    batch: Annotated[str, typer.Option(help="dynamic (any batch size), or a fixed size, e.g. 8")] = "dynamic"
    opset: Annotated[int, typer.Option(help="version of the ONNX operators, 18 to 23")] = 20
    size: Annotated[
        int | None, typer.Option("--img-size", min=1, max=4096, help="side of the images; default: the model's")
    ] = None
    precision: Annotated[
        str, typer.Option("--precision", "--dtype", help="fp32, fp16, bf16, or int8 with --images, if --to supports it")
    ] = "fp32"
    preprocess: Preprocess = False
    check: Annotated[
        int, typer.Option(min=0, max=MAX_BATCH, help="number of images to compare file and model; 0: none")
    ] = 64
    freeze: Annotated[
        bool, typer.Option("--freeze", help="adaptive methods: fix the counts to their means over --images")
    ] = False
    capacity: Annotated[
        float | None, typer.Option(help="adaptive methods: slots per block for this share of --images, e.g. 0.99")
    ] = None
    bench: Annotated[
        bool, typer.Option("--bench", help="time the eager and exported, dense and reduced models at batch 1 and 8")
    ] = False

    def spec(self) -> FileSpec:
        from vitrim.engines.writing import FileSpec

        text = self.batch
        if text != "dynamic" and (not text.isdecimal() or len(text) > 10 or int(text) < 1):
            raise VitrimError(f"unexpected --batch '{text}': write dynamic, or the only size of a batch, 1 or more")
        batch = None if text == "dynamic" else int(text)
        return FileSpec(self.to, batch, self.opset, self.precision, self.preprocess, self.size)

    @property
    def fixed(self) -> bool | float:
        if self.freeze and self.capacity is not None:
            raise VitrimError("give either --freeze or --capacity, not both")
        return self.freeze if self.capacity is None else self.capacity


def export(
    *,
    model: Model,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="name:key=value,key=value, e.g. tome:r=13, or @FILE; default: dense"),
    ] = None,
    out: Annotated[Path, typer.Option(help="the file; FILE.json beside it repeats its metadata")],
    wanted: File,
    images: Images,
    limit: Limit = None,
    compute: Compute,
    output: Output,
) -> None:
    """Write a dense or reduced model as a file that runs without vitrim. ONNX Runtime, OpenVINO or torch run it.

    The file is kept only if it gives the same top-1, and logits within 1e-4, at batch 1, 2 and the rest of --check
    images. Methods whose counts depend on the images need --freeze, --capacity or --batch 1.
    """
    if method is not None and len(method) > 1:
        raise VitrimError(f"a file holds one method, got {len(method)}: {', '.join(method)}")
    with progress(f"loading {model.name}") as signs:
        from vitrim.engines.exported import sidecar
        from vitrim.measure.export import export as write

        output.spare(sidecar(out))
        compute.start()
        file = write(
            model.spec(model.name),
            method[0] if method else None,
            out,
            wanted.spec(),
            images=images.read(limit=limit),
            check=wanted.check,
            freeze=wanted.fixed,
            bench=wanted.bench,
            seed=compute.seed,
            on_progress=signs.tell,
        )
    assert file.report is not None
    output.finish(file.report)
