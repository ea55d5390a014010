"""The cost of a setting relative to the dense model: multiply-accumulates, or latency on this device."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of
from vitrim.engines.copies import dense_copies, reduced_copy
from vitrim.engines.engine import Engine, compilation, engines_named
from vitrim.engines.macs import Profile, profile_of
from vitrim.errors import VitrimError
from vitrim.measure.latency import FloatArray, fastest, in_turn, time_interleaved
from vitrim.measure.timing import check_engines, in_dtype
from vitrim.tuning.space import Point, Space

ALLOWED = 0.005
"""Largest relative error of fitted MACs; otherwise every setting is counted."""

SAMPLES = 24
"""Settings that a cost is fitted to."""

TINY = 1e-6
"""Smaller weights count as 0: no scale makes them act."""

TOGETHER = 6
"""Settings prepared on an engine at a time: each may hold a copy of the weights."""

WANTED_ERROR = 0.05
"""Mean error of the latency model above which half as many settings more are timed, once."""


class Cost(ABC):
    """The cost of settings of a `Space`.

    Attributes:
        unit: "macs" or "latency".
        error: mean relative error of `share`, 0 if it is counted.
    """

    unit: Literal["macs", "latency"]
    error: float = 0.0

    @abstractmethod
    def share(self, config: MethodConfig) -> float:
        """The cost as a share of the dense model's."""

    def estimate(self, config: MethodConfig) -> float:
        """A faster approximation of `share`."""
        return self.share(config)

    def measure(self, configs: Sequence[MethodConfig]) -> list[float] | None:
        """The measured costs of settings if `share` predicts them; None if it counts them."""
        return None

    steps: int = 40
    """Most halvings to find a scale."""


# ---- counting --------------------------------------------------------------------------------------------------------


class MacsCost(Cost):
    """Multiply-accumulates, counted by `vitrim.engines.macs.profile_of`; ``dense`` are those of the dense model.

    If counts follow from shapes, a copy of the model on the meta device is counted. Estimates come from a least-squares
    fit over sums of token counts to settings drawn from the space, unless the fit misses three test settings by more
    than 0.5 %.

    Args:
        model: the dense model; not changed.
        images: batches (B, C, H, W) to count an adaptive method on.
        settle: maps a setting of an adaptive method to the static one that runs in its place, which is counted then.

    Raises:
        VitrimError: an adaptive method without images.
    """

    unit = "macs"

    def __init__(
        self,
        model: nn.Module,
        space: Space,
        images: Sequence[Tensor] = (),
        *,
        seed: int = 0,
        settle: Callable[[MethodConfig], MethodConfig] | None = None,
    ) -> None:
        self.space, self._settle = space, settle
        self._known: dict[str, Profile] = {}
        self._settled: dict[str, MethodConfig] = {}
        adaptive = space.adaptive and settle is None
        if adaptive and not images:
            raise VitrimError(f"{space.base.name} adapts to the content of the images: give some to count its MACs on")
        self._images: Tensor | list[Tensor]
        if adaptive:
            self._model, self._images = copy.deepcopy(model).eval(), list(images)
        else:
            like = next(model.parameters())
            size = images[0].shape[1:] if len(images) else host_of(model).facts(model).input_size
            self._model = copy.deepcopy(model).to("meta").eval()
            self._images = torch.zeros(1, *size, dtype=like.dtype, device="meta")
        self.dense = profile_of(self._model, None, self._images).macs.total
        self._fit = None if space.adaptive else self._fitted(seed)
        self.steps = 10 if space.adaptive else 40

    def share(self, config: MethodConfig) -> float:
        return self._profile(config).macs.total / self.dense

    def settled(self, config: MethodConfig) -> MethodConfig:
        """The setting that runs for ``config``."""
        if self._settle is None or not config.is_adaptive():
            return config
        text = config.describe()
        if text not in self._settled:
            self._settled[text] = self._settle(config)
        return self._settled[text]

    def tokens(self, config: MethodConfig) -> FloatArray:
        """Tokens after every block, means over the images."""
        return np.array(self._profile(config).tokens_per_block)

    def _profile(self, config: MethodConfig) -> Profile:
        text = config.describe()
        if text not in self._known:
            self._known[text] = profile_of(self._model, self.settled(config), self._images)
        return self._known[text]

    def estimate(self, config: MethodConfig) -> float:
        if self._fit is None:
            return self.share(config)
        return float(self._fit.value(_terms(self.space, config)))

    def _fitted(self, seed: int) -> Fit | None:
        configs = samples(self.space, SAMPLES, seed)
        if len(configs) < SAMPLES:  # a small space is counted instead
            return None
        shares = np.array([self.share(config) for config in configs])
        terms = np.stack([_terms(self.space, config) for config in configs])
        fit = Fit.of(terms[:-3], shares[:-3])
        errors = [abs(fit.value(one) - share) / share for one, share in zip(terms[-3:], shares[-3:], strict=True)]
        return fit if max(errors) <= ALLOWED else None


