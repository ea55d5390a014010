"""Vision towers of Qwen2-VL and Qwen3-VL: images of any size in one sequence, and a merger of 2 x 2 patches behind.

Between the blocks images (and the frames of videos, which attend apart) are batch rows, and cells of 2 x 2 patches are
reduced as wholes (`vitrim.core.cells`): the library's order of patches is cell by cell.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import isqrt, prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLVisionBlock,
    VisionAttention,
    apply_rotary_pos_emb_vision,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionAttention,
    Qwen3VLVisionBlock,
    Qwen3VLVisionModel,
)

from vitrim.core.attention import Attention
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.core.trace import Trace
from vitrim.errors import VitrimError
from vitrim.hosts.shared.padding import Group, run_groups
from vitrim.hosts.transformers.common import NoMapsHook, PackedLayer, TransformersHost, hand_stamp

USUAL_SIDE = 32
"""Patches a side for which amounts are checked, where the model does not say: 448 pixels."""


class _ReducedPackedBlock(PackedLayer):
    """The first block takes images of one size apart, (B*P, C) to (B, P, C); where all places are read, packs again."""

    scale_name = "scaling"

    norm1: Any
    norm2: Any
    mlp: Any

    def run(self, x: Tensor, *host_args: Any) -> Tensor:
        if x.dim() == 3:
            return super().run(x, *host_args)
        images: int = host_args[1]
        apart = x.view(images, x.shape[0] // images, x.shape[1])
        hand_stamp(x, apart)
        out = super().run(apart, *host_args)
        hand_stamp(apart, x)
        return out

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        x = super().outgoing(x, state)
        if not (self.last or state.full_grid):
            return x
        packed = x.flatten(0, 1)
        hand_stamp(x, packed)
        return packed

    @property
    def attn(self) -> Any:
        return self._modules["attn"]

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.norm1(x)  # type: ignore[no-any-return]

    def projected(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        attn = self.attn
        q, raw, v = attn.qkv(self.pre_norm(x)).unflatten(-1, (3, attn.num_heads, -1)).unbind(2)
        # images of one size have the same angles
        cos, sin = (state.patch_rows(table[: state.initial_patches]) for table in host_args[0])
        q, k = apply_rotary_pos_emb_vision(q, raw, cos, sin)
        q, k, v, raw = (part.transpose(1, 2) for part in (q, k, v, raw))
        return Attention(
            q=q if rows is None else q[:, :, :rows],
            k=k,
            v=v,
            scale=attn.scaling,
            bias=state.key_bias(q.dtype, self.proportional),
            dropout=attn.attention_dropout if attn.training else 0.0,
            k_raw=raw,
            fused=attn.config._attn_implementation != "eager",
        )

    def values(self, x: Tensor) -> Tensor:
        attn = self.attn
        v: Tensor = attn.qkv(self.pre_norm(x)).unflatten(-1, (3, attn.num_heads, -1))[:, :, 2]
        return v.transpose(1, 2)

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.attn.proj(out)  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ReducedQwen2VLVisionBlock(_ReducedPackedBlock, Qwen2VLVisionBlock):  # type: ignore[override, misc]
    """`Qwen2VLVisionBlock` under reduction."""

    host_class = Qwen2VLVisionBlock
    attention_class = VisionAttention


class ReducedQwen3VLVisionBlock(_ReducedPackedBlock, Qwen3VLVisionBlock):  # type: ignore[override]
    """`Qwen3VLVisionBlock` under reduction."""

    host_class = Qwen3VLVisionBlock
    attention_class = Qwen3VLVisionAttention


class PackedImages:
    """The forward of the tower: images, and frames of videos, of one size together, size by size.

    An object and not a function, so that the model can still be copied and pickled.

    Args:
        tower: whose forward it is.
        trace: what its blocks share.
        every_block: what follows some blocks reads every place, so that all un-merge.
    """

    def __init__(self, tower: Any, trace: Trace, every_block: bool) -> None:
        self.tower = tower
        self.trace = trace
        self.every_block = every_block

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.tower).forward)

    @property
    def __code__(self) -> Any:  # by which torch.export names the forward
        return type(self.tower).forward.__code__

    def __call__(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        with self.trace.dense() if self.every_block else nullcontext():
            return self.run(hidden_states, grid_thw, **kwargs)

    def run(self, patches: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Run the forward on packed ``patches`` (sum of t h w, values), ``grid_thw`` (images, 3)."""
        forward: Any = type(self.tower).forward
        _check_grids(grid_thw, len(patches), self.tower.spatial_merge_size)
        grids = [(1, rows, columns) for frames, rows, columns in grid_thw.tolist() for _ in range(frames)]
        counts = [rows * columns for _, rows, columns in grids]
        places: dict[tuple[int, int, int], list[int]] = {}
        for place, grid in enumerate(grids):
            places.setdefault(grid, []).append(place)
        single = patches.split(counts)
        grid_of = {}
        groups = []
        for grid, images in places.items():
            groups.append(Group(torch.tensor(images), grid[1] * grid[2]))
            grid_of[id(groups[-1])] = grid

        def call(group: Group) -> Any:
            number = len(group.images)
            cut = torch.cat([single[image] for image in group.images.tolist()]) if len(groups) > 1 else patches
            self.trace.leave_table(cut.new_empty(number))
            output = forward(self.tower, cut, grid_thw=grid_thw.new_tensor([grid_of[id(group)]] * number), **kwargs)
            return output if len(groups) == 1 else _map(output, lambda x: x.unflatten(0, (number, -1)))

        if len(groups) == 1:
            return call(groups[0])
        joined = run_groups(self.tower, self.trace, groups, max(counts), call)
        return _map(joined, lambda x: _packed(x, counts))


