"""vitrim's own models and those of users, assumed to follow timm's conventions as far as they go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.host import no_tokens
from vitrim.core.plan import Layout, Part
from vitrim.core.registry import register_library
from vitrim.hosts.timm.general import TimmModel


@register_library("vitrim")
class OwnModel(TimmModel):
    """A model of no library, about which nothing is certain: its parts are recognised by any library's names."""

    name = "vitrim"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        **TimmModel.parts,
        "positions": (*TimmModel.parts["positions"], "pos_embedding", "position_embedding", "position_embeddings"),
        "stem": (*TimmModel.parts["stem"], "embeddings", "conv_proj", "tokens_to_token"),
    }

    @classmethod
    def without_head(cls, model: Any) -> nn.Module:
        """A model with maps of its own, such as ViTTM, without its classifiers."""
        cls.layout(model)
        model.reset_classifier(0)
        return model  # type: ignore[no-any-return]

    @classmethod
    def tokens(cls, model: Any, images: Tensor) -> Tensor:
        """The last map of ``model``; of ViTTM with both streams' channels where their grids are equal."""
        cls.layout(model)
        (last,) = model.forward_intermediates(images, 1, output_fmt="NLC", intermediates_only=True)
        return last  # type: ignore[no-any-return]

    @classmethod
    def layout(cls, model: Any) -> Layout:
        if not hasattr(model, "forward_intermediates") or not hasattr(model, "feature_info"):
            raise no_tokens(model)
        last = model.feature_info[-1]
        return Layout(last["num_chs"], 0, (last["reduction"], last["reduction"]))
