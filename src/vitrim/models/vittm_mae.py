"""Pre-training of ViTTM by masked autoencoding (MAE) of both streams; `MaskedViTTM.encoder` is then fine-tuned.

Most patches of each stream are masked; the encoder sees the rest of both, and a small decoder per stream predicts the
pixels of the masked patches from the tokens of its stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models import register_model
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vitrim.errors import VitrimError
from vitrim.models.common import renamed, unwrapped
from vitrim.models.streams import initialise
from vitrim.models.vittm import ViTTM, vittm_base_28_28
from vitrim.models.vittm import checkpoint_filter_fn as encoder_filter_fn

if TYPE_CHECKING:
    from vitrim.tasks.step import Step

MASK_RATIO = 0.75
STREAMS = ("memory", "process")


class StreamMask(NamedTuple):
    """Indices of the patches of one stream, rows first: ``kept`` (B, K) and ``masked`` (B, N - K), int64."""

    kept: Tensor
    masked: Tensor


def random_mask(batch: int, num_patches: int, ratio: float = MASK_RATIO) -> StreamMask:
    """Mask a share ``ratio`` in (0, 1) of the patches, drawn for every image of a ``batch``.

    The number kept is rounded down, but at least 1; at least one is masked.
    """
    kept = max(int(num_patches * (1 - ratio)), 1)
    if not 0 < ratio < 1 or kept == num_patches:
        raise VitrimError(f"a mask ratio of {ratio} on {num_patches} patches: it must mask some and be below 1")
    order = torch.rand(batch, num_patches).argsort(1)
    return StreamMask(order[:, :kept], order[:, kept:])


def matched_mask(mask: StreamMask, grid: tuple[int, int], finer: tuple[int, int]) -> StreamMask:
    """Mask the same areas of the image on a ``finer`` grid, whose rows and columns are multiples of the ``grid``'s."""
    if finer[0] % grid[0] or finer[1] % grid[1]:
        raise VitrimError(f"masks of a {grid} grid cannot be matched on {finer}, which is not a multiple of it")
    hidden = torch.zeros(mask.kept.shape[0], grid[0] * grid[1], device=mask.kept.device).scatter_(1, mask.masked, 1.0)
    # A masked patch of the coarse grid masks all fine ones in its area.
    hidden = F.interpolate(hidden.unflatten(1, grid).unsqueeze(1), size=finer, mode="nearest").flatten(1)
    # A stable order: the kept patches come first, both kinds in raster order.
    order = hidden.argsort(dim=1, stable=True)
    number = mask.kept.shape[1] * finer[0] * finer[1] // (grid[0] * grid[1])
    return StreamMask(order[:, :number], order[:, number:])


