"""torchvision's `VisionTransformer`: ViT-B, L and H, whose attention is `nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from vitrim.core.attention import Attention
from vitrim.core.block import ReducedBlock
from vitrim.core.modules import input_channels
from vitrim.core.plan import HostFacts
from vitrim.core.registry import register_host
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.hosts.shared.multihead import attention_of, check_attention, project_output, values_of
from vitrim.hosts.torchvision.general import TorchvisionModel


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


@register_host("torchvision.models.vision_transformer.VisionTransformer")
class TorchvisionViT(TorchvisionModel):
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
            num_classes=cls.num_classes(model),
            num_prefix=1,
            has_class_token=True,
            grid_size=(side, side),
            head_rows=1,
            input_size=(input_channels(model.conv_proj), model.image_size, model.image_size),
        )

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.conv_proj  # type: ignore[no-any-return]

    @classmethod
    def features_and_logits(cls, model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        cls.classifiers(model)
        # as in `VisionTransformer.forward`, which hands out no tokens
        patches = model._process_input(images)
        tokens: Tensor = model.encoder(torch.cat([model.class_token.expand(len(patches), -1, -1), patches], dim=1))
        return tokens, model.heads(tokens[:, 0])

    @classmethod
    def find_classifiers(cls, model: Any) -> list[nn.Module]:
        return [model.heads] if _last_linear(model) else []

    @classmethod
    def without_head(cls, model: Any) -> nn.Module:
        model.heads = nn.Identity()
        return model  # type: ignore[no-any-return]

    @classmethod
    def tokens(cls, model: Any, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        if (height, width) != (model.image_size, model.image_size):
            raise VitrimError(
                f"images of {height} x {width} px: this VisionTransformer of torchvision takes {model.image_size} x "
                f"{model.image_size} only; create it with image_size"
            )
        patches = model._process_input(images)
        token = model.class_token.expand(patches.shape[0], -1, -1)
        return model.encoder(torch.cat((token, patches), dim=1))  # type: ignore[no-any-return]

    @classmethod
    def classifier_names(cls, model: nn.Module) -> tuple[str, ...]:
        return super().classifier_names(model)[-1:]  # there may be a linear layer in front of it

    @classmethod
    def num_classes(cls, model: Any) -> int:
        return sum(layer.out_features for layer in _last_linear(model).values())

    @classmethod
    def reset_head(cls, model: Any, num_classes: int) -> None:
        if not _last_linear(model):
            super().reset_head(model, num_classes)
        for name, old in _last_linear(model).items():  # one
            new = nn.Linear(old.in_features, num_classes, device=old.weight.device, dtype=old.weight.dtype)
            nn.init.zeros_(new.weight)  # as the library starts it
            nn.init.zeros_(new.bias)
            model.set_submodule(name, new)
        model.num_classes = num_classes


def _last_linear(model: Any) -> dict[str, nn.Linear]:
    """The classifying layer by its name in ``model``; nothing if there is none."""
    found = [(name, layer) for name, layer in model.heads.named_modules(prefix="heads") if isinstance(layer, nn.Linear)]
    return dict(found[-1:])
