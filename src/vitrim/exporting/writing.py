"""`export`: write a model, reduced or not, as a file for an engine without vitrim."""

from __future__ import annotations

import copy
import dataclasses
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrim.core.method import Adaptive, MethodConfig
from vitrim.core.plan import Preprocessing
from vitrim.core.reduce import get_reduction, handle_of, reduce_, restore_
from vitrim.core.registry import ask, fitting, input_size_of, parse_method
from vitrim.data import ImageDataset, batches
from vitrim.errors import ReductionWarning, VitrimError, check_known, check_read, first_line
from vitrim.exporting import static
from vitrim.exporting.exported import Exported, ExportReport, sidecar, size_of, staged, weights_beside
from vitrim.exporting.formats import format_named
from vitrim.exporting.formats.base import OPSETS, PRECISIONS, Format, Graph, as_array, check_quantiser
from vitrim.exporting.program import MAX_BATCH, Program, as_read, trace
from vitrim.exporting.program import check as compare
from vitrim.files import as_path, check_file, json_text
from vitrim.hosts.shared.classes import class_names
from vitrim.loading import MADE, ModelSpec
from vitrim.measure.copies import apart, dense_copies, shared_copy, take_learned
from vitrim.measure.earlier import earlier
from vitrim.measure.inputs import WHERE, DataSpec, open_images
from vitrim.measure.latency import Budget, fastest, paired_speedup, speed_row, time_interleaved
from vitrim.measure.machine import drawing, environment
from vitrim.measure.macs import count_macs
from vitrim.measure.records import DENSE, Row
from vitrim.report import Table
from vitrim.version import __version__

FITTED = 512
"""Default number of images to fix counts on."""

EAGER = "eager"

GIGA = 1e9

COLUMNS = ("method", "engine", "images/s", "p50 ms", "p95 ms", "speed-up", "q1-q3", "promised", "ratio", "over eager")

CALLS = {"freeze": "freeze", "capacity": "bound"}
"""The functions of `vitrim.exporting.static` behind options of the command."""

CHECKED = 64
"""Default number of random images for the parity check."""

MAX_SIDE = 4096
"""Largest side in pixels: beyond, a model may need gigabytes or hours before it refuses the size."""

CALIBRATED = 64
"""Images to calibrate int8 on."""

ALIKE = 0.98
"""Cosine above which embeddings count as equal; equivalent to a relative change of a fifth."""

AGREES = 0.8
"""Share of real images in which a file in bf16 or int8 must give the model's top-1; less indicates an error. Of 1,000
photographs 84.8 (`vid_tldr`) to 96.4 % (dense) agree in int8 on ViT-Ti, 85.0 (`tofu`) to 95.4 % on DeiT-T
(docs/results/engines.md)."""


@dataclass(frozen=True)
class FileSpec:
    """The file that `export` writes; the suffix and the defaults are often enough.

    Attributes:
        to: onnx, pt2, openvino (.xml) or aoti (also .pt2); None for the format of the suffix.
        batch: the only batch size; None for any.
        opset: ONNX operator set, 18 to 23.
        precision: fp32, fp16 (weights and computation), bf16 (openvino; pt2 and aoti like fp16) or int8 (products with
            weights; onnx and openvino). Decisions, input and output keep their precision.
        preprocess: take (batch, H, W, C) uint8 and normalise in the graph, but do not resize or crop.
        size: side of the images, or height and width; None for the model's own.
        name: name of the model in the metadata.
        classes: names of the classes in the metadata; None for those of the model, of the images, or of ImageNet.
    """

    to: str | None = None
    batch: int | None = None
    opset: int = 20
    precision: str = "fp32"
    preprocess: bool = False
    size: int | tuple[int, int] | None = None
    name: str | None = None
    classes: Sequence[str] | None = None


