"""The baselines of benchmarks/overhead.py: timm's blocks in a plain loop.

`slicing` drops tokens by number alone (x = x[:, :n]): nothing that decides can be faster. `LOOPS` are methods as one
writes them for an experiment: tokens gathered or merged between the layers of a timm model, for class-token models,
inference and default options alone, without state, hooks, sizes that nobody asked for, or a way back. Learned layers
are those of a reduced model, so that both give the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.attention import unfused_is_faster

Forward = Callable[[Tensor], Tensor]
Loop = Callable[[Any, Sequence[Any], Sequence[int]], Forward]
"""Maps the dense model, the reducers and the tokens that leave each block to a forward of images (B, C, H, W)."""


# ---- parts of a timm model -------------------------------------------------------------------------------------------


def embed(model: Any, images: Tensor) -> Tensor:
    """(B, N, C) tokens that enter the first block."""
    x: Tensor = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
    return x


def classify(model: Any, x: Tensor) -> Tensor:
    """(B, K) logits of the tokens that leave the last block."""
    logits: Tensor = model.forward_head(model.norm(x))
    return logits


def project(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, N, d) queries, keys and values."""
    attn = block.attn
    batch, n, channels = x.shape
    parts = attn.qkv(block.norm1(x)).reshape(batch, n, 3, attn.num_heads, channels // attn.num_heads)
    q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
    return attn.q_norm(q), attn.k_norm(k), v


def add_attention(block: Any, x: Tensor, out: Tensor) -> Tensor:
    """``x`` (B, M, C) with the output (B, H, M, d) of its attention added."""
    update: Tensor = block.ls1(block.attn.proj(out.transpose(1, 2).flatten(2)))
    return x + update


def add_mlp(block: Any, x: Tensor) -> Tensor:
    """``x`` (B, M, C) with the MLP added."""
    update: Tensor = block.ls2(block.mlp(block.norm2(x)))
    return x + update


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention by the kernel that vitrim would choose, so that kernels are not what is compared."""
    if unfused_is_faster(q.device, q.dtype, *q.shape[:3], k.shape[2]):
        logits = (q * scale) @ k.transpose(-2, -1)
        return (logits if bias is None else logits + bias).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def attend_with_map(block: Any, x: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens with attention added, and the attention (B, P) of the class token to every patch, from the whole map."""
    weights, out = attention_map(block, x, size)
    return add_attention(block, x, out), weights[:, :, 0, 1:].mean(1)


def attention_map(block: Any, x: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The map (B, H, N, N), each key weighted by ``size`` (B, N), and the attention output (B, H, N, d)."""
    q, k, v = project(block, x)
    logits = (q * block.attn.scale) @ k.transpose(-2, -1)
    weights = (logits if size is None else logits + size.log()[:, None, None, :]).softmax(-1)
    return weights, weights @ v


def plain_block(block: Any, x: Tensor) -> Tensor:
    """One block as it is."""
    q, k, v = project(block, x)
    return add_mlp(block, add_attention(block, x, attend(q, k, v, block.attn.scale)))


def pick(x: Tensor, index: Tensor) -> Tensor:
    """(B, M, C) rows ``index`` (B, M) of ``x`` (B, N, C)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


# ---- the slice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """The change in the number of tokens in one block.

    Attributes:
        site: where: before, query, between or after, as `vitrim.core.block.Reducer.site`.
        count: tokens that leave the block, prefix included.
        rows: of the last block where only so many outputs are computed, for the head; None: all.
    """

    site: str
    count: int
    rows: int | None = None


def slicing(model: Any, cuts: Sequence[Cut]) -> Forward:
    """The model with as many tokens as a method leaves, in the same places: the first ones."""
    returns = any(after.count > before.count for before, after in pairwise(cuts))

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        waiting: list[Tensor] = []
        for block, cut in zip(model.blocks, cuts, strict=True):
            if returns and cut.count < x.shape[1]:
                waiting.append(x[:, cut.count :])  # as deep as it was cut; which block's value it is costs nothing
            if cut.rows is None and cut.count > x.shape[1]:
                x = torch.cat([x, *waiting], dim=1)
            x = sliced_block(block, x, cut)
        return classify(model, x)

    return forward


def sliced_block(block: Any, x: Tensor, cut: Cut) -> Tensor:
    """One block that cuts the tokens down where it should."""
    if cut.rows is not None:
        attn, width = block.attn, x.shape[-1]
        y = block.norm1(x)
        bias = attn.qkv.bias
        own = F.linear(y[:, : cut.rows], attn.qkv.weight[:width], None if bias is None else bias[:width])
        both = F.linear(y, attn.qkv.weight[width:], None if bias is None else bias[width:])
        q, k, v = (part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in (own, *both.chunk(2, -1)))
        out = attend(attn.q_norm(q), attn.k_norm(k), v, attn.scale)
        return add_mlp(block, add_attention(block, x[:, : cut.rows], out))
    if cut.site == "before":
        return plain_block(block, x[:, : cut.count])
    if cut.site == "query":
        q, k, v = project(block, x)
        out = attend(q[:, :, : cut.count], k, v, block.attn.scale)
        return add_mlp(block, add_attention(block, x[:, : cut.count], out))
    if cut.site == "between":
        q, k, v = project(block, x)
        return add_mlp(block, add_attention(block, x, attend(q, k, v, block.attn.scale))[:, : cut.count])
    return plain_block(block, x)[:, : cut.count]


# ---- methods as loops ------------------------------------------------------------------------------------------------


def tome(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """ToMe (section 3): match by mean keys, merge by size, attend in proportion to size."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        size: Tensor | None = None
        for block, count in zip(model.blocks, counts, strict=True):
            q, k, v = project(block, x)
            bias = None if size is None else size.log().to(q.dtype)[:, None, None, :, 0]
            x = add_attention(block, x, attend(q, k, v, block.attn.scale, bias))
            if count < x.shape[1]:
                x, size = merge_pairs(x, size, k.mean(1), x.shape[1] - count)
            x = add_mlp(block, x)
        return classify(model, x)

    return forward


def merge_pairs(x: Tensor, size: Tensor | None, metric: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Merge the ``r`` tokens at even places that are most like one at an odd place into it; the class token stays."""
    unit = metric / metric.norm(dim=-1, keepdim=True)
    scores = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    scores[:, 0] = -torch.inf
    best, partner = scores.max(dim=-1)
    order = best.argsort(dim=1, descending=True)
    moved, kept = order[:, :r], order[:, r:].sort(dim=1).values
    target = partner.gather(1, moved)

    def pooled(values: Tensor) -> Tensor:
        even, odd = values[:, ::2], values[:, 1::2]
        index = target.unsqueeze(-1).expand(-1, -1, values.shape[-1])
        return torch.cat([pick(even, kept), odd.scatter_add(1, index, pick(even, moved))], dim=1)

    size = x.new_ones(x.shape[0], x.shape[1], 1) if size is None else size
    total = pooled(size)
    return pooled(x * size) / total, total


def topk(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """Top-K: keep the patches that the class token attends to most."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        for block, count in zip(model.blocks, counts, strict=True):
            if count == x.shape[1]:
                x = plain_block(block, x)
                continue
            x, score = attend_with_map(block, x)
            kept = score.topk(count - 1, dim=1).indices
            x = add_mlp(block, torch.cat([x[:, :1], pick(x[:, 1:], kept)], dim=1))
        return classify(model, x)

    return forward


def evit(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """EViT (section 3): the same, with the sum of the others, weighted by score, as one more token."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        for block, count in zip(model.blocks, counts, strict=True):
            if count == x.shape[1]:
                x = plain_block(block, x)
                continue
            x, score = attend_with_map(block, x)
            order = score.argsort(dim=1, descending=True)
            kept, dropped = order[:, : count - 2], order[:, count - 2 :]
            weight = score.gather(1, dropped).unsqueeze(-1).to(x.dtype)
            fused = (weight * pick(x[:, 1:], dropped)).sum(dim=1, keepdim=True)
            x = add_mlp(block, torch.cat([x[:, :1], pick(x[:, 1:], kept), fused], dim=1))
        return classify(model, x)

    return forward


def diffrate(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """DiffRate (section 3), at inference: the patches that the class token attends to least join the others."""
    discounts = reducers[0].config.discount_sizes

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        size: Tensor | None = None
        for block, count in zip(model.blocks, counts, strict=True):
            x, score = attend_with_map(block, x, size)
            if count < x.shape[1]:
                size = x.new_ones(x.shape[:2]) if size is None else size
                order = F.pad(score.argsort(dim=1, descending=True) + 1, (1, 0))
                x, size = pick(x, order), size.gather(1, order)
                unit = x / x.norm(dim=-1, keepdim=True)
                similarity = unit[:, count:] @ unit[:, 1:count].transpose(1, 2)
                best, partner = similarity.max(dim=-1)
                gained = size[:, count:] * best if discounts else size[:, count:]
                size = size[:, :count].scatter_add(1, partner + 1, gained).clamp_min(torch.finfo(size.dtype).eps)
                index = (partner + 1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
                x = x[:, :count].scatter_reduce(1, index, x[:, count:], "mean")
            x = add_mlp(block, x)
        return classify(model, x)

    return forward


def gtp(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """GTP-ViT (section 3): the patches that matter least go, and their neighbours on a graph gain their content."""
    config = reducers[0].config

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        graph, scale = patch_graph(model, x[:, 1:], config.num_neighbours), x.new_ones(x.shape[:2])
        for block, count in zip(model.blocks, counts, strict=True):
            weights, out = attention_map(block, x, scale)
            x = add_attention(block, x, out)
            if count < x.shape[1]:
                score = weights.diagonal(dim1=2, dim2=3).amax(dim=1) * weights.sum(dim=2).amax(dim=1)
                order = score[:, 1:].argsort(dim=1, descending=True)
                kept, removed = order[:, : count - 1], order[:, count - 1 :]
                rows = pick(graph, kept)
                lost = config.alpha * rows.gather(2, removed.unsqueeze(1).expand(-1, count - 1, -1))
                graph = rows.gather(2, kept.unsqueeze(1).expand(-1, count - 1, -1))
                together = torch.cat([x, scale.unsqueeze(-1)], dim=-1)
                patches = pick(together[:, 1:], kept) + lost @ pick(together[:, 1:], removed)
                x, scale = torch.cat([together[:, :1], patches], dim=1).split([x.shape[-1], 1], dim=-1)
                scale = scale.squeeze(-1)
            x = add_mlp(block, x)
        return classify(model, x)

    return forward


def patch_graph(model: Any, patches: Tensor, neighbours: int) -> Tensor:
    """(B, P, P) D^-1/2 G D^-1/2 of GTP-ViT: patches next to each other on the grid or similar in content."""
    index = torch.arange(patches.shape[1], device=patches.device)
    row, column = index // model.patch_embed.grid_size[1], index % model.patch_embed.grid_size[1]
    near = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs()) == 1
    unit = F.normalize(patches, dim=-1)
    similarity = unit @ unit.transpose(1, 2)
    similarity.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    joined = (near | (similarity >= similarity.topk(neighbours, dim=2).values[..., -1:])).to(patches.dtype)
    root = joined.sum(dim=2).rsqrt()
    return joined * root[:, :, None] * root[:, None, :]


def dynamicvit(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """DynamicViT (section 3.2), at inference: keep what the predictor prefers."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        for block, reducer, count in zip(model.blocks, reducers, counts, strict=True):
            if count < x.shape[1]:
                patches = x[:, 1:]
                local, rest = reducer.predictor.in_conv(patches).chunk(2, dim=-1)
                joined = torch.cat([local, rest.mean(dim=1, keepdim=True).expand_as(local)], dim=-1)
                score = reducer.predictor.out_conv(joined).log_softmax(dim=-1)[..., 0]
                kept = score.argsort(dim=1, descending=True)[:, : count - 1]
                x = torch.cat([x[:, :1], pick(patches, kept)], dim=1)
            x = plain_block(block, x)
        return classify(model, x)

    return forward


def cropr(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """Token Cropr (section 3), at inference with last layer fusion: routers score, pruned tokens rejoin at the end."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        pruned: list[Tensor] = []
        for block, reducer, count in zip(model.blocks, reducers, counts, strict=True):
            if count < x.shape[1]:
                score = (reducer.cross_attn.queries @ x.transpose(1, 2)).sum(dim=1)
                score[:, 0] = torch.inf
                ordered = pick(x, score.argsort(dim=1, descending=True))
                x = ordered[:, :count]
                pruned.append(ordered[:, count:])
            elif count > x.shape[1]:
                x = torch.cat([x, *pruned], dim=1)
            x = plain_block(block, x)
        return classify(model, x)

    return forward


def sit(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """SiT's token slimming: patches become mixtures of patches."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        for block, reducer, count in zip(model.blocks, reducers, counts, strict=True):
            if count < x.shape[1]:
                patches = x[:, 1:]
                logits = reducer.weights(F.gelu(reducer.hidden(reducer.norm(patches)))) * reducer.scale
                x = torch.cat([x[:, :1], logits.softmax(dim=1).transpose(1, 2) @ patches], dim=1)
            x = plain_block(block, x)
        return classify(model, x)

    return forward


LOOPS: dict[str, Loop] = {
    "tome": tome,
    "topk": topk,
    "evit": evit,
    "dynamicvit": dynamicvit,
    "cropr": cropr,
    "diffrate": diffrate,
    "gtp": gtp,
    "sit": sit,
}
"""A loop for every method that has one, with its default options but for the amount."""


class Plain(nn.Module):
    """A forward as a module, so that its work can be counted. ``model`` owns the parameters."""

    def __init__(self, model: nn.Module, run: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, images: Tensor) -> Tensor:
        """(B, K) logits of ``images`` (B, C, H, W)."""
        return self.run(images)
