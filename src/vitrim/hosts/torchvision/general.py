"""Answers that hold for all torchvision models. Their `preprocessing` is that of an ``eval_transform``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, cast

from torch import nn

from vitrim.core.host import Host
from vitrim.core.plan import Part
from vitrim.core.registry import register_library


@register_library("torchvision")
class TorchvisionModel(Host):
    """Any model of torchvision."""

    name = "torchvision"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        "tokens": ("*_token",),
        "head": ("head", "heads", "fc", "classifier"),
        "positions": ("pos_embedding",),
        "stem": ("conv_proj",),
    }

    @classmethod
    def undecayed(cls, model: nn.Module) -> Collection[str]:
        return cls.parts["tokens"]  # the library itself does not say

    @classmethod
    def num_classes(cls, model: nn.Module) -> int | None:
        return cast("int | None", getattr(model, "num_classes", None))
