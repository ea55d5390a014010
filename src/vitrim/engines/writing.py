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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitrim.checked import Natural, Seed, checked, checked_call
from vitrim.core.method import Adaptive, MethodConfig
from vitrim.core.plan import Preprocessing
from vitrim.core.reduce import get_reduction, reduce_, restore_
from vitrim.core.registry import ask, fitting, input_size_of, parse_method
from vitrim.data import ImageDataset, batches
from vitrim.data.dataset import CALIBRATED, calibrating
from vitrim.engines import static
from vitrim.engines.exported import Exported, ExportReport, sidecar, size_of, staged, weights_beside
from vitrim.engines.formats import format_named
from vitrim.engines.formats.base import OPSETS, PRECISIONS, Array, Format, Graph, as_array, check_quantiser
from vitrim.engines.program import MAX_BATCH, Program, as_read, highest_share, trace
from vitrim.engines.program import check as compare
from vitrim.engines.timing import noise, table, time_exported
from vitrim.errors import ReductionWarning, VitrimError, check_known, first_line
from vitrim.files import check_file, json_text
from vitrim.loading import ModelSpec
from vitrim.measure.copies import Apart, apart, shared_copy, take_learned
from vitrim.measure.inputs import DataSpec, open_images
from vitrim.measure.machine import drawing, environment
from vitrim.measure.macs import count_macs
from vitrim.tasks.classes import class_names
from vitrim.version import __version__

FITTED = 512
"""Default number of images to fix counts on."""

GIGA = 1e9

CALLS = {"freeze": "freeze", "capacity": "bound"}
"""The functions of `vitrim.engines.static` behind options of the command."""

CHECKED = 64
"""Default number of random images for the parity check."""

MAX_SIDE = 4096
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
"""Largest side in pixels: beyond, a model may need gigabytes or hours before it refuses the size."""

MOST_TOLD = 2**16
"""Most images that a note asks for."""

ALIKE = 0.98
"""Cosine above which embeddings count as equal; equivalent to a relative change of a fifth."""

AGREES = 0.8
"""Share of real images in which a file in fp16, bf16 or int8 must give the model's top-1; a file that is shown to have
less (`highest_share`) is wrong. Of 1,000 photographs 84.8 (`vid_tldr`) to 96.4 % (dense) agree in int8 on ViT-Ti, 85.0
(`tofu`) to 95.4 % on DeiT-T (docs/results/engines.md)."""


@checked
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
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    opset: Annotated[int, Field(ge=OPSETS.start, lt=OPSETS.stop)] = 20
    precision: str = "fp32"
    preprocess: bool = False
    size: Side | tuple[Side, Side] | None = None
    name: str | None = None
    classes: Sequence[str] | None = None


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
    library's embedding (batch, D), or to its first output. The file is kept only if it agrees with the model: the same
    top-1 and logits within 1e-4, at batch 1, 2 and all other images of ``check``, except near ties
    (`vitrim.engines.check`), which the metadata count. A file in int8, and in bf16 for OpenVINO, is derived from such
    a file; weights in half precision are held to what torch gives in it. The metadata give the share of images with
    the same top-1, and real images that show it to be below 80 % are a reason to refuse the file. A JSON file beside it
    repeats its metadata.

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
        freeze: True: fix the method's counts at the means over ``images`` (`vitrim.engines.freeze`). A share in
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
    with drawing(torch.device("cpu"), seed), ExitStack() as kept:
        loaded = spec.load("cpu")
        plain = _plain(loaded.model)
        own = Apart(plain) if config is None else kept.enter_context(apart(plain))  # a method replaces the model's own
        plain, learned = own.model, own.learned or loaded.learned
        config = next(iter(fitting(plain, [] if config is None else [config])), None)
        dataset = open_images(plain, source, in_patches=False)
        if dataset is not None and (freeze is not False or not isinstance(check, int) or check):
            _check_images(dataset, plain, wanted.size, check, wanted.batch)
        if freeze is not False and config is not None:
            tell("finding counts")
            config = _fixed(plain, config, dataset, freeze, source.limit, learned)
        reduced = _reduced(plain, config, learned, wanted.batch, bench)
        subject = _Subject.of(reduced, wanted, kind)
        check, calibration = _of_dataset(subject, dataset, check)
        compared = _compared_on(subject, check)
        facts = _describe(subject, compared, isinstance(check, Tensor), loaded.name, dataset)
        tell("exporting")
        with staged(path) as place:
            written = _write(subject, facts, place)
            if compared is not None:
                tell("comparing")
                written = _agreeing(written, path, reduced, compared, real=dataset is not None)
            if wanted.precision in kind.makes:
                tell(f"making {wanted.precision}")
                written = _made(written, path, wanted.precision, calibration, compared, real=dataset is not None)
            sidecar(place).write_text(json_text(dict(written.metadata), indent=2) + "\n", encoding="utf-8")
        made = replace(written, path=path)
        report = _report(made, loaded.weights, seed)
        if bench:
            _time(report, made, reduced, seed, tell)
    return replace(made, report=report)


