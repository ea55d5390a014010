"""Speed and memory of reduced models against the dense one, at one batch size and dtype, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import get_reduction
from vitrim.core.registry import ask, host_of
from vitrim.errors import VitrimError
from vitrim.measure.latency import (
    Budget,
    FloatArray,
    dense_copies,
    fastest,
    images_per_second,
    paired_speedup,
    reduced_copy,
    summarise,
    time_interleaved,
)
from vitrim.measure.macs import count_macs
from vitrim.measure.prefill import Prefill
from vitrim.measure.records import DENSE, Row
from vitrim.speed.engines import Call, Compiled, Eager, Engine, compilation, engines_named
from vitrim.tasks import tasks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE = "whole model"
"""The part of a dense model that is all of it."""


def measure(
    model: nn.Module,
    methods: Mapping[str, MethodConfig],
    images: Tensor,
    *,
    engines: Sequence[str | Engine] = ("eager",),
    compiled: bool = False,
    budget: Budget | None = None,
) -> list[Row]:
    """Speed and peak memory of a dense model and its reductions at one batch size and dtype, in one interleaved run.

    The baseline is the dense model on the fastest of the engines, with the faster attention kernel there.

    Args:
        model: an unreduced host in eval mode, or the `Prefill` of a vision-language model; it is not changed.
        methods: configs by the name that the rows should carry.
        images: (B, C, H, W) on the device and in the dtype of the model; (B, n, C, H, W) for a `Prefill`.
        engines: names (`vitrim.speed.engines.engines`: eager, compile, onnxruntime, openvino, aoti, torch.export) or
            engines. Every model runs on each, but for methods without a fixed graph on those that need one.
        compiled: in place of ``engines``, torch.compile in its default mode alone.
        budget: how long to time.

    Returns:
        One row per engine for the dense model with the faster attention kernel there (method "dense"), then one per
        method and engine, each with ``method, engine, compiled, images_per_second, latency_ms`` (p50, p95, min, iqr),
        ``rounds, peak_memory_mib`` (None where it cannot be measured), ``speedup, speedup_q1, speedup_q3`` over the
        baseline, ``promised_speedup`` (dense MACs over reduced MACs), ``ratio`` (speedup over promised_speedup),
        ``dense_engine, dense_kernel`` of the baseline, ``engine_speedup`` over the dense model on the same engine,
        ``dense_p50_ms`` of that (by kernel), and ``prepare_seconds`` (compiling or exporting, and the first run).

        Of a dense model (`vitrim.models.segmenter`, `vitrim.models.vitdet`) two rows each, with ``part``: what runs in
        front of its heads, against the same part of the dense model, and the whole model.

        Of the prefill of a vision-language model (`vitrim.measure.prefill.Prefill`) rows have ``text_tokens,
        prompt_images, image_tokens`` of a prompt, too, and images per second count all images of the prompts.

    Raises:
        VitrimError: a method does not fit the model or runs on none of the engines, or an engine cannot run here.

    Example:
        >>> import timm
        >>> from vitrim.core.registry import parse_method
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
        >>> rows = measure(model, {"tome:r=1": parse_method("tome:r=1")}, torch.zeros(1, 3, 32, 32),
        ...                budget=Budget(min_rounds=1, min_seconds=0.0))
        >>> [(row["method"], row["engine"]) for row in rows]
        [('dense', 'eager'), ('tome:r=1', 'eager')]
    """
    chosen = [Compiled()] if compiled else engines_named(engines)
    check_engines(chosen, methods, model, images.device, images.dtype)
    copies: dict[tuple[str, str], nn.Module] = {(DENSE, kernel): copy for kernel, copy in dense_copies(model).items()}
    copies |= {(name, ""): reduced_copy(model, config) for name, config in methods.items()}
    parts = _parts(model)
    # counted on the very copies that are timed: learned reducers are drawn anew for every copy
    promised = {
        part: _promises(take(model), {name: take(copies[name, ""]) for name in methods}, images)
        for part, take in parts.items()
    }
    entries = [
        Entry(name, kernel, engine, part, take(copy), promised[part].get(name, 1.0))
        for engine in chosen
        for part, take in parts.items()
        for (name, kernel), copy in copies.items()
        if name == DENSE or engine.obstacle(methods[name]) is None
    ]
    with TemporaryDirectory() as folder, compilation(any(engine.compiled for engine in chosen)):
        for number, entry in enumerate(entries):
            entry.prepare(images, Path(folder) / str(number))
        with torch.inference_mode():
            times = time_interleaved({entry.key: entry.call for entry in entries}, images.device, budget)
            return _rows(entries, times, [DENSE, *methods], images)


@dataclass
class Entry:
    """One model, or a part of one, on one engine.

    Attributes:
        name: of the method, or "dense".
        kernel: the attention kernel of a dense model.
        engine: what runs it.
        part: of the model; None where it is timed as one.
        model: what runs.
        promised: dense MACs over its MACs.
        call: one forward of the images; `prepare` makes it.
        seconds: that took.
    """

    name: str
    kernel: str
    engine: Engine
    part: str | None
    model: nn.Module
    promised: float
    call: Call = field(init=False)
    seconds: float = field(init=False)

    @property
    def key(self) -> str:
        """The name among all that is timed."""
        kernel = f" ({self.kernel})" if self.kernel else ""
        on = "" if self.engine.label == Eager.label else f" on {self.engine.label}"
        return self.name + kernel + on + ("" if self.part is None else f" [{self.part}]")

    def prepare(self, images: Tensor, folder: Path) -> None:
        """Compile or export the model for ``images``; files go to ``folder``."""
        folder.mkdir()
        start = time.perf_counter()
        self.call = self.engine.prepare(self.model, images, folder)
        self.seconds = time.perf_counter() - start


def check_engines(
    engines: Sequence[Engine],
    methods: Mapping[str, MethodConfig],
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Refuse engines that cannot run here, or not this model, and methods that run on none of them.

    Raises:
        VitrimError: saying which, and what to do.
    """
    part = (ask(model).front(model) or (None,))[0]
    for engine in engines:
        engine.check(device, dtype)
        if isinstance(model, Prefill) and not engine.runs_prompts:
            raise VitrimError(f"engine {engine.label} runs models of images, not prompts: time prefill on eager")
        if part is not None and engine.whole_models_only:
            raise VitrimError(f"engine {engine.label} runs whole models only, and the {part} is timed by itself here")
    for name, config in methods.items():
        obstacles = [engine.obstacle(config) for engine in engines]
        if None not in obstacles:
            raise VitrimError(f"{name} runs on none of these engines: {obstacles[0]}; give eager too")