def _check_grids(grid_thw: Tensor, patches: int, cell: int) -> None:
    """Refuse grids that are not those of so many ``patches`` in cells of ``cell`` x ``cell``."""
    whole = not grid_thw.is_floating_point() and grid_thw.dim() == 2 and grid_thw.shape[1] == 3 and len(grid_thw) > 0
    grids = grid_thw.tolist()
    if whole:
        whole = all(min(grid) > 0 and grid[1] % cell == grid[2] % cell == 0 for grid in grids)
    if not whole or sum(prod(grid) for grid in grids) != patches:
        raise VitrimError(
            f"expected grid_thw (images, 3) of frames, rows and columns with {patches} patches in all, rows and "
            f"columns multiples of {cell}, got {grids}"
        )


def _packed(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Images (B, P, C) of so many patches each, or (B, Q, C) of so many cells, as one sequence."""
    share = max(counts) // x.shape[1]
    return torch.cat([image[: count // share] for image, count in zip(x, counts, strict=True)])


def _map(output: Any, change: Any) -> Any:
    """An output of the library with every tensor changed."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, Mapping):
        return type(output)(**{key: _map(value, change) for key, value in output.items()})
    return type(output)(_map(value, change) for value in output) if isinstance(output, list | tuple) else output


class _QwenTower(TransformersHost):
    """Cells of 2 x 2 patches are reduced as wholes, so that the merger behind reads what it would of equal cells."""

    in_cells = True
    heads = ("grid",)
    hook_class = NoMapsHook
    layers_name = "blocks"
    num_prefix = 0
    has_class_token = False
    tokens_of_images = False  # but of patches, and hands out one sequence of all images
    every_block: ClassVar[bool] = False

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        config = cls.trunk(model).config
        side = cls.usual_side(config)
        return HostFacts(
            dim=cls.channels(config),
            num_heads=config.num_heads,
            num_classes=0,
            num_prefix=0,
            has_class_token=False,
            grid_size=(side, side),
            head_rows=None,
            input_size=(config.in_channels, side * config.patch_size, side * config.patch_size),
            dense=True,
            cell=config.spatial_merge_size,
            cell_by_cell=True,
        )

    @classmethod
    def usual_side(cls, config: Any) -> int:
        """Patches a side of the image for which amounts are checked."""
        return USUAL_SIDE

    @classmethod
    def channels(cls, config: Any) -> int:
        """C, by the config."""
        return config.hidden_size  # type: ignore[no-any-return]

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        return None  # its output shows no rows and columns

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        super().install(model, trace)
        trunk = cls.trunk(model)
        trunk.forward = PackedImages(trunk, trace, cls.every_block)

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        super().uninstall(model)
        del cls.trunk(model).forward


class HFQwen2VL(_QwenTower):
    """Hugging Face Qwen2-VL: the image tower, on packed images and videos. [Cells](#cells) of 2 x 2 patches."""

    name = "transformers Qwen2-VL"
    purpose = "vision-language models"
    reduced_blocks = (ReducedQwen2VLVisionBlock,)
    trunk_classes = (Qwen2VisionTransformerPretrainedModel,)

    @classmethod
    def channels(cls, config: Any) -> int:
        return config.embed_dim  # type: ignore[no-any-return]


class HFQwen3VL(_QwenTower):
    """Hugging Face Qwen3-VL: as Qwen2-VL. Some blocks' outputs go to the language model: all of them un-merge."""

    name = "transformers Qwen3-VL"
    purpose = "vision-language models"
    reduced_blocks = (ReducedQwen3VLVisionBlock,)
    trunk_classes = (Qwen3VLVisionModel,)
    every_block = True

    @classmethod
    def usual_side(cls, config: Any) -> int:
        return isqrt(config.num_position_embeddings)
