"""The baselines of benchmarks/baselines.py: timm's blocks in a plain loop.

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


def attend_with_map(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens with attention added, and the attention (B, P) of the class token to every patch, from the whole map."""
    q, k, v = project(block, x)
    weights = ((q * block.attn.scale) @ k.transpose(-2, -1)).softmax(-1)
    return add_attention(block, x, weights @ v), weights[:, :, 0, 1:].mean(1)


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


def atc(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """ATC: agglomerative clustering of the mean keys by SciPy, image by image; means and attention by size."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        size = x.new_ones(x.shape[0], x.shape[1], 1)
        for block, reducer, count in zip(model.blocks, reducers, counts, strict=True):
            q, k, v = project(block, x)
            x = add_attention(block, x, attend(q, k, v, block.attn.scale, size.log()[:, None, None, :, 0]))
            if count < x.shape[1]:
                keys = F.normalize(k.mean(1)[:, 1:], dim=-1)
                distance = (1 - keys @ keys.transpose(1, 2)).cpu()
                groups = torch.stack([clusters(one, reducer.config.linkage, count - 1) for one in distance])
                index = F.pad(groups.to(x.device) + 1, (1, 0)).unsqueeze(-1)
                total = x.new_zeros(x.shape[0], count, 1).scatter_add(1, index, size)
                sums = x.new_zeros(x.shape[0], count, x.shape[2])
                x = sums.scatter_add(1, index.expand_as(x), x * size) / total
                size = total
            x = add_mlp(block, x)
        return classify(model, x)

    return forward


def clusters(distance: Tensor, linkage: str, count: int) -> Tensor:
    """(P,) the cluster of every patch, 0 to ``count`` - 1, by SciPy."""
    from scipy.cluster.hierarchy import fcluster
    from scipy.cluster.hierarchy import linkage as tree_of
    from scipy.spatial.distance import squareform

    tree = tree_of(squareform(distance.numpy(), checks=False), linkage)
    return torch.from_numpy(fcluster(tree, count, "maxclust")).long() - 1


def ppt(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """PPT: where the scores of an image vary little, merge pairs as ToMe; elsewhere drop the lowest."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        size = x.new_ones(x.shape[0], x.shape[1], 1)
        for block, reducer, count in zip(model.blocks, reducers, counts, strict=True):
            q, k, v = project(block, x)
            bias = size.log()[:, None, None, :, 0]
            if count == x.shape[1]:
                x = add_mlp(block, add_attention(block, x, attend(q, k, v, block.attn.scale, bias)))
                continue
            weights = ((q * block.attn.scale) @ k.transpose(-2, -1) + bias).softmax(-1)
            x = add_attention(block, x, weights @ v)
            score = weights[:, :, 0, 1:].sum(1) * v.transpose(1, 2).flatten(2)[:, 1:].norm(dim=-1)
            score = score / score.sum(dim=1, keepdim=True)
            pools = score.var(dim=1) < reducer.config.threshold
            left, sizes = x.new_empty(x.shape[0], count, x.shape[2]), x.new_empty(x.shape[0], count, 1)
            if pools.any():
                left[pools], sizes[pools] = merge_pairs(x[pools], size[pools], k[pools].mean(1), x.shape[1] - count)
            if not pools.all():
                kept = F.pad(score[~pools].argsort(dim=1, descending=True)[:, : count - 1] + 1, (1, 0))
                left[~pools], sizes[~pools] = pick(x[~pools], kept), pick(size[~pools], kept)
            x, size = add_mlp(block, left), sizes
        return classify(model, x)

    return forward


def saint(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """SAINT, each image with its own number: images padded with zeros to the longest, which no token attends to."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        lengths = [x.shape[1]] * len(x)
        for block, reducer in zip(model.blocks, reducers, strict=True):
            q, k, v = project(block, x)
            mask = x.new_zeros(x.shape[0], 1, 1, x.shape[1])
            for image, length in enumerate(lengths):
                mask[image, ..., length:] = -torch.inf
            x = add_attention(block, x, attend(q, k, v, block.attn.scale, mask))
            if type(reducer).__name__ == "SAINTReducer":
                parts = [
                    x[image, dissimilar(k[image, :, :length].mean(0), reducer.config)]
                    for image, length in enumerate(lengths)
                ]
                lengths = [len(part) for part in parts]
                x = nn.utils.rnn.pad_sequence(parts, batch_first=True)
            x = add_mlp(block, x)
        return classify(model, x)

    return forward


def dissimilar(keys: Tensor, config: Any) -> Tensor:
    """The tokens (M,) of one image that stay, in order, from keys (N, d)."""
    unit = F.normalize(keys[1:], dim=-1)
    cosine = unit[::2] @ unit[1::2].T
    alike = cosine >= config.threshold
    count = alike.sum(1)
    mean = (cosine * alike).sum(1) / count.clamp_min(1)
    score = torch.where(count > 0, count * (config.gamma * (mean - config.threshold)).exp(), cosine.mean(1))
    r = int((count >= config.neighbours).sum())
    if r == 0:
        return torch.arange(len(keys), device=keys.device)
    order = score.argsort(descending=True)[r:]
    odd = torch.arange(2, len(keys), 2, device=keys.device)
    return torch.cat([odd.new_zeros(1), 1 + 2 * order, odd])


def vid_tldr(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """vid-TLDR with a class token, which stays: pairs of similar tokens, weighted by how sharply they attend."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        size = x.new_ones(x.shape[0], x.shape[1], 1)
        for block, count in zip(model.blocks, counts, strict=True):
            q, k, v = project(block, x)
            bias = size.log()[:, None, None, :, 0]
            if count == x.shape[1]:
                x = add_mlp(block, add_attention(block, x, attend(q, k, v, block.attn.scale, bias)))
                continue
            logits = (q * block.attn.scale) @ k.transpose(-2, -1)
            plain = logits.softmax(-1).mean(1)
            sharp = (plain * plain.log()).sum(-1)[:, 1:]
            sharp = sharp - sharp.amin(1, keepdim=True)
            sharp = sharp / sharp.amax(1, keepdim=True)
            weight = (sharp - sharp.mean(1, keepdim=True)).clamp_min(0)
            weight = F.pad(weight / weight.amax(1, keepdim=True), (1, 0), value=1.0).unsqueeze(-1)
            x = add_attention(block, x, (logits + bias).softmax(-1) @ v)
            x, size = merge_weighted(x, size, weight, x.shape[1] - count)
            x = add_mlp(block, x)
        return classify(model, x)

    return forward


def merge_weighted(x: Tensor, size: Tensor, weight: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Do what `merge_pairs` does, by tokens; what moves counts with its ``weight`` (B, N, 1) times its size."""
    unit = x / x.norm(dim=-1, keepdim=True)
    scores = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    scores[:, 0] = -torch.inf
    best, partner = scores.max(dim=-1)
    order = best.argsort(dim=1, descending=True)
    moved, kept = order[:, :r], order[:, r:].sort(dim=1).values
    index = partner.gather(1, moved).unsqueeze(-1)
    mass = size[:, ::2] * weight[:, ::2]

    def pooled(even: Tensor, lighter: Tensor, odd: Tensor) -> Tensor:
        added = odd.scatter_add(1, index.expand(-1, -1, odd.shape[-1]), pick(lighter, moved))
        return torch.cat([pick(even, kept), added], dim=1)

    total = pooled(size[:, ::2], mass, size[:, 1::2])
    return pooled(x[:, ::2] * size[:, ::2], x[:, ::2] * mass, x[:, 1::2] * size[:, 1::2]) / total, total


def cubist_merge(model: Any, reducers: Sequence[Any], counts: Sequence[int]) -> Forward:
    """CubistMerge: shorten rows, then columns, by the largest magnitude of neighbours."""

    def forward(images: Tensor) -> Tensor:
        x = embed(model, images)
        for block, reducer, count in zip(model.blocks, reducers, counts, strict=True):
            if count < x.shape[1]:
                height, width = model.patch_embed.grid_size
                rows, columns = reducer.layer.amount.sides((height, width))
                lines = x[:, 1:].reshape(-1, width, x.shape[2])
                grid = shorter(lines, width - columns).view(len(x), height, columns, -1).transpose(1, 2)
                grid = shorter(grid.reshape(-1, height, x.shape[2]), height - rows).view(len(x), columns, rows, -1)
                x = torch.cat([x[:, :1], grid.transpose(1, 2).flatten(1, 2)], dim=1)
            x = plain_block(block, x)
        return classify(model, x)

    return forward


def shorter(x: Tensor, r: int) -> Tensor:
    """Lines (L, n, C) without ``r`` tokens each, which one of their neighbours has taken in; step by step."""
    unit = F.normalize(x, dim=-1)
    alike = (unit[:, 1:] * unit[:, :-1]).sum(-1)
    odd = torch.arange(1, x.shape[1], 2, device=x.device)
    right = F.pad(alike, (0, 1), value=-torch.inf)[:, odd]
    best, side = torch.stack([alike[:, odd - 1], right]).max(0)
    moved = best.topk(r, dim=1).indices
    line = torch.arange(len(x), device=x.device)
    stays = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    x = x.clone()
    for step in range(r):
        source = odd[moved[:, step]]
        target = source + 2 * side[line, moved[:, step]] - 1
        old, new = x[line, target], x[line, source]
        x[line, target] = torch.where(new.abs() > old.abs(), new, old)
        stays[line, source] = False
    return x[stays].view(len(x), -1, x.shape[2])


LOOPS: dict[str, Loop] = {
    "tome": tome,
    "topk": topk,
    "evit": evit,
    "dynamicvit": dynamicvit,
    "cropr": cropr,
    "sit": sit,
    "atc": atc,
    "ppt": ppt,
    "saint": saint,
    "vid_tldr": vid_tldr,
    "cubist_merge": cubist_merge,
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
