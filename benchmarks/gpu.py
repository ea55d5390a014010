"""Everything that is measured on a GPU, by one command.

    python benchmarks/gpu.py --markdown               # minutes: speeds of a few settings, as a text to paste
    python benchmarks/gpu.py --json gpu.json          # hours: everything
    python benchmarks/gpu.py --json gpu.json --part speed --model deit_small_patch16_224 --dtype bf16 --engine eager
    python benchmarks/gpu.py --markdown --method tome:r=13 --rival 192 176     # settings and sizes of your own
    python benchmarks/gpu.py --device cpu --tiny      # a try on the CPU: its numbers mean nothing

`bias`: proportional attention as a bias against two more channels that keep the flash kernel (benchmarks/kernels.py).
`determinism`: for every method, whether forwards and the gradients of two training steps are equal to the bit, and
whether torch's deterministic algorithms accept them. `training`: training steps under autocast, as in
benchmarks/training_speed.py. `speed`: `vitrim bench` of every method at half the MACs, in bf16 and fp16, eager, as a
CUDA graph and compiled, for four models, three image sizes (at the nearest multiple of the patch below) and three batch
sizes, and in the same rounds the dense model on smaller images, by default those that cost half as much. Methods
whose counts depend on the images are left out of it: random images say nothing about them.

With `--markdown`, what is measured goes to standard error and the text to standard output: it names the GPU and the
versions, and no file or user. The whole takes many hours. What matters most comes first (eager, small images), the
record is written after every row, and every option takes several values. What fails says why, and the command then ends
with an error.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
import training_speed
from script import Row, at_share, exactly, from_shell, spread, table, write_json
from vitrim import MethodConfig, ReductionWarning, VitrimError, bench, create_model, parse_method, reduce_
from vitrim.core.registry import methods
from vitrim.engines import machine
from vitrim.engines.engine import Compiled, Eager, Engine
from vitrim.engines.formats.base import DTYPES
from vitrim.engines.memory import peak_memory_mib
from vitrim.engines.runnable import Module, Runnable
from vitrim.errors import first_line
from vitrim.loading import PlacedModel
from vitrim.measure.inputs import random_images

MODELS = ("deit_small_patch16_224", "deit_base_patch16_224", "vit_large_patch16_224", "vit_small_patch14_dinov2")
FULL = {"model": MODELS, "size": (224, 384, 1024), "batch_size": (1, 32, 256), "dtype": ("bf16", "fp16")}
FULL |= {"engine": ("eager", "graph", "compile"), "rounds": 30}
SHORT = {"part": ("speed",), "model": MODELS[:2], "size": (224,), "batch_size": (1, 32, 256), "dtype": ("bf16",)}
SHORT |= {"engine": ("eager", "graph"), "rounds": 10, "method": ("tome", "topk", "diffrate")}
TINY = {"model": ("test_vit",), "size": (64,), "batch_size": (1, 2), "dtype": ("bf16",)}
TINY |= {"engine": ("eager", "graph"), "rounds": 2, "method": ("tome", "topk", "atm")}
NOTE = "tiny settings: these numbers mean nothing, they only show that the command runs"
TRAINING_BATCH = 64


class Graph(Engine):
    """A forward captured as a CUDA graph, and replayed: no time between kernels. No compiler."""

    label = "graph"

    def check(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise VitrimError("CUDA graphs need a CUDA device")

    def obstacle(self, config: MethodConfig, batch: int) -> str | None:
        return config.obstacle()

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Runnable:
        images = images.to(next(model.parameters()).dtype)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(3):  # lazy set-up must not be captured
                model(images)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            output = model(images)

        def run(given: Tensor) -> Any:
            if given is not images:
                images.copy_(given)
            graph.replay()
            return output

        return Replayed(model, self.label, self.precision, len(images), run)


class Replayed(Module):
    """A model whose forward is a captured graph."""

    def peak_mib(self, images: Tensor) -> float | None:
        # of what was captured: replays allocate nothing
        return peak_memory_mib(partial(self.model, images), images.device)


ENGINES: dict[str, Callable[[str], Engine]] = {"eager": Eager, "graph": Graph, "compile": Compiled}


def make_model(name: str, size: int) -> nn.Module:
    """A dense model with random weights, in float32 on the CPU."""
    torch.manual_seed(0)
    return create_model(name, options={"img_size": size // patch_of(name) * patch_of(name)}).eval()


def patch_of(name: str) -> int:
    """The side of a patch in pixels."""
    return 14 if "patch14" in name else 16


def attempt(make: Callable[[], Row]) -> Row:
    """The entries of a row, or the reason why there are none: one row must not end hours of measuring."""
    try:
        return make()
    except (VitrimError, RuntimeError, MemoryError) as error:
        return {"failed": first_line(error)}


# ---- parts -----------------------------------------------------------------------------------------------------------


def bias(given: argparse.Namespace) -> Iterator[Row]:
    """Yield the forms of proportional attention by size, batch size and dtype, for tokens of a patch of 16."""
    for dtype, size, batch in product(given.dtype, given.size, given.batch_size):
        shape = batch, 6, (size // 16) ** 2 + 1, 64
        run = partial(kernels.forms, shape, DTYPES[dtype], torch.device(given.device), exactly(given.rounds))
        yield {"size": size, "batch_size": batch, "dtype": dtype, **attempt(run)}


def determinism(given: argparse.Namespace) -> Iterator[Row]:
    """Yield whether work repeats to the bit, for every method on the first model, in the first dtype."""
    name, dtype = given.model[0], given.dtype[0]
    model = make_model(name, min(given.size))
    images = random_images(model, 4, 0).to(given.device, DTYPES[dtype])
    model = model.to(given.device, DTYPES[dtype])
    for method in given.method:
        yield {"model": name, "dtype": dtype, "method": method, **attempt(partial(repeats, model, method, images))}


def repeats(model: nn.Module, method: str, images: Tensor) -> Row:
    """True where repeated work is equal to the bit, by kind of work."""
    reduced = copy.deepcopy(model)
    reduce_(reduced, method)
    with torch.inference_mode():
        runs = [seeded(reduced, images) for _ in range(5)]
    first, second = gradients(reduced, images), gradients(reduced, images)
    row: Row = {"forward": all(torch.equal(runs[0], other) for other in runs[1:])}
    row["gradients"] = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.use_deterministic_algorithms(True)
    try:
        row["deterministic_algorithms"] = attempt(lambda: {"accepted": bool(gradients(reduced, images))})
    finally:
        torch.use_deterministic_algorithms(False)
    return row


def seeded(model: nn.Module, images: Tensor) -> Tensor:
    """The logits, from the same draws."""
    torch.manual_seed(0)
    logits: Tensor = model(images)
    return logits


def gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The gradients of one training step, from the same draws."""
    model.train().zero_grad()
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    F.cross_entropy(seeded(model, images).float(), labels).backward()
    model.eval()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def training(given: argparse.Namespace) -> Iterator[Row]:
    """Yield training steps of every model in bfloat16, at the smallest size and a batch of at most 64."""
    size, batch = min(given.size), max(min(each, TRAINING_BATCH) for each in given.batch_size)
    chosen = training_speed.METHODS[:2] if given.tiny else training_speed.METHODS
    for name in given.model:
        model = make_model(name, size)
        images = random_images(model, batch, 0).to(given.device)
        run = partial(steps, model, [parse_method(text) for text in chosen], images, given.rounds)
        yield {"model": name, "size": size, "batch_size": batch, **attempt(run)}