def _rows(entries: Sequence[Entry], times: Mapping[str, FloatArray], names: Sequence[str], images: Tensor) -> list[Row]:
    """A row for every method, engine and part; of the dense model on an engine that with its faster kernel."""

    def quickest(among: Iterable[Entry]) -> Entry:
        by_key = {entry.key: entry for entry in among}
        return by_key[fastest(times, by_key)]

    kernels: dict[tuple[str, str | None], list[Entry]] = {}
    for entry in entries:
        if entry.name == DENSE:
            kernels.setdefault((entry.engine.label, entry.part), []).append(entry)
    dense = {place: quickest(every) for place, every in kernels.items()}
    baseline = {part: quickest(one for one in dense.values() if one.part == part) for _, part in dense}
    kept = [*dense.values(), *(entry for entry in entries if entry.name != DENSE)]
    rows = []
    for entry in sorted(kept, key=lambda entry: names.index(entry.name)):
        place = entry.engine.label, entry.part
        facts: dict[str, Any] = {} if entry.part is None else {"part": entry.part}
        facts |= {"engine": entry.engine.label, "compiled": entry.engine.compiled}
        facts |= {"dense_engine": baseline[entry.part].engine.label, "dense_kernel": baseline[entry.part].kernel}
        facts |= _prompt(entry.model, images)
        facts["dense_p50_ms"] = {one.kernel: summarise(times[one.key]).p50_ms for one in kernels[place]}
        peak = entry.engine.peak_mib(entry.model, entry.call, images)
        numbers = _numbers(times, entry, baseline[entry.part], dense[place], _number(entry.model, images))
        rows.append(Row(entry.name, {**facts, **numbers, "peak_memory_mib": peak}))
    return rows