@earlier(model=ModelSpec, file=FileSpec, images=DataSpec)
def export(
    model: nn.Module | str | ModelSpec,
    method: MethodConfig | str | None,
    path: str | Path,
    file: FileSpec | None = None,
    *,
    check: int | Tensor = CHECKED,
    images: Any = None,
    freeze: bool | float = False,
    bench: bool = False,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> Exported:
    """Write a model, reduced by ``method``, as a file that runs without vitrim. ``model`` is not changed.

    The file maps ``image`` (batch, C, H, W) float32 to float32 logits (batch, K); for a model without a head, to the
    library's embedding (batch, D), or to its first output. The file is kept only if it agrees with the model: the same
    top-1 and logits within 1e-4, at batch 1, 2 and all other images of ``check``, except near ties
    (`vitrim.exporting.check`), which the metadata count. A file in bf16 or int8 is derived from such a file, and its
    metadata give the share of images with the same top-1. A JSON file beside it repeats its metadata.

    Args:
        model: a dense or reduced module, its name as on the command line, or a `vitrim.ModelSpec`. A reduced module,
            e.g. with learned parameters, is exported as it is if ``method`` is None. A model that cannot be reduced
            takes ``none`` or None. Parameters that a training run learned for the method are used.
        method: config or text. A method whose counts depend on the images needs ``freeze``, unless its graph can follow
            them.
        path: path of the file; names of additional files begin with its name.
        file: format and options.
        check: number of images to compare on, of ``images`` or else random, 0 for none; or these images, as the file
            takes them. They are disjoint from those that calibrate int8.
        images: a source, as for ``--images``, a dataset, or a `vitrim.DataSpec`; required for int8. Counts are fixed on
            its ``limit`` of images, by default 512.
        freeze: True: fix the method's counts at the means over ``images`` (`vitrim.exporting.freeze`). A share in
            (0, 1]: give it slots per block, enough for this share of ``images`` (`vitrim.exporting.bound`).
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
    check_read(spec, MADE)
    check_read(source, (*WHERE, "limit"))
    precision, preprocess, batch, size = wanted.precision, wanted.preprocess, wanted.batch, wanted.size
    config = parse_method(method) if isinstance(method, str) else method
    fixing = freeze is not False
    if fixing and config is None and isinstance(spec.model, nn.Module) and (reduction := get_reduction(spec.model)):
        config = reduction.config
    _check_fixing(config, freeze, source)
    path = as_path(path)
    kind = format_named(wanted.to, path)
    _check_file(wanted, path, kind)
    if precision == "int8" and source.source is None:
        raise VitrimError("int8 finds the ranges of activations on images: give them, with --images DATA or images=")
    tell = on_progress or (lambda _: None)
    with drawing(torch.device("cpu"), seed), ExitStack() as kept:
        loaded = spec.load("cpu")
        plain, learned = _plain(loaded.model), loaded.learned
        if config is not None:  # replaces the model's own reduction
            apart_from = kept.enter_context(apart(plain))
            plain, learned = apart_from.model, apart_from.learned or learned
        config = next(iter(fitting(plain, [] if config is None else [config])), None)
        dataset = open_images(plain, source)
        if dataset is not None and (fixing or not isinstance(check, int) or check):
            _check_images(dataset, plain, size, check, batch)
        if fixing and config is not None:
            tell("finding counts")
            counting = (images for images, _ in batches(dataset, 32, limit=source.limit or FITTED))
            if freeze is True:
                config = static.freeze(plain, config, counting, learned=learned)
            else:
                config = static.bound(plain, config, counting, quantile=freeze, learned=learned)
        reduced = _reduced(plain, config, learned, batch)
        if bench and _follows(reduced):
            raise VitrimError(
                f"--bench times random images, and how long {handle_of(reduced).config.name} takes depends on the "
                "images: leave --bench out, or fix its counts by --freeze"
            )
        shape = _shape(reduced, size)
        told = replace(ask(reduced).preprocessing(reduced), size=shape[1:])
        calibration: Tensor | None = None
        if dataset is not None and isinstance(check, int) and (check > 0 or precision == "int8"):
            own = CALIBRATED if precision == "int8" else 0
            every = _spread(dataset, max(check, batch or 1) + own, told if preprocess else None)
            parts = torch.arange(len(every)) * own // len(every)  # calibration images are spread evenly, too
            calibrating = torch.diff(parts, prepend=torch.tensor([-1])) > 0 if own else parts < 0
            check, calibration = (every[~calibrating] if check else 0), every[calibrating]
        compared = _images(check, shape, batch, preprocess)
        others = None if dataset is None else dataset.class_names
        names = class_names(reduced, others) if wanted.classes is None else wanted.classes
        counted: Any = torch.zeros(1, *shape)
        if _follows(reduced):
            counted = _images(1, shape, batch, preprocess) if compared is None else compared[:CHECKED]
            counted = Program(reduced, told).normalised(counted) if preprocess else counted
        facts = _describe(reduced, counted, told, wanted.name or loaded.name, names)
        if _follows(reduced):
            real = dataset is not None or isinstance(check, Tensor)
            facts["counted_on"] = f"{len(counted)} {'images' if real and compared is not None else 'random images'}"
        tell("exporting")
        with staged(path) as place:
            written = _write(wanted, kind, reduced, shape, told, facts, place)
            if compared is not None:
                tell("comparing")
                found = compare(written, reduced, compared)
                if not found.holds:
                    raise VitrimError(f"{path} is not written: as {kind.name} it disagrees with the model; {found}")
                words = {"parity": str(found), "near_ties": found.near_ties, "largest_difference": found.largest}
                written = replace(written, metadata={**written.metadata, **words})
            if precision in kind.makes:
                tell(f"making {precision}")
                written = _made(written, path, precision, calibration, compared, real=dataset is not None)
            text = json_text(dict(written.metadata), indent=2) + "\n"
            sidecar(place).write_text(text, encoding="utf-8")
        made = replace(written, path=path)
        report = _report(made, loaded.weights, seed)
        if bench:
            dense = _dense(reduced)
            with dense_file(dense, made) as other:
                sizes = (1, 8) if made.batch is None else (made.batch,)
                for turn, images_at_once in enumerate(sizes):
                    tell(f"timing at batch {images_at_once}, {turn + 1} of {len(sizes)}")
                    rows = time_exported(dense, reduced, other, made, _noise(made, images_at_once, seed))
                    report.rows = [*report.rows, *rows]
                    report.tables.append(_table(rows))
    return replace(made, report=report)


def _check_file(wanted: FileSpec, path: Path, kind: type[Format]) -> None:
    """Refuse options that the format does not support, and paths that cannot be written."""
    if wanted.batch is not None and not 1 <= wanted.batch <= MAX_BATCH:
        raise VitrimError(f"batch={wanted.batch} must be a whole number from 1 to {MAX_BATCH}, or none for any")
    if wanted.opset not in OPSETS:
        raise VitrimError(f"opset={wanted.opset} must be a whole number from {OPSETS.start} to {OPSETS.stop - 1}")
    check_known(f"precision of {kind.name} files", wanted.precision, (*kind.casts, *kind.makes))
    kind.check()
    if wanted.precision == "int8":
        check_quantiser()
    for file in (path, sidecar(path), *weights_beside(path)):
        check_file(file)
        if file.exists() and not file.is_file():
            raise VitrimError(f"cannot write {file}: it is a device or a pipe, and a model is written as a file")


def _write(
    wanted: FileSpec,
    kind: type[Format],
    reduced: nn.Module,
    shape: tuple[int, int, int],
    told: Preprocessing,
    facts: dict[str, object],
    place: Path,
) -> Exported:
    weights = wanted.precision if wanted.precision in kind.casts else "fp32"
    cast = reduced if weights == "fp32" else copy.deepcopy(reduced).to(PRECISIONS[weights])
    module = Program(cast, told if wanted.preprocess else None).eval()
    channels, height, width = shape
    layout = (height, width, channels) if wanted.preprocess else shape
    dtype = "uint8" if wanted.preprocess else "float32"
    # two images: torch treats a batch of one as a constant
    example = torch.zeros(wanted.batch or 2, *layout, dtype=getattr(torch, dtype))
    program = trace(module, example, wanted.batch is None)
    output = "logits" if ask(reduced).num_classes(reduced) else "features"
    embeds = output == "features" and program.graph.output_node().args[0][-1].meta["val"].ndim == 2
    inputs = (wanted.batch or "batch", *layout)
    known = {
        **facts,
        "input": {
            "name": "image",
            "shape": list(inputs),
            "dtype": dtype,
            "layout": "NHWC, as read, 0 to 255" if wanted.preprocess else "NCHW, normalised",
        },
        "output": {"name": output, **({"embedding": ask(reduced).embedding_name(reduced)} if embeds else {})},
        "weights": weights,
        "precision": weights,
        "opset": wanted.opset,
        "format": kind.name,
    }
    nodes = kind.write(Graph(program, output, json_text(known), wanted.opset, PRECISIONS[weights]), place)
    known = {**known, "nodes": nodes}
    return Exported(place, kind.name, {"image": inputs}, nodes, size_of(place), known, trust=True)


def _made(
    written: Exported,
    path: Path,
    precision: str,
    calibration: Tensor | None,
    compared: Tensor | None,
    *,
    real: bool,
) -> Exported:
    """Replace the fp32 file by one in a derived precision, and record their agreement; refuse if it is low."""
    place, size = written.path, written.batch or 1
    batches = [] if calibration is None else [as_array(each) for each in calibration.split(size) if len(each) == size]
    made = written.in_precision(precision, place.with_stem(f"{place.stem}.made"), batches)
    if compared is not None:
        size = written.batch or 32
        images = [as_array(each) for each in compared.split(size) if len(each) == size or written.batch is None]
        pairs = [(made.run(each), written.run(each)) for each in images]
        ones, others = (np.concatenate(each) for each in zip(*pairs, strict=True))
        cosines = np.array([])
        if classified := made.metadata["output"]["name"] == "logits" and ones.ndim == 2:
            same = (ones.argmax(1) == others.argmax(1)).mean()
        elif ones.ndim == 2:  # compare embeddings by cosine
            both, long = (ones * others).sum(1), np.linalg.norm(ones, axis=1) * np.linalg.norm(others, axis=1)
            cosines = both / np.maximum(long, np.finfo(np.float32).tiny)
            same = (cosines >= ALIKE).mean()
        else:  # compare features and maps by relative distance
            flat, like = ones.reshape(len(ones), -1), others.reshape(len(others), -1)
            same = (np.linalg.norm(flat - like, axis=1) <= 0.2 * np.linalg.norm(like, axis=1)).mean()
        what = "same top-1" if classified else "within 20 %"
        if len(cosines):
            what = f"embeddings with a cosine of {cosines.mean():.4f}, and {ALIKE} or more"
        found = f"{what} as fp32 in {100 * same:.1f} % of {len(ones)} {'images' if real else 'random images'}"
        if not np.isfinite(ones).all() or (real and same < AGREES):
            raise VitrimError(f"{path} is not written: {precision} is too coarse for it; {found}")
        made = replace(made, metadata={**made.metadata, "parity": found, "agreement": float(same)})
    for file in (made.path, *weights_beside(made.path)):
        if file.is_file():
            os.replace(file, file.with_name(file.name.replace(made.path.stem, place.stem)))
    return replace(made, path=place)


# ---- options ---------------------------------------------------------------------------------------------------------


def _check_fixing(config: MethodConfig | None, freeze: bool | float, source: DataSpec) -> None:
    """Refuse options that fix counts without an adaptive method or without images."""
    option = "--freeze" if freeze is True else "--capacity"
    if freeze is False:
        if source.limit is not None:
            raise VitrimError("--limit says on how many images --freeze and --capacity find counts: give one of them")
        return
    if not 0.0 < freeze <= 1.0:
        raise VitrimError(f"{option} {freeze} must be above 0 and at most 1: the share of images that fit")
    if config is None:
        raise VitrimError(f"{option} is for a method that adapts to the images: give one with -m")
    if source.source is None:
        raise VitrimError(f"{option} finds counts on images: give --images too")


def _check_images(
    dataset: ImageDataset,
    model: nn.Module,
    size: int | tuple[int, int] | None,
    check: int | Tensor,
    batch: int | None,
) -> None:
    """Refuse images that do not fit the file or are too few, before any work."""
    if size is not None:
        _, rows, columns = input_size_of(model)
        if size not in (rows if rows == columns else None, (rows, columns)):
            side = size if isinstance(size, int) else ",".join(map(str, size))
            raise VitrimError(
                f"--images are prepared at the model's own {rows} x {columns}, not at --image-size {side}: make the "
                f"model of that size, e.g. --model-option img_size={side} (timm), or leave --images out"
            )
    if isinstance(check, int) and check and batch is not None and len(dataset) < batch:
        raise VitrimError(
            f"{dataset.source} has {len(dataset)} images, too few to compare a file for batches of {batch}: give more, "
            "or --check 0"
        )


def _plain(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in float32 and eval mode."""
    plain = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in model.parameters())
    return (shared_copy(model) if plain else copy.deepcopy(model).to("cpu", torch.float32)).eval()


