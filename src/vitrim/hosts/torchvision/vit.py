"""torchvision's `VisionTransformer`: ViT-B, L and H, whose attention is `nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from vitrim.core.attention import Attention
from vitrim.core.block import ReducedBlock
from vitrim.core.host import Host
from vitrim.core.library import input_channels
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.multihead import attention_of, check_attention, project_output, values_of


class ReducedEncoderBlock(ReducedBlock, EncoderBlock):
    """torchvision's `EncoderBlock` under reduction."""

    host_class = EncoderBlock

    ln_1: Any
    self_attention: Any
    dropout: Any
    ln_2: Any
    mlp: Any

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [block.self_attention]

    def forward(self, input: Tensor) -> Tensor:
        return self.run(input)

    def project(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        return attention_of(self.self_attention, self.ln_1(x), state, rows, self)

    def values(self, x: Tensor) -> Tensor:
        return values_of(self.self_attention, self.ln_1(x))

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.dropout(project_output(self.self_attention, out))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class TorchvisionViT(Host):
    """ViT-B, L, H: queries, keys and values from the packed weights of `nn.MultiheadAttention`."""

    name = "torchvision VisionTransformer"
    heads = ("class token",)
    reduced_blocks = (ReducedEncoderBlock,)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        if type(model).forward is not VisionTransformer.forward:
            raise UnsupportedModelError(
                f"{type(model).__name__} overrides forward of torchvision's VisionTransformer, so vitrim cannot know "
                "what its head reads; supported: VisionTransformer"
            )
        for block in cls.blocks(model):
            cls.reduced_class(block)
            attn: Any = block.self_attention
            check_attention(attn, cls.name)

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.encoder.layers)

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        side = model.image_size // model.patch_size
        return HostFacts(
            dim=model.hidden_dim,
            num_heads=model.encoder.layers[0].self_attention.num_heads,
            num_classes=_num_classes(model),
            num_prefix=1,
            has_class_token=True,
            grid_size=(side, side),
            head_rows=1,
            input_size=(input_channels(model.conv_proj), model.image_size, model.image_size),
        )

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.conv_proj  # type: ignore[no-any-return]


def _num_classes(model: Any) -> int:
    linear = [layer for layer in model.heads.modules() if isinstance(layer, nn.Linear)]
    return linear[-1].out_features if linear else 0
