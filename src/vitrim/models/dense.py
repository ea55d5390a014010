"""Dense models by name: ``segmenter:NAME`` and ``vitdet:NAME`` put a head on the backbone NAME.

Options named here are the head's; all others are the backbone's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from vitrim.core.registry import ask
from vitrim.errors import VitrimError, check_known
from vitrim.models.segmenter import LinearDecoder, MaskTransformer, Segmenter

Options = dict[str, Any]
Create = Callable[[bool, Options], nn.Module]
"""Creates the backbone from ``pretrained`` and its options."""

DECODERS = {"linear": LinearDecoder, "mask_transformer": MaskTransformer}
DECODER = "decoder_"
"""Prefix of the mask transformer's options."""
MASK_OPTIONS = ("layers", "width", "heads", "dropout", "drop_path", "proportional")
SEGMENTER_OPTIONS = ("num_classes", "decoder", "decoder_tokens", *(f"{DECODER}{name}" for name in MASK_OPTIONS))
DETECTOR_OPTIONS = (
    *("num_classes", "masks", "cascade", "channels", "hidden", "rpn_layers", "box_layers"),
    *("samples", "soft_nms", "maskness", "window_size", "global_blocks"),
)
SWITCHES = ("masks", "cascade", "decoder_proportional")
COUNTS = (
    *("channels", "hidden", "rpn_layers", "box_layers", "samples", "window_size"),
    *("decoder_layers", "decoder_width", "decoder_heads"),
)
SHARES = ("soft_nms", "maskness", "decoder_dropout", "decoder_drop_path")
ADE20K, COCO = 150, 80
"""Default numbers of classes."""
ANY_SIZE = "dynamic_img_size"
"""timm's option for position tables that follow the image."""


def segmenter(create: Create, pretrained: bool, options: Options) -> nn.Module:
    """Put a `Segmenter` on the backbone that ``create`` makes; its decoder is always new.

    Args:
        create: creates the backbone.
        pretrained: load the backbone's weights.
        options: `SEGMENTER_OPTIONS`, and those of the backbone.

    Raises:
        VitrimError: an option is not valid, or the backbone's tokens are not available.

    Example:
        >>> import timm
        >>> def create(pretrained, options):
        ...     return timm.create_model("test_vit", pretrained=pretrained, **options)
        >>> segmenter(create, False, {"decoder": "mask_transformer", "num_classes": 3}).num_classes
        3
    """
    own, rest = split(options, SEGMENTER_OPTIONS)
    num_classes, kind = own.pop("num_classes", ADE20K), own.pop("decoder", "linear")
    tokens = own.pop("decoder_tokens", "all")
    check_known("decoder", kind, DECODERS)
    if own and kind == "linear":
        raise VitrimError(f"{next(iter(own))} goes with decoder=mask_transformer")
    model = backbone(create, pretrained, rest)
    decoder = DECODERS[kind](
        ask(model).layout(model).dim, num_classes, **{key.removeprefix(DECODER): value for key, value in own.items()}
    )
    return Segmenter(model, decoder, num_classes, tokens)


def detector(create: Create, pretrained: bool, options: Options) -> nn.Module:
    """Put a `Detector` on a backbone, as `segmenter`, with `DETECTOR_OPTIONS`; its backbone must allow windows."""
    from vitrim.models.vitdet import Detector
    from vitrim.models.windowed import windowed

    if "windows" in options:
        raise VitrimError("windows: unknown option; windows of S x S patches are window_size=S")
    own, rest = split(options, DETECTOR_OPTIONS)
    num_classes = own.pop("num_classes", COCO)
    side, crossing = own.pop("window_size", None), own.pop("global_blocks", ())
    if crossing and side is None:
        raise VitrimError("global_blocks attend across windows: they go with window_size")
    trunk = backbone(create, pretrained, rest)
    return Detector(trunk if side is None else windowed(trunk, side, crossing), num_classes, **own)


def split(options: Options, names: Collection[str]) -> tuple[Options, Options]:
    """Split ``options`` into those called ``names``, valid, and the rest; None means the default.

    Example:
        >>> split({"masks": True, "img_size": 64}, ("masks",))
        ({'masks': True}, {'img_size': 64})
    """
    own = {key: value for key, value in options.items() if key in names and value is not None}
    for key, value in own.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in SWITCHES and not isinstance(value, bool):
            raise VitrimError(f"{key}={value} must be true or false")
        if key in COUNTS and not (number and isinstance(value, int) and 1 <= value <= 2**14):
            raise VitrimError(f"{key}={value} must be a whole number from 1 to {2**14}")
        if key in SHARES and not (number and 0 <= value <= 1):
            raise VitrimError(f"{key}={value} must be a number from 0 to 1")
        if key == "global_blocks":
            numbers = isinstance(value, list | tuple) and all(type(one) is int for one in value)
            if not numbers:
                raise VitrimError(f"{key}={value} must be a list of the numbers of blocks, e.g. [3, 6, 9, 12]")
        if key == "num_classes" and (not number or value < 1):
            raise VitrimError(f"num_classes={value}: a dense model needs at least one class")
    return own, {key: value for key, value in options.items() if key not in names}


def backbone(create: Create, pretrained: bool, options: Options) -> nn.Module:
    """Create the backbone without its head, with tokens to read; timm models accept any image size where they can."""
    if ANY_SIZE not in options:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            trial = create(False, options)
        if takes(type(trial), ANY_SIZE):
            options = {**options, ANY_SIZE: True}
    model = create(pretrained, options)
    return ask(model).without_head(model)


def takes(kind: type, option: str) -> bool:
    """True if the constructor of a class accepts ``option``, itself or through ``**kwargs``.

    Example:
        >>> import timm
        >>> takes(timm.models.deit.VisionTransformerDistilled, "dynamic_img_size"), takes(timm.models.Beit, "dynamic")
        (True, False)
    """
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base).parameters
            if option in parameters:
                return True
            if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
                return False
    return False


KINDS: dict[str, Callable[[Create, bool, Options], nn.Module]] = {"segmenter": segmenter, "vitdet": detector}
"""Dense models, by the prefix of their backbone's name."""
