"""One cell of a large measurement: a model at one image size, batch size and dtype, on one engine.

The dense model is timed first, with every attention kernel that fits into memory; then methods in turn with the fastest
of them. Shared by benchmarks/resolution.py, which times all methods of a cell in one run, and benchmarks/gpu.py, which
gives each a run of its own, so that a measurement that is stopped loses one row.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lines import Row
from methods import at_share
from vitrim.core.block import Reducer
from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of, methods
from vitrim.engines.engine import Engine, Run, compilation
from vitrim.errors import VitrimError, first_line
from vitrim.measure.bench import promised_speedups
from vitrim.measure.copies import dense_copies, reduced_copy
from vitrim.measure.latency import (
    Budget,
    FloatArray,
    fastest,
    images_per_second,
    paired_speedup,
    summarise,
    time_interleaved,
)
from vitrim.measure.macs import profile_of

T = TypeVar("T")

DENSE = "dense"
MIB = 2**20
ROOM = 0.8
"""The share of free memory that an estimate may take."""
HOPELESS = 1.5
"""A kernel that takes more than this many times the fastest one's time at a first look is not timed further."""
SLOW_MS = 2000.0
"""A forward of more milliseconds averages over the noise of the machine by itself: its share is taken once."""
LIVE = 14
"""Tensors of the size of all tokens that a block holds at its peak: input, norm, q, k, v, and the MLP's four-fold."""


# ---- memory ----------------------------------------------------------------------------------------------------------


def needed_mib(model: nn.Module, images: Tensor, *, whole_map: bool) -> float:
    """A rough upper bound on the memory of a dense forward, in MiB; with attention maps if ``whole_map``."""
    facts = host_of(model).facts(model)
    tokens = facts.num_prefix + facts.grid_size[0] * facts.grid_size[1]
    values = LIVE * tokens * facts.dim
    if whole_map:
        values += 2 * facts.num_heads * tokens**2  # before and after softmax
    return len(images) * values * images.element_size() / MIB


def free_mib(device: torch.device) -> float:
    """The memory in MiB that is free on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / MIB
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) / 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB


def does_not_fit(model: nn.Module, images: Tensor, *, whole_map: bool = False) -> str | None:
    """The reason to skip the forward, in words; None if it fits."""
    need, free = needed_mib(model, images, whole_map=whole_map), free_mib(images.device)
    return None if need <= ROOM * free else f"needs about {need / 1024:.1f} GiB, {free / 1024:.1f} GiB are free"


# ---- methods at a share of the MACs ----------------------------------------------------------------------------------


def matched(model: nn.Module, name: str, images: Tensor, share: float) -> MethodConfig:
    """The setting of a method at ``share`` of the dense MACs; without computing anything where counts are fixed."""
    if methods()[name]().is_adaptive():
        return at_share(model, name, images[:2], share)
    shapes = copy.deepcopy(model).to("meta")
    return at_share(shapes, name, images[:1].to("meta"), share)


# ---- one cell --------------------------------------------------------------------------------------------------------


class Forced(nn.Module):
    """A model whose attention runs on one kernel of torch and on no other."""

    def __init__(self, model: nn.Module, kernel: SDPBackend) -> None:
        super().__init__()
        self.model = model
        self.kernel = kernel

    def forward(self, images: Tensor) -> Any:
        """The model's own output."""
        with sdpa_kernel(self.kernel):
            return self.model(images)


