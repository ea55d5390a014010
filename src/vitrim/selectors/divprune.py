"""DivPrune: tokens as far from each other as possible."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, first_largest, unit_rows


@torch.no_grad()
def farthest_first(features: Tensor, count: int) -> Tensor:
    """(B, T) tokens of ``features`` (B, N, D) in the order of selection: each the farthest from those before, by 1 -
    cosine.

    The first is the token whose nearest neighbour is farthest. A running minimum makes a pick cost N comparisons.
    Unlike in the release, duplicates cannot be selected twice. Zero tokens have no cosine and come last.
    """
    normed = unit_rows(features)
    cosine = normed @ normed.transpose(1, 2)
    distance = (1 - cosine) * cosine.diagonal(dim1=1, dim2=2).round()[:, None]  # with itself: 1, or 0 for zeros
    own = distance.diagonal(dim1=1, dim2=2)  # a view
    own.fill_(torch.inf)
    pick = first_largest(distance.amin(dim=1))
    own.fill_(-torch.inf)  # so that the minimum excludes them, too
    images = torch.arange(len(features), device=features.device)
    picked, nearest = [pick], distance[images, pick[:, 0]]
    for _ in range(count - 1):
        pick = first_largest(nearest)
        picked.append(pick)
        # The distance to the nearest pick so far; picks themselves stay at minus infinity.
        nearest = torch.minimum(nearest, distance[images, pick[:, 0]])
    return torch.cat(picked, dim=1)


@register_selector
class DivPrune(Selector):
    """Select tokens as far from each other as possible: farthest first, by the cosine of the connector's features.

    Per image; in the release the first prompt of a batch decides for all.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("divprune:keep=0.098").count((24, 24))
        56
    """

    name = "divprune"
    paper = "Alvar et al., DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models, CVPR 2025"
    published_with = "LLaVA-1.5, LLaVA-NeXT, LLaVA-NeXT-Video"

    def select(self, seen: Seen) -> list[Choice]:
        picked = farthest_first(seen.features, self.budget(seen.features.shape[1]))
        return [Choice(kept) for kept in picked.sort(dim=1).values]