def _reduced(plain: nn.Module, method: MethodConfig | None, learned: Path | None, batch: int | None) -> nn.Module:
    """A copy reduced by ``method``, with its parameters in ``learned``; methods without a fixed graph are refused."""
    reduced = shared_copy(plain)
    if method is not None:
        take_learned(reduce_(reduced, method), learned)
    if (reduction := get_reduction(reduced)) is not None:
        config = reduction.config
        if (obstacle := config.in_graph(batch)) is not None:
            way_out = "; for single images it can as it is: --batch 1" if config.single_images else ""
            if isinstance(config, Adaptive):
                options = " or ".join(f"--{way}" for way in config.fixed_by)
                calls = " or ".join(f"vitrim.exporting.{CALLS[way]}" for way in config.fixed_by)
                way_out += f"; find fixed counts on images by {options} ({calls})"
            raise VitrimError(f"{config.describe()} cannot be exported: {obstacle}{way_out}")
    return reduced


def _follows(model: nn.Module) -> bool:
    """True for a reduced model whose graph for single images has sizes that depend on the image."""
    reduction = get_reduction(model)
    return reduction is not None and reduction.config.obstacle() is not None


def _dense(model: nn.Module) -> nn.Module:
    dense = shared_copy(model)
    restore_(dense)
    return dense


