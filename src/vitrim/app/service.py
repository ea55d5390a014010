"""The jobs of the page: from an image and settings to pictures and numbers. They keep no state of users."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitrim.app.messages import (
    MOST_BESIDE,
    FrontFile,
    Limits,
    ModelSource,
    Offer,
    Reduced,
    Reply,
    Settings,
    Side,
    Timing,
)
from vitrim.app.photographs import EXAMPLES, known_of
from vitrim.app.pictures import pictures_of
from vitrim.app.sliders import STEPS, config_of, matched, slide_of
from vitrim.app.uploads import read_front, read_image
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_
from vitrim.core.registry import host_of
from vitrim.data.transforms import eval_transform
from vitrim.engines.copies import shared_copy
from vitrim.engines.macs import profile_of
from vitrim.errors import ReductionWarning, VitrimError, check_known
from vitrim.loading import ModelSpec
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.inputs import EMBEDDING, task_name
from vitrim.measure.latency import Budget
from vitrim.measure.task_data import task_of
from vitrim.measure.timing import measure
from vitrim.plots.classifier import check_shown
from vitrim.plots.patches import sources_of
from vitrim.tasks import Task
from vitrim.tasks.classes import class_names
from vitrim.tuning.space import training_free

KEPT_MODELS = 3
BEST = 5
ROUNDS = 5
GIGA = 1e9


@dataclass(frozen=True)
class _Ready:
    model: nn.Module
    classes: Sequence[str]
    methods: Sequence[str]
    examples: Sequence[str]
    gallery: Tensor | None
    """(E, D), dense embeddings of the examples, whose names are then the classes; None for classifiers."""


class Service:
    """The models of the page and the jobs on them. The last `KEPT_MODELS` models stay loaded; jobs share only weights.

    Args:
        sources: the models; no others are loaded.
        seconds: limit of a job; timing is omitted if it would exceed it.

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
        """A model with its methods and examples; `VitrimError` if it cannot be created, reduced or shown."""
        loaded = self._load(name)
        rows, columns = host_of(loaded.model).facts(loaded.model).grid_size
        slides = {method: slide_of(method, rows * columns) for method in loaded.methods}
        return Offer(name, self.sources[name].weights, slides, loaded.examples)

    def offers(self) -> list[Offer]:
        return [self.offer(name) for name in self.sources]

    def front(self, content: bytes) -> FrontFile:
        return read_front(content)

    def run(self, content: bytes, choice: Settings) -> Reply:
        """Run a model on an image file, dense and reduced; `VitrimError` for an invalid image, method,
        value or option.
        """
        loaded = self._load(choice.model)
        end = time.monotonic() + self.seconds  # loading a model does not count
        beside = _beside(choice, loaded.methods)
        config = config_of(choice.method, choice.value, choice.more)
        upload = read_image(content, self.limits)
        image = eval_transform(loaded.model, in_patches=False)(upload.image)
        images, notes = image[None], [*upload.notes]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ReductionWarning)
            dense, seconds = _dense(loaded.model, images)
            # a reduced model takes at most twice as long, including the counting of MACs
            if beside and time.monotonic() + 2 * STEPS * len(beside) * seconds > end:
                notes.append(f"{_slow(seconds)} for several methods at once; see `vitrim compare`")
                beside = []
            configs, runs = [config], [_reduced(loaded.model, config, images)]
            for name in beside:
                configs.append(_as_cheap(loaded.model, name, images, _macs(runs[0][0])))
                runs.append(_reduced(loaded.model, configs[-1], images))
        notes += [str(one.message) for one in caught if issubclass(one.category, ReductionWarning)]
        timings: Sequence[Timing | None] = [None] * len(configs)
        # besides the rounds: counting MACs and measuring memory, some forwards each
        if time.monotonic() + (3 + len(configs)) * (ROUNDS + 4) * seconds > end:
            notes.append(f"{_slow(seconds)} to be timed here; see `vitrim bench`")
        else:
            timings = _timings(loaded.model, configs, images)
        source = self.sources[choice.model]
        return Reply(
            model=choice.model,
            embeds=loaded.gallery is not None,
            weights=source.weights,
            checkpoint=source.checkpoint is not None,
            options=source.options,
            notes=list(dict.fromkeys(notes)),
            image=pictures_of(loaded.model, image)[0],
            dense=_side(dense, loaded),
            reduced=[_shown(loaded, image, dense, *each) for each in zip(configs, runs, timings, strict=True)],
        )

    def _load(self, name: str) -> _Ready:
        check_known("model", name, self.sources)
        if name not in self.loaded:
            source = self.sources[name]
            # the same random weights when a model is loaded again
            spec = ModelSpec(name, source.pretrained, source.checkpoint, dict(source.options), seed=0)
            loaded = spec.load()
            model, embeds = loaded.model, task_name(loaded) == EMBEDDING
            if not embeds:
                check_shown(model)
            methods, outputs = [config.name for config in training_free(model)], _of_examples(model)
            if embeds:
                shown, names = known_of({}), [one.name for one in EXAMPLES]
                self.loaded[name] = _Ready(model, names, methods, shown, outputs)
            else:
                count = loaded.num_classes or 0
                classes = class_names(loaded.class_names, count) or [f"class {number}" for number in range(count)]
                said = zip(EXAMPLES, outputs.argmax(1).tolist(), strict=True)
                known = known_of({one.name: classes[place] for one, place in said})
                self.loaded[name] = _Ready(model, classes, methods, known, None)
        # The model that nobody asked for longest is dropped first.
        self.loaded.move_to_end(name)
        while len(self.loaded) > KEPT_MODELS:
            self.loaded.popitem(last=False)
        return self.loaded[name]


