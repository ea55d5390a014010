"""VisionZip: the most attended tokens unchanged, the others merged into a few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, complement, unit_rows
from vitrim.errors import VitrimError
from vitrim.selectors.fastervlm import most_attended


class Zipped(NamedTuple):
    """The tokens of VisionZip.

    Attributes:
        dominant: (B, n) unchanged tokens, in raster order.
        anchors: (B, C) tokens into which others merge, in raster order.
        assign: (B, N) number of the anchor of each token, its own for anchors; -1: dominant.
        contextual: (B, C, D) merged tokens, in place of the anchors.
    """

    dominant: Tensor
    anchors: Tensor
    assign: Tensor
    contextual: Tensor


def zipped(scores: Tensor, keys: Tensor, features: Tensor, dominant: int, contextual: int) -> Zipped:
    """Keep the tokens with the largest scores, and merge each other token into the anchor with the most similar key.

    Anchors are the others at regular steps, from the first. A contextual token is its anchor plus the mean of its
    members, so about twice as long as a token, as published.

    Args:
        scores, keys, features: (B, N), (B, N, d) means over heads, (B, N, D).
        dominant: tokens by score, without a class token.
        contextual: C, at most the others.
    """
    batch, total = scores.shape
    kept = most_attended(scores, dominant)
    rest = complement(kept, total)
    left = rest.shape[1]
    if contextual > left:
        raise VitrimError(f"{contextual} contextual tokens cannot be made of the {left} that {dominant} dominant leave")
    assign = torch.full_like(rest.new_empty(batch, total), -1)
    if contextual == 0:
        return Zipped(kept, rest[:, :0], assign, features[:, :0])
    step = max(1, left // contextual)
    is_anchor = torch.zeros(left, dtype=torch.bool, device=rest.device)
    # Anchors at steps from the first; what remains at the end is no anchor.
    is_anchor[: step * contextual : step] = True
    metric = unit_rows(keys.gather(1, rest[:, :, None].expand(-1, -1, keys.shape[2])))
    near = (metric @ metric[:, is_anchor].transpose(1, 2)).max(dim=2).indices  # (B, left)
    # An anchor is its own nearest, whatever rounding says.
    near[:, is_anchor] = torch.arange(contextual, device=rest.device)
    anchors, members = rest[:, is_anchor], rest[:, ~is_anchor]
    assign = assign.scatter(1, rest, near)
    width = features.shape[2]
    rows = features.gather(1, members[:, :, None].expand(-1, -1, width))
    into = near[:, ~is_anchor]
    wide = into[:, :, None].expand(-1, -1, width)
    sums = features.new_zeros(batch, contextual, width).scatter_add(1, wide, rows)
    counts = features.new_zeros(batch, contextual).scatter_add(1, into, torch.ones_like(into, dtype=features.dtype))
    means = sums / counts.clamp_min(1)[:, :, None]
    own = features.gather(1, anchors[:, :, None].expand(-1, -1, width))
    return Zipped(kept, anchors, assign, own + means)


@register_selector
class VisionZip(Selector):
    """Select the most attended tokens, and merge the others into a few by their keys.

    A class token that the connector can read comes first and counts in the budget. Without one, the score of a token is
    the attention it gets from all others.

    Example:
        >>> import vitrim
        >>> selector = vitrim.parse_selector("visionzip:tokens=64")
        >>> selector.shares(64)  # 54 + 10, as published
        (54, 10)
    """

    name = "visionzip"
    paper = "Yang et al., VisionZip: Longer is Better but Not Necessary in Vision Language Models, CVPR 2025"
    place = "before"
    merges = True
    published_with = "LLaVA-1.5, LLaVA-NeXT, Mini-Gemini"

    contextual: int | None = Field(
        None, ge=0, description="how many of the budget are merged tokens; default 10 of 64, rounded"
    )
    order: Literal["raster", "appended"] = Field(
        "raster", description="merged tokens stand at their anchors, or behind all others, as published"
    )

    def faults(self) -> Iterator[str]:
        if self.tokens is not None and self.contextual is not None and self.contextual >= self.tokens:
            yield f"contextual={self.contextual} leaves none of {self.tokens} tokens"
        if self.order == "appended" and self.positions == "original":
            yield "order=appended has no original positions"

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(attention="read")

    def keeps_places(self) -> bool:
        return self.order == "raster"

    def shares(self, budget: int) -> tuple[int, int]:
        """Split ``budget`` into dominant tokens, class token included, and contextual ones."""
        merged = round(budget * 10 / 64) if self.contextual is None else min(self.contextual, budget - 1)
        return budget - merged, merged

    def select(self, seen: Seen) -> list[Choice]:
        assert seen.scores is not None
        assert seen.keys is not None
        total = seen.scores.shape[1]
        front = None if self.positions == "original" else seen.class_token
        budget = self.budget(total)
        if budget == total:
            return [Choice(torch.arange(total, device=seen.features.device)) for _ in seen.features]
        dominant, contextual = self.shares(budget)
        found = zipped(seen.scores, seen.keys, seen.features, dominant - (front is not None), contextual)
        kept = torch.cat([found.dominant, found.anchors], dim=1)
        width = seen.features.shape[2]
        own = seen.features.gather(1, found.dominant[:, :, None].expand(-1, -1, width))
        tokens = torch.cat([own, found.contextual], dim=1)
        merged = torch.zeros_like(kept, dtype=torch.bool)
        merged[:, found.dominant.shape[1] :] = True
        if self.order == "raster":
            kept, order = kept.sort(dim=1)
            tokens = tokens.gather(1, order[:, :, None].expand(-1, -1, width))
            merged = merged.gather(1, order)
        firsts = [None] * len(kept) if front is None else front[:, None].unbind()
        parts = zip(kept, tokens, firsts, merged, strict=True)
        return [Choice(own, new, first, merged=made) for own, new, first, made in parts]