@dataclass(frozen=True)
class _Subject:
    """The model that `export` writes, and its images.

    Attributes:
        model: dense or reduced.
        shape: channels, height and width of the images.
        preprocessing: the model's preprocessing, at this size.
    """

    model: nn.Module
    shape: tuple[int, int, int]
    preprocessing: Preprocessing
    wanted: FileSpec
    kind: type[Format]

    @classmethod
    def of(cls, model: nn.Module, wanted: FileSpec, kind: type[Format]) -> _Subject:
        shape = _shape(model, wanted.size)
        count = ask(model).num_classes(model)
        if wanted.classes is not None and count and len(wanted.classes) != count:
            raise VitrimError(f"classes are {len(wanted.classes)} names, and the model has {count} classes")
        return cls(model, shape, replace(ask(model).preprocessing(model), size=shape[1:]), wanted, kind)

    @property
    def layout(self) -> tuple[int, int, int]:
        """The shape of one image, as the file takes it."""
        channels, height, width = self.shape
        return (height, width, channels) if self.wanted.preprocess else self.shape


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


def _write(subject: _Subject, facts: dict[str, object], place: Path) -> Exported:
    wanted, kind = subject.wanted, subject.kind
    weights = wanted.precision if wanted.precision in kind.casts else "fp32"
    cast = subject.model if weights == "fp32" else copy.deepcopy(subject.model).to(PRECISIONS[weights])
    module = Program(cast, subject.preprocessing if wanted.preprocess else None).eval()
    dtype = "uint8" if wanted.preprocess else "float32"
    # two images: torch treats a batch of one as a constant
    example = torch.zeros(wanted.batch or 2, *subject.layout, dtype=getattr(torch, dtype))
    program = trace(module, example, wanted.batch is None)
    library = ask(subject.model)
    output = "logits" if library.num_classes(subject.model) else "features"
    embeds = output == "features" and program.graph.output_node().args[0][-1].meta["val"].ndim == 2
    inputs = (wanted.batch or "batch", *subject.layout)
    known = {
        **facts,
        "input": {
            "name": "image",
            "shape": list(inputs),
            "dtype": dtype,
            "layout": "NHWC, as read, 0 to 255" if wanted.preprocess else "NCHW, normalised",
        },
        "output": {"name": output, **({"embedding": library.embedding_name(subject.model)} if embeds else {})},
        "weights": weights,
        "precision": weights,
        "opset": wanted.opset,
        "format": kind.name,
    }
    nodes = kind.write(Graph(program, output, json_text(known), wanted.opset, PRECISIONS[weights]), place)
    known = {**known, "nodes": nodes}
    return Exported(place, kind.name, {"image": inputs}, nodes, size_of(place), known, trust=True)


def _agreeing(written: Exported, path: Path, model: nn.Module, compared: Tensor, *, real: bool) -> Exported:
    """The file with its comparison with the model in its metadata; refuse one that disagrees."""
    found = compare(written, model, compared)
    if not found.holds:
        raise VitrimError(f"{path} is not written: as {written.format} it disagrees with the model; {found}")
    words = {"parity": str(found), "near_ties": found.near_ties, "largest_difference": found.largest}
    if written.precision != "fp32" and found.same_top1 is not None:
        what = f"same top-1 as fp32 in {100 * found.same_top1 / found.images:.1f} %"
        doubt = _check_agreement(path, written.precision, found.same_top1, found.images, what, real=real)
        words |= {"agreement": found.same_top1 / found.images, "parity": f"{found}{doubt}"}
    return replace(written, metadata={**written.metadata, **words})


