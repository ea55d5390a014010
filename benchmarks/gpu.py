"""Everything that is measured on a GPU, by one command that goes on where it stopped.

    python benchmarks/gpu.py --json gpu.jsonl
    python benchmarks/gpu.py --json gpu.jsonl --part speed --model deit_small_patch16_224 --dtype bf16 --engine eager
    python benchmarks/gpu.py --device cpu --tiny --json tiny.jsonl       # a try on the CPU: its numbers mean nothing

Four parts, in this order; `--part` takes some of them:

`bias`: proportional attention as a bias against two more channels that keep the flash kernel (benchmarks/kernels.py).
`determinism`: for every method, whether two forwards, and the gradients of two training steps, are equal to the bit,
and whether torch's deterministic algorithms accept them. `training`: a step (forward, backward, AdamW) under autocast,
as benchmarks/training_speed.py. `speed`: DeiT-S and -B, ViT-L, DINOv2-S; bf16 and fp16; eager, compiled, and captured
as a CUDA graph; 224, 384 and 1024 px (DINOv2 at the nearest multiple of its patch below); batch 1, 32, 256; every
method at half the MACs against the dense model with the fastest attention kernel (the library's fused one, unfused, and
the flash kernel alone), timed in turn; peak memory.

Every row is written to the file of `--json` when it is done. What does not fit into memory is skipped; what fails says
why, and the command then ends with an error; `--again` tries both once more. The whole takes many hours of a GPU: rows
that matter most come first (eager, small images), and each of the options takes several values.
"""

from __future__ import annotations

import argparse
import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
import training_speed
from cells import Cell, attempt, compiling, does_not_fit, matched, told
from lines import Lines, Row
from script import from_shell
from vitrim import reduce_
from vitrim.cli.options import parse_methods
from vitrim.core.method import MethodConfig
from vitrim.core.registry import make_method, methods
from vitrim.engines.engine import Compiled, Eager, Engine, Run
from vitrim.engines.formats.base import DTYPES
from vitrim.errors import ReductionWarning, VitrimError
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget
from vitrim.measure.memory import peak_memory_mib

MODELS = ("deit_small_patch16_224", "deit_base_patch16_224", "vit_large_patch16_224", "vit_small_patch14_dinov2")
PARTS = ("bias", "determinism", "training", "speed")
KEYS = ("part", "model", "size", "batch_size", "dtype", "engine", "method")
SHARE = 0.5
FULL = {"model": MODELS, "size": (224, 384, 1024), "batch_size": (1, 32, 256), "dtype": ("bf16", "fp16")}
FULL |= {"engine": ("eager", "graph", "compile"), "rounds": (30,)}
TINY = {"model": ("test_vit",), "size": (64,), "batch_size": (1, 2), "dtype": ("bf16",)}
TINY |= {"engine": ("eager", "graph"), "rounds": (2,)}
TINY_METHODS = ("tome", "topk", "atm")
NOTE = "tiny settings: these numbers mean nothing, they only show that the command runs"
HEADS, WIDTH = 6, 64
TRAINING_BATCH = 64


