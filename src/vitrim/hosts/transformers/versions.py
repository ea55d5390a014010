"""Differences between versions of transformers: each names the version that ends it (see `vitrim.core.versions`)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from vitrim.core.versions import is_older
from vitrim.hosts.transformers import of_modules
from vitrim.hosts.transformers.common import ReducedDinoLayer, ReducedLayer, ReducedOlderLayer

OLDER_VIT, OLDER_DINO = is_older("transformers", "5.9"), is_older("transformers", "5.18")

MODULES = {
    "5.4": "altclip chinese_clip owlv2 owlvit pixtral vjepa2",  # before, layers give tuples
    "5.5.1": "videomae",  # attention has its biases beside it
    "5.6": "siglip2",  # a tower within the model takes padding by another name
    "5.9": "beit lw_detr",  # layers are of another form
    "5.13": "radio",  # is not there
    "5.17": "sam3",  # layers have no position_ids
    "5.18": "rf_detr",  # is not there until 5.9, then attention is of another form
    "5.20": "molmo2",  # is not there
    "5.21": "paddleocr_vl",  # the whole model takes no features
    "5.23": "cosmos3_edge",  # its language model takes no four rows of positions
}
SINCE = {f"transformers.models.{name}.modeling_{name}": v for v, names in MODULES.items() for name in names.split()}
# whole vision-language models take no features that were computed before (``mm_encoder_outputs``)
SINCE |= {"VISION_LANGUAGE": "5.18", "SELECTED": "5.18"}
"""The version with which families work, by their module or table, where it is above the bound of ``pyproject.toml``."""


class ReducedOlderDinoLayer(ReducedOlderLayer):
    """`ReducedOlderLayer` by DINOv2's names; its MLP is a module of its own."""

    norm_name = ReducedDinoLayer.norm_name
    update_names: ClassVar[tuple[str, ...]] = ReducedDinoLayer.update_names
    mlp_names: ClassVar[tuple[str, ...]] = ReducedDinoLayer.mlp_names

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [block.attention, block.attention.attention]

    mlp_branch = ReducedLayer.mlp_branch


OLDER_TOWERS = {
    "altclip": "towers:HFAltCLIP AltCLIPVisionTransformer",
    "chinese_clip": "towers:HFChineseCLIP ChineseCLIPVisionTransformer",
    "clip": "towers:HFCLIP CLIPVisionTransformer",
    "metaclip_2": "towers:HFMetaClip2 MetaClip2VisionTransformer",
    "siglip": "towers:HFSiglip SiglipVisionTransformer",
}
HOSTS = of_modules(OLDER_TOWERS) if is_older("transformers", "5.6") else {}
"""Hosts of classes that only older versions have, as in the table of this folder."""

ViTForm: Any = ReducedOlderLayer if OLDER_VIT else ReducedLayer
DinoForm: Any = ReducedOlderDinoLayer if OLDER_DINO else ReducedDinoLayer
VIT_LAYERS = "encoder.layer" if OLDER_VIT else "layers"
DINOV3_LAYERS = "layer" if is_older("transformers", "5.4") else "model.layer"


def attention(module: Any, name: str, nested: bool) -> Any:
    """The class of attention in a family's ``module``; ``nested`` where an older one lies within another."""
    return getattr(module, f"{name}{'Self' if nested else ''}Attention")


def tower(module: Any, name: str) -> Any:
    """The class that owns the layers of a tower of images in a family's ``module``; before 5.6 one within the model."""
    return getattr(module, f"{name}VisionTransformer", None) or getattr(module, f"{name}VisionModel")
