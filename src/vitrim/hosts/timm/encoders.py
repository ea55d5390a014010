"""timm's image encoders of language models: Qwen3-VL, DeepSeek, Gemma 4, alone or in its classifiers.

Behind the blocks their tokens are laid out as a map, so every patch needs a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.models import deepseek_vit as deepseek
from timm.models import gemma4_vit as gemma4
from timm.models import qwen3_vit as qwen3
from torch import Tensor, nn

from vitrim.core.attention import Attention, split_heads
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.hosts.shared.blocks import check_calls
from vitrim.hosts.timm.common import PreNorm, TimmBlock, TimmHost, kernel, refuse_mask
from vitrim.hosts.timm.eva import ReducedEvaBlock, ReducedRopeBlock, expand_groups


class ReducedDeepseekBlock(PreNorm, ReducedRopeBlock, deepseek.DeepseekVitBlock):
    """DeepSeek's reduced block: Eva's, without layer scales."""

    update_names = ("drop_path1",)
    mlp_names = ("norm2", "mlp", "drop_path2")


class ReducedGemma4Block(TimmBlock, gemma4.Gemma4Block):
    """Gemma 4's reduced block: norms before and behind both branches, logits without scale."""

    attention_classes = (gemma4.Gemma4Attention,)
    output_names = ("o_proj", "proj_drop")
    update_names = ("norm2", "drop_path")
    mlp_names = ("norm3", "mlp", "norm4", "drop_path")

    def forward(self, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        refuse_mask(attn_mask)
        return self.run(x, (rope_cos, rope_sin))

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attn: Any = self.attn
        y = self.pre_norm(x)
        # The first rows are the prefix and the first patches: their angles are the first, too.
        q = attn.q_norm(split_heads(attn.q_proj(y if rows is None else y[:, :rows]), attn.num_heads))
        k_raw = expand_groups(attn.k_norm(split_heads(attn.k_proj(y), attn.num_kv_heads)), attn.num_heads)
        # (B, P0, d) each, as one table for all heads
        cos, sin = state.patch_rows(torch.cat(given, dim=-1).unsqueeze(1)).squeeze(1).chunk(2, dim=-1)
        m = q.shape[2]
        q = gemma4.apply_multidimensional_rope(q, cos[:, :m], sin[:, :m], unsqueeze_dim=1)
        k = gemma4.apply_multidimensional_rope(k_raw, cos, sin, unsqueeze_dim=1)
        v = None if self.reducer.fresh_values and rows is None else self._values(y)
        bias = state.key_bias(q.dtype, self.proportional)
        return Attention(q, k, v, 1.0, bias, k_raw=k_raw, **kernel(attn))

    def values(self, x: Tensor) -> Tensor:
        return self._values(self.pre_norm(x))

    def _values(self, y: Tensor) -> Tensor:
        attn: Any = self.attn
        return expand_groups(attn.v_norm(split_heads(attn.v_proj(y), attn.num_kv_heads)), attn.num_heads)


class EncoderHost(TimmHost):
    """An encoder whose tokens are laid out as a map behind its blocks, or timm's classifier around one."""

    purpose = "vision-language models"
    heads = ("grid",)
    classifier: ClassVar[type[nn.Module]]

    @classmethod
    def encoder(cls, model: Any) -> Any:
        """The encoder that ``model`` is or contains."""
        return model.encoder if isinstance(model, cls.classifier) else model

    @classmethod
    def check(cls, model: nn.Module) -> None:
        encoder = cls.encoder(model)
        if encoder is not model:
            check_calls(model, "timm", (cls.classifier,), TimmHost.calls)
        super().check(encoder)

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(cls.encoder(model).blocks)

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return super().patch_maker(cls.encoder(model))

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        facts = super().facts(cls.encoder(model))
        return replace(facts, num_classes=model.num_classes, head_rows=None, dense=True)

    @classmethod
    def form(cls, model: Any) -> tuple[Any, ...]:
        return ()  # with any pooling it reads every patch, at any size


class TimmQwen3(EncoderHost):
    """The encoder of Qwen3-VL, with its projector or without, alone or in timm's classifier."""

    name = "timm Qwen3VitEncoder"
    reduced_blocks = (ReducedEvaBlock,)
    model_classes = (qwen3.Qwen3VitEncoder,)
    classifier = qwen3.Qwen3VitClassifier


class TimmDeepseek(EncoderHost):
    """The encoder of DeepSeek-V4, with its projector or without, alone or in timm's classifier."""

    name = "timm DeepseekVitEncoder"
    reduced_blocks = (ReducedDeepseekBlock,)
    model_classes = (deepseek.DeepseekVitEncoder,)
    classifier = deepseek.DeepseekVitClassifier


class TimmGemma4(EncoderHost):
    """The encoder of Gemma 4, with its pooling or without, alone or in timm's classifier; on images of one size."""

    name = "timm Gemma4VitEncoder"
    reduced_blocks = (ReducedGemma4Block,)
    model_classes = (gemma4.Gemma4VitEncoder,)
    classifier = gemma4.Gemma4VitClassifier
    calls = (*TimmHost.calls, "_encode")

    @classmethod
    def geometry(cls, model: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        # it takes images of any size and records none; its weights were made at 768 px
        height, width = (getattr(model, "pretrained_cfg", None) or {"input_size": (3, 768, 768)})["input_size"][-2:]
        return (height // model.patch_size[0], width // model.patch_size[1]), (height, width)

    @classmethod
    def grid_of(cls, maker: Any, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        images = args[0]
        if not isinstance(images, Tensor) or images.dim() != 4:  # a list of patches with their places
            return None
        return images.shape[2] // maker.patch_size[0], images.shape[3] // maker.patch_size[1]