def _shape(model: nn.Module, size: int | tuple[int, int] | None) -> tuple[int, int, int]:
    """Channels, height and width of the images."""
    channels, height, width = input_size_of(model)
    if size is None:
        return channels, height, width
    rows, columns = (size, size) if isinstance(size, int) else size
    shape = (channels, rows, columns)
    if not 1 <= min(shape) <= max(rows, columns) <= MAX_SIDE:
        raise VitrimError(f"size={size} must be from 1 to {MAX_SIDE}")
    try:
        with torch.inference_mode():
            model(torch.zeros(1, channels, 1, 1).expand(1, *shape))  # needs no memory if the shape is refused
    except (RuntimeError, ValueError, AssertionError, LookupError) as error:
        kind = type(model).__name__
        raise VitrimError(f"{kind} takes no images of {rows} x {columns}: {first_line(error)}") from error
    return shape


def _spread(dataset: ImageDataset, count: int, as_bytes: Preprocessing | None) -> Tensor:
    """(count, C, H, W) images spread over the dataset; with ``as_bytes`` (count, H, W, C) uint8."""
    images: Tensor
    images, _ = next(iter(batches(dataset, min(count, len(dataset)), limit=count)))
    return images if as_bytes is None else as_read(images, as_bytes)


def _images(wanted: int | Tensor, shape: tuple[int, int, int], batch: int | None, preprocess: bool) -> Tensor | None:
    """The images of the comparison, as the file takes them; None for no comparison."""
    channels, height, width = shape
    layout = (height, width, channels) if preprocess else shape
    if isinstance(wanted, Tensor):
        dtype = torch.uint8 if preprocess else torch.float32
        if wanted.shape[1:] != layout or wanted.dtype != dtype:
            takes, given = (", ".join(map(str, sides)) for sides in (layout, wanted.shape))
            kinds = [str(kind).removeprefix("torch.") for kind in (dtype, wanted.dtype)]
            raise VitrimError(f"check holds images ({given}) {kinds[1]}, and the file takes (n, {takes}) {kinds[0]}")
        if len(wanted) < (batch or 1):
            raise VitrimError(f"check holds {len(wanted)} images, too few for a file for batches of {batch or 1}")
        return wanted
    if wanted < 0:
        raise VitrimError(f"check={wanted} must not be negative; 0 leaves the comparison out")
    if wanted == 0:
        return None
    count = max(wanted, batch or 1)
    generator = torch.Generator().manual_seed(0)
    if preprocess:
        return torch.randint(256, (count, *layout), generator=generator, dtype=torch.uint8)
    return torch.randn(count, *layout, generator=generator)