def samples(space: Space, number: int, seed: int) -> list[MethodConfig]:
    """Draw distinct settings from a space, over the entire range of strength."""
    random = np.random.default_rng(seed)
    found: dict[str, MethodConfig] = {}
    for _ in range(20 * number):
        point: Point = tuple((random.random(space.size) * (random.random(space.size) < 0.8)).tolist())
        config = space.config(point, scale=float(random.random()))
        found.setdefault(space.key(config), config)
        if len(found) == number:
            break
    return list(found.values())


# ---- timing ----------------------------------------------------------------------------------------------------------


Timer = Callable[[nn.Module, Sequence[MethodConfig], Sequence[Tensor]], tuple[FloatArray, float]]
"""Maps the dense model, settings (S) and batches of images, which rounds use in turn, to (S,) ratios of latency to the
dense model's, and the dense latency in milliseconds."""


class LatencyCost(Cost):
    """Latency on one device, predicted by a least-squares fit over sums of token counts.

    Args:
        fit: fit of the latency over the dense model's, see `latency_fit`.
        again: measures settings (S) once more, as S ratios of latency to the dense model's.
        counted: counts the tokens of an adaptive method; None for other methods.
    """

    unit = "latency"

    def __init__(
        self,
        space: Space,
        fit: Fit,
        again: Callable[[Sequence[MethodConfig]], list[float]] | None = None,
        counted: MacsCost | None = None,
    ) -> None:
        self.space, self.fit, self.again, self.counted, self.error = space, fit, again, counted, fit.error
        self.steps = Cost.steps if counted is None else counted.steps

    def share(self, config: MethodConfig) -> float:
        return self.fit.value(_few_terms(self.space, config, self.counted))

    def measure(self, configs: Sequence[MethodConfig]) -> list[float] | None:
        return None if self.again is None else self.again(configs)