@dataclass
class Cell:
    """A model, its images and an engine; nothing is computed before it is asked for.

    Attributes:
        model: dense, in eval mode, on the device and in the dtype of ``images``.
        images: (B, C, H, W).
        engine: what runs it.
        budget: of every timed run.
        flash: whether to time dense attention on the flash kernel alone, too.
        calls: dense models that are ready, on the images, by kernel.
        folder: for files of the engine.
    """

    model: nn.Module
    images: Tensor
    engine: Engine
    budget: Budget
    flash: bool = False
    calls: dict[str, Callable[[], object]] = field(default_factory=dict)
    folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)

    def kernels(self) -> dict[str, nn.Module]:
        """Dense models by attention kernel, those that fit into memory."""
        found: dict[str, nn.Module] = dict(dense_copies(self.model))
        if "unfused" in found and does_not_fit(self.model, self.images, whole_map=True):
            del found["unfused"]
        if self.flash and "fused" in found and self.images.dtype != torch.float32:  # there is none in float32 on a GPU
            found["flash"] = Forced(found["fused"], SDPBackend.FLASH_ATTENTION)
        return found

    def prepare(self, model: nn.Module) -> tuple[Run, float]:
        """A call that runs ``model``, and the seconds that making it and its first run took."""
        start = time.perf_counter()
        with torch.inference_mode():
            run = self.engine.prepare(model, self.images, Path(self.folder.name))
            run(self.images)
        return run, time.perf_counter() - start

    def dense(self) -> Row:
        """The dense model with every kernel: which is fastest, its time and memory."""
        models = self.kernels()
        prepared = {kernel: self.prepare(model) for kernel, model in models.items()}
        self.calls = {kernel: partial(run, self.images) for kernel, (run, _) in prepared.items()}
        device = self.images.device
        with torch.inference_mode():
            times = time_interleaved(self.calls, device, Budget(1, min_seconds=0.2, warmup_rounds=0))
            limit = HOPELESS * median(times[fastest(times, self.calls)])
            near = {kernel: call for kernel, call in self.calls.items() if median(times[kernel]) <= limit}
            times |= time_interleaved(near, device, self.budget)
            best = fastest(times, near)
            peak = self.engine.peak_mib(models[best], prepared[best][0], self.images)
        p50 = {kernel: summarise(found).p50_ms for kernel, found in times.items()}
        row = {"kernel": best, "kernels_p50_ms": p50, "p50_ms": p50[best], "peak_memory_mib": peak}
        speed = images_per_second(len(self.images), p50[best])
        return {**row, "images_per_second": speed, "prepare_seconds": prepared[best][1]}

    def reduced(self, config: MethodConfig, kernel: str) -> Row:
        """A method against the dense model on ``kernel``."""
        return self.together({config.name: config}, kernel)[config.name]

    def together(self, configs: Mapping[str, MethodConfig], kernel: str, *, matching: bool = False) -> dict[str, Row]:
        """Several methods in one run, in turn with the dense model on ``kernel``, which they share: a row for each.

        What does not run says so in its row, and the others go on. ``matching``: also the share of time that deciding
        takes.
        """
        if kernel not in self.calls:
            self.calls = {kernel: partial(self.prepare(self.kernels()[kernel])[0], self.images)}
        models: dict[str, nn.Module] = {}
        ready: dict[str, tuple[Run, float]] = {}
        rows: dict[str, Row] = {}
        for name, config in configs.items():
            models[name] = reduced_copy(self.model, config)
            prepared = attempt(partial(self.prepare, models[name]))
            if isinstance(prepared, dict):
                rows[name] = prepared
            else:
                ready[name] = prepared
        reduced = {name: partial(run, self.images) for name, (run, _) in ready.items()}
        calls = {DENSE: self.calls[kernel], **reduced}
        with torch.inference_mode():
            times = time_interleaved(calls, self.images.device, self.budget)
        for name, (run, seconds) in ready.items():
            speed = {"kernel": kernel, "prepare_seconds": seconds, **_speed(times[DENSE], times[name])}
            rest = attempt(partial(self._beside, configs[name], models[name], run, speed, matching))
            rows[name] = speed | rest if "ratio" in rest else rest
        return rows

    def _beside(self, config: MethodConfig, model: nn.Module, run: Run, speed: Row, matching: bool) -> Row:
        """Entries of a row besides ``speed``: the promise and its kept share, memory, the share of deciding."""
        row = self._promised(config, model)
        row["ratio"] = speed["speedup"] / row["promised_speedup"]
        with torch.inference_mode():
            row["peak_memory_mib"] = self.engine.peak_mib(model, run, self.images)
        if matching:
            row["matching_time"] = deciding_share(model, self.images, 3 if speed["p50_ms"] < SLOW_MS else 1)
        return row

    def _promised(self, config: MethodConfig, model: nn.Module) -> Row:
        """The speed-up that MACs promise for a method."""
        macs = profile_of(self.model, config, self.images if config.is_adaptive() else self.images[:1]).macs
        row: Row = {"setting": config.describe(), "adaptive": config.is_adaptive(), "macs": macs.total}
        row["promised_speedup"] = promised_speedups(self.model, {"": model}, [self.images])[""]
        return {**row, "matching_macs": macs.matching / macs.total}


def _speed(dense: FloatArray, reduced: FloatArray) -> Row:
    """Speed-up and latency, from the milliseconds of the same rounds."""
    speedup, latency = paired_speedup(dense, reduced), summarise(reduced)
    row: Row = {"rounds": len(reduced), "dense_p50_ms": summarise(dense).p50_ms}
    row |= {"p50_ms": latency.p50_ms, "iqr_ms": latency.iqr_ms}
    return {**row, "speedup": speedup.median, "speedup_q1": speedup.q1, "speedup_q3": speedup.q3}


def deciding_share(model: nn.Module, images: Tensor, repeats: int = 3) -> float:
    """The share of an eager forward's time that goes into decisions, which are calls of `Reducer`: what the MACs count
    as matching. Moving tokens is not in it."""
    device = images.device

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    spent: list[float] = []

    def enter(module: nn.Module, given: Any) -> None:
        spent.append(-now())

    def leave(module: nn.Module, given: Any, output: Any) -> None:
        spent.append(now())

    hooks = []
    for module in model.modules():
        if isinstance(module, Reducer):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    shares = []
    with torch.inference_mode():
        for _ in range(repeats):
            spent.clear()
            start = now()
            model(images)
            shares.append(sum(spent) / (now() - start))
    for hook in hooks:
        hook.remove()
    return median(shares)


def attempt(make: Callable[[], T]) -> T | Row:
    """The result of ``make``, or a row with the reason why there is none.

    What does not run here must not end hours of measuring: the row tells, and the command fails at its end.
    """
    try:
        return make()
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"skipped": f"out of memory: {first_line(error)}"}
    except (VitrimError, RuntimeError) as error:
        return {"failed": first_line(error)}


def compiling(engine: Engine) -> AbstractContextManager[None]:
    """The context in which an engine compiles many variants of one model; earlier ones are forgotten."""
    return compilation(engine.compiled)


def told(row: Row, **more: Any) -> None:
    """Print a row in one line."""
    why = row.get("skipped") or row.get("failed")
    name = " ".join(str(part) for part in more.values())
    if why is not None:
        print(f"{name}: {'skipped' if 'skipped' in row else 'failed'}: {why}", flush=True)
    elif "speedup" in row:
        spread = f"[{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}]"
        print(
            f"{name}: {row['p50_ms']:.1f} ms, {row['speedup']:.2f} {spread} times dense, promised "
            f"{row['promised_speedup']:.2f}, ratio {row['ratio']:.2f}, {memory(row)}",
            flush=True,
        )
    else:
        print(f"{name}: {row['p50_ms']:.1f} ms ({row['kernel']}), {memory(row)}", flush=True)


def memory(row: Row) -> str:
    """Peak memory in words."""
    peak = row["peak_memory_mib"]
    return "memory unknown" if peak is None else f"{peak:.1f} MiB"
