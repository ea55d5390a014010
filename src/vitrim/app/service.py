"""The work of a job of the page: an image and choices in, pictures and numbers out. No page, no state of a user."""

from __future__ import annotations

import io
import math
import re
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrim.app.messages import BlockPicture, Choice, FrontFile, Limits, ModelSource, Offer, Reply, Side, Slide, Timing
from vitrim.app.uploads import read_front, read_image
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_
from vitrim.core.registry import ask, host_of, make_method, parse_method, split_options
from vitrim.data.transforms import eval_transform
from vitrim.errors import ReductionWarning, VitrimError, unknown
from vitrim.loading import create_model
from vitrim.measure.contestants import Contestant, Output
from vitrim.measure.latency import (
    Budget,
    dense_copies,
    fastest,
    paired_speedup,
    reduced_copy,
    shared_copy,
    time_interleaved,
)
from vitrim.plots.patches import draw_kept, groups_of, sources_of
from vitrim.plots.show import LARGE, check_shown, pixels_of
from vitrim.tasks import make_task
from vitrim.tuning.space import training_free

__all__ = ["Service", "class_names", "config_of", "slide_of"]

KEPT_MODELS = 3
BEST = 5
ROUNDS = 5
GIGA = 1e9
LONGEST = 300
"""Characters of further options."""
STRENGTH = 0.3
"""Of a slider's start where the method's own default removes nothing."""


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
        slides = {method: slide_of(method, _patches(loaded.model)) for method in loaded.methods}
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
            dense, reduced = _contestants(loaded.model, config)
            outputs, sources, seconds = _outputs(dense, reduced, image[None])
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
            pictures=_pictures(loaded.model, image, sources),
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
            self.loaded[name] = _Ready(model, class_names(model, count), methods)
        self.loaded.move_to_end(name)
        while len(self.loaded) > KEPT_MODELS:
            self.loaded.popitem(last=False)
        return self.loaded[name]


def _patches(model: nn.Module) -> int:
    rows, columns = host_of(model).facts(model).grid_size
    return rows * columns


def _contestants(model: nn.Module, config: MethodConfig) -> tuple[Contestant, Contestant]:
    """The dense and the reduced model, as copies that share the weights of ``model`` and nothing else."""
    task = make_task("classification", host_of(model).facts(model).num_classes)
    copy = shared_copy(model)
    reduction = reduce_(copy, config, record=True)
    return Contestant(shared_copy(model), task, watched=True), Contestant(copy, task, reduction, watched=True)


def _outputs(
    dense: Contestant, reduced: Contestant, images: Tensor
) -> tuple[tuple[Output, Output], NDArray[np.int64], float]:
    """Both models' outputs with their MACs, the token of every patch after every block, seconds of a dense forward."""
    assert reduced.reduction is not None
    with torch.no_grad(), torch.random.fork_rng([]):
        torch.manual_seed(0)  # a method that draws at random gives the same picture to everybody
        outputs = (dense.run(images, count=True), reduced.run(images, count=True))
        start = time.perf_counter()
        dense.run(images)
        seconds = time.perf_counter() - start
        torch.manual_seed(0)
        reduced.run(images)
    return outputs, sources_of(reduced.reduction.states[1:]), seconds


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
    speedup = paired_speedup(dense, reduced)
    ratios = (speedup.median, speedup.q1, speedup.q3)
    return Timing(_quartiles(dense), _quartiles(reduced), ratios, ROUNDS, torch.get_num_threads())