def _beside(choice: Settings, known: Sequence[str]) -> list[str]:
    """The methods besides the first, after a check of all."""
    beside = [name for name in dict.fromkeys(choice.beside) if name != choice.method]
    for name in (choice.method, *beside):
        check_known("method", name, known)
    if len(beside) > MOST_BESIDE:
        raise VitrimError(f"{len(beside)} methods beside the first are too many for one page: at most {MOST_BESIDE}")
    return beside


def _shown(
    ready: _Ready,
    image: Tensor,
    dense: ModelOutput,
    config: MethodConfig,
    run: tuple[ModelOutput, NDArray[np.int64]],
    timing: Timing | None,
) -> Reduced:
    """The pictures and numbers of one method, beside the dense model's output; ``run`` is from `_reduced`."""
    output, sources = run
    side = _side(output, ready)
    return Reduced(
        method=config.describe(),
        pictures=pictures_of(ready.model, image, sources),
        side=side,
        same=side.best[0][0] == _side(dense, ready).best[0][0],
        saved=1 - _macs(output) / _macs(dense),
        timing=timing,
        cosine=None if ready.gallery is None else _cosines(output.prediction, dense.prediction).item(),
    )


def _of_examples(model: nn.Module) -> Tensor:
    """(E, D) logits or embeddings of the examples."""
    dense, transform, found = Contestant(shared_copy(model), _task(model)), eval_transform(model, in_patches=False), []
    for one in EXAMPLES:
        with Image.open(one.path) as image, torch.no_grad():
            found.append(dense.run(transform(image.convert("RGB"))[None]).prediction)
    return torch.cat(found)


def _task(model: nn.Module) -> Task:
    return task_of(ModelSpec(model).load(), None)


def _cosines(vectors: Tensor, others: Tensor) -> Tensor:
    """The cosines of embeddings (B, D) and (B or 1, D)."""
    return torch.cosine_similarity(vectors.double(), others.double(), dim=1)


def _dense(model: nn.Module, images: Tensor) -> tuple[ModelOutput, float]:
    """The dense model's output with its MACs, and the seconds of a forward pass."""
    dense = Contestant(shared_copy(model), _task(model), watched=True)
    with torch.no_grad():
        output = dense.run(images, count=True)
        start = time.perf_counter()
        dense.run(images)
        return output, time.perf_counter() - start


def _reduced(model: nn.Module, config: MethodConfig, images: Tensor) -> tuple[ModelOutput, NDArray[np.int64]]:
    """The output and MACs of a reduced copy, and the token of every patch after every block."""
    copy = shared_copy(model)
    reduction = reduce_(copy, config, record=True)
    with torch.no_grad(), torch.random.fork_rng([]):
        # The same draws in both passes: the picture shows the pass whose cost is counted.
        torch.manual_seed(0)  # random methods give the same picture to all users
        output = Contestant(copy, _task(model), reduction, watched=True).run(images, count=True)
        torch.manual_seed(0)
        copy(images)
    return output, sources_of(reduction.states[1:])


def _as_cheap(model: nn.Module, name: str, images: Tensor, wanted: float) -> MethodConfig:
    """The method at the slider value with about the ``wanted`` MACs on these images."""
    rows, columns = host_of(model).facts(model).grid_size
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return matched(name, rows * columns, lambda config: profile_of(model, config, images).macs.total, wanted)


def _macs(output: ModelOutput) -> float:
    return float(sum((output.macs or {}).values()))


def _slow(seconds: float) -> str:
    return f"the models take {seconds:.1f} s a forward: too long"


def _side(output: ModelOutput, ready: _Ready) -> Side:
    shares = output.prediction[0].double().softmax(-1)
    if ready.gallery is not None:
        shares = _cosines(ready.gallery, output.prediction)
    values, places = shares.topk(min(BEST, len(shares)))
    best = [(ready.classes[place], value) for place, value in zip(places.tolist(), values.tolist(), strict=True)]
    return Side(best, _macs(output) / GIGA, output.tokens_per_block)


def _timings(model: nn.Module, configs: Sequence[MethodConfig], images: Tensor) -> list[Timing]:
    """Time all methods in turn with the dense model, by its faster attention kernel."""
    budget = Budget(ROUNDS, min_seconds=0.0, max_rounds=ROUNDS, warmup_rounds=1)
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore", ReductionWarning)
        dense, *rows = measure(model, {config.describe(): config for config in configs}, images, budget=budget)
    base = dense["latency_ms"]["p50"]
    return [
        Timing(base, row["latency_ms"]["p50"], (row["speedup"], row["speedup_q1"], row["speedup_q3"])) for row in rows
    ]
