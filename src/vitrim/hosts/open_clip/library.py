"""Answers about all open_clip models, of two towers or one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.library import Library, no_tokens, pair
from vitrim.core.plan import Part, Preprocessing
from vitrim.errors import VitrimError


class OpenClipLibrary(Library):
    """Any model of open_clip; the image tower alone has a host."""

    name = "open_clip"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        "tokens": ("class_embedding",),
        "head": ("attn_pool", "attn_pool_contrastive", "proj"),
        "positions": ("positional_embedding",),
        "stem": ("conv1",),
    }

    def undecayed(self, model: Any) -> Collection[str]:
        return model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()

    def preprocessing(self, model: nn.Module) -> Preprocessing:
        """The ``preprocess_cfg`` that the library keeps at a tower."""
        config: Any = getattr(getattr(model, "visual", model), "preprocess_cfg", None)
        if not config:
            return super().preprocessing(model)
        return Preprocessing(
            channels=len(config["mean"]),
            size=pair(config["size"]),
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation=config.get("interpolation"),
        )

    def patch_dropout(self, model: Any) -> Any | None:
        found = None if self.host is None else model.patch_dropout
        return found if hasattr(found, "prob") else None

    def checkpoint_gradients(self, model: Any, on: bool = True) -> None:
        if self.host is None:
            super().checkpoint_gradients(model, on)
        model.set_grad_checkpointing(on)

    def without_head(self, model: Any) -> nn.Module:
        if self.host is None or model.attn_pool is not None:
            raise no_tokens(model)
        model.proj = None
        return model  # type: ignore[no-any-return]

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        if self.host is None:
            raise no_tokens(model)
        size = (images.shape[2], images.shape[3])
        if size != tuple(model.image_size):
            raise VitrimError(
                f"images of {size[0]} x {size[1]} px: this VisionTransformer of open_clip takes "
                f"{model.image_size[0]} x {model.image_size[1]} only; create it with force_image_size"
            )
        return model.ln_post(model.transformer(model._embeds(images)))  # type: ignore[no-any-return]