def _prompt(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """The tokens of a prompt of the last forward, if ``model`` reads any."""
    if not isinstance(model, Prefill):
        return {}
    return {"text_tokens": model.text, "prompt_images": model.shape[0], "image_tokens": model.image_tokens(images)}


def _number(model: nn.Module, images: Tensor) -> int:
    return len(images) * (model.shape[0] if isinstance(model, Prefill) else 1)


class Front(nn.Module):
    """The part of a dense model in front of its heads (`Host.front`), as a model that can be counted and compiled.

    Example:
        >>> from vitrim.loading import create_model
        >>> options = {"img_size": 32, "depth": 1, "num_classes": 3}
        >>> model = create_model("segmenter:vit_tiny_patch16_224", options=options)
        >>> Front(model)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 5, 192])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.library = ask(model)

    def forward(self, images: Tensor) -> Any:
        """Compute what the heads read of ``images`` (B, C, H, W)."""
        front = self.library.front(self.model)
        assert front is not None
        return front[1](images)


def _parts(model: nn.Module) -> dict[str | None, Callable[[nn.Module], nn.Module]]:
    """The parts that are timed each by itself: how they are taken from a model, by name; None: there is only one."""
    front = ask(model).front(model)
    return {None: _itself} if front is None else {front[0]: Front, WHOLE: _itself}


def _itself(model: nn.Module) -> nn.Module:
    return model


def _numbers(
    times: Mapping[str, FloatArray], entry: Entry, baseline: Entry, own: Entry, batch_size: int
) -> dict[str, Any]:
    """The speed of an entry: alone, over the baseline, and over the dense model on its own engine."""
    latency = summarise(times[entry.key])
    speedup = paired_speedup(times[baseline.key], times[entry.key])
    return {
        "images_per_second": images_per_second(batch_size, latency.p50_ms),
        "latency_ms": {
            "p50": latency.p50_ms,
            "p95": latency.p95_ms,
            "min": latency.min_ms,
            "iqr": latency.iqr_ms,
        },
        "rounds": len(times[entry.key]),
        "speedup": speedup.median,
        "speedup_q1": speedup.q1,
        "speedup_q3": speedup.q3,
        "promised_speedup": entry.promised,
        "ratio": speedup.median / entry.promised,
        "engine_speedup": paired_speedup(times[own.key], times[entry.key]).median,
        "prepare_seconds": entry.seconds,
    }


def _promises(dense: nn.Module, reduced: Mapping[str, nn.Module], images: Tensor) -> dict[str, float]:
    """`promised_speedup` of several reduced models, or fronts of models."""
    return {name: promised_speedup(dense, candidate, images) for name, candidate in reduced.items()}


def promised_speedup(dense: nn.Module, reduced: nn.Module, images: Tensor) -> float:
    """Dense MACs over the MACs of the ``reduced`` model: the speed-up if time were proportional to MACs.

    Counted on all of ``images`` (B, C, H, W) where counts depend on them, else on one.
    """
    model = reduced.model if isinstance(reduced, Front) else reduced
    varies = get_reduction(model).config.is_adaptive() or (reduced is model and cost_varies(model))
    sample = images if varies else images[:1]
    return count_macs(dense, sample).total / count_macs(reduced, sample).total


def cost_varies(model: nn.Module) -> bool:
    """Tell whether the work of ``model`` depends on what is in the images: that of RoI heads does, on the proposals.

    Example:
        >>> cost_varies(nn.Linear(1, 1))
        False
    """
    library = ask(model)
    return library.front(model) is not None and tasks()[library.tasks(model)[0]].cost_varies


def random_images(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Standard normal images (count, C, H, W), float32 on the CPU, of the size and channels that ``model`` takes.

    (count, n, C, H, W) for a `Prefill` of prompts with n images.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = model.shape if isinstance(model, Prefill) else host_of(model).facts(model).input_size
    return torch.randn(count, *shape, generator=generator)
