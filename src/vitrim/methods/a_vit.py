"""A-ViT: tokens that halt (Yin et al., A-ViT: Adaptive Tokens for Efficient Vision Transformer, CVPR 2022)."""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, Site, StepOutput
from vitrim.core.method import MethodConfig, Needs, Traits, Tunable
from vitrim.core.registry import register
from vitrim.core.scoring import prune_flagged
from vitrim.core.tokens import TokenState, decision_dtype

PONDER = "ponder"
HALTING = "halting"


class AViT(MethodConfig):
    """Halt each token once its halting probabilities, summed over the blocks, reach 1 - ``eps``.

    Auxiliary outputs in training: ``halting`` (B, N), h_l after every block, 0 where the token had halted; after the
    last block ``ponder`` (B, N), blocks used plus remainder, and ``steps`` (B, N), blocks used.

    Formulas and deviations are in docs/methods/a_vit.md.

    Example:
        >>> AViT(gate_scale=10.0, gate_center=75.0).describe()  # DeiT-S
        'a_vit:gate_scale=10.0,gate_center=75.0'
    """

    name = "a_vit"
    paper = "A-ViT: Adaptive Tokens for Efficient Vision Transformer (CVPR 2022)"
    traits = Traits(training_free=False, single_images=True, aligns=False)
    tunable = Tunable("gate_center", 100.0, 0.0, digits=3)

    gate_scale: float = Field(10.0, gt=0.0, description="gamma: factor of channel 0 in the halting probability")
    gate_center: float = Field(30.0, description="beta, subtracted: 30 for DeiT-T, 75 for DeiT-S")
    eps: float = Field(0.01, gt=0.0, lt=1.0, description="a token halts when its probabilities sum to 1 - eps")

    def needs(self) -> Needs:
        return Needs(prefix=True)  # an image is done when its prefix is: without one it would be done at once

    def is_adaptive(self) -> bool:
        return True

    def obstacle(self) -> str | None:
        return (
            "an image is done when its class token halts, in any block: in a fixed graph every token would run to the "
            "end, masked, which saves nothing"
        )


@register(AViT)
class AViTReducer(Reducer[AViT]):
    site = "after"
    everywhere = True

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site != self.site:
            return x, state
        state = self.accumulate(x, state)
        # The output is the mean over the blocks, weighted by halting probabilities, not what the last block computes.
        if self.layer.is_last:
            return state.carry["output"], replace(state, carry={})
        if self.training:
            # In training halted tokens stay, as zeros that nobody attends to, and every image keeps its shape.
            alive = self.alive(state)
            return x * alive.unsqueeze(-1).to(x.dtype), replace(state, mask=alive)
        assignment = self(x, attention, state)
        if assignment is not None:
            x, state = assignment.apply(x, state)
        p = state.num_prefix
        if p < 2:  # a single prefix token needs no mask once it has halted: no token is left to see it
            return x, state
        mask = torch.ones_like(state.size, dtype=torch.bool) if state.mask is None else state.mask
        return x, replace(state, mask=torch.cat([mask[:, :p] & self.alive(state)[:, :p], mask[:, p:]], dim=1))

    def remember(self, attention: Attention, state: TokenState) -> None:
        """Keep nothing: halting depends on the output of the block, so q, k and v need not live through the MLP."""

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        alive, p = self.alive(state), state.num_prefix
        running = alive[:, :p].any(1, keepdim=True)  # a token that the head may read still changes
        return prune_flagged(state, alive[:, p:] & running, state.num_patches, follows=True)

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        return 1.0 - state.carry["spent"][:, state.num_prefix :]

    def accumulate(self, y: Tensor, state: TokenState) -> TokenState:
        """Add this block's halting probability to the state: spent, remainder and output of every token."""
        if "spent" not in state.carry:
            zero = torch.zeros_like(state.size)
            start = {"spent": zero, "rest": zero + 1, "output": torch.zeros_like(y)}
            state = replace(state, carry={**start, "steps": zero} if self.training else start)
        carry, alive = state.carry, self.alive(state)
        raw = (
            torch.sigmoid(self.config.gate_scale * y[..., 0].to(decision_dtype(y.dtype)) - self.config.gate_center)
            * alive
        )
        # The last block takes the whole remainder, so that the weights of a token sum to 1.
        h = alive.to(raw.dtype) if self.layer.is_last else raw
        spent = carry["spent"] + h.detach()  # no gradient: it only decides
        # A token that halts here adds its remainder to the mean, one that goes on its probability, a halted one
        # nothing.
        halts, goes_on = alive & (spent >= (1.0 - self.config.eps)), alive & (spent < (1.0 - self.config.eps))
        share = torch.where(halts, carry["rest"], torch.where(goes_on, h, 0.0))
        new = {
            "spent": spent,
            "rest": carry["rest"] - h * goes_on,
            "output": carry["output"] + y * share.unsqueeze(-1).to(y.dtype),
        }
        if self.training:
            new["steps"] = carry["steps"] + alive
            state = state.report(HALTING, self.layer.depth, raw)
            if self.layer.is_last:
                # the remainder of a token no longer changes once it has halted
                state = state.report(PONDER, self.layer.depth, new["steps"] + new["rest"])
                state = state.report("steps", self.layer.depth, new["steps"])
        return replace(state, carry=new)

    def alive(self, state: TokenState) -> Tensor:
        """(B, N) bool, prefix included: tokens that have not halted and are not padding."""
        alive = state.carry["spent"] < (1.0 - self.config.eps)
        return alive if state.mask is None else alive & state.mask