def gather(tokens: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (B, K) of tokens (B, N, C), or of a table (1, N, C) for all images: (B, K, C)."""
    tokens = tokens.expand(index.shape[0], -1, -1)
    return tokens.gather(1, index.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def pixels(images: Tensor, patch_size: int) -> Tensor:
    """Cut (B, C, H, W) images into patches (B, N, p * p * C), pixel by pixel in the order row, column, channel."""
    rows, columns = images.shape[2] // patch_size, images.shape[3] // patch_size
    patches: Tensor = images.unflatten(3, (columns, patch_size))
    patches = patches.unflatten(2, (rows, patch_size))  # (B, C, rows, p, columns, p)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class StreamDecoder(nn.Module):
    """Predict the masked patches of one stream from the tokens of the kept ones."""

    def __init__(
        self, dim: int, num_patches: int, num_pixels: int, decoder_dim: int, depth: int, num_heads: int
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, decoder_dim)
        self.pos = nn.Parameter(torch.zeros(1, num_patches, decoder_dim))
        self.blocks = nn.Sequential(
            *(Block(decoder_dim, num_heads, qkv_bias=True, norm_layer=nn.LayerNorm) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(decoder_dim)
        self.pred = nn.Linear(decoder_dim, num_pixels)

    def forward(self, kept: Tensor, mask: StreamMask, mask_token: Tensor) -> Tensor:
        """Predict the pixels (B, N - K, p * p * 3) of the masked patches from the tokens (B, K, C) of the kept ones."""
        # Kept patches, then a mask token for each masked one; positions follow in the same order.
        tokens = torch.cat((self.embed(kept), mask_token.expand(*mask.masked.shape, -1)), dim=1)
        tokens = self.blocks(tokens + gather(self.pos, torch.cat(mask, dim=1)))
        return self.pred(self.norm(tokens[:, kept.shape[1] :]))  # type: ignore[no-any-return]


class MaskedViTTM(nn.Module):
    """A ViTTM and a decoder for each of its streams.

    Args:
        encoder: for the image size of the training, without token_learner heads and add_erase fusion, which need all
            tokens.
        normalise: predict pixels normalised per patch (unbiased variance, + 1e-6).
        num_classes: of the data, for the training loop; not learned.

    Example:
        >>> encoder = ViTTM(img_size=32, process_patch_size=8, memory_patch_size=8, embed_dim=32, depth=1, num_heads=2)
        >>> model = MaskedViTTM(encoder, decoder_dim=16, decoder_depth=1, decoder_num_heads=2)
        >>> losses = model.objective(torch.zeros(2, 3, 32, 32), *model.random_masks(2))
        >>> sorted(losses)
        ['memory', 'process', 'total']
    """

    def __init__(
        self,
        encoder: ViTTM,
        decoder_dim: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int = 16,
        normalise: bool = False,
        num_classes: int = 0,
    ) -> None:
        super().__init__()
        if encoder.fixed_length:
            raise VitrimError("token_learner heads and add_erase fusion cannot see a part of the tokens only")
        self.encoder = encoder
        self.normalise = normalise
        self.num_classes = num_classes
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.memory_decoder, self.process_decoder = (
            StreamDecoder(
                encoder.embed_dim,
                rows * columns,
                patch * patch * encoder.in_chans,
                decoder_dim,
                decoder_depth,
                decoder_num_heads,
            )
            for (rows, columns), patch in zip(encoder.embed.grids, encoder.embed.patch_sizes, strict=True)
        )
        for part in (self.memory_decoder, self.process_decoder):
            initialise(part)
        nn.init.normal_(self.mask_token, std=0.02)

    @property
    def pretrained_cfg(self) -> Any:
        """timm's description of the encoder: size, mean and standard deviation of the images."""
        return self.encoder.pretrained_cfg

    def random_masks(
        self, batch: int, ratio: float = MASK_RATIO, *, matched: bool = False
    ) -> tuple[StreamMask, StreamMask]:
        """Draw masks of memory and process for ``batch`` images: independent, or ``matched``, one for both.

        Draws on the CPU, equally for every device. Raises as `random_mask` and `matched_mask`.
        """
        memory, process = self.encoder.embed.grids
        process_mask = self._placed(random_mask(batch, process[0] * process[1], ratio))
        if matched:
            return matched_mask(process_mask, process, memory), process_mask
        return self._placed(random_mask(batch, memory[0] * memory[1], ratio)), process_mask

    def _placed(self, mask: StreamMask) -> StreamMask:
        return StreamMask(*(part.to(self.mask_token.device) for part in mask))

    def forward(self, images: Tensor, memory_mask: StreamMask, process_mask: StreamMask) -> tuple[Tensor, Tensor]:
        """Predict the pixels (B, M, p * p * 3) of the masked patches of images (B, 3, H, W), in memory and process."""
        memory, process = self.encoder.embed(images)
        memory, process = self.encoder.forward_layers(
            gather(memory, memory_mask.kept), gather(process, process_mask.kept)
        )
        return (
            self.memory_decoder(memory, memory_mask, self.mask_token),
            self.process_decoder(self.encoder.process_norm(process), process_mask, self.mask_token),
        )

    def objective(self, images: Tensor, memory_mask: StreamMask, process_mask: StreamMask) -> dict[str, Tensor]:
        """Compute the mean squared errors of masked pixels: "memory", "process", and "total", their sum."""
        masks = StreamMask(*memory_mask), StreamMask(*process_mask)
        predictions = self(images, *masks)
        losses = {
            stream: F.mse_loss(prediction, self._wanted(images, patch, mask))
            for stream, patch, mask, prediction in zip(
                STREAMS, self.encoder.embed.patch_sizes, masks, predictions, strict=True
            )
        }
        return {**losses, "total": losses["memory"] + losses["process"]}

    def losses(self, step: Step) -> dict[str, Tensor]:
        return self.objective(step.images, *self.random_masks(len(step.images)))

    def _wanted(self, images: Tensor, patch_size: int, mask: StreamMask) -> Tensor:
        wanted = gather(pixels(images, patch_size), mask.masked)
        if not self.normalise:
            return wanted
        return (wanted - wanted.mean(-1, keepdim=True)) / (wanted.var(-1, keepdim=True) + 1e-6).sqrt()


_RENAMED = (
    (r"(memory|process)_decoder_pos_embed", r"\1_decoder.pos"),
    (r"(memory|process)_decoder_", r"\1_decoder."),
)
"""Rules from the authors' names of the decoders to ours, applied in turn."""


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: MaskedViTTM) -> dict[str, Tensor]:
    """Rename the weights of a checkpoint of the authors' code, or of this class, for ``model``.

    Drops weights that the published encoder never uses. Decoders keep their image size.
    """
    state = unwrapped(state_dict)
    encoder = {name.removeprefix("encoder."): value for name, value in state.items() if name.startswith("encoder.")}
    out = {f"encoder.{name}": value for name, value in encoder_filter_fn(encoder, model.encoder).items()}
    decoders = {name: value for name, value in state.items() if not name.startswith("encoder.")}
    return out | renamed(decoders, _RENAMED)


@register_model
def vittm_base_28_28_mae(pretrained: bool = False, num_classes: int = 0, **kwargs: Any) -> MaskedViTTM:
    """ViTTM-B(28,28) and a decoder per stream, for pre-training by `MaskedViTTM.losses`; ``kwargs`` are the
    encoder's.
    """
    return MaskedViTTM(vittm_base_28_28(pretrained, num_classes=0, **kwargs), num_classes=num_classes)