def _quartiles(times: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    q1, median, q3 = (float(value) for value in np.percentile(times, [25, 50, 75]))
    return median, q1, q3


# ---- pictures --------------------------------------------------------------------------------------------------------


def _pictures(model: nn.Module, image: Tensor, sources: NDArray[np.int64]) -> list[BlockPicture]:
    pixels, grid = pixels_of(model, image), host_of(model).facts(model).grid_size
    scale = max(1, -(-LARGE // pixels.shape[1]))
    whole = np.arange(sources.shape[1])
    found = [BlockPicture(-1, _png(draw_kept(pixels, whole, grid, scale=scale)), "the image as the model gets it")]
    for block in range(len(sources)):
        drawn = draw_kept(pixels, sources[: block + 1], grid, scale=scale)
        found.append(BlockPicture(block, _png(drawn), _words(block, groups_of(sources[: block + 1]))))
    return found


def _words(block: int, groups: NDArray[Any]) -> str:
    """A picture's contents, in one sentence.

    Example:
        >>> _words(3, np.array([0, 1, 1, -1]))
        'after block 3: of 4 patches, 1 is pruned, 2 are merged into 1 group'
    """
    sizes = np.unique(groups[groups >= 0], return_counts=True)[1]
    pruned, merged, count = int((groups < 0).sum()), int(sizes[sizes > 1].sum()), int((sizes > 1).sum())
    parts = [f"{pruned} {'is' if pruned == 1 else 'are'} pruned"] if pruned else []
    parts += [f"{merged} are merged into {count} group{'' if count == 1 else 's'}"] if merged else []
    if not parts:
        return f"after block {block}: all {len(groups)} patches are there"
    return f"after block {block}: of {len(groups)} patches, {', '.join(parts)}"


def _png(picture: NDArray[Any]) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray((picture * 255).round().astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def class_names(model: nn.Module, count: int) -> list[str]:
    """The names of the classes of a model: its own, ImageNet's as timm has them, or numbers.

    Args:
        model: of any library.
        count: of its classes.

    Example:
        >>> from vitrim.loading import create_model
        >>> class_names(create_model("vitrim:cifar10_vit"), 10)[:2]
        ['airplane', 'automobile']
        >>> class_names(create_model("test_vit", options={"num_classes": 2}), 2)
        ['class 0', 'class 1']
    """
    own = ask(model).class_names(model)
    if own is not None and len(own) == count:
        return list(own)
    from timm.data import ImageNetInfo

    imagenet = ImageNetInfo()
    if count == imagenet.num_classes():
        return [imagenet.index_to_description(number) for number in range(count)]
    return [f"class {number}" for number in range(count)]


def slide_of(name: str, patches: int) -> Slide:
    """The slider of a method on a model of so many patches.

    Raises:
        VitrimError: an unknown method, or one without an option that says how much is removed.

    Example:
        >>> slide = slide_of("tome", patches=64)
        >>> slide.label, slide.low, slide.high, slide.value
        ('tokens merged per block (r)', 0, 32, 8)
        >>> slide_of("topk", patches=64).info
        '1 removes nothing, 0.05 the most'
    """
    config = make_method(name)
    tunable = config.tunable
    if tunable is None:
        raise VitrimError(f"{name} has no one option that says how much is removed")
    given = getattr(config, tunable.option)
    end = tunable.end(patches)
    low, high = sorted((tunable.mildest, end))
    value = given if isinstance(given, int | float) and given != tunable.mildest else tunable.value(STRENGTH, patches)
    return Slide(
        method=name,
        label=f"{_description(type(config), tunable.option)} ({tunable.option})",
        info=f"{tunable.mildest:g} removes nothing, {end:g} the most",
        paper=config.paper,
        low=low,
        high=high,
        step=0.01 if tunable.digits else 1,
        value=min(max(value, low), high),
    )


def _description(kind: type[MethodConfig], option: str) -> str:
    """The description of an option up to what it says of lists and other forms."""
    text = str(kind.model_fields[option].description)
    return re.split(r"; |, or | or a list|, for all", text)[0].rpartition(": ")[2]


def config_of(name: str, value: float, more: str = "") -> MethodConfig:
    """The method with its slider at a value, and further options.

    Args:
        name: of the method.
        value: of the option that the slider moves.
        more: ``key=value,key=value``, as on the command line.

    Raises:
        VitrimError: an option or value that is not valid, or an option that is given twice.

    Example:
        >>> config_of("tome", 12.0, "proportional=false").describe()
        'tome:r=12,proportional=false'
    """
    if len(more) > LONGEST:
        raise VitrimError(f"the options have {len(more)} characters; at most {LONGEST} are read")
    tunable = make_method(name).tunable
    if tunable is None:
        raise VitrimError(f"{name} has no one option that says how much is removed")
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise VitrimError(f"{tunable.option}={str(value)[:20]} is no number")
    number = round(value, tunable.digits) if tunable.digits else round(value)
    given = {part.partition("=")[0].strip() for part in split_options(more)}
    fixed = [f"{key}={value}" for key, value in tunable.fixed.items() if key not in given]
    return parse_method(f"{name}:" + ",".join([f"{tunable.option}={number}", *fixed, *split_options(more)]))
