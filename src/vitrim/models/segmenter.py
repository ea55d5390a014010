"""Segmenter: class scores at every pixel, from the tokens of any supported model (Strudel et al., ICCV 2021).

    images -> backbone -> tokens of all patches -> decoder -> (B, K) per patch -> enlarged to the size of the images

The linear decoder scores every patch by itself; the mask transformer (section 3.2) lets K learned class tokens attend
to the patches, and scores a patch by its product with each of them.
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
    """Scores every token by one linear layer, ``head``.

    Args:
        dim: channels C of the tokens.
        num_classes: classes K.

    Example:
        >>> LinearDecoder(8, num_classes=3)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 3])
    """

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, num_classes)
        draw_linear_(self)

    def forward(self, x: Tensor, size: Tensor | None = None) -> Tensor:
        """Score the tokens ``x`` (B, M, C): (B, M, K). Their ``size`` plays no part."""
        return cast(Tensor, self.head(x))

    def renewed(self, num_classes: int) -> LinearDecoder:
        """A new decoder of this kind, for ``num_classes``."""
        return LinearDecoder(self.head.in_features, num_classes)


class MaskTransformer(nn.Module):
    """Scores tokens by their product with K class tokens that attended to them (section 3.2).

    The class tokens join behind the patches; pre-norm blocks run on both. Then both are projected and normalised over
    channels, and the (B, M, K) products go through a layer norm over the *classes*. Parameters have the names of the
    released checkpoints, ``decoder.*`` there.

    Args:
        dim: channels C of the tokens.
        num_classes: classes K.
        layers: blocks.
        width: channels of the blocks; default C.
        heads: attention heads; default one per 64 channels of the blocks.
        dropout: in the blocks, after attention weights, projections and MLP layers.
        drop_path: stochastic depth of the last block; grows linearly from 0.
        proportional: where tokens stand for several patches, attend to them as to so many copies.

    Raises:
        VitrimError: ``heads`` does not divide ``width``.

    Example:
        >>> MaskTransformer(64, num_classes=3)(torch.zeros(2, 5, 64)).shape
        torch.Size([2, 5, 3])
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
        """Score the tokens ``x`` (B, M, C): (B, M, K).

        Args:
            x: the tokens.
            size: (B, M) how many patches each stands for; None where each is one patch.
        """
        num_classes = self.cls_emb.shape[1]
        bias = None
        if size is not None and self.proportional:
            bias = F.pad(size, (0, num_classes), value=1.0).log().to(x.dtype)[:, None, None, :]
        x = torch.cat((self.proj_dec(x), self.cls_emb.expand(x.shape[0], -1, -1)), dim=1)
        for block in self.blocks:
            x = block(x) if bias is None else block(x, attn_mask=bias)
        x = self.decoder_norm(x)
        patches = F.normalize(x[:, :-num_classes] @ self.proj_patch, dim=-1)
        classes = F.normalize(x[:, -num_classes:] @ self.proj_classes, dim=-1)
        return cast(Tensor, self.mask_norm(patches @ classes.transpose(1, 2)))

    def renewed(self, num_classes: int) -> MaskTransformer:
        """A new decoder of this kind, for ``num_classes``."""
        return MaskTransformer(self.proj_dec.in_features, num_classes, **self.settings)

    def no_weight_decay(self) -> set[str]:
        """The class tokens, as released."""
        return {"cls_emb"}


class Segmenter(DenseModel):
    """Class scores at every pixel. ``model(images)``: (B, 3, H, W) to logits (B, K, H, W), of any size.

    Images are padded with zeros at their right and bottom to whole patches, and the logits cut to the image again.

    Args:
        backbone: a model whose tokens its library hands out (`vitrim.core.library.Library.tokens`), without its head.
        decoder: a `LinearDecoder`, a `MaskTransformer`, or any module from tokens (B, M, C) and their sizes (B, M),
            which may be None, to scores (B, M, K).
        num_classes: classes K.
        decoder_tokens: ``all``: the decoder gets one token per patch, as they come out of a reduced backbone un-merged.
            ``merged``: it gets the tokens that are left, and its scores are un-merged (ALGM). For a linear decoder both
            are the same but for the work.

    Raises:
        VitrimError: the backbone hands out no tokens.

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
        """Of the reduced backbone, while the model is reduced and decodes merged tokens (`DenseHost.install`)."""

    task = "segmentation"
    front_name = "trunk"

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (B, K, H, W) of ``images`` (B, 3, H, W).

        Raises:
            VitrimError: the backbone cannot take images of this size.
        """
        whole, grid = padded(images, self.layout.patch_size)
        scores = self.scores(self.library.tokens(self.backbone, whole), grid)
        maps = scores.transpose(1, 2).unflatten(2, grid).contiguous()  # enlarged several times as fast
        logits = F.interpolate(maps, size=whole.shape[2:], mode="bilinear", align_corners=False)
        return logits[:, :, : images.shape[2], : images.shape[3]]

    def front(self, images: Tensor) -> Tensor:
        """Compute the tokens (B, N, C) that the decoder gets of ``images`` (B, 3, H, W), prefix in front."""
        whole, _ = padded(images, self.layout.patch_size)
        return self.library.tokens(self.backbone, whole)

    def scores(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Decode the backbone's ``tokens`` (B, N, C), prefix in front: (B, P, K) for every patch of the ``grid``."""
        state = None if self.trace is None else self.trace.call.final
        if state is None or not state.reduced:
            return cast(Tensor, self.decoder(patch_map(tokens, self.layout.num_prefix, grid)))
        # decode the tokens that are left, and un-merge their scores
        prefix = self.layout.num_prefix
        scores = self.decoder(tokens[:, prefix:], None if state.uniform else state.size[:, prefix:])
        return unmerge(F.pad(scores, (0, 0, prefix, 0)), state)[:, prefix:]

    def reset_classifier(self, num_classes: int) -> None:
        """Make a new decoder of the same kind for ``num_classes``."""
        place = next(self.decoder.parameters())
        self.decoder = cast(Any, self.decoder).renewed(num_classes).to(device=place.device, dtype=place.dtype)
        self.num_classes = num_classes
