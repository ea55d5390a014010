"""Sinkhorn clustering: optimal transport between patches and learned centres (Haurum et al., ICCVW 2023)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitrim.core.assignment import Soft
from vitrim.core.plan import Layer
from vitrim.core.tokens import decision_dtype
from vitrim.methods.patchmerger import SoftMixing, SoftReducer, mixes


class Sinkhorn(SoftMixing):
    """Assign unit-length patches to K learned unit centres, softly and in balance.

    Formulas and deviations are in docs/methods/sinkhorn.md.

    Example:
        >>> Sinkhorn(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "sinkhorn"
    paper = "Which Tokens to Use? Investigating Token Reduction in Vision Transformers (ICCVW 2023)"

    eps: float = Field(0.05, gt=0.0, description="temperature of the transport; 1 as published, where tokens collapse")
    iterations: int = Field(3, ge=1, le=1000, description="rounds of scaling rows, then columns")
    in_place: bool = Field(False, description="overwrite the centres by unit vectors in every forward, as published")


@mixes(Sinkhorn)
class SinkhornReducer(SoftReducer[Sinkhorn]):
    """Parameters: the centres ``v`` (K, C)."""

    def __init__(self, config: Sinkhorn, layer: Layer) -> None:
        super().__init__(config, layer)
        self.v = nn.Parameter(torch.randn(self.num_tokens, layer.dim))

    def mix(self, patches: Tensor) -> Soft:
        values = F.normalize(patches, dim=-1)
        if self.config.in_place:
            with torch.no_grad():
                self.v.copy_(F.normalize(self.v, dim=-1))
        centres = self.v if self.config.in_place else F.normalize(self.v, dim=-1)
        scores = (centres @ values.transpose(-1, -2)).to(decision_dtype(values.dtype)) / self.config.eps
        return Soft(transport(scores, self.config.iterations), values)


def transport(scores: Tensor, iterations: int) -> Tensor:
    """Scale exp(``scores``) (B, K, P) until its rows, then its columns, have equal sums; the columns' sums are 1."""
    # In logarithms, because exp of a score over a small eps overflows in float32.
    log_mass = -math.log(scores.shape[1] + scores.shape[2])
    columns = torch.zeros_like(scores[:, :1])
    for _ in range(iterations):
        rows = log_mass - (scores + columns).logsumexp(dim=2, keepdim=True)
        columns = log_mass - (scores + rows).logsumexp(dim=1, keepdim=True)
    return (scores + rows + columns - log_mass).exp()
