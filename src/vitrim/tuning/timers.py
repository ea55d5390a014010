"""Settings timed on other engines than eager PyTorch: a schedule for the engine that will run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.measure.latency import Budget, dense_copies, fastest, reduced_copy, time_interleaved
from vitrim.speed.bench import check_engines
from vitrim.speed.engines import Call, Eager, Engine, compilation, engines_named
from vitrim.tuning.cost import FloatArray, Timer, eager

TOGETHER = 6
"""Settings that are ready at the same time: each may hold a copy of the weights."""


def timer_on(names: Sequence[str | Engine]) -> Timer:
    """The timer of several engines: settings are timed on that which is the fastest for the dense model.

    Args:
        names: as of `vitrim.speed.engines.engines_named`.

    Raises:
        VitrimError: an engine that is unknown. The timer itself refuses one that cannot run here, and a method that
            cannot run on it.

    Example:
        >>> timer_on(["eager"]) is eager
        True
    """
    engines = engines_named(names)
    if [type(engine) for engine in engines] == [Eager]:
        return eager

    def timed(
        model: nn.Module, configs: Sequence[MethodConfig], images: Tensor, budget: Budget | None
    ) -> tuple[FloatArray, float]:
        methods = {config.describe(): config for config in configs}
        for engine in engines:  # each must take all of them: which is the fastest is known only later
            check_engines([engine], methods, model, images.device, images.dtype)
        with TemporaryDirectory() as folder, compilation(any(engine.compiled for engine in engines)):
            ready = _Ready(images, Path(folder), budget)
            engine, dense, dense_ms = ready.dense(model, engines)
            ratios = [
                ratio
                for start in range(0, len(configs), TOGETHER)
                for ratio in ready.ratios(model, configs[start : start + TOGETHER], engine, dense)
            ]
        return np.array(ratios), dense_ms

    return timed


class _Ready:
    """Models made ready for a batch of images, in folders of their own, and timed.

    Args:
        images: (B, C, H, W).
        folder: for their files.
        budget: the time to spend on each.
    """

    def __init__(self, images: Tensor, folder: Path, budget: Budget | None) -> None:
        self.images, self.folder, self.budget = images, folder, budget
        self.made = 0

    def call(self, engine: Engine, model: nn.Module) -> Call:
        """Make one model ready."""
        place = self.folder / str(self.made)
        place.mkdir()
        self.made += 1
        return engine.prepare(model, self.images, place)

    def dense(self, model: nn.Module, engines: Sequence[Engine]) -> tuple[Engine, Call, float]:
        """The fastest engine for the dense model, that with its faster kernel there, and its milliseconds."""
        calls = {
            f"{engine.label} {kernel}": (engine, self.call(engine, copy))
            for engine in engines
            for kernel, copy in dense_copies(model).items()
        }
        times = self.timed({name: call for name, (_, call) in calls.items()})
        best = fastest(times, calls)
        return *calls[best], float(np.median(times[best]))

    def ratios(self, model: nn.Module, configs: Sequence[MethodConfig], engine: Engine, dense: Call) -> list[float]:
        """The median of every setting's ratio to the dense model within a round."""
        calls = {str(place): self.call(engine, reduced_copy(model, config)) for place, config in enumerate(configs)}
        times = self.timed({"dense": dense, **calls})
        return [float(np.median(times[name] / times["dense"])) for name in calls]

    def timed(self, calls: dict[str, Call]) -> dict[str, FloatArray]:
        """Time calls in turn."""
        with torch.inference_mode():
            return time_interleaved(calls, self.images.device, self.budget)
