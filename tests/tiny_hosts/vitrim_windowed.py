"""Trunks with windows of 6 x 6 patches, four in an image: ViT and EVA-02, whose second and fourth block cross them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.timm_vit import GEOMETRY
from vitrim.models.windowed import windowed

FURTHER = True


def trunk(kind: Callable[..., nn.Module], **kwargs: Any) -> Create:
    options = {**GEOMETRY, "patch_size": 2, "global_pool": "avg", "dynamic_img_size": True, **kwargs}
    return seeded(lambda: windowed(kind(**options), 6, (2, 4)))


HOSTS: dict[str, Create] = {
    "windowed_vit": trunk(VisionTransformer, qk_norm=True, init_values=0.5),
    "windowed_eva": trunk(Eva, use_rot_pos_emb=True, swiglu_mlp=True, scale_mlp=True, ref_feat_shape=(4, 4)),
    "windowed_rope": trunk(Eva, use_rot_pos_emb=True, attn_type="rope", use_abs_pos_emb=False, rope_rotate_half=True),
}
