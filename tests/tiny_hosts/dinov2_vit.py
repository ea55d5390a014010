"""DINOv2 and DINOv3 of facebookresearch, as re-created in `tests/recreated`: registers, chunks, plain blocks."""

from __future__ import annotations

from typing import Any

from dinov2.layers.block import Block
from dinov2.models.vision_transformer import DinoVisionTransformer as Dinov2
from dinov3.models.vision_transformer import DinoVisionTransformer as Dinov3
from torch import nn

from tiny_hosts import Create
from tiny_hosts.common import seeded

FURTHER = True


def dino(kind: type[nn.Module] = Dinov2, **kwargs: Any) -> Create:
    return seeded(lambda: kind(**kwargs))


HOSTS: dict[str, Create] = {
    "dinov2_registers": dino(num_register_tokens=2),
    "dinov2_chunks": dino(block_fn=Block, block_chunks=2),
    "dinov3_storage": dino(Dinov3, n_storage_tokens=2, mask_k_bias=True),
}
