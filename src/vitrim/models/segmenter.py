"""Segmenter: class scores at every pixel, from the tokens of any supported model (Strudel et al., ICCV 2021).

The linear decoder scores each patch alone; in the mask transformer (section 3.2) K learned class tokens attend to the
patches, and a patch is scored by its product with each of them. The scores are upsampled to the size of the images.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vitrim.core.block import draw_linear_
from vitrim.core.tokens import Trace, unmerge
from vitrim.errors import VitrimError, check_known
from vitrim.models.common import DenseModel, padded, patch_map

DecoderTokens = Literal["all", "merged"]
DECODER_TOKENS: tuple[DecoderTokens, ...] = ("all", "merged")


class LinearDecoder(nn.Module):
    """Score every token (B, M, C) by one linear layer, ``head``: (B, M, K)."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, num_classes)
        draw_linear_(self)

    def forward(self, x: Tensor, size: Tensor | None = None) -> Tensor:
        """The scores (B, M, K) of tokens ``x`` (B, M, C), whatever their ``size``."""
        return cast(Tensor, self.head(x))

    def renewed(self, num_classes: int) -> LinearDecoder:
        """A new decoder of this kind for ``num_classes``."""
        return LinearDecoder(self.head.in_features, num_classes)


class MaskTransformer(nn.Module):
    """Score tokens by their product with K class tokens that attend to them (section 3.2).

    The class tokens follow the patches; pre-norm blocks run on both. Then both are projected and normalised over
    channels, and the (B, M, K) products go through a layer norm over the *classes*. Parameter names are those of the
    released checkpoints, ``decoder.*`` there.

    Args:
        width: channels of the blocks; default C.
        heads: attention heads, which divide ``width``; default one per 64 channels.
        dropout: in the blocks, after attention weights, projections and MLP layers.
        drop_path: stochastic depth of the last block; grows linearly from 0.
        proportional: attend to a token of size s as to s copies.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        layers: int = 2,
        width: int | None = None,
        heads: int | None = None,
        dropout: float = 0.1,
        drop_path: float = 0.0,
        proportional: bool = True,
    ) -> None:
        super().__init__()
        width = dim if width is None else width
        heads = max(1, width // 64) if heads is None else heads
        if width % heads:
            raise VitrimError(f"{heads} heads of the mask transformer do not divide its {width} channels")
        self.settings: dict[str, Any] = {
            "layers": layers,
            "width": width,
            "heads": heads,
            "dropout": dropout,
            "drop_path": drop_path,
            "proportional": proportional,
        }
        self.proportional = proportional
        # On the CPU even where a model is made on the meta device: rates are numbers.
        rates = torch.linspace(0, drop_path, layers, device="cpu").tolist()
        drops: dict[str, Any] = {"proj_drop": dropout, "attn_drop": dropout}
        self.blocks = nn.ModuleList(Block(width, heads, qkv_bias=True, drop_path=rate, **drops) for rate in rates)
        self.cls_emb = nn.Parameter(torch.zeros(1, num_classes, width))
        self.proj_dec = nn.Linear(dim, width)
        self.proj_patch = nn.Parameter(width**-0.5 * torch.randn(width, width))
        self.proj_classes = nn.Parameter(width**-0.5 * torch.randn(width, width))
        self.decoder_norm = nn.LayerNorm(width)
        self.mask_norm = nn.LayerNorm(num_classes)
        nn.init.trunc_normal_(self.cls_emb, std=0.02)
        draw_linear_(self)

    def forward(self, x: Tensor, size: Tensor | None = None) -> Tensor:
        """Score the tokens ``x`` (B, M, C) of ``size`` (B, M) patches each, None for 1: (B, M, K)."""
        num_classes = self.cls_emb.shape[1]
        bias = None
        if size is not None and self.proportional:
            # The logarithm of a size, added to the logits, weighs a token as so many copies; class tokens count once.
            bias = F.pad(size, (0, num_classes), value=1.0).log().to(x.dtype)[:, None, None, :]
        x = torch.cat((self.proj_dec(x), self.cls_emb.expand(x.shape[0], -1, -1)), dim=1)
        for block in self.blocks:
            x = block(x) if bias is None else block(x, attn_mask=bias)
        x = self.decoder_norm(x)
        patches = F.normalize(x[:, :-num_classes] @ self.proj_patch, dim=-1)
        classes = F.normalize(x[:, -num_classes:] @ self.proj_classes, dim=-1)
        return cast(Tensor, self.mask_norm(patches @ classes.transpose(1, 2)))

    def renewed(self, num_classes: int) -> MaskTransformer:
        return MaskTransformer(self.proj_dec.in_features, num_classes, **self.settings)

    def no_weight_decay(self) -> set[str]:
        return {"cls_emb"}


class Segmenter(DenseModel):
    """Class scores at every pixel. ``model(images)`` maps (B, 3, H, W), of any size, to logits (B, K, H, W).

    Images are padded with zeros at right and bottom to full patches, and the logits cropped to the image.

    Args:
        decoder: a `LinearDecoder`, a `MaskTransformer`, or any module from tokens (B, M, C) and their sizes (B, M) or
            None to scores (B, M, K).
        decoder_tokens: ``all``: one token per patch, those of a reduced backbone un-merged. ``merged``: the remaining
            tokens, whose scores are un-merged (ALGM). For a linear decoder the results are equal.

    Example:
        >>> import timm
        >>> backbone = timm.create_model("test_vit", num_classes=0, dynamic_img_size=True)
        >>> model = Segmenter(backbone, LinearDecoder(64, num_classes=3), num_classes=3).eval()
        >>> model(torch.zeros(1, 3, 90, 120)).shape
        torch.Size([1, 3, 90, 120])
    """

    def __init__(
        self, backbone: nn.Module, decoder: nn.Module, num_classes: int, decoder_tokens: DecoderTokens = "all"
    ) -> None:
        check_known("decoder_tokens", decoder_tokens, DECODER_TOKENS)
        super().__init__(backbone, num_classes)
        self.decoder = decoder
        self.decoder_tokens = decoder_tokens
        self.trace: Trace | None = None
        """That of the reduced backbone, while the decoder works on merged tokens (`DenseHost.install`)."""

    task = "segmentation"
    front_name = "trunk"

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (B, K, H, W) of ``images`` (B, 3, H, W), of a size that the backbone accepts."""
        whole, grid = padded(images, self.layout.patch_size)
        scores = self.scores(self.library.tokens(self.backbone, whole), grid)
        maps = scores.transpose(1, 2).unflatten(2, grid).contiguous()  # upsampling is several times as fast
        logits = F.interpolate(maps, size=whole.shape[2:], mode="bilinear", align_corners=False)
        return logits[:, :, : images.shape[2], : images.shape[3]]

    def front(self, images: Tensor) -> Tensor:
        """Compute the decoder's input, the tokens (B, N, C) of ``images`` (B, 3, H, W), prefix first."""
        whole, _ = padded(images, self.layout.patch_size)
        return self.library.tokens(self.backbone, whole)

    def scores(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Decode the backbone's ``tokens`` (B, N, C), prefix first: (B, P, K) for every patch of the ``grid``."""
        state = None if self.trace is None else self.trace.call.final
        if state is None or not state.reduced:
            return cast(Tensor, self.decoder(patch_map(tokens, self.layout.num_prefix, grid)))
        # decode the remaining tokens and un-merge their scores
        prefix = self.layout.num_prefix
        scores = self.decoder(tokens[:, prefix:], None if state.uniform else state.size[:, prefix:])
        # `unmerge` reads all tokens, prefix included: its scores are padding, and go again.
        return unmerge(F.pad(scores, (0, 0, prefix, 0)), state)[:, prefix:]

    def reset_classifier(self, num_classes: int) -> None:
        place = next(self.decoder.parameters())
        self.decoder = cast(Any, self.decoder).renewed(num_classes).to(device=place.device, dtype=place.dtype)
        self.num_classes = num_classes
