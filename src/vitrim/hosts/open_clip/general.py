"""Answers that hold for all open_clip models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import nn

from vitrim.core.host import Host
from vitrim.core.modules import pair
from vitrim.core.plan import Part, Preprocessing
from vitrim.core.registry import register_library


@register_library("open_clip")
class OpenClipModel(Host):
    """Any model of open_clip, of two towers or one."""

    name = "open_clip"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        "tokens": ("class_embedding",),
        "head": ("attn_pool", "attn_pool_contrastive", "proj"),
        "positions": ("positional_embedding",),
        "stem": ("conv1",),
    }

    @classmethod
    def undecayed(cls, model: Any) -> Collection[str]:
        return model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()

    @classmethod
    def preprocessing(cls, model: nn.Module) -> Preprocessing:
        """The ``preprocess_cfg`` that the library keeps at a tower."""
        said: Any = getattr(getattr(model, "visual", model), "preprocess_cfg", None)
        if not said:
            return super().preprocessing(model)
        return Preprocessing(
            channels=len(said["mean"]),
            size=pair(said["size"]),
            mean=tuple(said["mean"]),
            std=tuple(said["std"]),
            interpolation=said.get("interpolation"),
        )
