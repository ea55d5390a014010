"""A model as a file: written, compared with the model, converted to another precision, described by its metadata."""

from __future__ import annotations

import copy
import dataclasses
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitrim.checked import checked
from vitrim.core.plan import Preprocessing
from vitrim.core.reduce import get_reduction, reduce_, restore_
from vitrim.core.registry import input_size_of
from vitrim.engines.copies import shared_copy
from vitrim.engines.exported import Exported, sidecar, size_of, staged, weights_beside
from vitrim.engines.formats.base import OPSETS, PRECISIONS, Array, Format, Graph, as_array
from vitrim.engines.macs import count_macs
from vitrim.engines.parity import check as compare
from vitrim.engines.parity import highest_share
from vitrim.engines.program import MAX_BATCH, Program, trace
from vitrim.errors import ReductionWarning, VitrimError, first_line
from vitrim.files import json_text
from vitrim.loading import Loaded
from vitrim.version import __version__

GIGA = 1e9

CHECKED = 64
"""Default number of random images for the parity check."""

MAX_SIDE = 4096
Pixels = Annotated[int, Field(ge=1, le=MAX_SIDE)]
"""Largest side in pixels: beyond, a model may need gigabytes or hours before it refuses the size."""

MOST_TOLD = 2**16
"""Most images that a note asks for."""

ALIKE = 0.98
"""Cosine above which embeddings count as equal; equivalent to a relative change of a fifth."""