def _tokens(reduced: nn.Module, images: Tensor) -> list[list[int]] | None:
    """Tokens of every image after each block, prefix included; None for a dense model."""
    reduction = get_reduction(reduced)
    if reduction is None:
        return None
    config, counted = reduction.config, _dense(reduced)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReductionWarning)  # issued when the model itself was reduced
        reduction = reduce_(counted, config, record=True)
    counted.load_state_dict(reduced.state_dict())  # includes learned parameters
    found = []
    with torch.inference_mode():
        for image in images.split(1):
            counted(image)
            found.append(list(reduction.tokens_per_block or ()))
    return found


# ---- metadata --------------------------------------------------------------------------------------------------------


def _describe(
    model: nn.Module,
    images: Tensor,
    told: Preprocessing,
    name: str,
    classes: Sequence[str] | None,
) -> dict[str, Any]:
    """The metadata of a model in eval mode, without entries about the file.

    Tokens and MACs are counted on ``images`` (I, C, H, W): means and, for several images, standard deviations.
    """
    reduction = get_reduction(model)
    dense = count_macs(_dense(model), images[:1]).total
    counts = [count_macs(model, image) for image in (images[:1] if reduction is None else images).split(1)]
    macs = [each.total for each in counts]
    tokens = _tokens(model, images)
    spread: dict[str, Any] = {}
    if tokens is not None and len(images) > 1:
        spread = {"gmacs_deviation": float(np.std(macs)) / GIGA, "counts_deviation": np.std(tokens, axis=0).tolist()}
    fields = {field.name: getattr(told, field.name) for field in dataclasses.fields(told) if field.name != "transform"}
    fields["resize"] = told.resize
    return {
        "vitrim": __version__,
        "torch": str(torch.__version__),
        "model": name,
        "method": "none" if reduction is None else reduction.config.describe(),
        "preprocessing": {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()},
        "classes": None if classes is None else list(classes),
        "tokens_per_block": tokens
        if tokens is None
        else tokens[0]
        if len(tokens) == 1
        else np.mean(tokens, 0).tolist(),
        "gmacs": statistics.fmean(macs) / GIGA,
        "gmacs_parts": {part: statistics.fmean(each.gmacs()[part] for each in counts) for part in counts[0].gmacs()},
        "dense_gmacs": dense / GIGA,
        **spread,
    }


