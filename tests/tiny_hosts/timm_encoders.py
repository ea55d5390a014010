"""timm's image encoders of language models: Qwen3-VL, DeepSeek, Gemma 4, with their projectors and without."""

from __future__ import annotations

from typing import Any

from timm.models.deepseek_vit import DeepseekVitClassifier, DeepseekVitEncoder
from timm.models.gemma4_vit import Gemma4VitClassifier, Gemma4VitEncoder
from timm.models.qwen3_vit import Qwen3VitClassifier, Qwen3VitEncoder
from torch import nn

from tiny_hosts import Create
from tiny_hosts.common import seeded

FURTHER = True
SIZE: dict[str, Any] = {"img_size": 24, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}


def qwen(kind: type[nn.Module] = Qwen3VitEncoder, **kwargs: Any) -> Create:
    return seeded(lambda: kind(**SIZE, mlp_ratio=2.0, pos_embed_grid_size=5, **kwargs))


def deepseek(kind: type[nn.Module] = DeepseekVitEncoder, **kwargs: Any) -> Create:
    return seeded(lambda: kind(**SIZE, mlp_ratio=2.0, **kwargs))


def gemma(kind: type[nn.Module] = Gemma4VitEncoder, **kwargs: Any) -> Create:
    def made() -> nn.Module:
        sizes = {"head_dim": 16, "intermediate_size": 64, "position_embedding_size": 16}
        model: Any = kind(**SIZE, **sizes, **kwargs)
        getattr(model, "encoder", model).pretrained_cfg = {"input_size": (3, 24, 24)}
        return model  # type: ignore[no-any-return]

    return seeded(made)


HOSTS: dict[str, Create] = {
    "qwen3_vit": qwen(out_features=16),
    "qwen3_vit_avg": qwen(global_pool="avg"),
    "qwen3_vit_classifier": qwen(Qwen3VitClassifier, num_classes=5),
    "deepseek_vit": deepseek(out_features=16),
    "deepseek_vit_classifier": deepseek(DeepseekVitClassifier, num_classes=5, encoder_pool="align", out_features=16),
    "gemma4_vit": gemma(standardize=True),
    "gemma4_vit_grouped": gemma(global_pool="avg", num_kv_heads=1, use_clipped_linears=True),
    "gemma4_vit_classifier": gemma(Gemma4VitClassifier, num_classes=5),
}
