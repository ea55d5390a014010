"""Features of many images under Ray Data: on the cores and GPUs of one machine, or of many.

    python examples/ray_features.py                                       # a try: tiny random model and pictures
    python examples/ray_features.py photos/ features/ --model vit_small_patch14_dinov2 --pretrained -m tome:r=8
    python examples/ray_features.py photos.parquet features/ --column image --workers 8 --gpus 1 --address auto

The images are those of a folder, with its folders, or the column of a parquet file or a folder of such files. Every
worker is an actor with a reduced model of its own. Each chunk of images becomes one parquet file with the columns
`name` and `feature`, written under another name and moved into place when it is whole. A worker that dies is made anew
by Ray, and its chunk again; a run that was killed and is started again leaves out the chunks that are there. It refuses
to go on in a folder of other images or another setting.
Needs `pip install 'vitrim[ray]'`. For many machines the folders must be ones that all of them see.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import vitrim
from vitrim.data import eval_transform
from vitrim.errors import VitrimError

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
SETTING = "_setting.json"
"""Begins with "_", which readers of a folder of parquet files leave out."""


def listed(source: Path) -> list[tuple[str, int]]:
    """Name and row of every image, in an order that is the same for every run; the row is -1 for an image file."""
    if source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.suffix.lower() in ENDINGS)
        if files:
            return [(str(path.relative_to(source)), -1) for path in files]
        tables = sorted(source.glob("*.parquet"))
    else:
        tables = [source]
    if not tables or not all(table.is_file() for table in tables):
        raise VitrimError(f"{source}: neither a folder of images nor parquet files")
    root = source if source.is_dir() else source.parent
    return [(str(one.relative_to(root)), row) for one in tables for row in range(pq.read_metadata(one).num_rows)]


def opened(source: Path, column: str, names: Sequence[str], rows: Sequence[int]) -> Iterator[Image.Image]:
    """The images of one chunk; of a parquet file only the groups of rows that hold them are read."""
    root = source if source.is_dir() else source.parent
    held: tuple[str, int] | None = None
    values: Any = None
    start = 0
    for name, row in zip(names, rows, strict=True):
        if row < 0:
            yield Image.open(root / name).convert("RGB")
            continue
        with pq.ParquetFile(root / name) as table:
            if column not in table.schema_arrow.names:
                raise VitrimError(f"{name} has no column '{column}'; it has {', '.join(table.schema_arrow.names)}")
            first = 0
            for group in range(table.num_row_groups):
                count = table.metadata.row_group(group).num_rows
                if row < first + count:
                    break
                first += count
            if held != (name, group):
                values, held, start = table.read_row_group(group, columns=[column]).column(0), (name, group), first
        value = values[row - start].as_py()
        yield Image.open(io.BytesIO(value["bytes"] if isinstance(value, dict) else value)).convert("RGB")


class Features:
    """A reduced model, made once in every worker; a call makes the features of one chunk and writes them.

    Args:
        options: of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(0)  # random weights, without --pretrained and --checkpoint, are alike in all workers
        self.options = options
        self.device = torch.device("cuda" if options.gpus else "cpu")
        made = vitrim.create_model(options.model, pretrained=options.pretrained, checkpoint=options.checkpoint)
        self.model = made.eval().to(self.device)
        self.prepare = eval_transform(self.model)
        if options.method:
            vitrim.reduce_(self.model, options.method)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        options = self.options
        for chunk, names, rows in zip(batch["chunk"], batch["names"], batch["rows"], strict=True):
            images = [self.prepare(image) for image in opened(options.source, options.column, names, rows)]
            found = []
            with torch.inference_mode():
                for part in torch.stack(images).split(options.batch_size):
                    tokens = self.model.forward_features(part.to(self.device))
                    found.append(self.model.forward_head(tokens, pre_logits=True).float().cpu())
            feature = pa.array(list(torch.cat(found).numpy()), pa.list_(pa.float32()))
            labels = [name if row < 0 else f"{name}:{row}" for name, row in zip(names, rows, strict=True)]
            write_table(pa.table({"name": labels, "feature": feature}), file_of(options.out, int(chunk)))
        return {"images": np.array([len(names) for names in batch["names"]])}


