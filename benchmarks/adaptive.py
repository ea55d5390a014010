"""Adaptive methods as files for single images, on the engines: image by image against the dense file, and PyTorch.

    python benchmarks/adaptive.py --model vit_tiny_patch16_224 --checkpoint VIT_TINY.safetensors \\
        --images imagenet-nips2017.parquet -m atm:alpha=1.0,beta=0.035,theta_min=0.88

Time depends on the image, so every image is timed, dense and reduced in turn. Engines make kernels for every new shape,
so images are run three times: the first pass stands by itself, and ratios are of the medians of the others. Every image
of a file is compared with PyTorch's: logits and top-1. A near tie may differ (`vitrim.engines.check`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import vitrim
from script import from_shell, write_json
from vitrim.core.registry import host_of
from vitrim.data import batches, eval_transform, load_images
from vitrim.engines import Exported, engines
from vitrim.engines.formats.base import Array
from vitrim.loading import ModelSpec
from vitrim.measure.copies import reduced_copy, shared_copy
from vitrim.measure.machine import environment

METHODS = (
    "atm:alpha=1.0,beta=0.035,theta_min=0.88",  # of the paper, for ViT-Ti
    "atm:theta=[1,1,1,0.88,1,1,0.88,1,1,0.88,1,1]",  # three blocks, where three-stage ToMe cuts
    "tome:r=13",
)
PASSES = 3


def main() -> None:
    """Print a row per engine and method."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("--image-size", type=int, help="default: the model's own; timm resamples its positions")
    parser.add_argument("--images", required=True)
    parser.add_argument("-m", "--method", action="append", help="may repeat; default: ATM, ATM in three blocks, ToMe")
    parser.add_argument("--engine", nargs="+", default=["openvino", "onnxruntime"])
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    loaded = ModelSpec(arguments.model, checkpoint=arguments.checkpoint).load()
    if arguments.image_size is not None:
        loaded.model.set_input_size(arguments.image_size)
    dataset = load_images(arguments.images)
    dataset.transform = eval_transform(loaded.model)
    given, labels = next(iter(batches(dataset, arguments.limit, limit=arguments.limit)))
    images = [each.numpy() for each in given.split(1)]
    methods = list(arguments.method or METHODS)
    models = {"dense": shared_copy(loaded.model).eval(), **{m: reduced_copy(loaded.model, m).eval() for m in methods}}
    with torch.inference_mode():
        wanted = {name: torch.cat([model(each) for each in given.split(1)]).numpy() for name, model in models.items()}
    place = environment(dtype="fp32")
    height, width = host_of(loaded.model).facts(loaded.model).input_size[1:]
    print(
        f"{arguments.model}, {height} x {width}, {len(images)} images one by one, fp32; {place['device_name']}, ",
        end="",
    )
    print(f"{place['threads']} threads\n")
    print(
        "| engine | method | ms | first pass, ms | over dense | quartiles | GMACs | same top-1 | largest difference |"
    )
    print(f"|{'---|' * 9}")
    rows: list[dict[str, Any]] = []
    for engine in arguments.engine:
        with TemporaryDirectory() as folder:
            kind = engines()[engine]
            files = {
                name: vitrim.export(
                    model, None, Path(folder) / f"{place}{kind.suffix}", vitrim.FileSpec(to=kind.name, batch=1), check=0
                )
                for place, (name, model) in enumerate(models.items())
            }
            for row in timed(files, images, wanted):
                rows.append({"engine": engine, **row})
                ratios = f"{row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}"
                cells = (
                    *(
                        engine,
                        f"`{row['method']}`",
                        f"{row['ms']:.2f}",
                        f"{row['first_ms']:.2f}",
                        f"{row['speedup']:.2f}",
                    ),
                    *(ratios, f"{row['gmacs']:.2f}", f"{row['same_top1']} of {len(images)}", f"{row['largest']:.0e}"),
                )
                print(f"| {' | '.join(cells)} |", flush=True)
    facts = {"environment": place, "model": arguments.model, "size": height, "images": Path(arguments.images).name}
    write_json(arguments.json, {**facts, "labels": labels.tolist(), "rows": rows})


def timed(files: dict[str, Exported], images: list[Array], wanted: dict[str, Array]) -> list[dict[str, Any]]:
    """A row per file, dense first: mean milliseconds of an image, ratios over dense image by image, and agreement."""
    times = {name: np.zeros((PASSES, len(images))) for name in files}
    found: dict[str, list[Array]] = {name: [] for name in files}
    for turn in range(PASSES):
        for number, image in enumerate(images):
            for name, file in files.items():
                start = time.perf_counter()
                logits = file.run(image)
                times[name][turn, number] = 1e3 * (time.perf_counter() - start)
                if turn == 0:
                    found[name].append(logits)
    own = {name: np.median(each[1:], axis=0) for name, each in times.items()}
    rows = []
    for name, file in files.items():
        logits, ratio = np.concatenate(found[name]), own["dense"] / own[name]
        rows.append(
            {
                "method": name,
                "ms": own[name].mean(),
                "first_ms": times[name][0].mean(),
                "speedup": own["dense"].sum() / own[name].sum(),
                "speedup_q1": np.quantile(ratio, 0.25),
                "speedup_q3": np.quantile(ratio, 0.75),
                "gmacs": file.metadata["gmacs"],
                "same_top1": int((logits.argmax(1) == wanted[name].argmax(1)).sum()),
                "largest": float(np.abs(logits - wanted[name]).max()),
                "logits": logits.argmax(1).tolist(),
            }
        )
    return rows


if __name__ == "__main__":
    from_shell(main)
