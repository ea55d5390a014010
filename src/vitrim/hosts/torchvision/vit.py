"""torchvision's `VisionTransformer`: ViT-B, L and H, whose attention is `nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from vitrim.core.host import Host
from vitrim.core.library import input_channels
from vitrim.core.plan import HostFacts
from vitrim.hosts.shared.blocks import check_attentions, check_calls
from vitrim.hosts.shared.multihead import MultiheadBlock, check_options


class ReducedEncoderBlock(MultiheadBlock, EncoderBlock):
    attention_name = "self_attention"
    norm_name = "ln_1"
    update_names = ("dropout",)
    mlp_names = ("ln_2", "mlp")

    def forward(self, input: Tensor) -> Tensor:
        return self.run(input)


class TorchvisionViT(Host):
    """ViT-B, L, H. Queries, keys and values come from the packed weights of `nn.MultiheadAttention`."""

    name = "torchvision VisionTransformer"
    heads = ("class token",)
    reduced_blocks = (ReducedEncoderBlock,)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        check_calls(model, "torchvision", (VisionTransformer,), ("forward",))
        check_attentions(cls, model)
        block: Any
        for block in cls.blocks(model):
            check_options(block.self_attention, cls.name)

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.encoder.layers)

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        side = model.image_size // model.patch_size
        linear = [layer for layer in model.heads.modules() if isinstance(layer, nn.Linear)]
        return HostFacts(
            dim=model.hidden_dim,
            num_heads=model.encoder.layers[0].self_attention.num_heads,
            num_classes=linear[-1].out_features if linear else 0,
            num_prefix=1,
            has_class_token=True,
            grid_size=(side, side),
            head_rows=1,
            input_size=(input_channels(model.conv_proj), model.image_size, model.image_size),
        )

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.conv_proj  # type: ignore[no-any-return]
