"""vid-TLDR: merge tokens by how sharply they attend (Choi et al., vid-TLDR, CVPR 2024)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, Soft
from vitrim.core.attention import Attention, KnownMap, at_once, map_is_faster
from vitrim.core.block import Reducer, StepOutput
from vitrim.core.matching import alternate_cosines, match_alternate
from vitrim.core.method import Fused, MethodConfig, Needs, Traits, Tunable
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Fuse, at_blocks, check_blocks, half
from vitrim.core.tokens import TokenState, changed, decision_dtype, no_gradient


class VidTLDR(MethodConfig):
    """Merge similar tokens in the first blocks, between attention and MLP; background counts for nothing.

    Formulas and deviations are in docs/methods/vid_tldr.md.

    Example:
        >>> VidTLDR(r=[600, 200, 100]).counts(1568, 12)[:4]
        [968, 768, 668, 668]
    """

    name = "vid_tldr"
    paper = "vid-TLDR: Training Free Token Merging for Light-weight Video Transformer (CVPR 2024)"
    kind = "merge"
    traits = Traits(least_kept=half)
    runtime = frozenset({"r"})
    tunable = Tunable("r", 0, None, per_layer="r", places="blocks")

    r: Fused | tuple[Fused, ...] = Field(
        0.2,
        description="tokens merged per block, or below 1 a share of the current ones; or a list from the first block "
        "on, or with one for each of blocks",
    )
    blocks: tuple[int, ...] | None = Field(
        None, description="where to merge, 0-based; default the first third, or as many as the list has"
    )
    head: Literal["patches", "tokens"] = Field(
        "patches", description="what an averaging head counts: patches, or the remaining tokens (as released)"
    )
    proportional: bool = Field(True, description="add log(size) to the attention logits")

    def needs(self) -> Needs:
        return Needs(attention_map=True)

    def unplaced(self) -> str | None:
        return None if self.head == "patches" else "hands out the tokens that are left, as head=tokens says"

    def stages(self, num_layers: int) -> tuple[int, ...]:
        if self.blocks is not None:
            return tuple(sorted(self.blocks))
        return tuple(range(len(self.r) if isinstance(self.r, tuple) else max(num_layers // 3, 1)))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        blocks = self.stages(num_layers)
        check_blocks(blocks, num_layers)
        return at_blocks(Fuse, self.r, blocks, num_layers, "vid_tldr: r")


@register(VidTLDR)
class VidTLDRReducer(Reducer[VidTLDR]):
    site = "between"

    def prepare(self, attention: Attention, state: TokenState) -> Attention:
        return KnownMap.of(attention) if self.num_removed(state) > 0 and map_is_faster(attention) else attention

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        p = state.num_prefix
        with no_gradient():
            biased = self.config.proportional and not state.uniform
            sharp = sharpness(attention.detach(), state.size if biased else None)
            similarity = alternate_cosines(x.to(decision_dtype(x.dtype)), p)
            pairs = match_alternate(state, similarity, self.num_removed(state))
            assert pairs.moved is not None
            # A token adds its size times its saliency to the mean; anchors keep their own size.
            moved = state.size.gather(1, pairs.moved) * saliency(sharp[:, p:]).gather(1, pairs.moved - p)
            mass = state.size.scatter(1, pairs.moved, moved.to(state.size.dtype))
        return changed(pairs, weight=mass)

    def carry_out(self, assignment: Hard | Soft, x: Tensor, state: TokenState) -> StepOutput:
        assert isinstance(assignment, Hard)
        assert assignment.weight is not None
        # the weight of a token in a mean is also the size that it adds
        return changed(assignment, weight=None).apply(x, changed(state, size=assignment.weight))


def sharpness(attention: Attention, size: Tensor | None) -> Tensor:
    """(B, N) sharpness of the attention of each token, averaged over heads: log N minus its entropy, in nats.

    ``size`` (B, N): its logarithm is removed from the bias of the attention; None if it is not in it.
    """
    batch, heads, m, _ = attention.q.shape
    n = attention.k.shape[2]
    # As many heads at a time as fit into the budget of maps.
    step = heads
    if not (isinstance(attention, KnownMap) or torch.compiler.is_compiling()):
        step = at_once(heads, batch * m * n * decision_dtype(attention.q.dtype).itemsize, attention.q.device)
    total: Tensor | None = None
    for first in range(0, heads, step):
        share = attention.narrow(1, first, min(step, heads - first)).probabilities()
        if size is not None:
            share = share / size[:, None, None, :].to(share.dtype)
            share = share / share.sum(dim=-1, keepdim=True)
        total = share.sum(dim=1) if total is None else total + share.sum(dim=1)
    assert total is not None
    # `saliency` ignores the constant log N. With it, small differences between entropies that are all close to log N
    # keep their digits in float32: logits of tiny models are up to 7e-6 off those in float64, without it up to 4e-5.
    relative = total * (n / heads)
    return torch.xlogy(relative, relative).mean(dim=-1)


def saliency(sharp: Tensor) -> Tensor:
    """(B, P) weights in [0, 1] from the `sharpness` (B, P) of patches: 0 for background, 1 for the sharpest."""
    scaled = sharp - sharp.amin(dim=1, keepdim=True)
    largest = scaled.amax(dim=1, keepdim=True)
    scaled = scaled / torch.where(largest > 0, largest, 1.0)
    above = (scaled - scaled.mean(dim=1, keepdim=True)).clamp_min(0.0)
    largest = above.amax(dim=1, keepdim=True)
    return torch.where(largest > 0, above / torch.where(largest > 0, largest, 1.0), 1.0)
