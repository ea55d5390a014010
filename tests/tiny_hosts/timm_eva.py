"""timm's Eva: EVA-02, DINOv3, rope ViT and Perception Encoder forms."""

from __future__ import annotations

from typing import Any

from timm.models.eva import Eva

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.timm_vit import GEOMETRY

ROPE: dict[str, Any] = {"use_rot_pos_emb": True, "global_pool": "token"}


def eva(**kwargs: Any) -> Create:
    return seeded(lambda: Eva(**{**GEOMETRY, **kwargs}))


HOSTS: dict[str, Create] = {
    "eva": eva(**ROPE, swiglu_mlp=True, scale_mlp=True),
    "eva02_avg": eva(use_rot_pos_emb=True, qkv_fused=False, swiglu_mlp=True, ref_feat_shape=(4, 4)),
    "eva_dinov3": eva(
        use_rot_pos_emb=True,
        use_abs_pos_emb=False,
        rope_type="dinov3",
        rope_rotate_half=True,
        num_reg_tokens=2,
        init_values=0.5,
        qkv_bias=False,
        use_fc_norm=False,
    ),
    "eva_rope_mixed": eva(**ROPE, rope_type="mixed", no_embed_class=True, init_values=0.5, attn_only_layer_scale=True),
    "eva_pe": eva(
        use_rot_pos_emb=True,
        attn_type="rope",
        global_pool="map",
        use_pre_transformer_norm=True,
        use_post_transformer_norm=True,
        use_fc_norm=False,
    ),
    "eva_post_norm": eva(use_post_norm=True, scale_attn_inner=True),
    "eva_grouped": eva(**ROPE, attn_type="rope", qkv_fused=False, num_kv_heads=1, qk_norm=True),
}
