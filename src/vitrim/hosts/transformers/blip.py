"""Hugging Face BLIP and BLIP-2: the image tower, whose attention has one projection for q, k and v."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.blip.modeling_blip import BlipAttention, BlipEncoderLayer, BlipModel, BlipVisionModel
from transformers.models.blip_2.modeling_blip_2 import Blip2Attention, Blip2EncoderLayer, Blip2VisionModel

from vitrim.core.attention import Attention, project_parts, split_heads
from vitrim.core.modules import is_bare
from vitrim.core.tokens import TokenState
from vitrim.hosts.transformers.common import ReducedClipLayer, TransformersHost


class ReducedPackedLayer(ReducedClipLayer):
    """The reduced form of BLIP's layers: CLIP's, but for the packed projection."""

    def projected(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        attn = self.attn
        q, k, v = project_joint(attn, self.pre_norm(x), rows, self.reducer.fresh_values)
        return Attention(
            q=q,
            k=k,
            v=v,
            scale=attn.scale,
            bias=state.key_bias(q.dtype, self.proportional),
            **self.kernel(),
        )

    def kernel(self) -> dict[str, Any]:
        """The way attention runs: its dropout, and whether fused."""
        attn = self.attn
        return {
            "dropout": attn.attention_dropout if attn.training else 0.0,
            "fused": attn.config._attn_implementation != "eager",
        }

    def values(self, x: Tensor) -> Tensor:
        return _part(self.attn, self.pre_norm(x), 2, 3)[0]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.attn.projection(out)  # type: ignore[no-any-return]


def project_joint(attn: Any, y: Tensor, rows: int | None, skip_values: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys and values as `project_parts`; a ``qkv`` that is more than its weights is called once, for all."""
    if is_bare(attn.qkv):
        return project_parts(partial(_part, attn), y, rows, skip_values)
    q, k, v = _part(attn, y, 0, 3)
    return q[:, :, :rows], k, v


def _part(attn: Any, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
    """Parts first..end of q, k, v (0, 1, 2) of normed tokens (B, N, C), each (B, H, N, d)."""
    qkv = attn.qkv
    if (first, end) == (0, 3) or not is_bare(qkv):
        parts = qkv(y).chunk(3, dim=-1)[first:end]
    else:
        width = qkv.weight.shape[0] // 3
        rows = slice(first * width, end * width)
        parts = F.linear(y, qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows]).chunk(end - first, dim=-1)
    return tuple(split_heads(part, attn.num_heads) for part in parts)


class ReducedBlipEncoderLayer(ReducedPackedLayer, BlipEncoderLayer):
    """`BlipEncoderLayer` under reduction."""

    host_class = BlipEncoderLayer
    attention_class = BlipAttention

    def kernel(self) -> dict[str, Any]:
        return {"fused": False, "drop": self.attn.dropout}  # BLIP writes its attention out


class ReducedBlip2EncoderLayer(ReducedPackedLayer, Blip2EncoderLayer):
    """`Blip2EncoderLayer` under reduction."""

    host_class = Blip2EncoderLayer
    attention_class = Blip2Attention


class HFBlip(TransformersHost):
    """Hugging Face BLIP: `BlipModel` reads the class token; decoders of text attend to all tokens of the bare tower."""

    name = "transformers BLIP"
    purpose = "images and text"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedBlipEncoderLayer,)
    trunk_classes = (BlipVisionModel,)
    chooses_kernel = False
    layers_name = "encoder.layers"

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return 1 if isinstance(model, BlipModel) else None


class HFBlip2(TransformersHost):
    """Hugging Face BLIP-2: the image tower; queries attend to all of its tokens."""

    name = "transformers BLIP-2"
    purpose = "vision-language models"
    heads = ("patches",)
    reduced_blocks = (ReducedBlip2EncoderLayer,)
    trunk_classes = (Blip2VisionModel,)
    layers_name = "encoder.layers"
