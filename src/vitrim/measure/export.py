"""`export`: write a model, reduced or not, as a file for an engine without vitrim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrim.checked import Natural, Seed, checked_call
from vitrim.core.method import Adaptive, MethodConfig
from vitrim.core.reduce import get_reduction, reduce_
from vitrim.core.registry import able_host, fitting, input_size_of, parse_method
from vitrim.data import ImageDataset, batches
from vitrim.data.dataset import CALIBRATED, calibrating
from vitrim.engines import static
from vitrim.engines.copies import Apart, apart, shared_copy, take_learned
from vitrim.engines.exported import Exported, sidecar, weights_beside
from vitrim.engines.formats import format_named
from vitrim.engines.formats.base import Format, check_quantiser
from vitrim.engines.machine import environment, seeded_draws
from vitrim.engines.program import as_read
from vitrim.engines.writing import CHECKED, Draft, FileSpec, random_batch, write
from vitrim.errors import VitrimError, check_known
from vitrim.files import check_file
from vitrim.loading import Loaded, ModelSpec
from vitrim.measure import timing
from vitrim.measure.inputs import DataSpec, open_images
from vitrim.measure.records import Row
from vitrim.measure.speed_report import SpeedReport
from vitrim.report import DENSE
from vitrim.tasks.classes import class_names

CALLS = {"freeze": "vitrim.freeze", "capacity": "vitrim.engines.bound"}
"""The functions that do what options of the command do."""


@checked_call
def export(
    model: nn.Module | str | ModelSpec,
    method: MethodConfig | str | None,
    path: str | Path,
    file: FileSpec | None = None,
    *,
    check: Natural | Tensor = CHECKED,
    images: Any = None,
    freeze: bool | float = False,
    bench: bool = False,
    seed: Seed = 0,
    on_progress: Callable[[str], None] | None = None,
) -> Exported:
    """Write a model, reduced by ``method``, as a file that runs without vitrim. ``model`` is not changed.

    The file maps ``image`` (batch, C, H, W) float32 to float32 logits (batch, K); for a model without a head, to the
    library's embedding (batch, D), or to its first output. It is kept only if it agrees with the model: the same top-1
    and logits within 1e-4, at batch 1, 2 and all other images of ``check``, except near ties (`vitrim.engines.check`).
    A file in int8, and in bf16 for OpenVINO, is derived from such a file; weights in half precision are held to what
    torch gives in it. Real images that show the same top-1 in less than 80 % are a reason to refuse the file. A JSON
    file beside it repeats its metadata.

    Args:
        model: a dense or reduced module, its name as on the command line, or a `vitrim.ModelSpec`. A reduced module is
            exported as it is if ``method`` is None. Parameters that a training run learned for the method are used.
        method: config or text. A method whose counts depend on the images needs ``freeze``, unless its graph can follow
            them.
        path: path of the file; names of additional files begin with its name.
        check: number of images to compare on, of ``images`` or else random, 0 for none; or these images, as the file
            takes them. They are disjoint from those that calibrate int8.
        images: a source, as for ``--images``, a dataset, or a `vitrim.DataSpec`; required for int8. Counts are fixed on
            its ``limit`` of images, by default 512.
        freeze: True: fix the method's counts at the means over ``images`` (`vitrim.freeze`). A share in
            (0, 1]: give it slots per block, enough for this share of ``images`` (`vitrim.engines.bound`).
        bench: time eager and exported, dense and reduced, at the file's batch size, or at 1 and 8.
        seed: seed of random weights and parameters, and of the images of ``bench``.
        on_progress: called with a short text on every step.

    Returns:
        The file, ready to `run` and trusted (`Exported.open`). Its ``report`` is the output and record of the command.

    Raises:
        VitrimError: the method or the model cannot be exported, a path or an option is invalid, or the file disagrees
            with the model. An existing file at ``path`` is unchanged.
        MissingPackageError: a package of the format is not installed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from vitrim.loading import create_model
        >>> options = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}
        >>> with TemporaryDirectory() as folder:
        ...     file = export(create_model("test_vit", options=options), "tome:r=2", f"{folder}/m.pt2", check=4)
        ...     file.metadata["method"], file.metadata["tokens_per_block"][:2]
        ('tome:r=2', [15, 13])
    """
    spec, source, wanted = ModelSpec.of(model), DataSpec.of(images), file or FileSpec()
    config = _asked_method(method, spec.model, freeze, source)
    path = Path(path)
    kind = format_named(wanted.to, path)
    _check_file(wanted, path, kind, source)
    tell = on_progress or (lambda _: None)
    with seeded_draws(torch.device("cpu"), seed), ExitStack() as kept:
        loaded = _at_size(spec.load("cpu"), wanted.size)
        plain = _plain(loaded.model)
        # Without a method the model is exported as it is, with its own reduction.
        own = Apart(plain) if config is None else kept.enter_context(apart(plain))  # a method replaces the model's own
        plain, learned = own.model, own.learned or loaded.learned
        config = next(iter(fitting(plain, [] if config is None else [config])), None)
        dataset = open_images(plain, source, in_patches=False)
        if dataset is not None and (freeze is not False or not isinstance(check, int) or check):
            _check_images(dataset, plain, wanted.size, check, wanted.batch)
        if freeze is not False and config is not None:
            tell("finding counts")
            config = _fixed(plain, config, dataset, freeze, source.limit, learned)
        # The method and its counts are known now: the graph is refused before the images are read.
        reduced = _reduced(plain, config, learned, wanted.batch, bench)
        names = None if dataset is None else dataset.class_names
        classes = wanted.classes
        if classes is None:
            classes = class_names(loaded.class_names, loaded.num_classes, names)
        wanted = replace(wanted, name=wanted.name or loaded.name, classes=classes)
        draft = Draft.of(replace(loaded, model=reduced), wanted, kind)
        check, calibration = _of_dataset(draft, dataset, check)
        compared, real = _compared_on(draft, check), isinstance(check, Tensor)
        strict = dataset is not None
        made = write(draft, path, compared, calibration, real=real, strict=strict, tell=tell)
        report = _report(made, loaded.weights, seed)
        if bench:
            _time(report, made, draft, seed, tell)
    return replace(made, report=report)


def _check_file(wanted: FileSpec, path: Path, kind: type[Format], images: DataSpec) -> None:
    """Refuse options that the format does not support, paths that cannot be written, and int8 without images."""
    check_known(f"precision of {kind.name} files", wanted.precision, (*kind.casts, *kind.makes))
    kind.check()
    if wanted.precision == "int8":
        check_quantiser()
    for file in (path, sidecar(path), *weights_beside(path)):
        check_file(file)
        if file.exists() and not file.is_file():
            raise VitrimError(f"cannot write {file}: it is a device or a pipe, and a model is written as a file")
    if wanted.precision == "int8" and images.source is None:
        raise VitrimError("int8 finds the ranges of activations on images: give them, with --images DATA or images=")


# ---- options ---------------------------------------------------------------------------------------------------------


def _at_size(loaded: Loaded, size: int | tuple[int, int] | None) -> Loaded:
    """The model for square images of ``size`` pixels, with images prepared for it; others take sizes as they run."""
    host = able_host(loaded.model)
    if not isinstance(size, int) or get_reduction(loaded.model) is not None:
        return loaded
    if host is not None and host.facts(loaded.model).any_size:
        return loaded
    return loaded.at_size(size) if size != loaded.side else loaded


def _asked_method(
    method: MethodConfig | str | None, model: object, freeze: bool | float, images: DataSpec
) -> MethodConfig | None:
    """The method as a config; without one, that of a reduced module whose counts are to be fixed on images."""
    config = parse_method(method) if isinstance(method, str) else method
    if freeze is False:
        if images.limit is not None:
            raise VitrimError("--limit says on how many images --freeze and --capacity find counts: give one of them")
        return config
    if config is None and isinstance(model, nn.Module) and (reduction := get_reduction(model)) is not None:
        config = reduction.config
    option = "--freeze" if freeze is True else "--capacity"
    if not 0.0 < freeze <= 1.0:
        raise VitrimError(f"{option} {freeze} must be above 0 and at most 1: the share of images that fit")
    if config is None:
        raise VitrimError(f"{option} is for a method that adapts to the images: give one with -m")
    if images.source is None:
        raise VitrimError(f"{option} finds counts on images: give --images too")
    return config


def _check_images(
    dataset: ImageDataset, model: nn.Module, size: int | tuple[int, int] | None, check: int | Tensor, batch: int | None
) -> None:
    """Refuse images that do not fit the file or are too few, before any work."""
    if size is not None:
        _, rows, columns = input_size_of(model)
        if size not in (rows if rows == columns else None, (rows, columns)):
            side = size if isinstance(size, int) else ",".join(map(str, size))
            raise VitrimError(
                f"--images are prepared at the model's own {rows} x {columns}, not at --img-size {side}: make the "
                f"model of that size, e.g. --model-option img_size={side} (timm), or leave --images out"
            )
    if isinstance(check, int) and check and batch is not None and len(dataset) < batch:
        raise VitrimError(
            f"{dataset.source} has {len(dataset)} images, too few to compare a file for batches of {batch}: give more, "
            "or --check 0"
        )


# ---- model and images ------------------------------------------------------------------------------------------------


def _plain(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in float32 and eval mode."""
    plain = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in model.parameters())
    return (shared_copy(model) if plain else copy.deepcopy(model).to("cpu", torch.float32)).eval()


