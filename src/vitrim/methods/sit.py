"""SiT's token slimming: a small network weighs the patches (Zong et al., Self-slimmed ViT, ECCV 2022)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.assignment import Soft
from vitrim.core.block import draw_linear_
from vitrim.core.plan import Layer
from vitrim.core.tokens import decision_dtype
from vitrim.methods.patchmerger import SoftMixing, SoftReducer, mixes


class SiT(SoftMixing):
    """Let each patch cast K weights by a two-layer network; each of K tokens is the mean of the patches by its weights.

    Formulas and deviations are in docs/methods/sit.md.

    Example:
        >>> SiT(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "sit"
    paper = "Self-slimmed Vision Transformer (ECCV 2022)"


@mixes(SiT)
class SiTReducer(SoftReducer[SiT]):
    """Parameters: ``norm``, ``hidden`` (C/2, C), ``weights`` (K, C/2), ``scale`` (1, 1, 1)."""

    def __init__(self, config: SiT, layer: Layer) -> None:
        super().__init__(config, layer)
        self.norm = nn.LayerNorm(layer.dim)
        self.hidden = nn.Linear(layer.dim, layer.dim // 2)
        self.weights = nn.Linear(layer.dim // 2, self.num_tokens)
        self.scale = nn.Parameter(torch.ones(1, 1, 1))
        for linear in (self.hidden, self.weights):
            draw_linear_(linear)

    def mix(self, patches: Tensor) -> Soft:
        logits = self.weights(F.gelu(self.hidden(self.norm(patches)))) * self.scale
        return Soft(logits.to(decision_dtype(patches.dtype)).softmax(dim=1).transpose(1, 2))
