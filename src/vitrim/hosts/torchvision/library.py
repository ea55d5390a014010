"""Answers about all torchvision models. Their `preprocessing` comes from ``eval_transform``."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import interpolate_embeddings

from vitrim.core.library import Library
from vitrim.core.plan import Part
from vitrim.errors import VitrimError


class TorchvisionLibrary(Library):
    """Any model of torchvision."""

    name = "torchvision"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        "tokens": ("*_token",),
        "head": ("head", "heads", "fc", "classifier"),
        "positions": ("pos_embedding",),
        "stem": ("conv_proj",),
    }

    def undecayed(self, model: nn.Module) -> Collection[str]:
        return self.parts["tokens"]  # the library does not list any


def transform_at(transform: Any, size: int) -> Any:
    """The ``transforms`` of weights for images of ``size`` pixels, with the same crop ratio.

    Example:
        >>> from torchvision.models import ViT_B_16_Weights
        >>> found = transform_at(ViT_B_16_Weights.DEFAULT.transforms(), 192)
        >>> found.resize_size, found.crop_size
        ([219], [192])
    """
    found = copy.copy(transform)
    (own,), (resized,) = transform.crop_size, transform.resize_size
    found.crop_size, found.resize_size = [size], [round(resized * size / own)]
    return found


class TorchvisionViTLibrary(TorchvisionLibrary):
    """A `VisionTransformer` with ``heads``, whose last linear layer classifies."""

    def classifiers(self, model: Any) -> list[nn.Module]:
        return [model.heads] if self.class_layers(model) else []

    def class_layers(self, model: Any) -> dict[str, int]:
        layers = model.heads.named_modules(prefix="heads")
        return dict.fromkeys([name for name, layer in layers if isinstance(layer, nn.Linear)][-1:], 0)

    def num_classes(self, model: Any) -> int:
        found: list[int] = [model.get_submodule(name).out_features for name in self.class_layers(model)]
        return found[0] if found else 0

    def reset_head(self, model: Any, num_classes: int) -> None:
        names = self.class_layers(model)
        if not names:
            super().reset_head(model, num_classes)
        for name in names:  # one
            old = model.get_submodule(name)
            new = nn.Linear(old.in_features, num_classes, device=old.weight.device, dtype=old.weight.dtype)
            nn.init.zeros_(new.weight)  # the library's own initialisation
            nn.init.zeros_(new.bias)
            model.set_submodule(name, new)
        model.num_classes = num_classes

    def resampled(self, model: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return interpolate_embeddings(model.image_size, model.patch_size, OrderedDict(weights))  # type: ignore[no-any-return]

    def set_size(self, model: Any, size: int) -> None:
        model.seq_length += (size // model.patch_size) ** 2 - (model.image_size // model.patch_size) ** 2
        model.image_size = size
        self.take_resampled(model)
        if hasattr(getattr(model, "eval_transform", None), "crop_size"):  # of the library's weights
            model.eval_transform = transform_at(model.eval_transform, size)

    def features_and_logits(self, model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        self.readers(model)  # refuses a model without
        # The class token comes first: the head reads that alone.
        tokens = self.tokens_of(model, images)
        return tokens, model.heads(tokens[:, 0])

    def without_head(self, model: Any) -> nn.Module:
        model.heads = nn.Identity()
        return model  # type: ignore[no-any-return]

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        if (height, width) != (model.image_size, model.image_size):
            raise VitrimError(
                f"images of {height} x {width} px: this VisionTransformer of torchvision takes {model.image_size} x "
                f"{model.image_size} only; create it with image_size"
            )
        return self.tokens_of(model, images)

    def tokens_of(self, model: Any, images: Tensor) -> Tensor:
        """The tokens of ``VisionTransformer.forward``, which does not return them."""
        patches = model._process_input(images)
        token = model.class_token.expand(patches.shape[0], -1, -1)
        return model.encoder(torch.cat((token, patches), dim=1))  # type: ignore[no-any-return]
