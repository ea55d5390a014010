"""torchvision's VisionTransformer."""

from __future__ import annotations

from typing import Any

from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from tiny_hosts import Create
from tiny_hosts.common import seeded

GEOMETRY: dict[str, Any] = {
    "image_size": 24,
    "patch_size": 4,
    "num_layers": 4,
    "num_heads": 2,
    "hidden_dim": 32,
    "mlp_dim": 64,
    "num_classes": 5,
}


def torchvision_vit(**kwargs: Any) -> Create:
    return seeded(lambda: VisionTransformer(**{**GEOMETRY, **kwargs}))


HOSTS: dict[str, Create] = {
    "torchvision_vit": torchvision_vit(),
    "torchvision_vit_stem": torchvision_vit(conv_stem_configs=[ConvStemConfig(8, 3, 4)], representation_size=16),
}
