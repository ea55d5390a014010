"""`vitrim optimize` on some photographs, and its answer scored once on others that it never saw.

    python benchmarks/optimized.py --model vit_tiny_patch16_224 --checkpoint VIT_TINY.safetensors \\
        --images imagenet-sample.parquet --held-out imagenet-nips2017.parquet --batch-size 1 --out optimized-1

The loss on the held-out photographs is that of the file against the dense model in PyTorch in fp32, image by image; the
speed is over the fastest dense file, and over PyTorch in fp32, timed in turn once more.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch

import vitrim
from script import from_shell, write_json
from vitrim.data import batches, eval_transform, load_images
from vitrim.loading import ModelSpec
from vitrim.measure.latency import Budget, paired_speedup, summarise, time_interleaved
from vitrim.measure.machine import environment


def main() -> None:
    """Print the sentence of `vitrim optimize`, and what held-out photographs and the clock say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("--images", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-loss", type=float, default=1.0)
    parser.add_argument("-m", "--method", action="append")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    report = vitrim.optimize(
        ModelSpec(arguments.model, checkpoint=arguments.checkpoint), arguments.images, max_loss=arguments.max_loss,
        batch_size=arguments.batch_size, methods=arguments.method, out=vitrim.Results(arguments.out, arguments.resume),
    )  # fmt: skip
    minutes = (time.monotonic() - start) / 60
    print(report, f"{minutes:.1f} minutes", sep="\n", flush=True)
    model, size = ModelSpec(arguments.model, checkpoint=arguments.checkpoint).load().model.eval(), arguments.batch_size
    dataset = load_images(arguments.held_out)
    dataset.transform = eval_transform(model)
    exact, found, labels = [], [], []
    with torch.inference_mode():
        for images, own in batches(dataset, size):
            if len(images) == size:
                exact.append(model(images).argmax(1))
                found.append(torch.from_numpy(report.file.run(images.numpy())).argmax(1))
                labels.append(own)
        right, kept, truth = (torch.cat(each) for each in (exact, found, labels))
        change = (kept == truth).double() - (right == truth).double()
        calls = {"PyTorch": partial(model, images), "file": partial(report.file.run, images.numpy())}
        times = time_interleaved(calls, budget=Budget(min_rounds=30, min_seconds=2.0))
    over = paired_speedup(times["PyTorch"], times["file"])
    row = {
        "minutes": minutes,
        "sentence": report.sentence,
        "chosen": report.facts["chosen"],
        "engine": report.facts["engine"],
        "images": len(truth),
        "dense_top1": (right == truth).double().mean().item(),
        "change": change.mean().item(),
        "error": (change.std() / len(change) ** 0.5).item(),
        "agreement": (kept == right).double().mean().item(),
        "ms": summarise(times["file"]).p50_ms,
        "over_pytorch": [over.q1, over.median, over.q3],
        "over_dense": [report.rows[-1][key] for key in ("speedup_q1", "speedup", "speedup_q3")],
    }
    q1, median, q3 = row["over_dense"]
    dense = f"; {median:.2f} ({q1:.2f}-{q3:.2f}) times as fast as the dense file" if report.best is not None else ""
    print(
        f"held out: {100 * row['change']:+.2f} points +- {100 * row['error']:.2f} of {100 * row['dense_top1']:.1f} on "
        f"{row['images']} photographs; {over.median:.2f} ({over.q1:.2f}-{over.q3:.2f}) times as fast as PyTorch in "
        f"fp32{dense}"
    )
    if arguments.json:
        write_json(arguments.json, {"environment": environment(), "model": arguments.model, "rows": [row]})


if __name__ == "__main__":
    from_shell(main)
