"""OTPrune: a determinant of the square of all similarities, without attention or text."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, unit_rows
from vitrim.selectors.cdpruner import greedy_determinant

SHARE = 0.01
"""Factor of the squared similarities in the kernel."""


@torch.no_grad()
def transported(features: Tensor, count: int) -> Tensor:
    """(B, T) tokens in the order of selection: each maximises the determinant of I + 0.01 S S^T, S = X X^T.

    As released, every channel of X has length 1 over the tokens. (In the paper's words it is every token.)

    Args:
        features: (B, N, D).
        count: T, at most N.
    """
    x = unit_rows(features.transpose(1, 2)).transpose(1, 2)
    alike = x @ x.transpose(1, 2)
    kernel = SHARE * (alike @ alike.transpose(1, 2))
    gain = kernel.diagonal(dim1=1, dim2=2)
    gain += 1
    # what is left of a token is at least 1, so none is picked twice
    order, _ = greedy_determinant(kernel, gain.clone(), torch.zeros_like(gain), count)
    return order


@register_selector
class OTPrune(Selector):
    """Select tokens by the determinant of their squared similarities, of the connector's features.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("otprune:keep=0.098").count((24, 24))
        56
    """

    name = "otprune"
    paper = "Chen et al., OTPrune, CVPR 2026 (2602.20205)"
    published_with = "LLaVA-1.5"

    def select(self, seen: Seen) -> list[Choice]:
        picked = transported(seen.features, self.budget(seen.features.shape[1]))
        return [Choice(kept) for kept in picked.sort(dim=1).values]