def _fixed(
    plain: nn.Module,
    config: MethodConfig,
    dataset: ImageDataset,
    freeze: float,
    limit: int | None,
    learned: Path | None,
) -> MethodConfig:
    """The method with its counts fixed on images of the dataset."""
    counting = (images for images, _ in batches(dataset, 32, limit=limit or static.FITTED))
    if freeze is True:
        return static.frozen(plain, config, counting, learned=learned)
    return static.bound(plain, config, counting, quantile=freeze, learned=learned)


def _reduced(
    plain: nn.Module, method: MethodConfig | None, learned: Path | None, batch: int | None, bench: bool
) -> nn.Module:
    """A copy reduced by ``method``, with its parameters; methods without a fixed graph or a fixed time are refused."""
    reduced = shared_copy(plain)
    if method is not None:
        take_learned(reduce_(reduced, method), learned)
    if (reduction := get_reduction(reduced)) is not None:
        config = reduction.config
        if (obstacle := config.in_graph(batch)) is not None:
            way_out = "; for single images it can as it is: --batch 1" if config.traits.single_images else ""
            if isinstance(config, Adaptive):
                options = " or ".join(f"--{way}" for way in config.traits.fixed_by)
                calls = " or ".join(CALLS[way] for way in config.traits.fixed_by)
                way_out += f"; find fixed counts on images by {options} ({calls})"
            raise VitrimError(f"{config.describe()} cannot be exported: {obstacle}{way_out}")
        if bench and config.obstacle() is not None:
            raise VitrimError(
                f"--bench times random images, and how long {config.name} takes depends on the images: leave --bench "
                "out, or fix its counts by --freeze"
            )
    return reduced