AGREES = 0.8
"""Share of real images in which a file in lower precision must give the model's top-1, else it is wrong.

Of 1,000 photographs 84.8 (`vid_tldr`) to 96.4 % (dense) agree in int8 on ViT-Ti, 85.0 (`tofu`) to 95.4 % on DeiT-T
(docs/results/engines.md).
"""


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
        size: side of the images, for which positions are resampled (`vitrim.core.image_size.at_size`), or height and
            width, for a model that takes them as it is; None for the model's own.
        name: name of the model in the metadata.
        classes: names of the classes in the metadata; None for those of the model, of the images, or of ImageNet.
    """

    to: str | None = None
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    opset: Annotated[int, Field(ge=OPSETS.start, lt=OPSETS.stop)] = 20
    precision: str = "fp32"
    preprocess: bool = False
    size: Pixels | tuple[Pixels, Pixels] | None = None
    name: str | None = None
    classes: Sequence[str] | None = None


@dataclass(frozen=True)
class Draft:
    """The model that `export` writes, dense or reduced, and the shape and preprocessing of its images."""

    loaded: Loaded
    shape: tuple[int, int, int]
    preprocessing: Preprocessing
    wanted: FileSpec
    kind: type[Format]

    @classmethod
    def of(cls, loaded: Loaded, wanted: FileSpec, kind: type[Format]) -> Draft:
        shape, count = _shape(loaded.model, wanted.size), loaded.num_classes
        if wanted.classes is not None and count and len(wanted.classes) != count:
            raise VitrimError(f"classes are {len(wanted.classes)} names, and the model has {count} classes")
        return cls(loaded, shape, replace(loaded.preprocessing, size=shape[1:]), wanted, kind)

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def layout(self) -> tuple[int, int, int]:
        """The shape of one image, as the file takes it."""
        channels, height, width = self.shape
        return (height, width, channels) if self.wanted.preprocess else self.shape


def write(
    draft: Draft,
    path: Path,
    compared: Tensor | None = None,
    calibration: Tensor | None = None,
    *,
    real: bool = False,
    strict: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Exported:
    """Write a model as a file, with its metadata beside it, and keep the file only if it agrees with the model.

    Args:
        compared: images to compare file and model on, as the file takes them; None: they are not compared.
        calibration: images to calibrate int8 on, as the file takes them.
        real: they are not random.
        strict: refuse a file in lower precision that they show to agree in less than `AGREES`.
        tell: called with a short text on every step.
    """
    wanted, tell = draft.wanted, tell or (lambda _: None)
    facts = _describe(draft, compared, real)
    tell("exporting")
    with staged(path) as place:
        written = _write(draft, facts, place)
        if compared is not None:
            tell("comparing")
            written = _agreeing(written, path, draft.model, compared, strict=strict)
        if wanted.precision in draft.kind.makes:
            tell(f"making {wanted.precision}")
            written = _made(written, path, wanted.precision, calibration, compared, strict=strict)
        sidecar(place).write_text(json_text(dict(written.metadata), indent=2) + "\n", encoding="utf-8")
    return replace(written, path=path)


def _write(draft: Draft, facts: dict[str, object], place: Path) -> Exported:
    wanted, kind = draft.wanted, draft.kind
    weights = wanted.precision if wanted.precision in kind.casts else "fp32"
    cast = draft.model if weights == "fp32" else copy.deepcopy(draft.model).to(PRECISIONS[weights])
    module = Program(cast, draft.preprocessing if wanted.preprocess else None).eval()
    dtype = "uint8" if wanted.preprocess else "float32"
    # two images: torch treats a batch of one as a constant
    example = torch.zeros(wanted.batch or 2, *draft.layout, dtype=getattr(torch, dtype))
    program = trace(module, example, wanted.batch is None)
    output = "logits" if draft.loaded.num_classes else "features"
    # Features of one row per image are an embedding; maps are not.
    embeds = output == "features" and program.graph.output_node().args[0][-1].meta["val"].ndim == 2
    inputs = (wanted.batch or "batch", *draft.layout)
    known = {
        **facts,
        "input": {
            "name": "image",
            "shape": list(inputs),
            "dtype": dtype,
            "layout": "NHWC, as read, 0 to 255" if wanted.preprocess else "NCHW, normalised",
        },
        "output": {"name": output, **({"embedding": draft.loaded.embedding_name} if embeds else {})},
        "weights": weights,
        "precision": weights,
        "opset": wanted.opset,
        "format": kind.name,
    }
    nodes = kind.write(Graph(program, output, json_text(known), wanted.opset, PRECISIONS[weights]), place)
    known = {**known, "nodes": nodes}
    return Exported(place, kind.name, {"image": inputs}, nodes, size_of(place), known, trust=True)


def _agreeing(written: Exported, path: Path, model: nn.Module, compared: Tensor, *, strict: bool) -> Exported:
    """The file with its comparison with the model in its metadata; refuse one that disagrees."""
    found = compare(written, model, compared)
    if not found.holds:
        raise VitrimError(f"{path} is not written: as {written.format} it disagrees with the model; {found}")
    words = {"parity": str(found), "near_ties": found.near_ties, "largest_difference": found.largest}
    if written.precision != "fp32" and found.same_top1 is not None:
        what = f"same top-1 as fp32 in {100 * found.same_top1 / found.images:.1f} %"
        doubt = _check_agreement(path, written.precision, found.same_top1, found.images, what, strict=strict)
        words |= {"agreement": found.same_top1 / found.images, "parity": f"{found}{doubt}"}
    return replace(written, metadata={**written.metadata, **words})


def _check_agreement(path: Path, precision: str, same: int, images: int, what: str, *, strict: bool) -> str:
    """Refuse a file that agrees in less than `AGREES` of real images; if that is not sure, how many would tell."""
    if not strict or same >= AGREES * images:
        return ""
    # Refused only if the share is shown to be below, not because few images happened to differ.
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
    strict: bool,
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
        doubt = _check_agreement(path, precision, int(same.sum()), many, found, strict=strict)
        parity = f"{found} of {many} {'images' if strict else 'random images'}{doubt}"
        made = replace(made, metadata={**made.metadata, "parity": parity, "agreement": share})
    # The converted file and its weights take the names of the fp32 file, whose weights they replace.
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


def _follows(model: nn.Module) -> bool:
    """True for a reduced model whose graph for single images has sizes that depend on the image."""
    reduction = get_reduction(model)
    return reduction is not None and reduction.config.obstacle() is not None


def made_dense(model: nn.Module) -> nn.Module:
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


def random_batch(draft: Draft, count: int) -> Tensor:
    """Random images, as the file takes them."""
    generator = torch.Generator().manual_seed(0)
    if draft.wanted.preprocess:
        return torch.randint(256, (count, *draft.layout), generator=generator, dtype=torch.uint8)
    return torch.randn(count, *draft.layout, generator=generator)


def _tokens(reduced: nn.Module, images: Tensor) -> list[list[int]] | None:
    """Tokens of every image after each block, prefix included; None for a dense model."""
    reduction = get_reduction(reduced)
    if reduction is None:
        return None
    config, counted = reduction.config, made_dense(reduced)
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


def _describe(draft: Draft, compared: Tensor | None, real: bool) -> dict[str, Any]:
    """The metadata of a model in eval mode, without entries about the file.

    Where counts depend on the image, they are of the images ``compared`` or of random ones: means and deviations.
    """
    model, preprocessing, wanted = draft.model, draft.preprocessing, draft.wanted
    images: Any = torch.zeros(1, *draft.shape)
    counted_on: dict[str, Any] = {}
    if _follows(model):
        images = random_batch(draft, wanted.batch or 1) if compared is None else compared[:CHECKED]
        images = Program(model, preprocessing).normalised(images) if wanted.preprocess else images
        what = "images" if real else "random images"
        counted_on = {"counted_on": f"{len(images)} {what}"}
    reduction = get_reduction(model)
    dense = count_macs(made_dense(model), images[:1]).total
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
    return {
        "vitrim": __version__,
        "torch": str(torch.__version__),
        "model": wanted.name,
        "method": "none" if reduction is None else reduction.config.describe(),
        "preprocessing": {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()},
        "classes": None if wanted.classes is None else list(wanted.classes),
        "tokens_per_block": per_block,
        "gmacs": statistics.fmean(macs) / GIGA,
        "gmacs_parts": {part: statistics.fmean(each.gmacs()[part] for each in counts) for part in counts[0].gmacs()},
        "dense_gmacs": dense / GIGA,
        **spread,
        **counted_on,
    }
