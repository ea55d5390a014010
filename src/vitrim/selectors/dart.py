"""DART: a few pivots, and the tokens that are least similar to them, on embeddings or within a language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, descending, unit_rows
from vitrim.core.tokens import decision_dtype

LEAST = 1e-8
"""Smallest product of two norms."""


def strongest(embeddings: Tensor, count: int) -> Tensor:
    """(n,) rows of ``embeddings`` (M, D) with the largest L1 norms, descending; n is at most M."""
    sums = embeddings.to(decision_dtype(embeddings.dtype)).abs().sum(dim=-1)
    return descending(sums[None])[0, :count]


def least_like_pivots(features: Tensor, text: Tensor | None, count: int, pivots: int) -> Tensor:
    """(T,) kept tokens of one image, in raster order.

    Keeps the strongest tokens of the image as pivots. Then each of them and of the text pivots, in this order, adds its
    share of the remaining count: the tokens of smallest cosine with it.

    Args:
        features: (N, D).
        text: (n, D) text pivots, or None.
        count: T, at most N.
        pivots: of the image.
    """
    x = features.to(decision_dtype(features.dtype))
    own = strongest(x, min(pivots, count))
    acting = x[own] if text is None else torch.cat([x[own], text.to(x)])
    lengths = x.norm(dim=-1)
    cosine = (acting @ x.T) / (acting.norm(dim=-1)[:, None] * lengths).clamp_min(LEAST)
    taken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    taken[own] = True
    left = count - len(own)
    for number, row in enumerate(cosine):
        share = -(-left // (len(cosine) - number))
        if share <= 0:
            break
        taken[descending((-row).masked_fill(taken, -torch.inf)[None])[0, :share]] = True
        left -= share
    return taken.nonzero().squeeze(1)


def quota(tokens: int, reduction: float) -> int:
    """Tokens that TensorRT Edge-LLM keeps of ``tokens`` when it removes the share ``reduction``, in single precision.

    Example:
        >>> quota(40, 0.5)
        20
    """
    share = float(torch.tensor(1.0) - torch.tensor(reduction, dtype=torch.float32))
    return min(max(int(torch.tensor(tokens * share, dtype=torch.float64).ceil()), 1), tokens)


def shortened_prompt(
    embeddings: Tensor, spans: Sequence[tuple[int, int]], reduction: float, pivot_image: int = 4, pivot_text: int = 4
) -> Tensor:
    """Kept positions of a prompt, ascending, text included, as TensorRT Edge-LLM cuts it before the first layer.

    Nothing is cut with fewer than 16 image tokens in all.

    Args:
        embeddings: (S, D) input embeddings of the prompt.
        spans: of image tokens, half open.
        reduction: share removed from every span.
        pivot_image: pivots of every span.
        pivot_text: pivots of all text, shared by all spans.
    """
    is_text = torch.ones(len(embeddings), dtype=torch.bool, device=embeddings.device)
    for start, stop in spans:
        is_text[start:stop] = False
    counts = [stop - start for start, stop in spans]
    quotas = [quota(count, reduction) for count in counts]
    stays = torch.ones_like(is_text)
    if sum(counts) >= FEWEST and sum(quotas) < sum(counts):
        text = embeddings[is_text]
        text = text[strongest(text, pivot_text)]
        for (start, stop), count in zip(spans, quotas, strict=True):
            stays[start:stop] = False
            stays[start + least_like_pivots(embeddings[start:stop], text, count, pivot_image)] = True
    return stays.nonzero().squeeze(1)


FEWEST = 16
"""Prompts with fewer image tokens are not cut."""


def in_language_model(
    states: Tensor,
    keys: Tensor,
    image: tuple[int, int],
    per_pivot: int,
    pivot_image: int = 4,
    pivot_text: int = 4,
    order: Sequence[int] | None = None,
) -> tuple[Tensor, list[int]]:
    """(n,) kept image tokens, counted from the first, ascending, and the pivots' positions in their order.

    DART as published: before a layer of the language model, from the outputs of the layer before.

    Args:
        states: (S, D) outputs of the layer before, after the model's final norm.
        keys: (H, S, d) keys of that layer, rotated.
        image: first position of the image, and the one after its last.
        per_pivot: further tokens that each pivot keeps.
        pivot_image: pivots of the image.
        pivot_text: pivots of the text after it.
        order: of the pivots; by default image, then text, each by descending strength. The release uses the order of a
            Python ``set`` of their positions, and the result depends on it.
    """
    start, stop = image
    sums = keys.to(decision_dtype(keys.dtype)).abs().sum(dim=(0, 2))
    own = (start + descending(sums[None, start:stop])[0, :pivot_image]).tolist()
    words = (stop + descending(sums[None, stop:])[0, :pivot_text]).tolist()
    acting = [*own, *words] if order is None else list(order)
    x = unit_rows(states)
    taken = torch.zeros(stop - start, dtype=torch.bool, device=x.device)
    taken[[position - start for position in own]] = True
    for row in x[acting] @ x[start:stop].T:
        free = min(per_pivot, int((~taken).sum()))
        taken[descending((-row).masked_fill(taken, -torch.inf)[None])[0, :free]] = True
    return taken.nonzero().squeeze(1), acting


@register_selector
class Dart(Selector):
    """Select a few pivots of image and text, and the least similar tokens, on the language model's embeddings.

    As in TensorRT Edge-LLM. The published DART acts within the language model, which selectors cannot do.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("dart:keep=0.75,pivots=4").count(1995)
        1497
    """

    name = "dart"
    paper = "Wen et al., Stop Looking for Important Tokens in Multimodal Language Models, EMNLP 2025"
    rounding = "ceil"
    published_with = "Qwen3-VL (on embeddings); LLaVA-1.5, LLaVA-NeXT, Qwen2.5-VL (within the language model)"

    pivots: int = Field(4, ge=0, description="pivots of every image: the tokens with the largest L1 norms")
    text_pivots: int = Field(4, ge=0, description="pivots of the text of the prompt, shared by its images")

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(text=self.text_pivots > 0)

    def select(self, seen: Seen) -> list[Choice]:
        budget = self.budget(seen.features.shape[1])
        found = []
        for place, features in enumerate(seen.features):
            text = None
            if seen.text is not None and self.text_pivots:
                text = seen.text[place]
                text = text[strongest(text, self.text_pivots)]
            pivots = max(self.pivots, 1) if text is None or not len(text) else self.pivots
            found.append(Choice(least_like_pivots(features, text, budget, pivots)))
        return found
