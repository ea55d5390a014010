"""timm's plain `VisionTransformer`: ViT, DeiT (distilled too), AugReg, MAE, register tokens, LayerScale, qk-norm."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from timm.layers.attention import Attention as TimmAttention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vitrim.attention import Attention
from vitrim.block import ReducedBlock
from vitrim.errors import UnsupportedModelError
from vitrim.host import DenseCall, Host, HostFacts
from vitrim.registry import register_backbone
from vitrim.tokens import TokenState, Trace


class ReducedTimmBlock(ReducedBlock, Block):
    """timm's pre-norm `Block` under reduction."""

    host_class = Block

    norm1: Any
    attn: Any
    ls1: Any
    drop_path1: Any
    norm2: Any
    mlp: Any
    ls2: Any
    drop_path2: Any

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError(
                "a reduced model takes no attn_mask and no is_causal: a mask for the full sequence has no meaning once "
                "tokens are gone; call it without, or vitrim.restore_(model) first"
            )
        return self.run(x)

    def project(self, x: Tensor, state: TokenState, rows: int | None = None, *host_args: Any) -> Attention:
        attn, y = self.attn, self.norm1(x)
        v: Tensor | None
        if rows is not None and _is_plain_linear(attn.qkv):
            (q,) = self._part(y[:, :rows], 0, 1)
            k, v = self._part(y, 1, 3)
        elif self.reducer.fresh_values and _is_plain_linear(attn.qkv):
            (q, k), v = self._part(y, 0, 2), None
        else:
            q, k, v = _heads(attn.qkv(y), attn.num_heads)
            q = q[:, :, :rows]
        return Attention(
            q=attn.q_norm(q),
            k=attn.k_norm(k),
            v=v,
            scale=attn.scale,
            bias=state.key_bias(q.dtype, self.proportional),
            dropout=attn.attn_drop.p if attn.training else 0.0,
            fused=attn.fused_attn,
        )

    def values(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if _is_plain_linear(self.attn.qkv):
            return self._part(y, 2, 3)[0]
        return _heads(self.attn.qkv(y), self.attn.num_heads)[2]

    def attention_branch(self, out: Tensor) -> Tensor:
        attn = self.attn
        return self.drop_path1(self.ls1(attn.proj_drop(attn.proj(attn.norm(out)))))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.drop_path2(self.ls2(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]

    def _part(self, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
        """Parts first..end of q, k, v (0, 1, 2) of normed tokens (B, N, C), each (B, H, N, d), and only those."""
        attn = self.attn
        rows = slice(first * attn.attn_dim, end * attn.attn_dim)
        bias = None if attn.qkv.bias is None else attn.qkv.bias[rows]
        return _heads(F.linear(y, attn.qkv.weight[rows], bias), attn.num_heads, end - first)


def _heads(projected: Tensor, num_heads: int, parts: int = 3) -> tuple[Tensor, ...]:
    """(B, N, parts*H*d) to ``parts`` tensors (B, H, N, d)."""
    batch, n, width = projected.shape
    head_dim = width // (parts * num_heads)  # not -1, which an empty batch leaves ambiguous
    return projected.reshape(batch, n, parts, num_heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether using some rows of the weight is the same as calling the module: no adapter, quantiser or hook."""
    return type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)


@register_backbone("timm.models.vision_transformer.VisionTransformer")
class TimmViT(Host):
    """Models of class `timm.models.vision_transformer.VisionTransformer`, and its distilled form."""

    name = "timm VisionTransformer"
    reduced_blocks = (ReducedTimmBlock,)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        own = (VisionTransformer, VisionTransformerDistilled)
        for call in ("forward", "forward_features", "forward_head", "pool"):
            if all(getattr(type(model), call) is not getattr(known, call) for known in own):
                raise UnsupportedModelError(
                    f"{type(model).__name__} overrides {call} of timm's VisionTransformer, so vitrim cannot know what "
                    "its head reads; supported: VisionTransformer, VisionTransformerDistilled"
                )
        for block in cls.blocks(model):
            cls.reduced_class(block)  # a block of another class is refused by its name, not by its attention
            attn: Any = block.attn
            if type(attn) is not TimmAttention:
                raise UnsupportedModelError(
                    f"{cls.name} with attention of class {type(attn).__name__} is not supported; supported: Attention"
                )
            if attn.gate is not None:
                raise UnsupportedModelError(f"{cls.name} with gated attention is not supported")

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        return HostFacts(
            dim=model.embed_dim,
            num_heads=model.blocks[0].attn.num_heads,
            num_classes=model.num_classes,
            num_prefix=model.num_prefix_tokens,
            has_class_token=model.has_class_token,
            grid_size=tuple(model.patch_embed.grid_size),
            head_rows=cls._head_rows(model),
        )

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        # get_intermediate_layers and feature wrappers come through here too
        model.forward_intermediates = DenseCall(model, "forward_intermediates", trace)

    @classmethod
    def uninstall(cls, model: Any) -> None:
        del model.forward_intermediates

    @staticmethod
    def _head_rows(model: Any) -> int | None:
        if isinstance(model, VisionTransformerDistilled):
            return 2
        if model.attn_pool is None and model.global_pool == "token":
            return 1
        return None