def _check_agreement(path: Path, precision: str, same: int, images: int, what: str, *, real: bool) -> str:
    """Refuse a file that is shown to agree in less than `AGREES` of real images; for one that may, or may not, a clause
    that says how many would tell."""
    if not real or same >= AGREES * images:
        return ""
    if highest_share(same, images) < AGREES:
        raise VitrimError(f"{path} is not written: {precision} is too coarse for it; {what} of {images} images")
    more = (images * 2**power for power in range(1, 20) if images * 2**power <= MOST_TOLD)
    enough = next((many for many in more if highest_share(round(same / images * many), many) < AGREES), None)
    told = "only many more" if enough is None else f"--check {enough}"
    return f"; {images} images do not show whether it is below {100 * AGREES:g} %: {told} would tell"


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
        same, what = _same(ones, others, made.metadata["output"]["name"] == "logits")
        share, many = float(same.mean()), len(ones)
        found = f"{what} as fp32 in {100 * share:.1f} %"
        if not np.isfinite(ones).all():
            raise VitrimError(f"{path} is not written: {precision} is too coarse for it; its outputs are not finite")
        doubt = _check_agreement(path, precision, int(same.sum()), many, found, real=real)
        parity = f"{found} of {many} {'images' if real else 'random images'}{doubt}"
        made = replace(made, metadata={**made.metadata, "parity": parity, "agreement": share})
    for file in (made.path, *weights_beside(made.path)):
        if file.is_file():
            os.replace(file, file.with_name(file.name.replace(made.path.stem, place.stem)))
    return replace(made, path=place)


def _same(ones: Array, others: Array, logits: bool) -> tuple[Array, str]:
    """(I,) bool: images with the same output; and what is compared."""
    if ones.ndim != 2:  # features and maps
        flat, like = ones.reshape(len(ones), -1), others.reshape(len(others), -1)
        within = np.linalg.norm(flat - like, axis=1) <= 0.2 * np.linalg.norm(like, axis=1)
        return within, "within 20 %"
    if logits:
        return ones.argmax(1) == others.argmax(1), "same top-1"
    cosines = F.cosine_similarity(torch.from_numpy(ones), torch.from_numpy(others)).numpy()
    return cosines >= ALIKE, f"embeddings with a cosine of {cosines.mean():.4f}, and {ALIKE} or more"


# ---- options ---------------------------------------------------------------------------------------------------------


def _asked_method(
    method: MethodConfig | str | None, model: object, freeze: bool | float, images: DataSpec
) -> MethodConfig | None:
    """The method as a config; without one, that of a reduced module whose counts are to be fixed.

    Refuse to fix counts without an adaptive method or without images.
    """
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
                f"--images are prepared at the model's own {rows} x {columns}, not at --image-size {side}: make the "
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
    counting = (images for images, _ in batches(dataset, 32, limit=limit or FITTED))
    if freeze is True:
        return static.freeze(plain, config, counting, learned=learned)
    return static.bound(plain, config, counting, quantile=freeze, learned=learned)


def _reduced(
    plain: nn.Module, method: MethodConfig | None, learned: Path | None, batch: int | None, bench: bool
) -> nn.Module:
    """A copy reduced by ``method``, with its parameters in ``learned``.

    Methods without a fixed graph are refused, and with ``bench`` those that take as long as the images ask for.
    """
    reduced = shared_copy(plain)
    if method is not None:
        take_learned(reduce_(reduced, method), learned)
    if (reduction := get_reduction(reduced)) is not None:
        config = reduction.config
        if (obstacle := config.in_graph(batch)) is not None:
            way_out = "; for single images it can as it is: --batch 1" if config.single_images else ""
            if isinstance(config, Adaptive):
                options = " or ".join(f"--{way}" for way in config.fixed_by)
                calls = " or ".join(f"vitrim.engines.{CALLS[way]}" for way in config.fixed_by)
                way_out += f"; find fixed counts on images by {options} ({calls})"
            raise VitrimError(f"{config.describe()} cannot be exported: {obstacle}{way_out}")
        if bench and config.obstacle() is not None:
            raise VitrimError(
                f"--bench times random images, and how long {config.name} takes depends on the images: leave --bench "
                "out, or fix its counts by --freeze"
            )
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
    try:
        with torch.inference_mode():
            model(torch.zeros(1, channels, 1, 1).expand(1, *shape))  # needs no memory if the shape is refused
    except (RuntimeError, ValueError, AssertionError, LookupError) as error:
        kind = type(model).__name__
        raise VitrimError(f"{kind} takes no images of {rows} x {columns}: {first_line(error)}") from error
    return shape