# ---- timing and words ------------------------------------------------------------------------------------------------


def time_exported(
    model: nn.Module,
    reduced: nn.Module,
    dense: Exported,
    exported: Exported,
    images: Tensor,
    budget: Budget | None = None,
) -> list[Row]:
    """Time a model eager and exported, dense and reduced, in turn on the same images.

    Eager dense uses the faster attention kernel of the host.

    Args:
        reduced: the model, reduced as exported.
        dense, exported: their files (`dense_file`).
        images: (B, ...) as the file takes them.

    Returns:
        Four rows, ``engine`` eager and the file's, each dense and reduced, with ``latency_ms, images_per_second,
        speedup, speedup_q1, speedup_q3`` (over dense on the same engine), ``over_eager`` (over eager dense),
        ``promised_speedup`` (dense MACs over reduced MACs) and ``ratio`` (speedup over promised_speedup).
    """
    known = exported.metadata
    array = as_array(images)
    told = ask(reduced).preprocessing(reduced) if known["input"]["dtype"] == "uint8" else None
    copies = {f"{EAGER} {kernel}": copy for kernel, copy in dense_copies(model).items()}
    runs: dict[str, Callable[[], object]] = {
        **{name: partial(Program(copy, told).eval(), images) for name, copy in copies.items()},
        "eager reduced": partial(Program(reduced, told).eval(), images),
        "exported dense": dense.on(array),
        "exported reduced": exported.on(array),
    }
    with torch.inference_mode():
        times = time_interleaved(runs, "cpu", budget)
    base = fastest(times, copies)
    promise = known["dense_gmacs"] / known["gmacs"]
    rows = []
    for engine, name, run, against, promised in (
        (EAGER, DENSE, base, base, 1.0),
        (EAGER, known["method"], "eager reduced", base, promise),
        (exported.engine, DENSE, "exported dense", "exported dense", 1.0),
        (exported.engine, known["method"], "exported reduced", "exported dense", promise),
    ):
        facts = {"engine": engine, "batch_size": len(images), "threads": exported.threads or torch.get_num_threads()}
        numbers = speed_row(times[run], times[against], len(images), promised)
        over = {"over_eager": paired_speedup(times[base], times[run]).median}
        rows.append(Row(name, {**facts, **numbers, **over}))
    return rows


