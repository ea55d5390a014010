"""A model of your own, and the host that tells vitrim how to reduce it: one file.

    python examples/own_host.py

The command line takes the model, too, once the file is imported (timm knows it by its name):

    python -c "import own_host; from vitrim.cli import main; main()" profile my_vit -m tome:r=4
"""

from __future__ import annotations

from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor, nn

import vitrim
from vitrim.core.attention import Attention, split_heads
from vitrim.core.block import ReducedBlock
from vitrim.core.host import Host
from vitrim.core.library import Library
from vitrim.core.plan import HostFacts, Preprocessing
from vitrim.core.registry import register_library
from vitrim.core.tokens import TokenState

# ---- the model, as it was before vitrim ------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        update: Tensor = self.mlp(self.norm2(x))
        return x + update


class MyViT(nn.Module):
    """Patches of 8 x 8 pixels, a class token that the head reads."""

    def __init__(self, size: int = 64, dim: int = 96, depth: int = 4, heads: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.size = size
        self.patches = nn.Conv2d(3, dim, 8, 8)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, (size // 8) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


@register_model
def my_vit(pretrained: bool = False, **options: Any) -> MyViT:
    """Lets `timm.create_model`, and so the command line, make the model by its name."""
    for unused in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(unused, None)
    return MyViT(**options)


# ---- its host --------------------------------------------------------------------------------------------------------


class ReducedOwnBlock(ReducedBlock, Block):
    """`Block` under reduction."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        y = self.norm1(x)
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(y).chunk(3, dim=-1))
        q = q if rows is None else q[:, :, :rows]  # the last block needs the class token's query alone
        # the bias lets a merged token weigh as many patches as it stands for
        return Attention(q, k, v, scale=q.shape[-1] ** -0.5, bias=state.key_bias(q.dtype, self.proportional))

    def values(self, x: Tensor) -> Tensor:
        return split_heads(self.qkv(self.norm1(x)).chunk(3, dim=-1)[2], self.heads)

    def attention_branch(self, out: Tensor) -> Tensor:
        update: Tensor = self.proj(out)
        return update

    def mlp_branch(self, x: Tensor) -> Tensor:
        update: Tensor = self.mlp(self.norm2(x))
        return update


@vitrim.register_host(f"{__name__}.MyViT")
class OwnHost(Host):
    """The model of this file."""

    name = "my ViT"
    heads = ("class token",)
    reduced_blocks = (ReducedOwnBlock,)

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        return HostFacts(
            dim=model.head.in_features,
            num_heads=model.blocks[0].heads,
            num_classes=model.head.out_features,
            num_prefix=1,
            has_class_token=True,
            grid_size=(model.size // 8, model.size // 8),
            head_rows=1,
            input_size=(3, model.size, model.size),
        )

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module:
        patches: nn.Module = model.patches
        return patches


@register_library(f"{__name__}.MyViT")
class OwnLibrary(Library):
    """Answers for training and measuring; without it the model is treated as one with timm's conventions."""

    def classifiers(self, model: Any) -> list[nn.Module]:
        return [model.head]

    def preprocessing(self, model: Any) -> Preprocessing:
        return Preprocessing(
            channels=3,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            size=(model.size, model.size),
            interpolation="bicubic",
            crop_share=1.0,
        )


def main() -> None:
    torch.manual_seed(0)
    model, images = timm.create_model("my_vit").eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        dense = model(images)
        vitrim.reduce_(model, "none")
        torch.testing.assert_close(model(images), dense)  # the host computes what the model does
        vitrim.restore_(model)
        reduction = vitrim.reduce_(model, "tome:r=8", record=True)
        merged = model(images)
        print("tokens after each block:", reduction.tokens_per_block)
        vitrim.restore_(model)
        vitrim.reduce_(model, "tome:r=8,last_block=class_token")
        torch.testing.assert_close(model(images), merged)  # `rows` is right


if __name__ == "__main__":
    main()
