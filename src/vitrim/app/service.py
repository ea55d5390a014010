"""The work of a job of the page: an image and choices in, pictures and numbers out. No page, no state of a user."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrim.app.messages import Choice, FrontFile, Limits, ModelSource, Offer, Reply, Side, Timing
from vitrim.app.pictures import pictures_of
from vitrim.app.sliders import config_of, slide_of
from vitrim.app.uploads import read_front, read_image
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_
from vitrim.core.registry import ask, host_of
from vitrim.data.transforms import eval_transform
from vitrim.errors import ReductionWarning, unknown
from vitrim.hosts.shared.classes import class_names
from vitrim.loading import create_model
from vitrim.measure.contestants import Contestant, Output
from vitrim.measure.latency import (
    Budget,
    dense_copies,
    fastest,
    reduced_copy,
    shared_copy,
    time_interleaved,
)
from vitrim.plots.patches import sources_of
from vitrim.plots.show import check_shown
from vitrim.tasks import make_task
from vitrim.tuning.space import training_free

__all__ = ["Service"]

KEPT_MODELS = 3
BEST = 5
ROUNDS = 5
GIGA = 1e9


@dataclass(frozen=True)
class _Ready:
    model: nn.Module
    classes: Sequence[str]
    methods: Sequence[str]


class Service:
    """Models by name, of which the last few stay loaded, and the jobs on them. Jobs share nothing but weights.

    Args:
        sources: the models on offer; no other is ever loaded.
        limits: of uploads.
        seconds: that a job may take; timing is left out where it would not fit.

    Example:
        >>> service = Service([ModelSource("vitrim:cifar10_vit", "reference")])
        >>> service.offer("vitrim:cifar10_vit").slides["tome"].value
        8
    """

    def __init__(self, sources: Sequence[ModelSource], limits: Limits | None = None, seconds: float = 20.0) -> None:
        self.sources = {source.name: source for source in sources}
        self.limits = limits or Limits()
        self.seconds = seconds
        self.loaded: OrderedDict[str, _Ready] = OrderedDict()

    def offer(self, name: str) -> Offer:
        """The facts known of a model on offer.

        Raises:
            VitrimError: it is none of them, cannot be created, or is no classifier that vitrim can reduce.
        """
        loaded = self._load(name)
        rows, columns = host_of(loaded.model).facts(loaded.model).grid_size
        slides = {method: slide_of(method, rows * columns) for method in loaded.methods}
        return Offer(name, self.sources[name].weights, slides)

    def offers(self) -> list[Offer]:
        """The facts known of every model on offer."""
        return [self.offer(name) for name in self.sources]

    def front(self, content: bytes) -> FrontFile:
        """The points of a ``front.json`` of ``vitrim tune``; see `read_front`."""
        return read_front(content)

    def run(self, content: bytes, choice: Choice) -> Reply:
        """Run a model on an image, dense and reduced.

        Args:
            content: of an image file.
            choice: of the user.

        Raises:
            VitrimError: the file is no image that is read; a model or method that is not on offer; a value or option
                that is not valid.
        """
        loaded = self._load(choice.model)
        end = time.monotonic() + self.seconds  # the time to load a model again does not count
        if choice.method not in loaded.methods:
            raise unknown("method", choice.method, loaded.methods)
        config = config_of(choice.method, choice.value, choice.more)
        upload = read_image(content, self.limits)
        image = eval_transform(loaded.model)(upload.image)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ReductionWarning)
            outputs, sources, seconds = _compared(loaded.model, config, image[None])
        notes = [*upload.notes, *(str(one.message) for one in caught if issubclass(one.category, ReductionWarning))]
        timing = None
        if time.monotonic() + 4 * (ROUNDS + 1) * seconds > end:
            notes.append(f"the models take {seconds:.1f} s a forward: too long to be timed here; see `vitrim bench`")
        else:
            timing = _timing(loaded.model, config, image[None])
        first = [int(output.prediction[0].argmax()) for output in outputs]
        source = self.sources[choice.model]
        return Reply(
            model=choice.model,
            weights=source.weights,
            checkpoint=source.checkpoint is not None,
            options=source.options,
            method=config.describe(),
            notes=list(dict.fromkeys(notes)),
            pictures=pictures_of(loaded.model, image, sources),
            dense=_side(outputs[0], loaded.classes),
            reduced=_side(outputs[1], loaded.classes),
            same=first[0] == first[1],
            timing=timing,
        )

    def _load(self, name: str) -> _Ready:
        if name not in self.sources:
            raise unknown("model", str(name), self.sources)
        if name not in self.loaded:
            source = self.sources[name]
            options = dict(source.options)
            with torch.random.fork_rng([]):
                torch.manual_seed(0)  # random weights stay the same when a model is loaded again
                model = create_model(name, pretrained=source.pretrained, checkpoint=source.checkpoint, options=options)
            check_shown(model)
            count = ask(model).num_classes(model) or 0
            methods = [config.name for config in training_free(model)]
            self.loaded[name] = _Ready(
                model, class_names(model) or [f"class {number}" for number in range(count)], methods
            )
        self.loaded.move_to_end(name)
        while len(self.loaded) > KEPT_MODELS:
            self.loaded.popitem(last=False)
        return self.loaded[name]


def _compared(
    model: nn.Module, config: MethodConfig, images: Tensor
) -> tuple[tuple[Output, Output], NDArray[np.int64], float]:
    """The outputs of the dense and the reduced model, which share the weights of ``model`` and nothing else.

    Returns:
        Both outputs with their MACs, the token of every patch after every block, seconds of a dense forward.
    """
    task = make_task("classification", host_of(model).facts(model).num_classes)
    copy = shared_copy(model)
    reduction = reduce_(copy, config, record=True)
    dense, reduced = Contestant(shared_copy(model), task, watched=True), Contestant(copy, task, reduction, watched=True)
    with torch.no_grad(), torch.random.fork_rng([]):
        torch.manual_seed(0)  # a method that draws at random gives the same picture to everybody
        outputs = (dense.run(images, count=True), reduced.run(images, count=True))
        start = time.perf_counter()
        dense.run(images)
        seconds = time.perf_counter() - start
        torch.manual_seed(0)
        reduced.run(images)
    return outputs, sources_of(reduction.states[1:]), seconds


def _side(output: Output, classes: Sequence[str]) -> Side:
    shares = output.prediction[0].double().softmax(-1)
    values, places = shares.topk(min(BEST, len(shares)))
    best = [(classes[place], value) for place, value in zip(places.tolist(), values.tolist(), strict=True)]
    return Side(best, sum((output.macs or {}).values()) / GIGA, output.tokens_per_block)


def _timing(model: nn.Module, config: MethodConfig, images: Tensor) -> Timing:
    """Time the reduced model and every kernel of the dense one in turn, against the fastest of these."""
    kernels = {f"dense {kernel}": copy for kernel, copy in dense_copies(model).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReductionWarning)
        models = {**kernels, "reduced": reduced_copy(model, config)}
    with torch.inference_mode(), torch.random.fork_rng([]):
        budget = Budget(min_rounds=ROUNDS, max_rounds=ROUNDS, min_seconds=0.0, warmup_rounds=1)
        times = time_interleaved({name: partial(one, images) for name, one in models.items()}, budget=budget)
    dense, reduced = times[fastest(times, kernels)], times["reduced"]
    # of each the median, then the lower and the upper quartile
    of_dense, of_reduced, ratios = (
        (median, q1, q3)
        for q1, median, q3 in np.percentile([dense, reduced, dense / reduced], [25, 50, 75], axis=1).T.tolist()
    )
    return Timing(of_dense, of_reduced, ratios, ROUNDS, torch.get_num_threads())
