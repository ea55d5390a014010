"""Scores of patches, and pruning by them."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from vitrim.core.assignment import Hard, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.method import MethodConfig, Needs, StagedConfig
from vitrim.core.tokens import TokenState, decision_dtype, flagged, is_traced, no_gradient, sizes_follow
from vitrim.errors import VitrimError

Score = Literal["class_token", "prefix_mean", "column_mean"]
EPSILON = 1e-6  # in `masked_softmax`

C = TypeVar("C", bound=MethodConfig)


class ScoredPruning(StagedConfig):
    """Options of methods that keep the patches with the highest attention score at a few stages."""

    score: Score = Field(
        "class_token",
        description="'class_token': attention from the class token; 'prefix_mean': mean attention from all tokens in "
        "front of the patches, for heads that read those (YOLOS); 'column_mean': attention received from all tokens, "
        "for models without a class token (computes the full map in these blocks)",
    )

    def needs(self) -> Needs:
        return needs_of(self.score)


def needs_of(score: Score) -> Needs:
    return Needs(class_token=score == "class_token", prefix=score == "prefix_mean", probabilities=True)


class ScorerReducer(Reducer[C]):
    """Prune all but the patches with the highest score, which a subclass defines in `score`, without gradient.

    Kept patches come in descending order of score; of equal ones the first stays if ``stable``, else any.

    Example:
        >>> class Loudest(ScorerReducer[StagedConfig]):
        ...     site = "before"
        ...     def score(self, x, attention, state):
        ...         return x[:, state.num_prefix :].norm(dim=-1)
    """

    stable: ClassVar[bool] = False

    def score(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor:
        """(B, P) scores of the patches in tokens ``x`` (B, N, C), the highest stay. Arguments as of `assign`."""
        raise VitrimError(f"{type(self).__name__} does not say what the score is: define score(x, attention, state)")

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        return self.score(x, attention, state)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        return self.keep_best(self.best_first(x, attention, state), state)

    def best_first(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor:
        """(B, K) patch indices in descending order of score: all of them if ``stable``, else those that are kept."""
        with no_gradient():
            score = self.score(x, attention, state)
            if score.shape != (x.shape[0], state.num_patches):
                raise VitrimError(
                    f"{type(self).__name__}.score must give one number for each of {state.num_patches} patches of "
                    f"each of {x.shape[0]} images, ({x.shape[0]}, {state.num_patches}), got {tuple(score.shape)}; "
                    f"tokens in front of the patches: {state.num_prefix}"
                )
            if self.stable:
                return score.argsort(dim=1, descending=True, stable=True)
            return score.topk(self.num_keep(state), dim=1).indices

    def keep_best(self, order: Tensor, state: TokenState) -> Hard:
        return prune(state, order[:, : self.num_keep(state)])


class EarlyScorer(nn.Module):
    """Computes scores in `Reducer.remember`, as a module, so that the MAC counter can attribute the cost to deciding.

    A reducer's forward must not call it, because its products are counted there already.
    """


def patch_score(attention: Attention, state: TokenState, score: Score, *, gradient: bool = False) -> Tensor:
    """(B, P) attention that each patch receives, averaged over heads, in at least float32."""
    if not gradient:
        attention = attention.detach()
    if score == "class_token":
        received = attention.class_mean()
    elif score == "prefix_mean":
        received = attention.rows(state.num_prefix).column_mean()
    else:
        received = attention.column_mean()
    return received[:, state.num_prefix :]


def real_patches(state: TokenState) -> Tensor:
    """(B, P) bool: which patch tokens are not padding."""
    if state.mask is None:
        return torch.ones(state.size.shape[0], state.num_patches, dtype=torch.bool, device=state.size.device)
    return state.mask[:, state.num_prefix :]


def rounded_up(count: Tensor, multiple: int, most: Tensor | int) -> Tensor:
    """Numbers of tokens (B, 1) rounded up to a ``multiple``, but at most ``most``: the option ``align`` by image.

    Example:
        >>> rounded_up(torch.tensor([[150], [193]]), 16, 197).tolist()
        [[160], [197]]
    """
    up = (count + multiple - 1) // multiple * multiple
    return up.clamp(max=most)


def first_ranked(score: Tensor, count: Tensor) -> Tensor:
    """(B, P) bool: the ``count`` (B, 1) places of the highest ``score`` (B, P), the first ones among equals.

    Example:
        >>> first_ranked(torch.tensor([[0.1, 0.3, 0.3]]), torch.tensor([[1]])).tolist()
        [[False, True, False]]
    """
    order = score.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return torch.zeros_like(order).scatter(1, order, places) < count


def prune_flagged(
    state: TokenState, chosen: Tensor, most: int, to_bound: bool = False, *, follows: bool = False
) -> Hard | None:
    """Keep the patches flagged in ``chosen`` (B, P), in order, a number that may differ per image. None if all stay.

    Images are padded to the longest of the batch; compiled, exported, traced or with ``to_bound``, to ``most``, the
    largest possible count. With ``follows``, a graph exported for single images has data-dependent sizes (`flagged`).
    """
    if follows and sizes_follow(chosen):
        return prune(state, flagged(chosen))
    # The flagged patches first, in order, and behind them the others, which fill shorter rows as padding.
    order = chosen.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
    if to_bound or torch.compiler.is_compiling() or is_traced():
        keep = order[:, :most]
        return prune(state, keep, valid=chosen.gather(1, keep))
    # The one place where the counts are read from the device.
    counts = chosen.sum(1).tolist()
    longest = max(counts, default=most)
    if min(counts, default=most) == state.num_patches:
        return None
    keep = order[:, :longest]
    ragged = state.mask is not None or min(counts, default=most) < longest
    return prune(state, keep, valid=chosen.gather(1, keep) if ragged else None)


def masked_softmax(logits: Tensor, policy: Tensor) -> Tensor:
    """Softmax of (B, H, M, N) over the tokens that ``policy`` (B, N) keeps and each token itself, smoothed by 1e-6.

    Differentiable in the policy; in at least float32. Query row i belongs to token i.
    """
    logits = logits.to(decision_dtype(logits.dtype))
    rows, n = logits.shape[-2:]
    own = torch.eye(rows, n, dtype=logits.dtype, device=logits.device)
    mask = policy[:, None, None, :].to(logits.dtype)
    # A token always attends to itself, so a row never sums to zero.
    mask = mask + (1.0 - mask) * own
    weight = (logits - logits.amax(dim=-1, keepdim=True)).exp() * mask
    return (weight + EPSILON / n) / (weight.sum(dim=-1, keepdim=True) + EPSILON)
