"""T2T-ViT, `vitrim.models.t2t_vit`: a timm ViT behind its own stem."""

from __future__ import annotations

from vitrim.hosts.timm.common import TimmHost
from vitrim.hosts.timm.vit import ReducedTimmBlock
from vitrim.models.t2t_vit import T2TViT


class T2TViTHost(TimmHost):
    """T2T-ViT: its blocks are timm's; the stem is not reduced. See [models](models/README.md)."""

    name = "vitrim T2T-ViT"
    reduced_blocks = (ReducedTimmBlock,)
    model_classes = (T2TViT,)
    calls = (*TimmHost.calls, "pool")