def _of_dataset(
    subject: _Subject, dataset: ImageDataset | None, check: int | Tensor
) -> tuple[int | Tensor, Tensor | None]:
    """Images to compare on, as many as ``check``, and others to calibrate int8, as the file takes them.

    ``check`` is unchanged if it is the images, if there is no dataset, or if none are compared.
    """
    wanted = subject.wanted
    if dataset is None or not isinstance(check, int) or (check <= 0 and wanted.precision != "int8"):
        return check, None
    own, compared = CALIBRATED if wanted.precision == "int8" else 0, max(check, wanted.batch or 1)
    count = min(compared + own, len(dataset))
    every: Tensor = next(iter(batches(dataset, count, limit=count)))[0]  # spread over the dataset
    if wanted.preprocess:
        every = as_read(every, subject.preprocessing)
    chosen = np.zeros(len(every), dtype=bool)
    if own:  # of few images, as large a share
        chosen[calibrating(np.arange(len(every)), max(len(every) * own // (own + compared), 1))] = True
    return (every[~torch.from_numpy(chosen)] if check else 0), every[torch.from_numpy(chosen)]


def _compared_on(subject: _Subject, check: int | Tensor) -> Tensor | None:
    """The images of the comparison: those given, or random ones; None for no comparison."""
    preprocess, fewest = subject.wanted.preprocess, subject.wanted.batch or 1
    if isinstance(check, Tensor):
        dtype = torch.uint8 if preprocess else torch.float32
        if check.shape[1:] != subject.layout or check.dtype != dtype:
            takes, given = (", ".join(map(str, sides)) for sides in (subject.layout, check.shape))
            kinds = [str(kind).removeprefix("torch.") for kind in (dtype, check.dtype)]
            raise VitrimError(f"check holds images ({given}) {kinds[1]}, and the file takes (n, {takes}) {kinds[0]}")
        if len(check) < fewest:
            raise VitrimError(f"check holds {len(check)} images, too few for a file for batches of {fewest}")
        return check
    return None if check == 0 else _random(subject, max(check, fewest))


def _random(subject: _Subject, count: int) -> Tensor:
    """Random images, as the file takes them."""
    generator = torch.Generator().manual_seed(0)
    if subject.wanted.preprocess:
        return torch.randint(256, (count, *subject.layout), generator=generator, dtype=torch.uint8)
    return torch.randn(count, *subject.layout, generator=generator)


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
    subject: _Subject, compared: Tensor | None, real: bool, name: str, dataset: ImageDataset | None
) -> dict[str, Any]:
    """The metadata of a model in eval mode, without entries about the file.

    Where counts depend on the image, tokens and MACs are those of the images ``compared`` (``real`` or random), or of
    random ones: means and, of several, standard deviations.
    """
    model, preprocessing, wanted = subject.model, subject.preprocessing, subject.wanted
    images: Any = torch.zeros(1, *subject.shape)
    counted_on: dict[str, Any] = {}
    if _follows(model):
        images = _random(subject, wanted.batch or 1) if compared is None else compared[:CHECKED]
        images = Program(model, preprocessing).normalised(images) if wanted.preprocess else images
        what = "images" if real else "random images"
        counted_on = {"counted_on": f"{len(images)} {what}"}
    reduction = get_reduction(model)
    dense = count_macs(_dense(model), images[:1]).total
    counts = [count_macs(model, image) for image in (images[:1] if reduction is None else images).split(1)]
    macs = [each.total for each in counts]
    tokens = _tokens(model, images)
    per_block: Any = None if tokens is None else tokens[0]
    spread: dict[str, Any] = {}
    if tokens is not None and len(images) > 1:
        per_block = np.mean(tokens, axis=0).tolist()
        spread = {"gmacs_deviation": float(np.std(macs)) / GIGA, "counts_deviation": np.std(tokens, axis=0).tolist()}
    fields = {
        field.name: getattr(preprocessing, field.name)
        for field in dataclasses.fields(preprocessing)
        if field.name != "transform"
    }
    fields["resize"] = preprocessing.resize
    classes = wanted.classes
    if classes is None:
        classes = class_names(model, None if dataset is None else dataset.class_names)
    return {
        "vitrim": __version__,
        "torch": str(torch.__version__),
        "model": wanted.name or name,
        "method": "none" if reduction is None else reduction.config.describe(),
        "preprocessing": {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()},
        "classes": None if classes is None else list(classes),
        "tokens_per_block": per_block,
        "gmacs": statistics.fmean(macs) / GIGA,
        "gmacs_parts": {part: statistics.fmean(each.gmacs()[part] for each in counts) for part in counts[0].gmacs()},
        "dense_gmacs": dense / GIGA,
        **spread,
        **counted_on,
    }


# ---- report ----------------------------------------------------------------------------------------------------------


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


def _time(report: ExportReport, file: Exported, reduced: nn.Module, seed: int, tell: Callable[[str], None]) -> None:
    """Add rows and tables to the report: eager and the file, dense and reduced."""
    dense, sizes = _dense(reduced), (1, 8) if file.batch is None else (file.batch,)
    with dense_file(dense, file) as other:
        for turn, size in enumerate(sizes, 1):
            tell(f"timing at batch {size}, {turn} of {len(sizes)}")
            rows = time_exported(dense, reduced, other, file, noise(file, size, seed))
            report.rows = [*report.rows, *rows]
            report.tables.append(table(rows))


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