class Graph(Engine):
    """A forward captured as a CUDA graph, and replayed: no time between kernels. No compiler."""

    label = "graph"

    def check(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise VitrimError("CUDA graphs need a CUDA device")

    def obstacle(self, config: MethodConfig, batch: int) -> str | None:
        return config.obstacle()

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Run:
        self.check(images.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # lazy set-up must not be captured
                model(images)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(images)

        def run(given: Tensor) -> Any:
            if given is not images:
                images.copy_(given)
            graph.replay()
            return output

        return run

    def peak_mib(self, model: nn.Module, run: Run, images: Tensor) -> float | None:
        return peak_memory_mib(partial(model, images), images.device)  # what was captured: a replay allocates nothing


ENGINES: dict[str, Callable[[str], Engine]] = {"eager": Eager, "graph": Graph, "compile": Compiled}


# ---- parts -----------------------------------------------------------------------------------------------------------


def make_model(name: str, size: int, options: argparse.Namespace) -> nn.Module:
    """A dense model with random weights; its size is the multiple of its patch that is nearest below ``size``."""
    torch.manual_seed(options.seed)
    patch = 14 if "patch14" in name else 16
    return create_model(name, options={"img_size": size // patch * patch}).eval()


def budget(options: argparse.Namespace) -> Budget:
    """So many rounds, whatever they take."""
    return Budget(options.rounds, 0.0, max_rounds=options.rounds, warmup_rounds=min(3, options.rounds))


def bias(lines: Lines, options: argparse.Namespace) -> None:
    """The forms of proportional attention by size, batch size and dtype; tokens of a patch of 16."""
    for dtype, size, batch_size in product(options.dtype, options.size, options.batch_size):
        key = {"part": "bias", "size": size, "batch_size": batch_size, "dtype": dtype}
        tokens = (size // 16) ** 2 + 1
        device = torch.device(options.device)
        run = partial(kernels.compare, batch_size, HEADS, tokens, WIDTH, DTYPES[dtype], device, budget(options))
        row = lines.once(key, partial(attempt, run))
        shown = {name: f"{ms:.3f} ms" for name, ms in row.get("p50_ms", {}).items()}
        print(f"bias, {size} px, batch {batch_size}, {dtype}: {shown or row}", flush=True)


def determinism(lines: Lines, options: argparse.Namespace) -> None:
    """Every method on the first model, in the first dtype."""
    name, size, dtype = options.model[0], min(options.size), options.dtype[0]
    model = make_model(name, size, options).to(options.device, DTYPES[dtype])
    images = random_images(model, 4, options.seed).to(options.device, DTYPES[dtype])
    for method in options.method:
        key = {"part": "determinism", "model": name, "size": size, "dtype": dtype, "method": method}
        row = lines.once(key, partial(attempt, partial(repeats, model, method, images)))
        print(f"determinism, {method}: { {k: v for k, v in row.items() if k not in key} }", flush=True)


def repeats(model: nn.Module, method: str, images: Tensor) -> Row:
    """True where repeated work is equal to the bit, by kind of work."""
    reduced = copy.deepcopy(model)
    reduce_(reduced, make_method(method))
    with torch.inference_mode():
        torch.manual_seed(0)
        first = reduced(images)
        row: Row = {"forward": all(torch.equal(first, _again(reduced, images)) for _ in range(4))}
    one, other = gradients(reduced, images), gradients(reduced, images)
    row["gradients"] = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    torch.use_deterministic_algorithms(True)
    try:
        gradients(reduced, images)
        row["deterministic_algorithms"] = "accepted"
    except RuntimeError as error:
        row["deterministic_algorithms"] = str(error).splitlines()[0]
    finally:
        torch.use_deterministic_algorithms(False)
    return row


def _again(model: nn.Module, images: Tensor) -> Tensor:
    torch.manual_seed(0)  # some methods draw
    logits: Tensor = model(images)
    return logits


def gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The gradients of one training step, from the same draws."""
    torch.manual_seed(0)
    model.train()
    model.zero_grad()
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    F.cross_entropy(model(images).float(), labels).backward()
    model.eval()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def training(lines: Lines, options: argparse.Namespace) -> None:
    """Training steps of every model in bfloat16, at the smallest size and the largest batch up to `TRAINING_BATCH`."""
    size, batch_size = min(options.size), max(min(one, TRAINING_BATCH) for one in options.batch_size)
    chosen = training_speed.METHODS[:2] if options.tiny else training_speed.METHODS
    for name in options.model:
        key = {"part": "training", "model": name, "size": size, "batch_size": batch_size, "dtype": "bf16"}
        if lines.find(**key) is None:
            row = lines.once(key, partial(attempt, partial(steps, name, size, batch_size, chosen, options)))
            print(training_speed.markdown(row["rows"]) if "rows" in row else f"training, {name}: {row}", flush=True)


def steps(name: str, size: int, batch_size: int, chosen: Sequence[str], options: argparse.Namespace) -> Row:
    """Rows of benchmarks/training_speed.py under autocast."""
    model = make_model(name, size, options)
    images = random_images(model, batch_size, options.seed).to(options.device)
    configs = parse_methods(chosen)
    # without its cache: weights change between the steps, and all of them run in one context
    with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
        return {"rows": training_speed.measure(model.to(options.device), configs, images, budget(options))}


def speed(lines: Lines, options: argparse.Namespace) -> None:
    """Every cell, and every method in it."""
    for engine, size, dtype, name, batch_size in cells(options):
        key = {"part": "speed", "model": name, "size": size, "batch_size": batch_size, "dtype": dtype, "engine": engine}
        if any(lines.find(**key, method=method) is None for method in ("dense", *options.method)):
            fill(lines, key, options)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, int, str, str, int]]:
    """Engine, size, dtype, model and batch size, what matters most first."""
    yield from product(options.engine, options.size, options.dtype, options.model, options.batch_size)


def fill(lines: Lines, key: Row, options: argparse.Namespace) -> None:
    """The rows of one cell that are not there yet."""
    device, dtype = torch.device(options.device), DTYPES[key["dtype"]]
    engine = ENGINES[key["engine"]](key["dtype"])
    model = make_model(key["model"], key["size"], options)
    pair = random_images(model, 2, options.seed).to(device, dtype)
    images = random_images(model, key["batch_size"], options.seed).to(device, dtype)
    model = model.to(device, dtype)
    cell = Cell(model, images, engine, budget(options), flash=not engine.compiled)
    obstacle = refused(engine, device) or does_not_fit(model, images)
    with compiling(engine):
        make = cell.dense if obstacle is None else partial(dict, skipped=obstacle)
        dense = lines.once({**key, "method": "dense"}, partial(attempt, make))
        told(dense, **key, method="dense")
        for method in options.method:
            place = {**key, "method": method}
            if lines.find(**place) is not None:
                continue
            if "kernel" not in dense:
                told(lines.add({**place, "skipped": "the dense model did not run"}), **place)
                continue
            told(lines.add({**place, **attempt(partial(one, cell, method, pair, dense["kernel"]))}), **place)


def one(cell: Cell, method: str, pair: Tensor, kernel: str) -> Row:
    """The row of one method at half the MACs."""
    config = matched(cell.model, method, pair, SHARE)
    obstacle = cell.engine.obstacle(config, len(pair))
    return {"skipped": obstacle} if obstacle is not None else cell.reduced(config, kernel)


def refused(engine: Engine, device: torch.device) -> str | None:
    """The reason why an engine does not run here; None if it does."""
    try:
        engine.check(device)
    except VitrimError as error:
        return str(error)
    return None


RUN: dict[str, Callable[[Lines, argparse.Namespace], None]] = {
    "bias": bias,
    "determinism": determinism,
    "training": training,
    "speed": speed,
}


# ---- command line ----------------------------------------------------------------------------------------------------


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny settings, for a try; the numbers mean nothing")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", nargs="+", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--size", nargs="+", type=int, help="pixels; default: 224 384 1024")
    parser.add_argument("--batch-size", nargs="+", type=int, help="default: 1 32 256")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), help="default: bf16 fp16")
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), help="default: all three")
    parser.add_argument("--method", nargs="+", choices=list(methods()), help="default: all that have an amount")
    parser.add_argument("--rounds", type=int, help="default: 30")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file of rows, one JSON text per line; it is continued")
    parser.add_argument("--again", action="store_true", help="try what was skipped or failed once more")
    options = parser.parse_args(given)
    for name, values in (TINY if options.tiny else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, values[0] if name == "rounds" else list(values))
    every = [name for name, config in methods().items() if config.tunable is not None]
    options.method = options.method or (list(TINY_METHODS) if options.tiny else every)
    return options


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure what is missing, part by part."""
    options = parse_arguments(given)
    machine.set_threads(options.threads)
    machine.select_device(options.device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic algorithms ask for
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks may run out of tokens at half the MACs
    environment = machine.environment(device=options.device, dtype=",".join(options.dtype), seed=options.seed)
    settings = {"command": "gpu", "rounds": options.rounds, "environment": environment}
    if options.tiny:
        settings["note"] = NOTE
        print(NOTE)
    lines = Lines(options.json, settings, KEYS, again=options.again)
    for part in options.part:
        RUN[part](lines, options)
    failed = [row for row in lines.rows if "failed" in row]
    for row in failed:
        print(f"failed: {' '.join(str(row[key]) for key in KEYS if key in row)}: {row['failed']}")
    if options.tiny:
        print(NOTE)
    if failed:
        raise SystemExit(f"{len(failed)} rows failed")
    return lines.rows


if __name__ == "__main__":
    from_shell(main)
