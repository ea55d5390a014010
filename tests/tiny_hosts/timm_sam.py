"""timm's SAM ViT: windows of 6 x 6 patches, four in an image; relative positions, rotary ones, one window."""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer_sam import VisionTransformerSAM

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.timm_vit import GEOMETRY

FURTHER = True


def sam(**kwargs: Any) -> Create:
    windows = {"patch_size": 2, "window_size": 6, "global_attn_indexes": (1, 3), "neck_chans": 8}
    return seeded(lambda: VisionTransformerSAM(**{**GEOMETRY, **windows, **kwargs}))


HOSTS: dict[str, Create] = {
    "samvit": sam(use_rel_pos=True),
    "samvit_rope": sam(use_rope=True, qk_norm=True, init_values=0.5, use_abs_pos=False),
    "samvit_no_neck": sam(neck_chans=0, patch_size=4, window_size=0, global_attn_indexes=()),
}
