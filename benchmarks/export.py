"""Measure the tables of docs/export.md.

    python benchmarks/export.py accuracy --data CIFAR --json accuracy.json     # exported against eager, 10,000 images
    python benchmarks/export.py frozen --data CIFAR --json frozen.json         # ATM frozen and in slots, adaptive
    python benchmarks/export.py parity --model deit_small_patch16_224    # every method with fixed counts, batch 1, 2, 8
    python benchmarks/export.py speed --json speed.json                        # exported dense against exported reduced
    python benchmarks/export.py speed --model deit_small_patch16_224 -m tome:r=13 --engine onnxruntime,openvino
    python benchmarks/export.py speed --fixed --engine openvino                # files that know the batch size

Speeds are ratios in one interleaved run, medians and quartiles over its rounds; one thread unless --threads says more.
Run them on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from script import from_shell, write_json
from vitrim.core.method import MethodConfig
from vitrim.core.registry import methods, parse_method
from vitrim.data import batches, eval_transform, load_images
from vitrim.engines import bound, check, engines, export, freeze
from vitrim.engines.timing import time_exported
from vitrim.engines.writing import FileSpec, dense_file
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.copies import reduced_copy
from vitrim.measure.latency import Budget

Row = dict[str, Any]

MODEL = "vitrim:cifar10_vit"
ACCURACY = ("tome:r=11", "topk:keep_rate=0.555", "evit:keep_rate=0.48", "mctf:r=8")
SPEED = ("tome:r=11", "topk:keep_rate=0.555")
ATM = "atm:alpha=0.97,beta=0.06,theta_min=0.7"
"""Thresholds that leave this model half of its MACs, more or less; --method takes others."""
BATCH = 100


def read(model: nn.Module, data: str, split: str, limit: int | None = None) -> Iterator[tuple[Any, Any]]:
    """Batches of images and labels, prepared as the model wants them."""
    dataset = load_images(data, split=split)
    dataset.transform = eval_transform(model)
    return iter(batches(dataset, BATCH, limit=limit))


def accuracy(model: nn.Module, chosen: Sequence[str], data: str, limit: int | None) -> list[Row]:
    """Top-1 of every method, eager and in onnxruntime, on the same images."""
    rows = []
    with TemporaryDirectory() as folder:
        for method in chosen:
            file = export(model, method, Path(folder) / "m.onnx")
            reduced = reduced_copy(model, method)
            seen = eager_right = file_right = other = 0
            for images, labels in read(model, data, "test", limit):
                with torch.inference_mode():
                    eager = reduced(images).argmax(1)
                found = torch.from_numpy(file.run(images.numpy()).argmax(1))
                seen += len(labels)
                eager_right += int((eager == labels).sum())
                file_right += int((found == labels).sum())
                other += int((eager != found).sum())
            row = {"method": method, "images": seen, "eager": eager_right / seen, "exported": file_right / seen}
            rows.append({**row, "other_top1": other})
            top1 = f"eager {100 * eager_right / seen:.2f}, onnxruntime {100 * file_right / seen:.2f}"
            print(f"{method}: {top1}, another top-1 in {other} of {seen} images", flush=True)
    return rows


def frozen(model: nn.Module, chosen: Sequence[str], data: str, limit: int | None) -> list[Row]:
    """Top-1 of adaptive methods, image by image, frozen and in slots, with the MACs of each."""
    from vitrim.measure.macs import count_macs

    rows = []
    for method in chosen:
        config = parse_method(method)
        sample = [images for images, _ in islice(read(model, data, "train", 512), 6)]
        forms: dict[str, MethodConfig] = {"adaptive": config, "frozen": freeze(model, config, sample)}
        forms |= {f"capacity {share}": bound(model, config, sample, quantile=share) for share in (0.9, 0.99)}
        for name, form in forms.items():
            reduced = reduced_copy(model, form)
            seen = right = macs = 0
            for number, (images, labels) in enumerate(read(model, data, "test", limit)):
                with torch.inference_mode():
                    right += int((reduced(images).argmax(1) == labels).sum())
                if number == 0:
                    macs = count_macs(reduced, images).total
                seen += len(labels)
            share = macs / count_macs(model, images[:1]).total
            rows.append({"form": name, "method": form.describe(), "images": seen, "top1": right / seen, "macs": share})
            print(f"{name}: {100 * right / seen:.2f} at {share:.3f} of the MACs ({form.describe()})")
    return rows


def parity(model: nn.Module, chosen: Sequence[str]) -> list[Row]:
    """The largest difference between file and model, of random images one alone, two, and eight in a batch."""
    rows = []
    with TemporaryDirectory() as folder:
        for method in chosen:
            reduced = reduced_copy(model, method)
            file = export(reduced, None, Path(folder) / "m.onnx", check=0)
            found = check(file, reduced, torch.randn(11, *file.shape[1:], generator=torch.Generator().manual_seed(0)))
            rows.append({"method": method, "nodes": file.nodes, "parity": str(found), "holds": found.holds})
            print(f"{method}: {found}{'' if found.holds else ', which is too much'}", flush=True)
    return rows


def fixed_methods() -> list[str]:
    """Every method whose counts do not depend on the images, with its defaults."""
    return [name for name, kind in methods().items() if kind().obstacle() is None]


def speed(
    model: nn.Module, chosen: Sequence[str], names: Sequence[str], sizes: Sequence[int], budget: Budget, fixed: bool
) -> list[Row]:
    """Exported dense against exported reduced, by engine and batch size; ``fixed``: in files for that size alone."""
    rows = []
    with TemporaryDirectory() as folder:
        for engine in names:
            kind = engines()[engine]
            for method in chosen:
                for size in sizes:
                    batch = size if fixed else None
                    path = Path(folder) / f"m{size}{kind.suffix}"
                    file = export(model, method, path, FileSpec(to=kind.name, batch=batch), check=max(4, size))
                    images = torch.from_numpy(
                        np.random.default_rng(0).standard_normal((size, *file.shape[1:]), np.float32)
                    )
                    with dense_file(model, file) as dense:
                        found = time_exported(model, reduced_copy(model, method), dense, file, images, budget)
                    for row in found:
                        rows.append(dict(row))
                        print(
                            f"{row['method']}, {row['engine']}, batch {size}: {row['latency_ms']['p50']:.2f} ms, "
                            f"{row['speedup']:.2f} ({row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}) times dense, "
                            f"promised {row['promised_speedup']:.2f}, ratio {row['ratio']:.2f}, "
                            f"{row['over_eager']:.2f} times eager dense",
                            flush=True,
                        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the four and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "frozen", "parity", "speed"))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("-m", "--method", action="append", help="may repeat")
    parser.add_argument("--data", help="CIFAR-10 with its splits, for accuracy and frozen")
    parser.add_argument("--limit", type=int, help="so many test images; default: all")
    parser.add_argument("--engine", default="onnxruntime", help="names, with commas between")
    parser.add_argument("--batch-size", default="1,8")
    parser.add_argument("--fixed", action="store_true", help="speed: files for the batch size alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--min-seconds", type=float, default=5.0)
    parser.add_argument("--json")
    given = parser.parse_args(arguments)
    if given.what in ("accuracy", "frozen") and given.data is None:
        parser.error(f"{given.what} needs --data")
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = create_model(given.model)
    if given.what == "accuracy":
        rows = accuracy(model, given.method or ACCURACY, given.data, given.limit)
    elif given.what == "parity":
        rows = parity(model, given.method or fixed_methods())
    elif given.what == "frozen":
        rows = frozen(model, given.method or [ATM], given.data, given.limit)
    else:
        sizes = [int(size) for size in given.batch_size.split(",")]
        budget = Budget(min_rounds=20, min_seconds=given.min_seconds)
        rows = speed(model, given.method or SPEED, given.engine.split(","), sizes, budget, given.fixed)
    write_json(given.json, {"environment": machine.environment(seed=0), "model": given.model, "rows": rows})


if __name__ == "__main__":
    from_shell(main)