def latency_fit(
    space: Space,
    clock: Callable[[Sequence[MethodConfig]], tuple[FloatArray, float]],
    *,
    number: int = SAMPLES,
    seed: int = 0,
    counted: MacsCost | None = None,
) -> tuple[Fit, float]:
    """Time settings drawn from a space, and fit their latency over the dense model's, the ratio within a round.

    Return the fit, and the latency of the dense model in milliseconds.

    Args:
        clock: a `Timer` for a model and images.
        number: settings to time; half as many more if the mean error exceeds 5 %.
        counted: see `LatencyCost`.
    """
    configs = samples(space, number + number // 2, seed)
    terms = np.stack([_few_terms(space, config, counted) for config in configs])
    ratios, dense_ms = clock(configs[:number])
    fit = Fit.of(terms[:number], ratios)
    if fit.error > WANTED_ERROR and len(configs) > number:
        more, _ = clock(configs[number:])
        fit = Fit.of(terms, np.concatenate([ratios, more]))
    return fit, dense_ms


def timer_on(names: Sequence[str | Engine], precisions: Sequence[str] = ("fp32",)) -> Timer:
    """The timer of engines: settings are timed on the engine that is fastest for the dense model.

    Args:
        names, precisions: see `vitrim.engines.engine.engines_named`.

    Raises:
        VitrimError: an unknown engine. The timer itself refuses an engine that cannot run here, or a method that cannot
            run on it.
    """
    engines, _ = engines_named(names, precisions)

    def timed(model: nn.Module, configs: Sequence[MethodConfig], images: Sequence[Tensor]) -> tuple[FloatArray, float]:
        methods = {config.describe(): config for config in configs}
        for engine in engines:  # each must run all methods, since the fastest is not known yet
            check_engines([engine], methods, model, len(images[0]))
        with TemporaryDirectory() as folder, compilation(any(engine.compiled for engine in engines)):

            def ready(engine: Engine, model: nn.Module) -> Callable[[], object]:
                made = engine.prepare(model, images[0], Path(mkdtemp(dir=folder)), torch.cat(list(images)))
                with torch.inference_mode():
                    return in_turn(made.run, [made.given(batch) for batch in images])

            def times(calls: dict[str, Callable[[], object]]) -> dict[str, FloatArray]:
                with torch.inference_mode():
                    return time_interleaved(calls, images[0].device)

            kernels = {
                f"{engine.label} {kernel}": (engine, ready(engine, copy))
                for engine in engines
                for kernel, copy in dense_copies(in_dtype(model, engine.dtype)).items()
            }
            found = times({name: call for name, (_, call) in kernels.items()})
            best = fastest(found, kernels)
            engine, dense = kernels[best]
            base = in_dtype(model, engine.dtype)
            dense_ms, ratios = float(np.median(found[best])), list[float]()
            for start in range(0, len(configs), TOGETHER):
                some = configs[start : start + TOGETHER]
                calls = {str(place): ready(engine, reduced_copy(base, config)) for place, config in enumerate(some)}
                found = times({"dense": dense, **calls})
                ratios += [float(np.median(found[name] / found["dense"])) for name in calls]
        return np.array(ratios), dense_ms

    return timed


# ---- fitting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A least-squares fit with its relative leave-one-out errors.

    Attributes:
        coefficients: (K,), of the terms.

    Example:
        >>> terms = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 5.0]])
        >>> fit = Fit.of(terms, 3.0 + 2.0 * terms[:, 1])
        >>> [round(float(one), 6) for one in fit.coefficients], round(fit.worst, 6)
        ([3.0, 2.0], 0.0)
    """

    coefficients: FloatArray
    error: float
    worst: float

    @classmethod
    def of(cls, terms: FloatArray, values: FloatArray) -> Fit:
        """Fit nonzero ``values`` (S,) by a sum over ``terms`` (S, K)."""
        inverse = np.linalg.pinv(terms, rcond=1e-10)
        coefficients = inverse @ values
        leverage = np.einsum("sk,ks->s", terms, inverse).clip(max=1.0 - 1e-9)
        errors = np.abs((values - terms @ coefficients) / (1.0 - leverage) / values)
        return cls(coefficients, float(errors.mean()), float(errors.max()))

    def value(self, terms: FloatArray) -> float:
        return float(self.coefficients @ terms)


def _tokens(space: Space, config: MethodConfig, counted: MacsCost | None = None) -> tuple[FloatArray, FloatArray]:
    """Tokens at the input and output of each block, relative to those at the input of the first block."""
    first = space.patches + space.num_prefix
    if counted is not None:
        left = counted.tokens(config)
    else:
        counts = space.counts(config)
        assert counts is not None, "the counts of this method depend on the images"
        left = np.array(counts, dtype=np.float64) + space.num_prefix
    return np.array([first, *left[:-1]]) / first, left / first


def _few_terms(space: Space, config: MethodConfig, counted: MacsCost | None = None) -> FloatArray:
    """(5,) terms of the latency: a constant, tokens, pairs of tokens, output tokens, and reducing blocks."""
    enter, leave = _tokens(space, config, counted)
    return np.array([1.0, enter.sum(), (enter**2).sum(), leave.sum(), (leave < enter).sum()])


def _terms(space: Space, config: MethodConfig) -> FloatArray:
    """(12,) terms of the MACs; separate ones for the last block, which may compute less, and for blocks that match."""
    enter, leave = _tokens(space, config)
    acts = leave < enter
    return np.array(
        [
            *(1.0, enter.sum(), (enter**2).sum(), leave.sum(), (leave**2).sum(), (enter * leave).sum()),
            *(acts.sum(), (acts * enter).sum(), (acts * enter**2).sum()),
            *(enter[-1], enter[-1] ** 2, leave[-1]),
        ]
    )


# ---- limits ----------------------------------------------------------------------------------------------------------


def within(space: Space, point: Point | None, cost: Cost, limit: float) -> MethodConfig | None:
    """The mildest setting of a point whose cost is at most ``limit``, found by bisection over the scale; else None.

    ``point`` None means one value for all blocks; ``limit`` is a share of the dense model's cost.
    """

    def at(scale: float) -> MethodConfig:
        return space.constant(scale) if point is None else space.raw(point, scale)

    most = 1.0 if point is None else 1.0 / min(weight for weight in point if weight > TINY)
    aim = limit
    for _ in range(8):
        low, high = 0.0, most
        if cost.estimate(at(high)) > aim:
            return None
        for _ in range(cost.steps):
            if high - low < space.resolution:
                break
            middle = (low + high) / 2
            low, high = (low, middle) if cost.estimate(at(middle)) <= aim else (middle, high)
        config = space.tidy(at(high))
        share = cost.share(config)
        if share <= limit:
            return config
        aim = min(aim, cost.estimate(config)) - 1.5 * (share - limit)  # the estimate was too low
    return None
