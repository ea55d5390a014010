"""timm's `VisionTransformer` with all its plain blocks: ViT, DeiT, DeiT III, AugReg, MAE, DINOv2, CLIP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention as TimmAttention
from timm.models import vision_transformer as vit
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vitrim.core.attention import Attention, project_parts, split_parts
from vitrim.core.block import is_bare
from vitrim.core.tokens import TokenState
from vitrim.hosts.shared.blocks import through
from vitrim.hosts.timm.common import PostNorm, PreNorm, TimmBlock, TimmHost, refuse_mask
from vitrim.hosts.timm.versions import fused_projection


class ReducedViTBlock(TimmBlock):
    """Base of the reduced blocks of `VisionTransformer`."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_mask(attn_mask, is_causal)
        return self.run(x)


class ReducedPlainBlock(ReducedViTBlock):
    """Base of timm's reduced blocks with one `Attention`, without their norms."""

    attention_classes = (TimmAttention,)
    output_names = ("norm", "proj", "proj_drop")
    plain = True

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attn = self.attn
        if rows is not None or self.reducer.fresh_values:
            q, k, v = self.project_all(x, rows)
        else:  # in few operations
            y = self.pre_norm(x)
            q, k, v = attn.qkv(y).view(*y.shape[:2], 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.attention_of(attn, state, attn.q_norm(q), attn.k_norm(k), v)


class ReducedTimmBlock(PreNorm, ReducedPlainBlock, vit.Block):
    """timm's pre-norm `Block` under reduction."""


class ReducedResPostBlock(PostNorm, ReducedPlainBlock, vit.ResPostBlock):
    """timm's `ResPostBlock`, whose norms are after attention and after the MLP, under reduction."""


class ReducedParallelScalingBlock(ReducedViTBlock, vit.ParallelScalingBlock):
    """Reduced `ParallelScalingBlock`: attention and MLP side by side behind one projection.

    Keys and values are needed for all tokens, the MLP's hidden layer only for those that stay: after a reduction at the
    ``query`` it is projected separately.
    """

    attention_classes = (vit.ParallelScalingBlock,)
    parallel = True

    in_norm: Any
    in_proj: Any
    in_split: Any
    q_norm: Any
    k_norm: Any
    mlp_drop: Any
    mlp_act: Any
    ls: Any
    drop_path: Any

    @classmethod
    def attentions(cls, block: Any) -> list[Any]:
        return [block]  # it is its own attention

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return []

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        y = self.in_norm(x)
        if is_bare(self.in_proj):
            q, k, v = project_parts(self._part, y, rows, self.reducer.fresh_values)
        else:
            q, k, v = self._part(y, 0, 3)
            q = q[:, :, :rows]
        return self.attention_of(self, state, self.q_norm(q), self.k_norm(k), v)

    def values(self, x: Tensor) -> Tensor:
        return self._part(self.in_norm(x), 2, 3)[0]

    def add_attention(self, x: Tensor, out: Tensor) -> Tensor:
        # both branches at once: they share output projection, layer scale and drop path
        hidden = self._projected(self.in_norm(x), 0, 1)
        if self.mlp_bias is not None:
            hidden = hidden + self.mlp_bias
        hidden = self.mlp_drop(self.mlp_act(hidden))
        if (together := fused_projection(self)) is not None:
            update = together(torch.cat((out, hidden), dim=-1))
        else:
            update = self.attn_out_proj(out) + self.mlp_out_proj(hidden)  # type: ignore[misc]
        return x + self.drop_path(self.ls(update))  # type: ignore[no-any-return]

    def _part(self, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
        """Parts first..end of q, k, v (0, 1, 2) of normed tokens (B, N, C), each (B, H, N, d)."""
        return split_parts(self._projected(y, first + 1, end + 1), end - first, self.num_heads)

    def _projected(self, y: Tensor, first: int, end: int) -> Tensor:
        """Parts first..end of MLP, q, k, v (0, 1, 2, 3) of normed tokens (B, N, C), concatenated."""
        # The rows of the joint projection: the MLP's hidden layer, then q, k, v.
        rows = slice(sum(self.in_split[:first]), sum(self.in_split[:end]))
        if not is_bare(self.in_proj):
            return self.in_proj(y)[..., rows]  # type: ignore[no-any-return]
        bias = None if self.in_proj.bias is None else self.in_proj.bias[rows]
        return F.linear(y, self.in_proj.weight[rows], bias)


class ReducedParallelThingsBlock(ReducedViTBlock, vit.ParallelThingsBlock):
    """Reduced `ParallelThingsBlock`: several attentions side by side, then several MLPs.

    Methods see one attention with the heads of all.
    """

    attention_classes = (TimmAttention,)

    attns: Any
    ffns: Any

    @classmethod
    def attentions(cls, block: Any) -> list[Any]:
        return [branch.attn for branch in block.attns]

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [*block.attns, *cls.attentions(block)]

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        queries, keys, values = [], [], []
        for branch in self.attns:
            q, k, v = self.project_qkv(branch.attn, branch.norm(x), rows)
            queries.append(branch.attn.q_norm(q))
            keys.append(branch.attn.k_norm(k))
            values.append(v)
        present = [v for v in values if v is not None]
        v = torch.cat(present, dim=1) if len(present) == len(values) else None
        return self.attention_of(self.attns[0].attn, state, torch.cat(queries, dim=1), torch.cat(keys, dim=1), v)

    def values(self, x: Tensor) -> Tensor:
        return torch.cat([self.project_values(branch.attn, branch.norm(x)) for branch in self.attns], dim=1)

    def attention_branch(self, out: Tensor) -> Tensor:
        updates = []
        # The heads of all attentions lie side by side: each takes its own back.
        for branch, own in zip(self.attns, out.chunk(len(self.attns), dim=-1), strict=True):
            updates.append(branch.drop_path(branch.ls(through(branch.attn, ("norm", "proj", "proj_drop"), own))))
        return torch.stack(updates).sum(dim=0)

    def mlp_branch(self, x: Tensor) -> Tensor:
        return torch.stack([ffn(x) for ffn in self.ffns]).sum(dim=0)


class TimmViT(TimmHost):
    """ViT, DeiT, DeiT III, distilled DeiT, AugReg, MAE, DINOv2 (and registers), CLIP and SigLIP towers.

    Also with post-norm (`ResPostBlock`) and parallel blocks (`ParallelScalingBlock`: attention and MLP side by side, so
    methods act at the end of the block; `ParallelThingsBlock`: the attentions of a block act as one with more heads).
    """

    name = "timm VisionTransformer"
    reduced_blocks = (ReducedTimmBlock, ReducedResPostBlock, ReducedParallelScalingBlock, ReducedParallelThingsBlock)
    model_classes = (vit.VisionTransformer, VisionTransformerDistilled)
    calls = (*TimmHost.calls, "pool")

    @classmethod
    def head_rows(cls, model: Any) -> int | None:
        return 2 if isinstance(model, VisionTransformerDistilled) else super().head_rows(model)
