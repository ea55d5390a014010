"""`export`: a model, reduced or not, as a file for an engine without vitrim."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from vitrim.core.method import Adaptive, MethodConfig
from vitrim.core.plan import Preprocessing
from vitrim.core.reduce import HANDLE, get_reduction, reduce_, restore_
from vitrim.core.registry import ask, host_of, parse_method
from vitrim.errors import ReductionWarning, VitrimError, first_line
from vitrim.exporting import parity
from vitrim.exporting.exported import Exported, sidecar, size_of, weights_beside
from vitrim.exporting.format import OPSETS, Format, Graph, format_named
from vitrim.exporting.metadata import describe, of_file
from vitrim.exporting.program import MAX_BATCH, Program, trace
from vitrim.files import check_file, json_text
from vitrim.measure.latency import shared_copy

CALLS = {"freeze": "freeze", "capacity": "bound"}
"""The functions of `vitrim.exporting.static` behind the options of the command."""

CHECKED = 64
"""Random images of the parity check where none are given."""

MAX_SIDE = 4096
"""Pixels of a side: beyond, a model may take gigabytes or hours before it says that it takes no such images."""

Dtype = Literal["fp32", "fp16"]


def export(
    model: nn.Module,
    method: MethodConfig | str | None,
    path: str | Path,
    *,
    to: str | None = None,
    batch: int | None = None,
    opset: int = 20,
    dtype: Dtype = "fp32",
    preprocess: bool = False,
    size: int | tuple[int, int] | None = None,
    check: int | Tensor = CHECKED,
    name: str | None = None,
    classes: Sequence[str] | None = None,
) -> Exported:
    """Write ``model``, reduced by ``method``, as a file that runs without vitrim. ``model`` stays as it is.

    The file takes ``image`` (batch, C, H, W) float32 and gives float32 logits (batch, K); of a model without a head,
    its first output. Before it gets its name it must agree with the model: the same top-1 and logits within 1e-4, at
    batch 1, 2 and all that is left of 64 random images. A JSON file beside it repeats the metadata in it.

    Args:
        model: a supported host: dense or, if ``method`` is None, reduced already, with learned parameters for instance.
        method: config or text. One whose counts depend on the images must be given fixed ones first
            (`vitrim.exporting.freeze`, `vitrim.exporting.bound`).
        path: of the file; the names of those beside it begin with its own.
        to: format, by default that of the suffix: onnx, pt2, openvino (.xml), aoti (.pt2 too).
        batch: the only batch size; None for any.
        opset: version of the ONNX operator set, 18 to 23.
        dtype: of weights and computation; decisions stay in fp32, as do input and output.
        preprocess: take (batch, H, W, C) uint8 and normalise in the graph; resizing and cropping stay outside.
        size: side of the images, or height and width; by default the model's own.
        check: so many random images for the comparison, 0 for none; or images as the file takes them.
        name: of the model, for the metadata.
        classes: names of the classes, likewise; by default the model's own, where it has them.

    Returns:
        The file, ready to `run`; it is trusted, as `Exported.open` says.

    Raises:
        VitrimError: the method or the model cannot be exported, a location or an option is not valid, or the file
            disagrees with the model. What was at ``path`` is then as it was.
        MissingPackageError: a package of the format is not installed.

    Example:
        >>> import timm, vitrim
        >>> from tempfile import TemporaryDirectory
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
        >>> with TemporaryDirectory() as folder:
        ...     file = vitrim.export(model, "tome:r=2", f"{folder}/m.pt2", check=4)
        ...     file.metadata["method"], file.metadata["tokens_per_block"][:2]
        ('tome:r=2', [15, 13])
    """
    wanted = _Wanted(Path(path), format_named(to, Path(path)), batch, opset, dtype, preprocess)
    reduced = _copy(model, parse_method(method) if isinstance(method, str) else method)
    shape = _shape(reduced, size)
    told = _told(reduced, shape)
    images = _images(check, shape, batch, preprocess)
    names = ask(reduced).class_names(reduced) if classes is None else classes
    facts = describe(reduced, torch.zeros(1, *shape), told, name=name, classes=names, tokens=_tokens(reduced, shape))
    with staged(wanted.path) as place:
        written = _write(wanted, reduced, shape, told, facts, place)
        if images is not None:
            found = parity.check(written, reduced, images)
            if not found.holds:
                raise VitrimError(
                    f"{wanted.path} is not written: as {wanted.kind.name} it disagrees with the model; {found}"
                )
            written = replace(written, metadata={**written.metadata, "parity": str(found)})
        text = json_text(dict(written.metadata), indent=2) + "\n"
        sidecar(place).write_text(text, encoding="utf-8")
    return replace(written, path=wanted.path)


@dataclass(frozen=True)
class _Wanted:
    """The options of a file, checked before any work."""

    path: Path
    kind: type[Format]
    batch: int | None
    opset: int
    dtype: Dtype
    preprocess: bool

    def __post_init__(self) -> None:
        if self.batch is not None and not 1 <= self.batch <= MAX_BATCH:
            raise VitrimError(f"batch={self.batch} must be a whole number from 1 to {MAX_BATCH}, or none for any")
        if self.opset not in OPSETS:
            raise VitrimError(f"opset={self.opset} must be a whole number from {OPSETS.start} to {OPSETS.stop - 1}")
        if self.dtype not in ("fp32", "fp16"):
            raise VitrimError(f"unknown dtype '{self.dtype}'; valid: fp32, fp16")
        self.kind.check()
        for file in (self.path, sidecar(self.path), *weights_beside(self.path)):
            check_file(file)
            if file.exists() and not file.is_file():
                raise VitrimError(f"cannot write {file}: it is a device or a pipe, and a model is written as a file")


def _write(
    wanted: _Wanted,
    reduced: nn.Module,
    shape: tuple[int, int, int],
    told: Preprocessing,
    facts: dict[str, object],
    place: Path,
) -> Exported:
    """Write the file to ``place``."""
    half = wanted.dtype == "fp16"
    module = Program(copy.deepcopy(reduced).half() if half else reduced, told if wanted.preprocess else None).eval()
    channels, height, width = shape
    layout = (height, width, channels) if wanted.preprocess else shape
    dtype = "uint8" if wanted.preprocess else "float32"
    # two images: with one, torch would take a dynamic batch for a constant
    example = torch.zeros(wanted.batch or 2, *layout, dtype=getattr(torch, dtype))
    program = trace(module, example, wanted.batch is None)
    output = "logits" if ask(reduced).num_classes(reduced) else "features"
    inputs = (wanted.batch or "batch", *layout)
    known = {
        **facts,
        **of_file(inputs, output, dtype=dtype, half=half, opset=wanted.opset, in_graph=wanted.preprocess),
        "format": wanted.kind.name,
    }
    nodes = wanted.kind.write(Graph(program, output, json_text(known), wanted.opset, half), place)
    known = {**known, "nodes": nodes}
    return Exported(place, wanted.kind.name, {"image": inputs}, nodes, size_of(place), known, trust=True)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a new folder beside ``path``; all files in it take their places at the end.

    After an error none does: what was there is as it was.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with staged(Path(folder) / "m.onnx") as place:
        ...         _ = place.write_text("graph")
        ...     [file.name for file in Path(folder).iterdir()]
        ['m.onnx']
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.stem}.", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise VitrimError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield folder / path.name
        _move(sorted(folder.iterdir(), key=lambda file: file.name == path.name), path)  # the file itself last
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(files: Sequence[Path], path: Path) -> None:
    """Give files their places beside ``path``, all of them or none.

    Raises:
        VitrimError: a place is taken by a folder, or cannot be written.
    """
    places = [path.with_name(file.name) for file in files]
    taken = next((place for place in places if place.is_dir()), None)
    if taken is not None:
        raise VitrimError(f"cannot write {taken}: it is a folder")
    try:
        for file, place in zip(files, places, strict=True):
            os.replace(file, place)
    except OSError as error:
        raise VitrimError(f"cannot write {path}: {error.strerror}") from error


def _copy(model: nn.Module, method: MethodConfig | None) -> nn.Module:
    """A copy on the CPU, in float32 and eval mode, reduced by ``method``.

    Raises:
        VitrimError: the method has no fixed graph or does not fit, or the model is reduced already, by another one.
    """
    plain = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in model.parameters())
    reduced = shared_copy(model) if plain else copy.deepcopy(model).to("cpu", torch.float32)
    reduced.eval()
    if method is not None:
        reduce_(reduced, method)
    if hasattr(reduced, HANDLE):
        config = get_reduction(reduced).config
        if (obstacle := config.obstacle()) is not None:
            raise VitrimError(f"{config.describe()} cannot be exported: {obstacle}{_way_out(config)}")
    return reduced


def _way_out(config: MethodConfig) -> str:
    """The options that give an adaptive method fixed counts, as far as it has such forms."""
    if not isinstance(config, Adaptive):
        return ""
    options = " or ".join(f"--{way}" for way in config.fixed_by)
    calls = " or ".join(f"vitrim.exporting.{CALLS[way]}" for way in config.fixed_by)
    return f"; find fixed counts on images by {options} ({calls})"


def _shape(model: nn.Module, size: int | tuple[int, int] | None) -> tuple[int, int, int]:
    """Channels, height and width of the images."""
    channels, height, width = host_of(model).facts(model).input_size
    if size is None:
        return channels, height, width
    rows, columns = (size, size) if isinstance(size, int) else size
    shape = (channels, rows, columns)
    if not 1 <= min(shape) <= max(rows, columns) <= MAX_SIDE:
        raise VitrimError(f"size={size} must be from 1 to {MAX_SIDE}")
    try:
        with torch.inference_mode():
            model(torch.zeros(1, channels, 1, 1).expand(1, *shape))  # as one number: sizes are refused by their shape
    except (RuntimeError, ValueError, AssertionError, LookupError) as error:
        kind = type(model).__name__
        raise VitrimError(f"{kind} takes no images of {rows} x {columns}: {first_line(error)}") from error
    return shape


def _told(model: nn.Module, shape: tuple[int, int, int]) -> Preprocessing:
    """The preprocessing of the model's images, at the size of the file; what the model does not say is None in it.

    Raises:
        VitrimError: what the model says cannot be read.
    """
    return replace(ask(model).preprocessing(model), size=shape[1:])


def _images(wanted: int | Tensor, shape: tuple[int, int, int], batch: int | None, preprocess: bool) -> Tensor | None:
    """The images of the comparison, as the file takes them, or None for no comparison."""
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


def _tokens(reduced: nn.Module, shape: tuple[int, int, int]) -> list[int] | None:
    """Tokens left after each block, prefix included; None for a dense model."""
    if not hasattr(reduced, HANDLE):
        return None
    config, counted = get_reduction(reduced).config, shared_copy(reduced)
    restore_(counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReductionWarning)  # said when the model itself was reduced
        reduction = reduce_(counted, config, record=True)  # counts do not depend on what was learned
    with torch.inference_mode():
        counted(torch.zeros(1, *shape))
    return reduction.tokens_per_block
