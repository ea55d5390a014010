"""Hugging Face SigLIP 2 (NaFlex): the vision tower, alone, with a classifier, or next to the text tower.

Its images come as patches with a mask. It can be reduced where nothing is padded: images of one shape, or one image.
"""

from __future__ import annotations

import inspect
from math import isqrt
from typing import Any

from torch import Tensor, nn
from transformers.models.siglip2.modeling_siglip2 import Siglip2Attention, Siglip2EncoderLayer, Siglip2VisionModel

from vitrim.core.registry import register_host
from vitrim.core.tokens import Trace
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import ReducedClipLayer, TransformersHost


class ReducedSiglip2EncoderLayer(ReducedClipLayer, Siglip2EncoderLayer):
    """`Siglip2EncoderLayer` under reduction."""

    host_class = Siglip2EncoderLayer
    attention_class = Siglip2Attention


class PaddingHook:
    """Runs before a forward that takes a ``pixel_attention_mask`` and drops a mask that masks nothing.

    Attention and heads would apply it to all N0 tokens. A mask of real padding is refused: padding would be merged
    with patches.
    """

    def __init__(self, module: nn.Module) -> None:
        self.positional = tuple(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        mask: Tensor | None = given.get("pixel_attention_mask")
        if mask is None:
            return None
        if not mask.all():
            raise UnsupportedModelError(
                "a reduced SigLIP 2 takes no padded images: give images of one shape in a batch, with "
                "max_num_patches equal to their number of patches, or vitrim.restore_(model) first"
            )
        return (), {**given, "pixel_attention_mask": None}


@register_host(
    "transformers.models.siglip2.modeling_siglip2.Siglip2VisionModel",
    "transformers.models.siglip2.modeling_siglip2.Siglip2Model",
    "transformers.models.siglip2.modeling_siglip2.Siglip2ForImageClassification",
)
class HFSiglip2(TransformersHost):
    """Hugging Face SigLIP 2: no class token; its heads attend to the patches with a probe, or average them."""

    name = "transformers SigLIP 2"
    heads = ("no class token",)
    reduced_blocks = (ReducedSiglip2EncoderLayer,)
    trunk_classes = (Siglip2VisionModel,)
    num_prefix = 0
    has_class_token = False
    layers_name = "encoder.layers"

    @classmethod
    def image_size(cls, config: Any) -> tuple[int, int]:
        side = isqrt(config.num_patches) * config.patch_size  # of a square image
        return side, side

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        return cls.trunk(model).embeddings  # type: ignore[no-any-return]

    @classmethod
    def grid_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        shapes = args[1].tolist()  # rows and columns of every image, which the embedding reads, too
        return tuple(shapes[0]) if shapes and all(shape == shapes[0] for shape in shapes) else None

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        super().install(model, trace)
        # the classifier's own mean reads the mask, too; the model of two towers hands it on
        model.vitrim_padding_hooks = [
            module.register_forward_pre_hook(PaddingHook(module), with_kwargs=True)
            for module in dict.fromkeys((model, cls.trunk(model)))
        ]

    @classmethod
    def uninstall(cls, model: Any) -> None:
        super().uninstall(model)
        for hook in model.vitrim_padding_hooks:
            hook.remove()
        del model.vitrim_padding_hooks
