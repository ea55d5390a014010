"""Three ViTs of one's own and what vitrim has to be told of them: PyTorch's layers, nanoGPT's, vit-pytorch's pairs.

python examples/own_vit.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrim

# ---- a model around nn.TransformerEncoder ----------------------------------------------------------------------------


class EncoderViT(nn.Module):
    """Patches of 8 x 8 pixels, a class token that the head reads, layers by PyTorch."""

    def __init__(self, dim: int = 96, depth: int = 4, heads: int = 4, num_classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 8, 8)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 65, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        logits: Tensor = self.head(self.encoder(x)[:, 0])
        return logits


@vitrim.register_host(f"{__name__}.EncoderViT")
class EncoderViTHost(vitrim.OwnHost):
    """The model above."""

    name = "my encoder"
    blocks_name, image_size, patch_size, patches_name = "encoder.layers", 64, 8, "patches"


# ---- a model written like nanoGPT ------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Attention, as in nanoGPT without the mask."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.resid_dropout, self.n_head = nn.Dropout(0.1), heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        update: Tensor = self.resid_dropout(self.c_proj(y))
        return update


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), SelfAttention(dim, heads)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        update: Tensor = self.mlp(self.ln_2(x))
        return x + update


class NanoViT(nn.Module):
    """Patches of 8 x 8 pixels and no class token: the head averages the patches."""

    def __init__(self, dim: int = 96, depth: int = 4, heads: int = 4, num_classes: int = 10) -> None:
        super().__init__()
        self.image_size, self.patch_size = 64, 8
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Conv2d(3, dim, 8, 8),
                "wpe": nn.Embedding(64, dim),
                "h": nn.ModuleList(Block(dim, heads) for _ in range(depth)),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](images).flatten(2).transpose(1, 2)
        x = x + parts["wpe"](torch.arange(x.shape[1], device=x.device))
        for block in parts["h"]:  # type: ignore[union-attr]
            x = block(x)
        logits: Tensor = self.lm_head(parts["ln_f"](x).mean(dim=1))
        return logits


class ReducedBlock(vitrim.OwnBlock, Block):
    """`Block` under reduction: the names of its parts."""

    norm_name, mlp_names = "ln_1", ("ln_2", "mlp")
    qkv_names, heads_name, output_names = ("c_attn",), "n_head", ("c_proj", "resid_dropout")


@vitrim.register_host(f"{__name__}.NanoViT")
class NanoViTHost(vitrim.OwnHost):
    """The model above."""

    name, heads, reduced_blocks = "my nanoGPT", ("no class token",), (ReducedBlock,)
    blocks_name, patches_name, head_name = "transformer.h", "transformer.wte", "lm_head"


# ---- a model whose blocks are pairs in lists, as vit-pytorch's -------------------------------------------------------


class PairAttention(nn.Module):
    """Attention with its norm within."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.to_qkv, self.to_out = (
            nn.Linear(dim, 3 * dim, bias=False),
            nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(self.norm(x)).chunk(3, -1)
        )
        update: Tensor = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return update


class Transformer(nn.Module):
    """Pairs in lists, which nothing calls as one."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(dim), nn.ModuleList()
        for _ in range(depth):
            mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            self.layers.append(nn.ModuleList([PairAttention(dim, heads), mlp]))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:  # type: ignore[misc]
            x = attention(x) + x
            x = mlp(x) + x
        normed: Tensor = self.norm(x)
        return normed


class PairViT(EncoderViT):
    """The first model with these layers."""

    def __init__(self, dim: int = 96, depth: int = 4, heads: int = 4) -> None:
        super().__init__(dim, depth, heads)
        self.encoder = Transformer(dim, depth, heads)  # type: ignore[assignment]


class Pair(nn.ModuleList):
    """A pair as a block: the same list, and the same names of weights."""

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self
        x = attention(x) + x
        update: Tensor = mlp(x)
        return update + x


class Layers(Transformer):
    """The layers, run block by block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed


def with_blocks(model: PairViT) -> PairViT:
    """The same model, with the same weights, whose pairs are blocks."""
    model.encoder.__class__ = Layers
    for pair in model.encoder.layers:
        pair.__class__ = Pair
    return model


class ReducedPair(vitrim.OwnBlock, Pair):
    """`Pair` under reduction: names with dots are parts of parts."""

    norm_name, attention_name, mlp_names = "0.norm", "0", ("1",)
    qkv_names, heads_name, output_names = ("to_qkv",), "heads", ("to_out",)


@vitrim.register_host(f"{__name__}.PairViT")
class PairViTHost(vitrim.OwnHost):
    """The model above."""

    name, reduced_blocks = "my pairs", (ReducedPair,)
    blocks_name, image_size, patch_size, patches_name = "encoder.layers", 64, 8, "patches"


def main() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 64, 64)
    pairs = PairViT().eval()
    expected = pairs(images)
    torch.testing.assert_close(with_blocks(pairs)(images), expected)
    for model in (EncoderViT().eval(), NanoViT().eval(), pairs):
        with torch.no_grad():
            dense = model(images)
            vitrim.reduce_(model, "none")
            torch.testing.assert_close(model(images), dense)
        reduction = vitrim.reduce_(model, "tome:r=8", record=True)
        model(images)
        print(f"{type(model).__name__}: tokens after each block {reduction.tokens_per_block}")


if __name__ == "__main__":
    main()
