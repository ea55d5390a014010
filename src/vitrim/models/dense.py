"""Dense models by name: ``segmenter:NAME`` and ``vitdet:NAME`` put a head on the backbone NAME, whose options they
pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, StrictBool
from torch import nn

from vitrim.checked import Checked, Positive, one_line_of
from vitrim.core.registry import ask
from vitrim.errors import VitrimError
from vitrim.models.segmenter import LinearDecoder, MaskTransformer, Segmenter

Keywords = dict[str, Any]
OwnOptions = TypeVar("OwnOptions", bound=Checked)
Create = Callable[[bool, Keywords], nn.Module]
"""Creates the backbone from ``pretrained`` and its options."""

DECODERS = {"linear": LinearDecoder, "mask_transformer": MaskTransformer}
DECODER = "decoder_"
"""Prefix of the mask transformer's options."""
ADE20K, COCO = 150, 80
"""Default numbers of classes."""
ANY_SIZE = "dynamic_img_size"
"""timm's option for position tables that follow the image."""


Number = Annotated[int | None, Field(ge=1, le=2**14)]
Fraction = Annotated[float | None, Field(ge=0, le=1)]


class SegmenterOptions(Checked):
    """Options of the head of ``segmenter:``; None: the default of the decoder."""

    num_classes: Positive = ADE20K
    decoder: Literal["linear", "mask_transformer"] = "linear"
    decoder_tokens: Literal["all", "merged"] = "all"
    decoder_layers: Number = None
    decoder_width: Number = None
    decoder_heads: Number = None
    decoder_dropout: Fraction = None
    decoder_drop_path: Fraction = None
    decoder_proportional: StrictBool | None = None


class DetectorOptions(Checked):
    """Options of ``vitdet:``; None: the default of the `Detector`."""

    num_classes: Positive = COCO
    masks: StrictBool | None = None
    cascade: StrictBool | None = None
    channels: Number = None
    hidden: Number = None
    rpn_layers: Number = None
    box_layers: Number = None
    samples: Number = None
    soft_nms: Fraction = None
    maskness: Fraction = None
    window_size: Number = None
    global_blocks: tuple[int, ...] = ()


def segmenter(create: Create, pretrained: bool, options: Keywords) -> nn.Module:
    """Put a `Segmenter` on the backbone that ``create`` makes; its decoder is always new.

    ``options`` are `SegmenterOptions`, and those of the backbone; `VitrimError` for an invalid one.
    """
    head, rest = split(options, SegmenterOptions)
    own = head.model_dump(exclude_unset=True, exclude={"num_classes", "decoder", "decoder_tokens"})
    if own and head.decoder == "linear":
        raise VitrimError(f"{next(iter(own))} goes with decoder=mask_transformer")
    model = backbone(create, pretrained, rest)
    own = {key.removeprefix(DECODER): value for key, value in own.items()}
    decoder = DECODERS[head.decoder](ask(model).layout(model).dim, head.num_classes, **own)
    return Segmenter(model, decoder, head.num_classes, head.decoder_tokens)


def detector(create: Create, pretrained: bool, options: Keywords) -> nn.Module:
    """Put a `Detector` on a backbone, as `segmenter`, with `DetectorOptions`; its backbone must allow windows."""
    from vitrim.models.vitdet import Detector
    from vitrim.models.windowed import windowed

    if "windows" in options:
        raise VitrimError("windows: unknown option; windows of S x S patches are window_size=S")
    head, rest = split(options, DetectorOptions)
    if head.global_blocks and head.window_size is None:
        raise VitrimError("global_blocks attend across windows: they go with window_size")
    own = head.model_dump(exclude_unset=True, exclude={"num_classes", "window_size", "global_blocks"})
    trunk = backbone(create, pretrained, rest)
    trunk = trunk if head.window_size is None else windowed(trunk, head.window_size, head.global_blocks)
    return Detector(trunk, head.num_classes, **own)


def split(options: Keywords, kind: type[OwnOptions]) -> tuple[OwnOptions, Keywords]:
    """The options of a head, None meaning the default, and the backbone's."""
    own = {key: value for key, value in options.items() if key in kind.model_fields and value is not None}
    with one_line_of("the head", kind):
        return kind.model_validate(own), {key: options[key] for key in options if key not in kind.model_fields}


def backbone(create: Create, pretrained: bool, options: Keywords) -> nn.Module:
    """Create the backbone without its head, with tokens to read; timm models accept any image size where they can."""
    if ANY_SIZE not in options:
        # A trial on the meta device draws from a generator of its own: the random numbers of the real model stay.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            trial = create(False, options)
        # A dense model sees images of all sizes: where timm can resample positions, it does.
        if takes(type(trial), ANY_SIZE):
            options = {**options, ANY_SIZE: True}
    model = create(pretrained, options)
    return ask(model).without_head(model)


def takes(kind: type, option: str) -> bool:
    """True if the constructor of a class accepts ``option``, itself or through ``**kwargs``."""
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base).parameters
            if option in parameters:
                return True
            if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
                return False
    return False


KINDS: dict[str, Callable[[Create, bool, Keywords], nn.Module]] = {"segmenter": segmenter, "vitdet": detector}
"""Dense models, by the prefix of their backbone's name."""