def steps(model: nn.Module, configs: Sequence[MethodConfig], images: Tensor, rounds: int) -> Row:
    """Rows of benchmarks/training_speed.py under autocast."""
    # without its cache: weights change between the steps, and all of them run in one context
    with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
        rows = training_speed.measure(model.to(images.device), configs, images, exactly(rounds))
    return {"rows": rows, "table": training_speed.markdown(rows)}


def speed(given: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of `vitrim bench` for every setting and method, each method in a run of its own."""
    for kind, size, dtype, name, batch in product(given.engine, given.size, given.dtype, given.model, given.batch_size):
        key = {"engine": kind, "size": size, "dtype": dtype, "model": name, "batch_size": batch}
        engine, model = ENGINES[kind](dtype), make_model(name, size).to(given.device)
        rivals = given.rival or [round(size * 0.5**0.5 / patch_of(name)) * patch_of(name)]
        for method in given.method:
            config = at_half(name, size, method)
            run = partial(timed, PlacedModel(model=model, img_sizes=rivals), config, batch, engine, given.rounds)
            yield {**key, "method": config.describe(), **attempt(run)}


@cache
def at_half(name: str, size: int, method: str) -> MethodConfig:
    """The setting of a method, or the mildest that halves the MACs if the text names none."""
    if ":" in method:
        return parse_method(method)
    shapes = make_model(name, size).to("meta")  # settings follow from counts: nothing is computed
    return at_share(shapes, method, random_images(shapes, 1, 0).to("meta"), 0.5)


def timed(model: PlacedModel, config: MethodConfig, batch: int, engine: Engine, rounds: int) -> Row:
    """The rows and the table of `vitrim bench`: dense, the method, dense on smaller images."""
    report = bench(model, config, batch_size=batch, engine=engine, budget=exactly(rounds))
    return {"rows": [dict(row) for row in report.rows], "table": str(report)}


PARTS = {"bias": bias, "determinism": determinism, "training": training, "speed": speed}


def as_markdown(rows: Sequence[Row], environment: Row) -> str:
    """The rows of `speed` as a table, below what they depend on."""
    cells = []
    for row in rows:
        setting = [row["model"], row["size"], row["batch_size"], row["engine"], row["dtype"], f"`{row['method']}`"]
        if "failed" in row:
            cells.append([*setting, "-", "-", row["failed"].replace("|", "/"), "-"])
            continue
        for one in row["rows"][1:]:
            ms = [f"{each['latency_ms']['p50']:.2f}" for each in (row["rows"][0], one)]
            faster = spread(one["speedup"], one["speedup_q1"], one["speedup_q3"])
            cells.append([*setting[:-1], f"`{one['method']}`", *ms, faster, f"{one['macs_speedup']:.2f}"])
    head = ("model", "px", "batch", "engine", "dtype", "method", "dense ms", "ms", "speed-up [quartiles]", "promised")
    known = ", ".join(f"{name} {environment[name]}" for name in ("vitrim", "torch", "timm"))
    return f"{environment['device_name']}, {known}; random weights\n\n{table(head, cells)}"


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure part by part; print every row and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny settings, for a try; the numbers mean nothing")
    parser.add_argument("--markdown", action="store_true", help="speeds of a few settings, as a text to paste")
    parser.add_argument("--part", nargs="+", choices=PARTS, help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--model", nargs="+", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--size", nargs="+", type=int, help="pixels; default: 224 384 1024")
    parser.add_argument("--batch-size", nargs="+", type=int, help="default: 1 32 256")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), help="default: bf16 fp16")
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), help="default: all three")
    parser.add_argument("--method", nargs="+", help="names, at half the MACs, or settings; default: all with an amount")
    parser.add_argument("--rival", nargs="+", type=int, help="pixels of smaller images; default: at half the MACs")
    parser.add_argument("--rounds", type=int, help="default: 30")
    parser.add_argument("--json", type=Path, help="the record, written after every row")
    options = parser.parse_args(given)
    if options.markdown and set(options.part or ("speed",)) != {"speed"}:
        parser.error("--markdown is of the part speed")
    settings = {"part": tuple(PARTS)} | FULL | (SHORT if options.markdown else {}) | (TINY if options.tiny else {})
    for name, values in settings.items():
        if getattr(options, name) is None:
            setattr(options, name, values)
    fixed = [name for name, kind in methods().items() if kind.tunable is not None and not kind().is_adaptive()]
    for text in options.method or ():
        parse_method(text)  # a name that nothing has ends here, and is not left out like that of an adaptive method
    options.method = [text for text in options.method or fixed if ":" in text or text in fixed]
    machine.select_device(options.device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic algorithms ask for
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks may run out of tokens at half the MACs
    environment = machine.environment(device=options.device, dtype=",".join(options.dtype), seed=0)
    rows: list[Row] = []
    for part in options.part:
        for row in PARTS[part](options):
            rows.append({"part": part, **row})
            print(row.get("table") or row, flush=True, file=sys.stderr if options.markdown else sys.stdout)
            write_json(options.json, {"command": "gpu", "environment": environment, "rows": rows})
    if options.markdown:
        print(as_markdown(rows, environment))
    if options.tiny:
        print(NOTE)
    failed = [row for row in rows if "failed" in row]
    if failed and not options.tiny:
        raise SystemExit(f"{len(failed)} of {len(rows)} rows failed")
    return rows


if __name__ == "__main__":
    from_shell(main)
