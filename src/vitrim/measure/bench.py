"""`bench`: the measured speed-up of reduced models over the fastest dense model, and the speed-up that MACs promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.utils.data import Subset

from vitrim.checked import Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.registry import fitting, parse_method, reducible
from vitrim.core.selection import Selector
from vitrim.data import ImageDataset, batches, spread
from vitrim.data.dataset import CALIBRATED, calibrating
from vitrim.engines.copies import apart, reduced_copy
from vitrim.engines.engine import Engine, engines_named, listed
from vitrim.engines.exported import Exported
from vitrim.engines.machine import environment, seeded_draws
from vitrim.engines.prefill import Prefill, Prompt, as_measured
from vitrim.errors import VitrimError, one_line_errors
from vitrim.loading import Loaded, PlacedModel
from vitrim.measure.in_files import AnyModel, MethodsAndFiles, file_words, load, parted, place_of
from vitrim.measure.inputs import (
    DataSpec,
    adaptive_note,
    open_images,
    random_images,
    untrained_counts,
    untrained_notes,
)
from vitrim.measure.latency import Budget
from vitrim.measure.limit import why_no_slice
from vitrim.measure.records import Row, images_at
from vitrim.measure.speed_report import SpeedReport
from vitrim.measure.timing import Sized, Tell, check_engines, cost_varies, measure_sizes, silent

SCORED = 256
"""Images to compare dense models on."""

RING = 32
"""Fewest images to time on, in turn, if token counts depend on the images."""

MAX_BATCH = 2**20
"""Far above any useful batch: a typing error is reported at once, not by a library that runs out of memory."""

BatchSizes: TypeAlias = (
    Annotated[int, Field(ge=1, le=MAX_BATCH)]
    | Annotated[Sequence[Annotated[int, Field(ge=1, le=MAX_BATCH)]], Field(min_length=1)]
)


@checked_call
def bench(
    model: AnyModel,
    methods: MethodsAndFiles = None,
    images: Any = None,
    *,
    batch_size: BatchSizes = (1, 8, 32),
    engine: str | Engine | Sequence[str | Engine] = "eager",
    precision: str | Sequence[str] = "fp32",
    budget: Budget | None = None,
    seed: Seed = 0,
    on_report: Callable[[SpeedReport], None] | None = None,
    on_progress: Tell | None = None,
) -> SpeedReport:
    """Time dense and reduced models in turn, in one run, and compare the speed-up with what the MACs promise.

    The baseline is the fastest dense model of the run, over engines, precisions, and fused and unfused attention.
    Speed-up is the median over rounds of the ratio within a round, with its quartiles; peak memory is what one forward
    allocates. For a vision-language model, prefill is timed: vision tower, connector and language model on a batch of
    prompts, which reduced models shorten by the removed image tokens. `vitrim.Prompt` can add an answer; speed-up and
    promise then include it.

    Args:
        model: a module, which is not changed and runs on its device, a name as on the command line, or a
            `vitrim.PlacedModel`; a reduced module is timed beside its dense self. Or a `vitrim.Exported` file, which is
            then the baseline.
        methods: one or several, configs or text; added to those of a reduced model. A model that cannot be reduced,
            such as Swin, is timed alone, without methods or under ``none``. Exported files among them are timed in the
            same rounds, each on its own engine.
        images: a source, as for ``--images``, a dataset, or a `vitrim.DataSpec`; None for random images. With images,
            int8 is calibrated on some of them, and the dense model of every engine and precision is compared with
            PyTorch in fp32 on others, at most 256. For a vision-language model, a `vitrim.Prompt`.
        batch_size: images per batch, one number or several.
        engine: one or several, names or objects of `vitrim.engines.engine`: eager, compile (with and without frozen
            weights), onnxruntime, openvino, aoti, torch.export.
        precision: fp32, bf16, fp16, int8, or several; notes name the precisions that an engine lacks.
        budget: rounds and seconds for every setting; default: 10 rounds and one second per model. With its ``slice``,
            every static method gets a row "plain slice of METHOD": ``x[:, :n]`` with its token counts and no decision,
            which is the limit of its speed, and no method to use.
        seed: seed of random weights, images and parameters.
        on_report: called with the report so far, before the first setting and after every setting.
        on_progress: called often with a short text on the current step.

    Returns:
        A row per batch size, model, engine and precision, as in `measure`, with ``model, batch_size`` and, for dense
        rows with images, ``agreement`` (share of images with the top-1 of fp32), ``top1`` if there are labels, and
        ``scored`` (number of images); a table per batch size, and advice in words.

    Raises:
        VitrimError: an invalid name, method or option, or an engine that cannot run here, before anything is timed. Or
            the machine has too little memory for a setting.

    Example:
        >>> from vitrim.loading import create_model
        >>> model = create_model("test_vit", options={"img_size": 32, "depth": 1})
        >>> report = bench(model, "tome:r=1", batch_size=2, budget=Budget(min_rounds=1, min_seconds=0))
        >>> [(row["method"], row["batch_size"], row["rounds"]) for row in report.rows]
        [('dense', 2, 1), ('tome:r=1', 2, 1)]
    """
    spec, sizes, budget = PlacedModel.of(model), batch_sizes(batch_size), budget or Budget()
    prompt = images if isinstance(images, Prompt) else Prompt()
    source = DataSpec.of(None if isinstance(images, Prompt) else images)
    given, beside = parted(methods)
    place = place_of(spec)
    file = spec.model if isinstance(spec.model, Exported) else None
    names, precisions = listed(engine), list(dict.fromkeys(listed(precision)))
    engines, lacking = ([], []) if file is not None else engines_named(names, precisions, place)
    with seeded_draws(place, seed), ExitStack() as kept:
        loaded, others = load(spec, place, given)
        if file is not None:
            host, configs, learned = loaded.model, dict[str, MethodConfig](), None
        else:
            own = kept.enter_context(apart(loaded.model))
            learned, prompt = own.learned, replace(prompt, select=prompt.select or own.select)
            given = own.with_own(given) or ([] if prompt.select is None else [parse_method("none")])
            if not given and not beside:
                check_alone(own.model)
            host, configs = _contestants(own.model, given, prompt, source)
            for one in (host, *(other.model for other in others)):
                check_methods(one, configs, engines, sizes, learned, on_random=source.source is None)
        dataset = open_images(host, source, others=others)
        if dataset is not None and source.limit is not None:
            dataset = dataset.part(spread(len(dataset), source.limit).tolist())
        check_enough(dataset, max(sizes))
        speeds = Speeds(host, configs, dataset, engines, budget, seed, learned, beside, scored=True, others=others)
        shown = None if dataset is None else source.name(dataset)
        untrained = untrained_counts(host, configs.values(), learned)
        computed = ",".join(dict.fromkeys(one.precision for one in (engines if file is None else [file])))
        facts = {
            "environment": environment(device=str(place), dtype=computed, seed=seed),
            "weights": loaded.weights,
            "untrained": untrained,
            "images": shown or "random",
            "split": None if dataset is None else dataset.split,
        }
        notes = [*_notes(speeds, sizes, shown), *lacking, *untrained_notes(untrained)]
        report, tell = SpeedReport("bench", facts, notes=notes), on_report or (lambda _: None)
        tell(report)
        for rows in speeds.at(sizes, on_progress):
            report.add([Row(row.method, {"model": loaded.name, **row}) for row in rows])
            tell(report)
    return report


def check_alone(model: nn.Module) -> None:
    """Refuse a model without methods to compare it with, unless it takes none."""
    if reducible(model):
        raise VitrimError(
            "there is nothing to compare with dense: name at least one method, e.g. -m tome:keep_rate=0.7; "
            "`vitrim list methods` names all"
        )


def _contestants(
    model: nn.Module, methods: Sequence[MethodConfig], prompt: Prompt, source: DataSpec
) -> tuple[nn.Module, dict[str, MethodConfig]]:
    """The dense model as it is measured, and the methods by row name."""
    host = as_measured(model, prompt)
    if not isinstance(host, Prefill):
        methods = fitting(host, methods)
    elif source.source is not None:
        raise VitrimError("images are for models of images alone: prompts are made of random images and text")
    behind = f" + {prompt.select.describe()}" if isinstance(prompt.select, Selector) else ""
    return host, {config.describe() + behind: config for config in methods}


def check_methods(
    model: nn.Module,
    methods: Mapping[str, MethodConfig],
    engines: Sequence[Engine],
    sizes: Sequence[int],
    learned: Path | None = None,
    *,
    on_random: bool = False,
) -> None:
    """Refuse methods that do not fit the engines, random images, or the model, which is reduced by each once."""
    for size in sizes:
        check_engines(engines, methods, model, size)
    adaptive = None if isinstance(model, Prefill) else adaptive_one(methods)
    if adaptive is not None and on_random:
        raise VitrimError(
            f"{adaptive} takes as long as the images ask for, and random ones are not like real ones: give --images"
        )
    for config in methods.values():
        reduced_copy(model, config, learned)


@dataclass(frozen=True)
class Speeds:
    """Models to time at several batch sizes, on images spread evenly over a dataset, or random images.

    Attributes:
        methods, engines, budget, learned, files: see `measure`.
        dataset: with the model's transform; None for random images.
        scored: compare dense models with fp32 on ``dataset``.
        others: the model at other sizes, whose images an item of ``dataset`` has, too.
    """

    model: nn.Module | Exported
    methods: Mapping[str, MethodConfig]
    dataset: ImageDataset | None
    engines: Sequence[Engine]
    budget: Budget
    seed: int
    learned: Path | None
    files: Mapping[str, Exported]
    scored: bool = False
    others: Sequence[Loaded] = ()

    def at(self, sizes: Sequence[int], on_progress: Tell | None = None) -> Iterator[list[Row]]:
        """Yield the rows of `measure` for every batch size, with a column for the size.

        Raises:
            VitrimError: the machine has too little memory, or cannot compute in a precision.
        """
        for turn, size in enumerate(sizes):
            which = f"{turn + 1} of {len(sizes)}, batch {size}" if len(sizes) > 1 else f"batch {size}"
            with one_line_errors(f"batch {size}"):
                rows = self._at(size, partial(_tell, on_progress or silent, which))
            yield [Row(row.method, {"batch_size": size, **row}) for row in rows]

    def _at(self, size: int, tell: Tell) -> list[Row]:
        ring, calibration, held_out = list[Any](), None, None
        if self.dataset is not None:
            many = size if adaptive_one(self.methods) is None else 2 * max(RING, size)  # half of them warm up
            every = batches(self.dataset, size, limit=many)
            ring = [images for images, labels in every if len(images_at(images, None)) == size]
            if len(self.engines) > 1 or any(engine.precision != "fp32" for engine in self.engines):
                calibration, held_out = _parted_images(self.dataset, size)
        device = "cpu" if isinstance(self.model, Exported) else next(self.model.parameters()).device
        sized = [
            Sized(
                model, [images_at(images, at).to(device) for images in ring or [random_images(model, size, self.seed)]],
                None if calibration is None else torch.cat([images_at(images, at) for images in calibration]),
                [(images_at(images, at), labels) for images, labels in held_out or () if self.scored], at,
            )
            for at, model in [(None, self.model), *((one.img_size, one.model) for one in self.others)]
        ]  # fmt: skip
        return measure_sizes(
            sized, self.methods, engines=self.engines, budget=self.budget, learned=self.learned, files=self.files,
            tell=tell,
        )  # fmt: skip


def _parted_images(dataset: ImageDataset, size: int) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Batches of at most a third of the images for calibration, and of the others for the comparison."""
    places = spread(len(dataset), SCORED + CALIBRATED)
    chosen = calibrating(places, min(CALIBRATED, -(-len(places) // 3)))
    others = np.setdiff1d(places, chosen)
    held_out = list(batches(Subset(dataset, others[: len(others) // size * size].tolist()), size))
    return [images for images, _ in batches(Subset(dataset, chosen.tolist()), max(size, 16))], held_out


def _tell(tell: Tell, which: str, text: str) -> None:
    tell(f"{which}: {text}")


def check_enough(dataset: ImageDataset | None, count: int) -> None:
    if dataset is not None and len(dataset) < count:
        raise VitrimError(f"{dataset.source} has {len(dataset)} images, too few for a batch of {count}")


def batch_sizes(given: int | Sequence[int]) -> list[int]:
    return list(dict.fromkeys([given] if isinstance(given, int) else given))


def adaptive_one(methods: Mapping[str, MethodConfig]) -> str | None:
    """The first method whose token counts depend on the images."""
    return next((name for name, config in methods.items() if config.is_adaptive()), None)


def _notes(speeds: Speeds, sizes: Sequence[int], images: str | None) -> Iterator[str]:
    """Yield what is needed to interpret the times; ``images`` is the name of their source."""
    host, methods, engines = speeds.model, speeds.methods, speeds.engines
    if isinstance(host, Exported):
        reduced = "" if host.metadata.get("method") == "none" else ", though it is reduced"
        yield f"{file_words([host, *speeds.files.values()])}; the row dense is the first of them{reduced}"
    elif speeds.files:
        yield file_words(list(speeds.files.values()))
    if cost_varies(host):
        yield (
            "the work of RoI heads depends on their proposals; these are of the weights and images at hand, what is "
            f"random of which is drawn from seed {speeds.seed}"
        )
    if isinstance(host, Prefill):
        what = f"{host.text} tokens of text and {host.shape[0]} x {host.places} of images"
        answer = f", and the {host.new_tokens} tokens of an answer" if host.new_tokens else ""
        yield f"prefill: batches are prompts of {what}{answer}; methods leave out the image tokens that are gone"
        yield from adaptive_note(host.select)
    adaptive = [name for name, config in methods.items() if config.is_adaptive()]
    if adaptive:
        given = f"{RING} images of {images}, or one batch if that is more, in turn" if images else "random images"
        yield f"{', '.join(adaptive)}: token counts depend on the images; speed and promise are those of {given}"
        if images:
            yield "new: the first turn of these images, after as many others; some engines prepare for every new shape"
    if speeds.budget.slice:
        refusals = {name: why_no_slice(host, config) for name, config in methods.items()}
        yield from (f"{name} has no plain slice beside it: {why}" for name, why in refusals.items() if why)
    if images is None and any(engine.precision == "int8" for engine in engines):
        yield "int8: ranges of activations are those of random images, so only its times mean something"
    for name, config in methods.items():
        refused = {f"{one.label} at batch {size}": one.obstacle(config, size) for one in engines for size in sizes}
        places = [place for place, obstacle in refused.items() if obstacle is not None]
        if places:
            yield f"{name} is not timed on {', '.join(places)}: {refused[places[0]]}"
