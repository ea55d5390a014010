"""Evo-ViT: unimportant patches wait and are ranked again later (Xu et al., AAAI 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor, nn

from vitrim.core.assignment import Hard, Soft, merge, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, Site, StepOutput, draw_linear_
from vitrim.core.method import Restore, Share, Traits
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, BringBack, KeepRule, effective_keep
from vitrim.core.scoring import ScoredPruning, patch_score
from vitrim.core.tokens import TokenState
from vitrim.errors import VitrimError

IMPORTANCE = "evo_vit_importance"
CLASS_LOGITS = "class_logits"


@dataclass(frozen=True)
class OfAll:
    """Apply another amount to all patches: waiting ones come back before it is decided."""

    amount: Amount

    def keep(self, initial: int, current: int) -> int:
        return self.amount.keep(initial, initial)


@dataclass(frozen=True)
class Rejoin(BringBack):
    """Bring back all patches after the last block, where a stage may begin as well."""

    stage: Amount | None


class EvoViT(ScoredPruning):
    """Let only the most important patches through the blocks; each stage ranks all of them again.

    Formulas and deviations are in docs/methods/evo_vit.md.

    Example:
        >>> EvoViT(keep_rate=0.5).counts(196, 12)
        [196, 196, 196, 196, 98, 98, 98, 98, 98, 98, 98, 196]
    """

    name = "evo_vit"
    paper = "Evo-ViT: Slow-Fast Token Evolution for Dynamic Vision Transformer (AAAI 2022)"
    traits = Traits(training_free=False, aligns=False)
    runtime = frozenset({"keep_rate", "blocks"})

    keep_rate: Share | tuple[Share, ...] = Field(
        0.5, description="share of all patches that go through the blocks, or a list with one share per stage"
    )
    rule: KeepRule = Field("floor_initial", description="how keep_rate becomes a count, always of all patches")
    tradeoff: float = Field(0.5, gt=0.0, le=1.0, description="t: weight of a block's own attention in the importance")
    fast_update: bool = Field(False, description="one more token, the mean of waiting patches, brings them up to date")
    rejoin: bool = Field(True, description="patches that wait come back after the last block")
    class_head: bool = Field(
        False, description="in training a second head, on the class token: its logits are reported"
    )

    def faults(self) -> Iterator[str]:
        if self.restore is not None:
            yield f"restore={self.restore} does not go with evo_vit: give rejoin"

    def restoring(self) -> Restore:
        return "zeros"  # with rejoin no patch is missing at the end

    def default_stages(self, num_layers: int) -> tuple[int, ...]:
        """A third and two thirds of the depth: blocks 4 and 8 of 12."""
        return tuple(sorted({max(1, num_layers * third // 3) for third in (1, 2)}))

    def added_tokens(self) -> int:
        return int(self.fast_update)

    def working(self, num_layers: int) -> list[Amount | None]:
        """The number of patches that go through the block of each stage; None elsewhere."""
        amounts = super().amounts(num_layers)
        if amounts[0] is not None:
            raise VitrimError("evo_vit ranks by the attention of the blocks before a stage: block 0 cannot be one")
        return [None if amount is None else OfAll(amount) for amount in amounts]

    def amounts(self, num_layers: int) -> list[Amount | None]:
        amounts = self.working(num_layers)
        return [*amounts[:-1], Rejoin(amounts[-1])] if self.rejoin else amounts


@register(EvoViT)
class EvoViTReducer(Reducer[EvoViT]):
    """Parameters: ``norm`` and ``head`` of the class token, in the last block, with ``class_head``."""

    site = "before"
    everywhere = True

    def __init__(self, config: EvoViT, layer: Layer) -> None:
        super().__init__(config, layer)
        self.norm: nn.LayerNorm | None = None
        if layer.is_last and config.class_head:
            if layer.num_classes == 0 or not layer.has_class_token:
                raise VitrimError("evo_vit: class_head=true needs a model with a class token and a classifier")
            self.norm = nn.LayerNorm(layer.dim, eps=1e-6)
            self.head = nn.Linear(layer.dim, layer.num_classes)
            draw_linear_(self.head)

    @property
    def needs_full_last_block(self) -> bool:
        return self.norm is not None  # the training head works after the block

    def follow(self, config: EvoViT, layer: Layer) -> None:
        super().follow(config, layer)
        # The last block may begin a stage and bring all back: here the stage counts.
        amounts = [amount.stage if isinstance(amount, Rejoin) else amount for amount in layer.amounts]
        depth, self.working = layer.depth, amounts[layer.depth]
        stages = [stage for stage, amount in enumerate(amounts) if amount is not None]
        # before the first stage only the last block counts, after the last ranking no block does
        self.observes = stages[0] - 1 <= depth < stages[-1]
        self.tradeoff = 1.0 if depth < stages[0] else config.tradeoff

    def num_keep(self, state: TokenState) -> int:
        # the plan's last amount brings all back; the stage itself still ranks before the block
        if self.working is None:
            return state.num_patches
        return effective_keep(self.working, 1, state.initial_patches, state.num_patches)

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site == "before" and self.working is not None:
            x, state = self.bring_back(x, state)
            return super().reduce(site, x, attention, state)
        if site == "between" and attention is not None and self.observes:
            # update the importance of the tokens in this block
            seen = state.pad_prefix(patch_score(attention, state, self.config.score), 0.0)
            if self.tradeoff < 1.0:
                seen = (1.0 - self.tradeoff) * state.carry[IMPORTANCE] + self.tradeoff * seen
            return x, replace(state, carry={**state.carry, IMPORTANCE: seen})
        if site == "after":
            if self.training and self.norm is not None:
                state = state.report(CLASS_LOGITS, self.layer.depth, self.head(self.norm(x[:, 0])))
            return self.bring_back(x, state) if self.layer.is_last and self.config.rejoin else (x, state)
        return x, state

    def carry_out(self, assignment: Hard | Soft, x: Tensor, state: TokenState) -> StepOutput:
        """Apply the assignment; the bank keeps the placeholders."""
        x, state = assignment.apply(x, state)
        if self.config.fast_update:
            # the bank holds differences to the mean, which goes through the blocks as the last token
            state = replace(state, bank=tuple(e._replace(tokens=e.tokens - x[:, -1:]) for e in state.bank))
        return x, state

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        keep = self.num_keep(state)
        importance = state.carry[IMPORTANCE]
        order = importance[:, state.num_prefix :].argsort(dim=1, descending=True, stable=True)
        if not self.config.fast_update:
            return prune(state, order[:, :keep], dropped=order[:, keep:])
        # the mean has the place of the most important placeholder; weights must not all be 0
        weight = importance.clamp_min(torch.finfo(importance.dtype).tiny)
        joining = order[:, keep + 1 :]
        mean = merge(state, order[:, : keep + 1], joining, torch.full_like(joining, keep), weight=weight)
        return replace(mean, dropped=order[:, keep:] + state.num_prefix)

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        return state.carry[IMPORTANCE][:, state.num_prefix :]

    def bring_back(self, x: Tensor, state: TokenState) -> StepOutput:
        """Bring back all patches, the placeholders last."""
        if not state.bank or not self.config.fast_update:
            return state.refill(x)
        mean, lost = x[:, -1:], state.lost
        # The mean is the last patch token: all but it, then the bank with its differences added to the mean.
        working = torch.arange(state.num_patches - 1, device=x.device).expand(x.shape[0], -1)
        x, state = prune(state, working).apply(x, state)
        bank = tuple(entry._replace(tokens=entry.tokens + mean) for entry in state.bank)
        return replace(state, bank=bank, lost=lost).refill(x)  # the patches in the mean are in the bank, too
