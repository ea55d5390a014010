"""timm's VisionTransformer in all its forms."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import (
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import nn

from tiny_hosts import Create
from tiny_hosts.common import seeded

GEOMETRY: dict[str, Any] = {
    "img_size": 24,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 4,
    "num_heads": 2,
    "num_classes": 5,
}


def vit(cls: type[nn.Module] = VisionTransformer, **kwargs: Any) -> Create:
    return seeded(lambda: cls(**{**GEOMETRY, **kwargs}))


HOSTS: dict[str, Create] = {
    "vit": vit(),
    "distilled": vit(VisionTransformerDistilled),
    "registers": vit(reg_tokens=3),
    "registers_no_embed_class": vit(reg_tokens=2, no_embed_class=True),
    "layerscale": vit(init_values=0.5),
    "qk_norm": vit(qk_norm=True),
    "no_class_token_avg": vit(class_token=False, global_pool="avg"),
    "avg_fc_norm": vit(global_pool="avg"),
    "avg_no_fc_norm": vit(global_pool="avg", fc_norm=False),
    "avgmax": vit(global_pool="avgmax"),
    "map": vit(class_token=False, global_pool="map"),
    "pre_norm": vit(pre_norm=True),
    "scale_norms": vit(scale_attn_norm=True, scale_mlp_norm=True),
    "dynamic_img_size": vit(dynamic_img_size=True),
    "no_qkv_bias": vit(qkv_bias=False),
    "headless": vit(num_classes=0),
    "no_pool": vit(global_pool="", num_classes=0),
    "post_norm": vit(block_fn=ResPostBlock),
    "parallel": vit(block_fn=ParallelScalingBlock, qk_norm=True),
    "parallel_fused_out": vit(block_fn=partial(ParallelScalingBlock, fuse_out_proj=True), qkv_bias=False),
    "parallel_things": vit(block_fn=ParallelThingsBlock, init_values=0.5),
}
