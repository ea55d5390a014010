"""The changes that int8 and bf16 make: files of models against the same models in fp32, on photographs.

    python benchmarks/precision.py --model vit_tiny_patch16_224 --checkpoint VIT_TINY.safetensors \\
        --calibration imagenet-sample.parquet --data imagenet-nips2017.parquet
    python benchmarks/precision.py --model vitrim:cifar10_vit --calibration cifar10-train.parquet \\
        --data cifar10-test.parquet -m tome:r=11 -m topk:keep_rate=0.555 -m evit:keep_rate=0.48 -m mctf:r=8

By default every method that needs no training and has a fixed graph, as it comes. Ranges of activations are found on
images of ``--calibration``; agreement (the same top-1 as the same method in fp32, in PyTorch), top-1 and the change of
it, paired by image, with its standard error, are of ``--data``. Files take one batch size, and what does not fill a
batch is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from script import from_shell, write_json
from vitrim.core.registry import methods
from vitrim.data import batches, eval_transform, load_images
from vitrim.engines.engine import FileEngine, engines_named
from vitrim.engines.exported import size_of
from vitrim.loading import ModelSpec
from vitrim.measure.copies import reduced_copy, shared_copy
from vitrim.measure.machine import environment

FIRST = ("tome:r=13", "tome:keep_rate=0.7", "mctf:r=16", "pitome:keep_rate=0.9", "evit", "topk")


def main() -> None:
    """Print a row per method, engine and precision, dense first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("-m", "--method", action="append", help="may repeat; default: all")
    parser.add_argument("--engine", nargs="+", default=["openvino"])
    parser.add_argument("--precision", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--calibrate-on", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    loaded = ModelSpec(arguments.model, checkpoint=arguments.checkpoint).load()
    size = arguments.batch_size

    def read(source: str, limit: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        dataset = load_images(source)
        dataset.transform = eval_transform(loaded.model)
        return [batch for batch in batches(dataset, size, limit=limit) if len(batch[0]) == size]

    calibration = torch.cat([images for images, _ in read(arguments.calibration, arguments.calibrate_on)])
    data = read(arguments.data, arguments.limit)
    labels = torch.cat([own for _, own in data])
    engines, lacking = engines_named(arguments.engine, arguments.precision)
    print(*lacking, sep="\n")
    rows = []
    every = [name for name, kind in methods().items() if kind.training_free and kind().obstacle() is None]
    for method in (None, *(arguments.method or dict.fromkeys((*FIRST, *sorted({*every} - {"none"}))))):
        model = shared_copy(loaded.model) if method is None else reduced_copy(loaded.model, method)
        model.eval()
        with torch.inference_mode():
            exact = torch.cat([model(images).argmax(1) for images, _ in data])
        with TemporaryDirectory() as folder:
            for engine in engines:
                assert isinstance(engine, FileEngine)
                run = engine.prepare(model, data[0][0], Path(folder), calibration)
                found = torch.cat([run(images).argmax(1) for images, _ in data])
                change = (found == labels).double() - (exact == labels).double()
                rows.append(
                    {
                        "method": method or "dense",
                        "engine": engine.label,
                        "precision": engine.precision,
                        "images": len(labels),
                        "top1_fp32": (exact == labels).double().mean().item(),
                        "top1": (found == labels).double().mean().item(),
                        "agreement": (found == exact).double().mean().item(),
                        "change": change.mean().item(),
                        "change_error": change.std().item() / len(change) ** 0.5,
                        "megabytes": size_of(run.file.path) / 1e6,
                    }
                )
                row = rows[-1]
                right = f"top-1 {100 * row['top1']:.1f} (fp32 {100 * row['top1_fp32']:.1f})"
                agrees = f"agreement {100 * row['agreement']:.1f} % of {row['images']}"
                paired = f"{100 * row['change']:+.2f} +- {100 * row['change_error']:.2f} points"
                size_mb = f"{row['megabytes']:.1f} MB"
                print(f"{row['method']:28} {engine!s:20} {right}, {paired}, {agrees}, {size_mb}", flush=True)
        if arguments.json:
            facts = {"environment": environment(), "model": arguments.model, "data": Path(arguments.data).name}
            write_json(arguments.json, {**facts, "rows": rows})


if __name__ == "__main__":
    from_shell(main)
