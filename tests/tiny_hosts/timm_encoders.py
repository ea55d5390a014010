"""timm's image encoders of language models: Qwen3-VL, DeepSeek, Gemma 4, with their projectors and without."""

from __future__ import annotations

from typing import Any

from timm.models.deepseek_vit import DeepseekVitEncoder
from timm.models.gemma4_vit import Gemma4VitEncoder
from timm.models.qwen3_vit import Qwen3VitEncoder
from torch import nn

from tiny_hosts import Create
from tiny_hosts.common import seeded

FURTHER = True
SIZE: dict[str, Any] = {"img_size": 24, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}


def qwen(**kwargs: Any) -> Create:
    return seeded(lambda: Qwen3VitEncoder(**SIZE, mlp_ratio=2.0, pos_embed_grid_size=5, **kwargs))


def deepseek(**kwargs: Any) -> Create:
    return seeded(lambda: DeepseekVitEncoder(**SIZE, mlp_ratio=2.0, **kwargs))


def gemma(**kwargs: Any) -> Create:
    def made() -> nn.Module:
        sizes = {"head_dim": 16, "intermediate_size": 64, "position_embedding_size": 16}
        model: Any = Gemma4VitEncoder(**SIZE, **sizes, **kwargs)
        model.pretrained_cfg = {"input_size": (3, 24, 24)}
        return model  # type: ignore[no-any-return]

    return seeded(made)


HOSTS: dict[str, Create] = {
    "qwen3_vit": qwen(out_features=16),
    "qwen3_vit_avg": qwen(global_pool="avg"),
    "deepseek_vit": deepseek(out_features=16),
    "deepseek_vit_avg": deepseek(global_pool="avg"),
    "gemma4_vit": gemma(standardize=True),
    "gemma4_vit_grouped": gemma(global_pool="avg", num_kv_heads=1, use_clipped_linears=True),
}
