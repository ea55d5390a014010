"""PiToMe: merge tokens with many look-alikes, protect those with none (Tran et al., NeurIPS 2024)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vitrim.core import compiled
from vitrim.core.assignment import Hard, merge, merge_of
from vitrim.core.attention import Attention, rows_at_once
from vitrim.core.block import Reducer
from vitrim.core.matching import cosines, full_precision, pair_most_similar, unit_mean_keys
from vitrim.core.method import Share, StagedConfig, Traits
from vitrim.core.registry import register
from vitrim.core.schedule import KeepRule, half
from vitrim.core.tokens import TokenState, no_gradient, take


class PiToMe(StagedConfig):
    """Bipartite merging led by an energy: tokens in large groups of look-alikes merge, the others are protected.

    Formulas and deviations are in docs/methods/pitome.md.

    Example:
        >>> PiToMe(keep_rate=0.9).counts(64, 6)
        [58, 53, 48, 44, 40, 36]
    """

    name = "pitome"
    paper = "Accelerating Transformers with Spectrum-Preserving Token Merging (NeurIPS 2024)"
    kind = "merge"
    traits = Traits(least_kept=half)

    keep_rate: Share | tuple[Share, ...] = Field(
        0.9, description="share of the current patches kept by each block, or a list with one share per block"
    )
    blocks: tuple[int, ...] | None = Field(None, description="where to merge, 0-based; default all")
    rule: KeepRule = Field("ceil_current", description="how keep_rate becomes a count")
    margin: float = Field(
        0.75, ge=-1.0, le=1.0, description="cosine above which two tokens are alike, in block 0; falls to 0 with depth"
    )
    protect: Literal["late", "early", "always"] = Field(
        "late",
        description="blocks that protect tokens of low energy: the late half (published for DeiT), the early half "
        "(for MAE), or all",
    )

    def default_stages(self, num_layers: int) -> tuple[int, ...]:
        return tuple(range(num_layers))


@register(PiToMe)
class PiToMeReducer(Reducer[PiToMe]):
    site = "between"

    @property
    def protects(self) -> bool:
        """True if only the patches of highest energy take part."""
        late = 2 * self.layer.depth >= self.layer.num_layers
        return self.config.protect == "always" or (self.config.protect == "late") == late

    @property
    def margin(self) -> float:
        """The cosine above which patches raise each other's energy in this block."""
        return self.config.margin * (1.0 - self.layer.depth / self.layer.num_layers)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        r = self.num_removed(state)
        keys = unit_mean_keys(attention, state.num_prefix)
        if compiled.suit(keys) and keys.shape[0] * keys.shape[1] ** 2 <= compiled.MOST:
            # one product of all keys serves both energies and pairs
            similarity = cosines(keys, keys)
            energy = self.alikeness(similarity.clone()).mean(dim=-1)
            index = torch.empty(keys.shape[0], state.num_tokens + r, dtype=torch.int64)
            PAIR(similarity, energy, r, self.protects, state.num_prefix, index)
            return merge_of(index, r)
        rank = self.energy(keys).argsort(dim=1, descending=True, stable=True)
        # Protected are the patches of low energy: only the 2 r of highest energy form the r pairs.
        candidates = rank[:, : 2 * r] if self.protects else rank
        sources, destinations = candidates[:, ::2], candidates[:, 1::2]
        similarity = cosines(take(keys, sources), take(keys, destinations))
        if self.protects:
            stays, moved, partner = rank[:, 2 * r :], sources, similarity.argmax(dim=-1)
        else:
            order, partner = pair_most_similar(similarity, r)
            stays, moved = sources.gather(1, order[:, r:]), sources.gather(1, order[:, :r])
        return merge(state, torch.cat([stays, destinations], dim=1), moved, partner + stays.shape[1])

    def alikeness(self, similarity: Tensor) -> Tensor:
        """Turn ``similarity``, in place, into what each pair adds to the energy of both its patches."""
        return F.elu(similarity.sub_(self.margin), inplace=True)

    def energy(self, keys: Tensor) -> Tensor:
        """(B, P) energy of the patches with keys (B, P, d) of length 1."""
        # Some rows at a time, because the similarities of all pairs would be the peak of the model's memory. A pair
        # counts for both its patches, so every step skips the pairs of earlier steps.
        step, others = rows_at_once(keys), keys.transpose(1, 2)
        with no_gradient(), full_precision(keys):
            if step >= keys.shape[1]:
                return self.alikeness(keys @ others).mean(dim=-1)
            total = torch.zeros_like(keys[..., 0])
            for at in range(0, keys.shape[1], step):
                pairs = self.alikeness(keys[:, at : at + step] @ others[:, :, at:])
                total[:, at : at + step] += pairs.sum(dim=2)
                total[:, at + step :] += pairs[:, :, step:].sum(dim=1)
        return total / keys.shape[1]


def _pair(similarity: Any, energy: Any, r: int, protects: bool, num_prefix: int, index: Any) -> None:
    """Fill ``index`` with anchors, the r moved and their destinations in a loop, as `PiToMeReducer.assign` does."""
    patches = similarity.shape[1]
    taking_part = 2 * r if protects else patches
    sources, destinations = (taking_part + 1) // 2, taking_part // 2
    kept = num_prefix + patches - r
    first = kept - destinations  # the destinations are the last anchors
    best, partner = np.empty(sources, similarity.dtype), np.empty(sources, np.int64)
    # The rank decides alternately: even ranks are sources, odd ranks destinations.
    for b in range(similarity.shape[0]):
        rank = np.argsort(-energy[b], kind="mergesort")
        for s in range(sources):
            row = similarity[b, rank[2 * s]]
            partner[s], best[s] = 0, row[rank[1]]
            for d in range(1, destinations):
                if row[rank[2 * d + 1]] > best[s]:
                    partner[s], best[s] = d, row[rank[2 * d + 1]]
        order = np.arange(sources) if protects else np.argsort(-best, kind="mergesort")
        for n in range(num_prefix):
            index[b, n] = n
        at = num_prefix
        for m in range(taking_part, patches):
            index[b, at] = num_prefix + rank[m]
            at += 1
        for m in range(r, sources):
            index[b, at] = num_prefix + rank[2 * order[m]]
            at += 1
        for d in range(destinations):
            index[b, first + d] = num_prefix + rank[2 * d + 1]
        for m in range(r):
            index[b, kept + m] = num_prefix + rank[2 * order[m]]
            index[b, kept + r + m] = first + partner[order[m]]


PAIR = compiled.Loop(_pair)
