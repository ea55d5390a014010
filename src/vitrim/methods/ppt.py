"""PPT: prune or pool, depending on the image (Wu et al., PPT: Token Pruning and Pooling for Efficient ViTs, 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, merge, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, StepOutput
from vitrim.core.matching import alternate_similarity, match_alternate
from vitrim.core.method import Fused, MethodConfig, Needs, Traits, Tunable
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Fuse, at_blocks, check_blocks, half, quarter_blocks
from vitrim.core.scoring import Score, needs_of, patch_score
from vitrim.core.tokens import TokenState, changed, is_traced, no_gradient


class PPT(MethodConfig):
    """Prune where a few patches get all the attention, pool where it is spread; between attention and MLP.

    Formulas and deviations are in docs/methods/ppt.md.

    Example:
        >>> PPT(r=50).counts(196, 12)[::3]
        [196, 146, 96, 48]
    """

    name = "ppt"
    paper = "PPT: Token Pruning and Pooling for Efficient Vision Transformers (2023)"
    kind = "mixed"
    traits = Traits(least_kept=half)
    runtime = frozenset({"r", "threshold", "spread"})
    tunable = Tunable("r", 0, None, per_layer="r", places="blocks")

    r: Fused | tuple[Fused, ...] = Field(
        0.3, description="patches removed at each stage, or below 1 a share of the current ones; or a list"
    )
    blocks: tuple[int, ...] | None = Field(None, description="stages, 0-based; default a quarter of the depth apart")
    threshold: float = Field(
        7e-5, ge=0.0, description="variance of the scores below which an image is pooled; 0: always prune"
    )
    spread: float | None = Field(
        None,
        ge=0.0,
        description="instead of threshold: a multiple of 1 / P^2 for P current patches, for images of any size",
    )
    score: Score = Field(
        "class_token",
        description="attention that is multiplied by the length of the values: 'class_token', 'prefix_mean' of all "
        "prefix tokens, or 'column_mean' from all tokens, for models without a class token (computes the full map)",
    )
    proportional: bool = Field(
        True, description="add log(size) to the attention logits, and weigh by size; false: neither (MAE)"
    )

    def faults(self) -> Iterator[str]:
        if self.spread is not None and "threshold" in self.model_fields_set:
            yield "give either threshold or spread"

    def needs(self) -> Needs:
        return needs_of(self.score)

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return quarter_blocks(num_layers) if self.blocks is None else tuple(sorted(self.blocks))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        blocks = self.stages(num_layers)
        check_blocks(blocks, num_layers)
        return at_blocks(Fuse, self.r, blocks, num_layers, "ppt: r")

    def least_variance(self, patches: int) -> float:
        """Variance of the scores of ``patches`` patches from which on an image is pruned."""
        return self.threshold if self.spread is None else self.spread / patches**2


@dataclass(frozen=True)
class Afresh(Hard):
    """An assignment that counts every token once, ignoring sizes."""

    def apply(self, x: Tensor, state: TokenState) -> StepOutput:
        return super().apply(x, changed(state, size=torch.ones_like(state.size), uniform=True))


@register(PPT)
class PPTReducer(Reducer[PPT]):
    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        p, keep = state.num_prefix, self.num_keep(state)
        threshold = self.config.least_variance(state.num_patches)
        with no_gradient():
            score = self.scores(attention, state)
            order = score.argsort(dim=1, descending=True, stable=True)
            if threshold == 0.0:  # no variance is below
                return self.counted(prune(state, order[:, :keep]))
            pools = (variance(score) < threshold).expand(-1, state.num_tokens)
            traced = torch.compiler.is_compiling() or is_traced()
            if score.device.type == "cpu" and not traced and not pools.any():  # nothing is waited for there
                return self.counted(prune(state, order[:, :keep]))
            pooled = match_alternate(state, alternate_similarity(attention, p), self.num_removed(state))
            assert pooled.moved is not None
            assert pooled.into is not None
            # every image has equally many anchors and equally many that leave
            kept, left = order.split([keep, order.shape[1] - keep], dim=1)
            # In images that prune, all join entry `keep`, which is none: they are lost.
            kept = torch.where(pools[:, :keep], pooled.anchor[:, p:] - p, kept)
            left = torch.where(pools[:, : left.shape[1]], pooled.moved - p, left)
            into = torch.where(pools[:, : left.shape[1]], pooled.into - p, keep)
        return self.counted(merge(state, kept, left, into, ragged=True))

    def counted(self, decided: Hard) -> Hard:
        """``decided``, or its `Afresh` form where sizes do not count."""
        return decided if self.config.proportional else Afresh(**vars(decided))

    def scores(self, attention: Attention, state: TokenState) -> Tensor:
        """(B, P) scores of the patches, which sum to 1, in at least float32."""
        received = patch_score(attention, state, self.config.score)
        values = attention.values.detach()[:, :, state.num_prefix :]
        score = received * values.to(received.dtype).square().sum(dim=(1, 3)).sqrt()
        return score / score.sum(dim=1, keepdim=True).clamp_min(torch.finfo(score.dtype).tiny)


def variance(score: Tensor) -> Tensor:
    """(B, 1) unbiased variance of the scores (B, P) of each image, P at least 2; B may be 0.

    Example:
        >>> variance(torch.tensor([[1.0, 3.0]]))
        tensor([[2.]])
    """
    apart = score - score.mean(dim=1, keepdim=True)
    return apart.square().sum(dim=1, keepdim=True) / (score.shape[1] - 1)
