"""timm's NaFlexVit on images: with the blocks of VisionTransformer, and with those of Eva."""

from __future__ import annotations

from typing import Any

from timm.models.naflexvit import NaFlexVit

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.timm_vit import GEOMETRY


def naflex(**kwargs: Any) -> Create:
    return seeded(lambda: NaFlexVit(**{**GEOMETRY, "pos_embed_grid_size": (6, 6), **kwargs}))


HOSTS: dict[str, Create] = {
    "naflex": naflex(class_token=True, global_pool="token"),
    "naflex_map_registers": naflex(reg_tokens=2, init_values=0.5),
    "naflex_rope": naflex(rope_type="axial", pos_embed="none", global_pool="avg", swiglu_mlp=True),
    "naflex_rope_mixed": naflex(rope_type="mixed", class_token=True, reg_tokens=1, global_pool="token"),
}