def _of_dataset(draft: Draft, dataset: ImageDataset | None, check: int | Tensor) -> tuple[int | Tensor, Tensor | None]:
    """Images to compare on, as many as ``check`` unless it is the images, and others to calibrate int8."""
    wanted = draft.wanted
    if dataset is None or not isinstance(check, int) or (check <= 0 and wanted.precision != "int8"):
        return check, None
    own, compared = CALIBRATED if wanted.precision == "int8" else 0, max(check, wanted.batch or 1)
    count = min(compared + own, len(dataset))
    # One batch of all: the file takes them in sizes of its own.
    every: Tensor = next(iter(batches(dataset, count, limit=count)))[0]  # spread over the dataset
    if wanted.preprocess:
        every = as_read(every, draft.preprocessing)
    chosen = np.zeros(len(every), dtype=bool)
    if own:  # of few images, as large a share
        # The two sets are disjoint: a file must agree on images that did not set its ranges.
        chosen[calibrating(np.arange(len(every)), max(len(every) * own // (own + compared), 1))] = True
    return (every[~torch.from_numpy(chosen)] if check else 0), every[torch.from_numpy(chosen)]


def _compared_on(draft: Draft, check: int | Tensor) -> Tensor | None:
    """The images of the comparison: those given, or random ones; None for no comparison."""
    preprocess, fewest = draft.wanted.preprocess, draft.wanted.batch or 1
    if isinstance(check, Tensor):
        dtype = torch.uint8 if preprocess else torch.float32
        if check.shape[1:] != draft.layout or check.dtype != dtype:
            takes, given = (", ".join(map(str, sides)) for sides in (draft.layout, check.shape))
            kinds = [str(kind).removeprefix("torch.") for kind in (dtype, check.dtype)]
            raise VitrimError(f"check holds images ({given}) {kinds[1]}, and the file takes (n, {takes}) {kinds[0]}")
        if len(check) < fewest:
            raise VitrimError(f"check holds {len(check)} images, too few for a file for batches of {fewest}")
        return check
    return None if check == 0 else random_batch(draft, max(check, fewest))


# ---- report ----------------------------------------------------------------------------------------------------------


def _report(file: Exported, weights: str, seed: int) -> SpeedReport:
    known = file.metadata
    shape = ", ".join(map(str, file.shape))
    counts = known["tokens_per_block"]
    tokens = "" if counts is None else f"; tokens per block: {[round(count) for count in counts]}"
    if "gmacs_deviation" in known:
        tokens += f"; means over {known['counted_on']}, deviation {known['gmacs_deviation']:.3f} GMACs"
    notes = [
        f"{file.path}: {file.format} for {file.engine}, {file.bytes / 2**20:.1f} MiB, {file.nodes} operations",
        f"{known['model']}, {known['method']}: {known['gmacs']:.3f} of {known['dense_gmacs']:.3f} GMACs{tokens}",
        f"input image ({shape}) {known['input']['dtype']}, output {known['output']['name']}",
        f"compared with the model: {known['parity']}" if "parity" in known else "not compared with the model",
    ]
    facts = {"path": str(file.path), "bytes": file.bytes, "inputs": file.inputs, **known}
    everything = {"environment": environment(seed=seed), "weights": weights, "file": facts}
    return SpeedReport("export", everything, notes=notes, files=[file.path, sidecar(file.path)])


def _time(report: SpeedReport, file: Exported, draft: Draft, seed: int, tell: Callable[[str], None]) -> None:
    """Add rows and tables to the report: eager and the file, dense and reduced."""
    method, sizes = file.metadata["method"], (1, 8) if file.batch is None else (file.batch,)
    with apart(draft.model) as own, dense_file(replace(draft.loaded, model=own.model), file) as other:
        # A dense file has nothing beside it.
        methods = {} if own.method is None else {method: own.method}
        files = {DENSE: other} if own.method is None else {DENSE: other, method: file}
        for turn, size in enumerate(sizes, 1):
            tell(f"timing at batch {size}, {turn} of {len(sizes)}")
            images = torch.randn(size, *draft.shape, generator=torch.Generator().manual_seed(seed))
            rows = timing.measure(own.model, methods, images, learned=own.learned, files=files)
            facts = {"model": file.metadata["model"], "batch_size": size}
            report.add([Row(row.method, {**facts, **row}) for row in rows])


@contextmanager
def dense_file(loaded: Loaded, exported: Exported) -> Iterator[Exported]:
    """Yield a file of the dense model, exported like ``exported``: a temporary one, or itself if it is dense."""
    known = exported.metadata
    if get_reduction(loaded.model) is not None:
        raise VitrimError("timing starts from the dense model: call vitrim.restore_(model) first")
    if known["method"] == "none":
        yield exported
        return
    shape = known["input"]["shape"]
    in_graph = known["input"]["dtype"] == "uint8"
    with TemporaryDirectory() as folder:
        wanted = FileSpec(
            to=exported.format, batch=exported.batch, opset=known["opset"], precision=known["weights"],
            preprocess=in_graph, size=tuple(shape[1:3] if in_graph else shape[2:]),
        )  # fmt: skip
        file = write(Draft.of(loaded, wanted, exported.kind), Path(folder) / f"dense{exported.kind.suffix}")
        yield replace(file, threads=exported.threads)
