"""Image towers of Hugging Face's vision-language models: Idefics3, SmolVLM, InternVL. What follows reads a map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.models.idefics3.modeling_idefics3 import (
    Idefics3EncoderLayer,
    Idefics3VisionAttention,
    Idefics3VisionTransformer,
)
from transformers.models.internvl.modeling_internvl import (
    InternVLVisionAttention,
    InternVLVisionLayer,
    InternVLVisionModel,
)
from transformers.models.smolvlm.modeling_smolvlm import (
    SmolVLMEncoderLayer,
    SmolVLMVisionAttention,
    SmolVLMVisionTransformer,
)

from vitrim.core.attention import Attention
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import ReducedClipLayer, ReducedLayer, TransformersHost, TrunkHook


class _UnmaskedLayer(ReducedClipLayer):
    """Layers that get a mask of patches, which `UnpaddedHook` knows to mask nothing."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self.run(hidden_states)


class ReducedIdefics3EncoderLayer(_UnmaskedLayer, Idefics3EncoderLayer):
    """`Idefics3EncoderLayer` under reduction."""

    host_class = Idefics3EncoderLayer
    attention_class = Idefics3VisionAttention


class ReducedSmolVLMEncoderLayer(_UnmaskedLayer, SmolVLMEncoderLayer):
    """`SmolVLMEncoderLayer` under reduction."""

    host_class = SmolVLMEncoderLayer
    attention_class = SmolVLMVisionAttention


class ReducedInternVLVisionLayer(ReducedLayer, InternVLVisionLayer):
    """`InternVLVisionLayer` under reduction: queries and keys may have a norm over all heads."""

    host_class = InternVLVisionLayer
    attention_class = InternVLVisionAttention
    scale_name = "scale"

    @property
    def attn(self) -> Any:
        return self.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.layernorm_before(x)  # type: ignore[no-any-return]

    def projected(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        attn, y = self.attn, self.pre_norm(x)
        q = self.split_heads(attn.q_norm(attn.q_proj(y if rows is None else y[:, :rows])))
        return Attention(
            q=q,
            k=self.split_heads(attn.k_norm(attn.k_proj(y))),
            v=None if self.reducer.fresh_values and rows is None else self.split_heads(attn.v_proj(y)),
            scale=attn.scale,
            bias=state.key_bias(q.dtype, self.proportional),
            dropout=attn.attention_dropout if attn.training else 0.0,
            fused=attn.config._attn_implementation != "eager",
        )

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.lambda_1 * self.attn.projection_dropout(self.attn.projection_layer(out))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.lambda_2 * self.dropout(self.mlp(self.layernorm_after(x)))  # type: ignore[no-any-return]


class UnpaddedHook(TrunkHook):
    """`TrunkHook` that refuses padded images: their padding is patches among the others, row by row."""

    def __call__(self, trunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__call__(trunk, args, kwargs)
        mask: Any = {**dict(zip(self.positional, args, strict=False)), **kwargs}.get("patch_attention_mask")
        if mask is not None and not mask.all():
            raise UnsupportedModelError(
                f"a reduced {type(trunk).__name__} takes no padded images: give images of one size, or one by one"
            )


class _Tower(TransformersHost):
    """A projector joins neighbouring tokens behind the tower, so pruned patches come back at its end."""

    heads = ("grid",)

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        return replace(super().facts(model), dense=True)


class _Padded(_Tower):
    hook_class = UnpaddedHook
    layers_name = "encoder.layers"
    num_prefix = 0
    has_class_token = False


class HFIdefics3(_Padded):
    """Hugging Face Idefics3: the image tower, on images without padding."""

    name = "transformers Idefics3"
    purpose = "vision-language models"
    reduced_blocks = (ReducedIdefics3EncoderLayer,)
    trunk_classes = (Idefics3VisionTransformer,)


class HFSmolVLM(_Padded):
    """Hugging Face SmolVLM: the image tower, on images without padding."""

    name = "transformers SmolVLM"
    purpose = "vision-language models"
    reduced_blocks = (ReducedSmolVLMEncoderLayer,)
    trunk_classes = (SmolVLMVisionTransformer,)


class HFInternVL(_Tower):
    """Hugging Face InternVL: the image tower."""

    name = "transformers InternVL"
    purpose = "vision-language models"
    reduced_blocks = (ReducedInternVLVisionLayer,)
    trunk_classes = (InternVLVisionModel,)
    layers_name = "encoder.layer"
