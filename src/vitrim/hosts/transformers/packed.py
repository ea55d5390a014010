"""Hugging Face towers that take images of any size packed into one sequence: Pixtral, Qwen2-VL, Qwen3-VL.

Between the blocks, images (and frames of videos) are batch rows. Behind Qwen's towers a merger joins cells of 2 x 2
patches, which are reduced as wholes (`vitrim.core.cells`); the library's order of patches is cell by cell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt, prod
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from vitrim.core.attention import Attention
from vitrim.core.block import Installed
from vitrim.core.plan import Grid, HostFacts
from vitrim.core.tokens import Asked, TokenState
from vitrim.errors import VitrimError
from vitrim.hosts.shared.blocks import hand_stamp
from vitrim.hosts.shared.padding import Group, run_groups
from vitrim.hosts.transformers.common import USUAL_SIDE, ConnectedTower, LayerCall, ReducedJointLayer, ReducedLayer
from vitrim.hosts.transformers.library import TransformersLibrary


@dataclass(eq=False)
class PackedCall(LayerCall):
    """``images`` are the number of equal ones in the sequence."""

    images: int = 1


class PackedLayer(ReducedLayer):
    """A layer that unpacks a sequence of equal images: B rows of P tokens from one of B*P.

    The first layer unpacks; wherever all places are read, tokens are packed again. So no mask is needed, and each image
    gets the result it gets alone.
    """

    call_class = PackedCall
    trace: Any
    leading: ClassVar[bool] = False
    """The sequence has a batch axis: (1, B*P, C), not (B*P, C)."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # outside the part that gradient checkpointing repeats, when the trace may hold another forward's images
        return super().__call__(hidden_states, *args, images=self.trace.call.images, **kwargs)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        mask_or_lengths: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        images: int = 1,
        **kwargs: Any,
    ) -> Tensor:
        x = hidden_states
        if x.dim() == 3 and x.shape[0] == images:
            return self.run(x, position_embeddings)
        apart = x.view(images, x.shape[-2] // images, x.shape[-1])
        hand_stamp(x, apart)
        out = self.run(apart, position_embeddings)
        hand_stamp(apart, x)
        return out

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        x = super().outgoing(x, state)
        if not (self.last or state.asked.full_grids) or (self.leading and x.shape[0] == 1):
            return x
        packed = x.flatten(0, 1)
        if self.leading:
            packed = packed.unsqueeze(0)
        hand_stamp(x, packed)
        return packed

    def projected(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attention = super().projected(x, state, rows, given)
        # images of one size have the same angles
        cos, sin = (state.patch_rows(table[: state.initial_patches]) for table in given)
        q, k = self.rotated(attention.q, attention.k, cos, sin)
        return replace(attention, q=q, k=k, k_raw=attention.k)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, N, d) rotated by their angles, (N, d) or (B, N, d)."""
        raise NotImplementedError


class ReducedPixtralAttentionLayer(PackedLayer, pixtral.PixtralAttentionLayer):  # type: ignore[misc]
    attention_classes = (pixtral.PixtralAttention,)
    norm_name = "attention_norm"
    update_names = ()
    mlp_names = ("ffn_norm", "feed_forward")
    dropout_name = "dropout"
    leading = True

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        axis = 0 if cos.dim() == 2 else 1
        return pixtral.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=axis)  # type: ignore[no-any-return]


class _ReducedQwenBlock(PackedLayer, ReducedJointLayer):
    attention_name = "attn"
    norm_name = "norm1"
    output_names = ("proj",)
    update_names = ()
    mlp_names = ("norm2", "mlp")

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = qwen2_vl.apply_rotary_pos_emb_vision(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)


class ReducedQwen2VLVisionBlock(_ReducedQwenBlock, qwen2_vl.Qwen2VLVisionBlock):  # type: ignore[misc]
    attention_classes = (qwen2_vl.VisionAttention,)


class ReducedQwen3VLVisionBlock(_ReducedQwenBlock, qwen3_vl.Qwen3VLVisionBlock):
    attention_classes = (qwen3_vl.Qwen3VLVisionAttention,)


@dataclass(eq=False, repr=False)
class PackedForward(Installed):
    """The forward of a tower: images of one size together, size by size."""

    tower: Any
    trace: Any

    @property
    def __signature__(self) -> inspect.Signature:  # export and trainers read it
        return inspect.signature(MethodType(type(self.tower).forward, self.tower))

    @property
    def __code__(self) -> Any:  # torch.export names the forward by it
        return type(self.tower).forward.__code__

    def by_size(self, grids: list[Grid], run: Callable[[list[int], Grid], Any]) -> Any:
        """Run images of equal ``grids`` (rows, columns) together, and join the outputs in the order of the sequence.

        ``run`` maps the indices of images of one grid, and that grid, to their output.
        """
        places: dict[Grid, list[int]] = {}
        for place, grid in enumerate(grids):
            places.setdefault(grid, []).append(place)

        def of_one_size(images: list[int]) -> Any:
            call = self.trace.call
            call.images, seen = len(images), len(call.attentions)
            output = run(images, grids[images[0]])
            # Notes of this pass count its own images: they get their numbers in the batch.
            call.attentions[seen:] = [note._replace(images=tuple(images)) for note in call.attentions[seen:]]
            return output

        if len(places) == 1:
            return of_one_size(places[grids[0]])

        def call(group: Group) -> Any:
            output = of_one_size(group.images.tolist())
            return tree_map_only(Tensor, lambda x: x.view(len(group.images), -1, x.shape[-1]), output)

        def packed(x: Tensor) -> Tensor:
            share = max(counts) // x.shape[1]  # behind a merger, a token is a cell of patches
            return torch.cat([image[: count // share] for image, count in zip(x, counts, strict=True)])

        counts = [rows * columns for rows, columns in grids]
        groups = [Group(torch.tensor(images), grid[0] * grid[1]) for grid, images in places.items()]
        return tree_map_only(Tensor, packed, run_groups(self.tower, self.trace, groups, max(counts), call))


class PixtralForward(PackedForward):
    """The forward of Pixtral's tower, whose input is a batch of images padded to one size."""

    def __call__(self, pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any) -> Any:
        forward: Any = type(self.tower).forward
        side: int = self.tower.patch_size
        if isinstance(image_sizes, Tensor):
            image_sizes = image_sizes.tolist()
        sizes = [tuple(pixel_values.shape[2:])] * len(pixel_values) if image_sizes is None else image_sizes
        grids = [(height // side, width // side) for height, width in sizes]

        def run(images: list[int], grid: Grid) -> Any:
            height, width = grid[0] * side, grid[1] * side
            # Images stand in the upper left corner of the frame; the rest is padding.
            own = pixel_values if len(images) == len(pixel_values) else pixel_values[images]
            return forward(self.tower, own[:, :, :height, :width], image_sizes=[(height, width)] * len(own), **kwargs)

        output = self.by_size(grids, run)
        return output if len(set(grids)) == 1 else tree_map_only(Tensor, lambda x: x.unsqueeze(0), output)


class QwenForward(PackedForward):
    """The forward of Qwen's towers: images, and frames of videos, as one sequence of patches."""

    every_block: ClassVar[bool] = False
    """Outputs of some blocks are read at every place, so all blocks un-merge."""

    def __call__(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Run the forward on packed patches (sum of t h w, values), ``grid_thw`` (images, 3)."""
        forward: Any = type(self.tower).forward
        _check_grids(grid_thw, len(hidden_states), self.tower.spatial_merge_size)
        # Frames attend separately, so each counts as an image.
        grids = [(rows, columns) for frames, rows, columns in grid_thw.tolist() for _ in range(frames)]
        single = hidden_states.split([rows * columns for rows, columns in grids])

        def run(images: list[int], grid: Grid) -> Any:
            cut = hidden_states if len(images) == len(grids) else torch.cat([single[image] for image in images])
            return forward(self.tower, cut, grid_thw=grid_thw.new_tensor([(1, *grid)] * len(images)), **kwargs)

        with self.trace.asking(Asked(full_grids=self.every_block)):
            return self.by_size(grids, run)


class QwenForwardOfAllBlocks(QwenForward):
    """`QwenForward` where outputs of some blocks go to the language model, too."""

    every_block = True


def _check_grids(grid_thw: Tensor, patches: int, cell: int) -> None:
    """Refuse grids that do not hold ``patches`` in cells of ``cell`` x ``cell``."""
    whole = not grid_thw.is_floating_point() and grid_thw.dim() == 2 and grid_thw.shape[1] == 3 and len(grid_thw) > 0
    grids = grid_thw.tolist()
    if whole:
        whole = all(min(grid) > 0 and grid[1] % cell == grid[2] % cell == 0 for grid in grids)
    if not whole or sum(prod(grid) for grid in grids) != patches:
        raise VitrimError(
            f"expected grid_thw (images, 3) of frames, rows and columns with {patches} patches in all, rows and "
            f"columns multiples of {cell}, got {grids}"
        )


def patches_in_cells(config: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """The patches (sum, values) of ``images`` (B, C, H, W) for Qwen's towers, by cells, and grids (B, 3) on the CPU.

    An image is a clip of equal frames.
    """
    side, cell = config.patch_size, config.spatial_merge_size
    rows, columns = images.shape[-2] // side, images.shape[-1] // side
    shape = (-1, images.shape[-3], rows // cell, cell, side, columns // cell, cell, side)
    # Cells in raster order, the patches of a cell in raster order, as the library's processor lays them out.
    patches = images.reshape(shape).permute(0, 2, 5, 3, 6, 1, 4, 7).flatten(0, 4)  # (patches, C, side, side)
    # The tower's patches are of several frames: an image repeats in time.
    clips = patches.unsqueeze(2).expand(-1, -1, config.temporal_patch_size, -1, -1)
    return clips.flatten(1), torch.tensor([[1, rows, columns]]).repeat(len(images), 1)


class QwenLibrary(TransformersLibrary):
    """A library of towers whose input is patches, with the frames, rows and columns of every image."""

    def inputs_of(self, model: Any, images: Tensor) -> dict[str, Any]:
        patches, grid = patches_in_cells(model.config, images)
        return {"hidden_states": patches, "grid_thw": grid}


class PackedHost(ConnectedTower):
    """A tower without a class token."""

    num_prefix = 0
    any_size = True
    has_maps = False
    tokens_of_images = False  # it returns one sequence of all images


class HFPixtral(PackedHost):
    """The image tower on packed images, size by size. The projector joins neighbours, so it reads every patch."""

    name = "transformers Pixtral"
    reduced_blocks = (ReducedPixtralAttentionLayer,)
    trunk_classes = (pixtral.PixtralVisionModel,)
    layers_name = "transformer.layers"
    maker_name = "patch_conv"
    forward_class = PixtralForward


class _QwenTower(PackedHost):
    """Cells of 2 x 2 patches are reduced as wholes, as the merger behind them reads whole cells."""

    in_cells = True
    layers_name = "blocks"
    maker_name = None  # the patch embedding's output does not show rows and columns
    heads_name = "num_heads"
    channels_name = "in_channels"

    @classmethod
    def image_size(cls, config: Any) -> tuple[int, int]:
        """Height and width of the image for which amounts are checked."""
        side = isqrt(getattr(config, "num_position_embeddings", USUAL_SIDE**2)) * config.patch_size
        return side, side

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        cell = cls.trunk(model).config.spatial_merge_size
        return replace(super().facts(model), cell=cell, cell_by_cell=True)


class HFQwen2VL(_QwenTower):
    """The image tower on packed images, size by size, and frames. [Cells](hosts.md#cells) of 2 x 2 patches."""

    name = "transformers Qwen2-VL"
    reduced_blocks = (ReducedQwen2VLVisionBlock,)
    trunk_classes = (qwen2_vl.Qwen2VisionTransformerPretrainedModel,)
    width_name = "embed_dim"
    forward_class = QwenForward


class HFQwen3VL(_QwenTower):
    """Like Qwen2-VL. Outputs of some blocks go to the language model, so all blocks un-merge."""

    name = "transformers Qwen3-VL"
    reduced_blocks = (ReducedQwen3VLVisionBlock,)
    trunk_classes = (qwen3_vl.Qwen3VLVisionModel,)
    forward_class = QwenForwardOfAllBlocks