def write_table(table: pa.Table, path: Path) -> None:
    """Write a file whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as file:
        pq.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def file_of(out: Path, chunk: int) -> Path:
    return out / f"features-{chunk:06d}.parquet"


def check_setting(options: argparse.Namespace, images: Sequence[tuple[str, int]]) -> None:
    """Write what the features are of, or compare with what a run before wrote.

    Raises:
        VitrimError: the folder holds features of something else.
    """
    own = {"model": options.model, "checkpoint": str(options.checkpoint), "pretrained": options.pretrained}
    own |= {"method": options.method, "chunk": options.chunk, "source": str(options.source.resolve())}
    own |= {"images": len(images), "first": images[0][0], "last": images[-1][0]}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / SETTING
    if not path.exists():
        path.write_text(json.dumps(own, indent=2) + "\n")
        return
    before = json.loads(path.read_text())
    other = [f"{key} {before.get(key)} -> {value}" for key, value in own.items() if before.get(key) != value]
    if other:
        raise VitrimError(f"{options.out} holds features of another setting ({'; '.join(other)}): give another folder")


def missing(options: argparse.Namespace, images: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """The chunks that have no file."""
    found = []
    for chunk, start in enumerate(range(0, len(images), options.chunk)):
        names, rows = zip(*images[start : start + options.chunk], strict=True)
        if not file_of(options.out, chunk).exists():
            found.append({"chunk": chunk, "names": list(names), "rows": list(rows)})
    return found


def features(options: argparse.Namespace) -> tuple[int, int]:
    """The images whose features were made, and those of chunks that were there."""
    import ray

    images = listed(options.source)
    check_setting(options, images)
    items = missing(options, images)
    total = sum(len(item["names"]) for item in items)
    if not items:
        return 0, len(images)
    own = not ray.is_initialized()
    if own:
        here = {"num_cpus": options.workers * options.threads} if options.address is None else {}
        # without "local" it would join a cluster that was started on this machine, whose size is another
        ray.init(address=options.address or "local", include_dashboard=False, log_to_driver=False, **here)
    try:
        dataset = ray.data.from_items(items, override_num_blocks=len(items))
        made = dataset.map_batches(
            Features,
            fn_constructor_args=[options],
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=options.workers),
            num_cpus=options.threads,
            num_gpus=options.gpus,
        )
        seen = sum(row["images"] for row in made.iter_rows())
    finally:
        if own:
            ray.shutdown()
    if seen != total:
        raise VitrimError(f"{seen} of {total} images have features: start the command again")
    return total, len(images) - total


def pictures(folder: Path, count: int) -> None:
    """Random pictures, for a try."""
    draw = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(draw.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(folder / f"{number:03d}.png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, nargs="?", help="folder of images, parquet file, or folder of these")
    parser.add_argument("out", type=Path, nargs="?", help="folder for features")
    parser.add_argument("--model", default="test_vit", help="of timm")
    parser.add_argument("--pretrained", action="store_true", help="the library's weights")
    parser.add_argument("--checkpoint", type=Path, help="your own weights")
    parser.add_argument("-m", "--method", default="tome:r=4", help="'' for the dense model")
    parser.add_argument("--column", default="image", help="of parquet files: bytes, or a record with bytes")
    parser.add_argument("--chunk", type=int, default=256, help="images of a file of features; also what a kill loses")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of a worker")
    parser.add_argument("--gpus", type=float, default=0, help="of a worker; 0.5: two workers share one")
    parser.add_argument("--address", help="of a Ray cluster, 'auto' on one of its machines; without: this machine")
    options = parser.parse_args(arguments)
    if (options.source is None) != (options.out is None):
        parser.error("give a source and a folder for features, or neither")
    try:
        new, old = run(options)
    except VitrimError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"features of {new} images made, of {old} were there")


def run(options: argparse.Namespace) -> tuple[int, int]:
    """The features asked for, or those of a try."""
    if options.source is not None:
        return features(options)
    with tempfile.TemporaryDirectory() as folder:
        options.source, options.out, options.chunk = Path(folder) / "in", Path(folder) / "out", 8
        options.source.mkdir()
        pictures(options.source, 24)
        return features(options)


if __name__ == "__main__":
    main()
