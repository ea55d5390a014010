"""timm's VisionTransformerRelPos: bias tables and bias networks, per block and shared."""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.timm_vit import GEOMETRY


def relpos(**kwargs: Any) -> Create:
    return seeded(lambda: VisionTransformerRelPos(**{**GEOMETRY, **kwargs}))


HOSTS: dict[str, Create] = {
    "relpos": relpos(rel_pos_type="bias", class_token=True, global_pool="token", init_values=0.5),
    "relpos_mlp_avg": relpos(rel_pos_dim=8, qk_norm=True, fc_norm=True),
    "relpos_shared_post_norm": relpos(
        shared_rel_pos=True, rel_pos_type="bias", class_token=True, block_fn=ResPostRelPosBlock
    ),
}
