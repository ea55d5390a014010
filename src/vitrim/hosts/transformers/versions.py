"""Differences between versions of transformers; see `vitrim.core.versions`."""

from __future__ import annotations

from typing import Any

from vitrim.core.versions import is_older
from vitrim.hosts.transformers import of_modules
from vitrim.hosts.transformers.common import ReducedDinoLayer, ReducedLayer, ReducedNestedLayer, ReducedOlderLayer

OLDER_VIT, OLDER_DINO = is_older("transformers", "5.9"), is_older("transformers", "5.18")

MODULES = {
    "5.4": "altclip chinese_clip owlv2 owlvit pixtral vjepa2",  # older layers return tuples
    "5.5.1": "videomae",  # older attention has separate biases
    "5.6": "siglip2",  # an older inner tower names the padding differently
    "5.9": "beit lw_detr",  # older layers have another form
    "5.13": "radio",  # new
    "5.17": "sam3",  # older layers have no position_ids
    "5.18": "rf_detr",  # new in 5.9, with another form of attention
    "5.20": "molmo2",  # new
    "5.21": "paddleocr_vl",  # older models take no features
    "5.23": "cosmos3_edge",  # older language models take no four rows of positions
}
SINCE = {f"transformers.models.{name}.modeling_{name}": v for v, names in MODULES.items() for name in names.split()}
# older vision-language models take no precomputed features (``mm_encoder_outputs``)
SINCE |= {"VISION_LANGUAGE": "5.18", "SELECTED": "5.18"}
"""The transformers version that a family needs, by module or table, where above the bound of ``pyproject.toml``."""


class ReducedOlderDinoLayer(ReducedDinoLayer, ReducedNestedLayer):
    """`ReducedNestedLayer` with DINOv2's names."""


OLDER_TOWERS = {
    "altclip": "towers:HFAltCLIP AltCLIPVisionTransformer",
    "chinese_clip": "towers:HFChineseCLIP ChineseCLIPVisionTransformer",
    "clip": "towers:HFCLIP CLIPVisionTransformer",
    "metaclip_2": "towers:HFMetaClip2 MetaClip2VisionTransformer",
    "siglip": "towers:HFSiglip SiglipVisionTransformer",
}
HOSTS = of_modules(OLDER_TOWERS) if is_older("transformers", "5.6") else {}
"""Hosts of classes that only older versions have."""

ViTForm: Any = ReducedOlderLayer if OLDER_VIT else ReducedLayer
DinoForm: Any = ReducedOlderDinoLayer if OLDER_DINO else ReducedDinoLayer
VIT_LAYERS = "encoder.layer" if OLDER_VIT else "layers"
DINOV3_LAYERS = "layer" if is_older("transformers", "5.4") else "model.layer"


def attention(module: Any, name: str, nested: bool) -> Any:
    """The attention class of a family's ``module``; ``nested``: an older form, inside another class."""
    return getattr(module, f"{name}{'Self' if nested else ''}Attention")


def tower(module: Any, name: str) -> Any:
    """The class with the layers of an image tower in a family's ``module``; before 5.6 nested in the model."""
    return getattr(module, f"{name}VisionTransformer", None) or getattr(module, f"{name}VisionModel")
