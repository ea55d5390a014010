"""vitrim's own models and those of users, assumed to follow timm's conventions as far as they go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vitrim.core.ask import register_library
from vitrim.core.facts import Part
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