@contextmanager
def dense_file(model: nn.Module, exported: Exported) -> Iterator[Exported]:
    """Yield a temporary file of the dense ``model``, exported like the reduced one; raise `VitrimError` if it is
    reduced."""
    known = exported.metadata
    if get_reduction(model) is not None:
        raise VitrimError("timing starts from the dense model: call vitrim.restore_(model) first")
    shape = known["input"]["shape"]
    in_graph = known["input"]["dtype"] == "uint8"
    with TemporaryDirectory() as folder:
        wanted = FileSpec(
            to=exported.format, batch=exported.batch, opset=known["opset"], precision=known["weights"],
            preprocess=in_graph, size=tuple(shape[1:3] if in_graph else shape[2:]),
        )  # fmt: skip
        file = export(model, None, Path(folder) / f"dense{exported.kind.suffix}", wanted, check=0)
        yield replace(file, threads=exported.threads)


def _noise(file: Exported, count: int, seed: int) -> Tensor:
    shape = (count, *(int(side) for side in file.shape[1:]))
    images = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (images * 64 + 128).clamp(0, 255).to(torch.uint8) if file.metadata["input"]["dtype"] == "uint8" else images


def _report(file: Exported, weights: str, seed: int) -> ExportReport:
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
    return ExportReport("export", everything, notes=notes, files=[file.path, sidecar(file.path)])


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"batch {first['batch_size']}, threads: {first['threads']}, rounds: {first['rounds']}"
    cells: list[tuple[Any, ...]] = [
        (
            row["method"],
            row["engine"],
            f"{row['images_per_second']:.1f}",
            f"{row['latency_ms']['p50']:.2f}",
            f"{row['latency_ms']['p95']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}",
            f"{row['promised_speedup']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['over_eager']:.2f}",
        )
        for row in rows
    ]
    return Table(f"batch_{first['batch_size']}", title, COLUMNS, cells, text_columns=2)
