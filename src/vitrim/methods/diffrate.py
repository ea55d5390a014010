"""DiffRate: prune and merge by learned amounts per block (Chen et al., DiffRate, ICCV 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitrim.core.assignment import Hard, merge, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, Site, StepOutput
from vitrim.core.matching import best_partners, full_precision, unit
from vitrim.core.method import Count, MethodConfig, Needs, Tunable
from vitrim.core.plan import Layer
from vitrim.core.reduce import Reduction
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Remove, per_layer
from vitrim.core.scoring import Score, masked_softmax, needs_of, patch_score
from vitrim.core.tokens import TokenState, decision_dtype, flat_index, take
from vitrim.errors import VitrimError

POLICY = "diffrate_policy"
KEPT = "kept_numbers"


@dataclass(frozen=True)
class Discounted(Hard):
    """A merge in which a moved token adds its size times its ``similarity`` (B, R) to the token that it joins."""

    similarity: Tensor = field(kw_only=True)

    def advance(self, x: Tensor, state: TokenState, size: Tensor | None = None) -> TokenState:
        assert self.moved is not None
        assert self.into is not None
        # As published, where the sizes of tokens that differ count less.
        gained = state.size.gather(1, self.moved) * self.similarity
        total = state.size.gather(1, self.anchor).scatter_add(1, self.into, gained)
        return super().advance(x, state, total.clamp_min(torch.finfo(total.dtype).eps))


@dataclass(frozen=True)
class KeepTokens:
    """Keep a fixed number of tokens, a class token included.

    Example:
        >>> KeepTokens(57).keep(64, 64)
        56
    """

    count: int

    def keep(self, initial: int, current: int) -> int:
        return self.count - 1


class DiffRate(MethodConfig):
    """Rank patches by class attention, drop the last ones, merge the next to last into the best.

    With ``learn=True``, ``reduction.aux("kept_numbers")`` has the numbers, and `learned` returns the config found.

    Formulas and deviations are in docs/methods/diffrate.md.

    Example:
        >>> DiffRate(prune_kept=(61, 53), merge_kept=(57, 49)).counts(64, 2)
        [56, 48]
    """

    name = "diffrate"
    paper = "DiffRate: Differentiable Compression Rate for Efficient Vision Transformers (ICCV 2023)"
    kind = "mixed"
    runtime = frozenset({"r", "prune_kept", "merge_kept"})
    tunable = Tunable("r", 0, None, per_layer="r")

    prune_kept: tuple[int, ...] | None = Field(
        None, description="tokens left by pruning in each block, class token counted; default: prune none"
    )
    merge_kept: tuple[int, ...] | None = Field(
        None, description="tokens left by merging in each block, class token counted; default: merge none"
    )
    r: Count | tuple[Count, ...] = Field(
        8, description="without those lists: patches merged in every block, or a list with one amount per block"
    )
    score: Score = Field(
        "class_token",
        description="'class_token': attention from the class token; 'prefix_mean': mean attention from all prefix "
        "tokens, for heads that read those (YOLOS); 'column_mean': attention received from all tokens, "
        "for models without a class token (computes the full map)",
    )
    learn: bool = Field(False, description="learn the amounts: patches are masked, none is removed; see `learned`")
    discount_sizes: bool = Field(False, description="a joining token adds its size times its similarity, as published")
    proportional: bool = Field(True, description="add log(size) to the attention logits")

    def faults(self) -> Iterator[str]:
        pruned, merged = self.prune_kept, self.merge_kept
        if self.learn and (pruned is not None or merged is not None or "r" in self.model_fields_set):
            yield "learn=true finds the amounts: give neither prune_kept, merge_kept nor r"
        if self.learn and self.last_block != "full":
            yield "learn=true needs last_block=full, as the last block learns its amounts, too"
        if (pruned is not None or merged is not None) and "r" in self.model_fields_set:
            yield "give either prune_kept and merge_kept, or r, not both"
        if min((*(pruned or ()), *(merged or ())), default=2) < 2:
            yield "prune_kept and merge_kept count the class token, so their smallest value is 2"
        if pruned is not None and merged is not None:
            if len(pruned) != len(merged):
                yield f"prune_kept has {len(pruned)} values but merge_kept has {len(merged)}"
            if any(after > before for before, after in zip(pruned, merged, strict=True)):
                yield "merge_kept must not be larger than prune_kept in any block"

    def amounts(self, num_layers: int) -> list[Amount | None]:
        if self.learn:
            return [Remove(0)] * num_layers
        kept = self.prune_kept if self.merge_kept is None else self.merge_kept
        if kept is None:
            return per_layer(self.r, num_layers)
        if len(kept) != num_layers:
            raise VitrimError(f"the lists have {len(kept)} amounts but the model has {num_layers} blocks")
        return [KeepTokens(count) for count in kept]

    def pruned(self, depth: int, num_layers: int, current: int, left: int) -> int:
        return current - max(min(self.prune_kept[depth] - 1, current), left) if self.prune_kept else 0

    def needs(self) -> Needs:
        return needs_of(self.score)


class DiffRateReducer(Reducer[DiffRate]):
    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        keep, survivors = self.num_keep(state), state.num_patches  # the plan's amount is what merging leaves
        if self.config.prune_kept is not None:
            survivors = min(self.config.prune_kept[self.layer.depth] - 1, survivors)
        rank = patch_score(attention, state, self.config.score).argsort(dim=1, descending=True, stable=True)
        best, tail = rank[:, :keep], rank[:, keep:survivors]
        if survivors == keep:
            return prune(state, best)
        patches = unit(x[:, state.num_prefix :].to(state.size.dtype))
        joining, receiving = take(patches, tail), take(patches, best)
        _, partner = best_partners(joining, receiving)
        # Weights of 1: a merged token is the plain mean, whatever its size.
        merged = merge(state, best, tail, partner, weight=torch.ones_like(state.size))
        if not self.config.discount_sizes:
            return merged
        return Discounted(**vars(merged), similarity=(joining * take(receiving, partner)).sum(dim=-1))

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        return patch_score(attention, state, self.config.score)


class LearningReducer(Reducer[DiffRate]):
    """Mask what the learned amounts would remove. Parameters: ``prune.logits``, ``merge.logits``, (P,) each."""

    site = "between"

    def __init__(self, config: DiffRate, layer: Layer) -> None:
        super().__init__(config, layer)
        self.prune = KeptShare(layer.initial_patches)
        self.merge = KeptShare(layer.initial_patches)

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site != self.site or attention is None:
            return x, state
        p = state.num_prefix
        policy = state.carry.get(POLICY, torch.ones_like(state.size))
        rank = self.rank(attention, policy, p)
        current = self.current(state)
        after_prune = self.prune.number(current)
        after_merge = self.merge.number(after_prune)
        # Factors of 1 and 0 with the gradient of their probability: what was gone stays gone.
        alive = policy[:, p:] * self.prune.mask(rank, current, after_prune)
        stays = self.merge.mask(rank, after_prune, after_merge)
        patches, size = self.join(x[:, p:], state.size[:, p:], rank < after_merge, alive, stays)
        policy = torch.cat([policy[:, :p], alive * stays], dim=1)
        state = replace(
            state,
            size=torch.cat([state.size[:, :p], size], dim=1),
            uniform=False,
            carry={**state.carry, POLICY: policy},
        )
        state = state.report(KEPT, self.layer.depth, torch.stack([after_prune, after_merge]))
        return torch.cat([x[:, :p], patches], dim=1), state

    def attend(self, attention: Attention, state: TokenState) -> Tensor:
        policy = state.carry.get(POLICY)
        return attention.output() if policy is None else attention.weigh(masked_softmax(attention.logits(), policy))

    def current(self, state: TokenState) -> Tensor:
        """Number of patches left so far, with the gradient of the blocks before."""
        numbers = [value for name, _, value in state.aux if name == KEPT]
        return numbers[-1][1] if numbers else state.size.new_tensor(float(state.num_patches))

    def rank(self, attention: Attention, policy: Tensor, num_prefix: int) -> Tensor:
        """(B, P) rank of each patch by importance, from 0; removed patches come last."""
        attention, policy = attention.detach(), policy.detach()
        if self.config.score != "column_mean":
            rows = 1 if self.config.score == "class_token" else num_prefix
            received = masked_softmax(attention.rows(rows).logits(), policy).sum(dim=(1, 2))
        else:
            received = (masked_softmax(attention.logits(), policy) * policy[:, None, :, None]).sum(dim=(1, 2))
        gone = policy[:, num_prefix:] < 0.5
        order = received[:, num_prefix:].masked_fill(gone, -1.0).argsort(dim=1, descending=True, stable=True)
        return order.argsort(dim=1)

    def join(self, x: Tensor, size: Tensor, receives: Tensor, alive: Tensor, stays: Tensor) -> tuple[Tensor, Tensor]:
        """Add the patches that merge to the most similar of those that stay: new patches (B, P, C) and sizes (B, P).

        ``receives`` (B, P) bool; ``alive`` and ``stays`` (B, P) 1 or 0 with gradient, 0 if pruned or if it merges.
        """
        p, channels = x.shape[1:]
        vectors = unit(x.to(decision_dtype(x.dtype)))
        with full_precision(vectors):
            similarity = vectors @ vectors.transpose(1, 2)
        itself = torch.eye(p, dtype=torch.bool, device=x.device)
        # Below every cosine: neither a patch that may not receive nor the patch itself is the partner.
        similarity, partner = similarity.masked_fill(~receives[:, None, :] | itself, -2.0).max(dim=2)
        weight = alive * (1.0 - stays)
        moving = (weight.unsqueeze(-1) * x.to(weight.dtype)).reshape(-1, channels)
        total = torch.zeros_like(moving).index_add(0, flat_index(partner, p), moving).view(x.shape)
        count = torch.zeros_like(weight).scatter_add(1, partner, weight)
        gained = size * weight.detach() * (similarity if self.config.discount_sizes else 1.0)
        size = torch.zeros_like(size).scatter_add(1, partner, gained) + size
        return ((x.to(weight.dtype) + total) / (1.0 + count).unsqueeze(-1)).to(x.dtype), size.clamp_min(1.0)


@register(DiffRate)
def _reducer(config: DiffRate, layer: Layer) -> type[Reducer[DiffRate]]:
    return LearningReducer if config.learn else DiffRateReducer


class KeptShare(nn.Module):
    """A learned distribution over the share k / K that is kept, k = 1..K."""

    def __init__(self, candidates: int) -> None:
        super().__init__()
        # all patches are kept at first, by a margin that a gradient can cross
        self.logits = nn.Parameter(torch.arange(1.0, candidates + 1.0) - candidates)

    def probabilities(self) -> Tensor:
        """(K,) in at least float32."""
        return self.logits.to(decision_dtype(self.logits.dtype)).softmax(dim=0)

    def number(self, current: Tensor) -> Tensor:
        """Number kept of ``current`` (a scalar): an integer, with the gradient of the mean share."""
        probability = self.probabilities()
        candidates = len(probability)
        k = torch.arange(1, candidates + 1, dtype=probability.dtype, device=probability.device)
        mean = current * (probability * k).sum() / candidates
        # the sum of the probabilities is 1 only up to rounding
        whole = torch.minimum((mean.detach() - 1e-3).ceil().clamp_min(1.0), current.detach())
        # The value of the integer, the gradient of the mean (straight through).
        return whole + (mean - mean.detach())

    def mask(self, rank: Tensor, current: Tensor, number: Tensor) -> Tensor:
        """(B, P) 1 where ``rank`` (B, P) is below ``number``, else 0, with the gradient of the probability of that."""
        probability = self.probabilities()
        tail = F.pad(probability.flip(0).cumsum(0).flip(0), (0, 1))  # tail[i]: k > i
        # A rank of the current patches as one of K candidates.
        index = (rank * len(probability) / current.detach()).floor().long().clamp_max(len(probability))
        chance = tail[index]
        return (rank < number.detach()).to(chance.dtype) + (chance - chance.detach())


def learned(reduction: Reduction) -> DiffRate:
    """Return the config with the amounts that ``learn=True`` found, at the model's own image size.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> learned(vitrim.reduce_(model, vitrim.DiffRate(learn=True))).merge_kept
        (197, 197)
    """
    reducers = learning_reducers(reduction)
    pruned, merged = [], []
    with torch.no_grad():
        # In the dtype of the forward: the same rounding gives the same integers.
        wide = decision_dtype(reducers[0].prune.logits.dtype)
        current = torch.tensor(
            float(reducers[0].layer.initial_patches), dtype=wide, device=reducers[0].prune.logits.device
        )
        for reducer in reducers:
            after_prune = reducer.prune.number(current)
            current = reducer.merge.number(after_prune)
            pruned.append(int(after_prune.item()) + 1)  # the class token counts
            merged.append(int(current.item()) + 1)
    given = reduction.config.model_dump(include=reduction.config.model_fields_set - {"learn"})
    return DiffRate(**given, prune_kept=tuple(pruned), merge_kept=tuple(merged))


def learning_reducers(reduction: Reduction) -> list[LearningReducer]:
    """The reducers of a model that learns its amounts, by depth; `VitrimError` if it does not."""
    found = [module for module in reduction.model.modules() if isinstance(module, LearningReducer)]
    if not found:
        raise VitrimError(f"{reduction.config.describe()} does not learn its amounts: use diffrate:learn=true")
    return sorted(found, key=lambda reducer: reducer.layer.depth)
