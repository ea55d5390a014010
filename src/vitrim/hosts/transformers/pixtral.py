"""Hugging Face Pixtral: images packed into one sequence. Under reduction they are batch rows between the layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.pixtral.modeling_pixtral import (
    PixtralAttention,
    PixtralAttentionLayer,
    PixtralVisionModel,
    apply_rotary_pos_emb,
)

from vitrim.core.attention import Attention
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.core.trace import Trace
from vitrim.hosts.shared.padding import Group, run_groups
from vitrim.hosts.transformers.common import NoMapsHook, PackedLayer, TransformersHost, hand_stamp

Grid = tuple[int, int]


class ReducedPixtralAttentionLayer(PackedLayer, PixtralAttentionLayer):  # type: ignore[misc]
    """`PixtralAttentionLayer` under reduction.

    The first one takes images of one size apart, (1, B*P, C) to (B, P, C), and the last one packs them again. So no
    mask is needed, and each image gets what it gets alone.
    """

    host_class = PixtralAttentionLayer
    attention_class = PixtralAttention
    dropout_name = "dropout"

    def run(self, x: Tensor, *host_args: Any) -> Tensor:
        images: int = host_args[1]
        if x.shape[0] == images:
            return super().run(x, *host_args)
        apart = x.view(images, x.shape[1] // images, x.shape[2])
        hand_stamp(x, apart)
        out = super().run(apart, *host_args)
        hand_stamp(apart, x)
        return out

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        x = super().outgoing(x, state)
        if x.shape[0] == 1 or not (self.last or state.full_grid):
            return x
        packed = x.reshape(1, x.shape[0] * x.shape[1], x.shape[2])
        hand_stamp(x, packed)
        return packed

    @property
    def attn(self) -> Any:
        return self.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.attention_norm(x)  # type: ignore[no-any-return]

    def projected(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        attention = super().projected(x, state, rows)
        # images of one size have the same angles
        cos, sin = (state.patch_rows(table[: state.initial_patches]) for table in host_args[0])
        q, k = apply_rotary_pos_emb(attention.q, attention.k, cos, sin, unsqueeze_dim=0 if cos.dim() == 2 else 1)
        return replace(attention, q=q, k=k, k_raw=attention.k)

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.attn.o_proj(out)  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class PackedForward:
    """The forward of the tower: images of one size together, size by size.

    An object and not a function, so that the model can still be copied and pickled.
    """

    def __init__(self, tower: Any, trace: Trace) -> None:
        self.tower = tower
        self.trace = trace
        self.__signature__ = inspect.signature(tower.forward)  # what export and trainers read

    @property
    def __code__(self) -> Any:  # by which torch.export names the forward
        return type(self.tower).forward.__code__

    def __call__(self, pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any) -> Any:
        forward: Any = type(self.tower).forward
        side: int = self.tower.patch_size
        if isinstance(image_sizes, Tensor):
            image_sizes = image_sizes.tolist()
        sizes = [tuple(pixel_values.shape[2:])] * len(pixel_values) if image_sizes is None else image_sizes
        grids = [(height // side, width // side) for height, width in sizes]

        def run(images: Tensor, grid: Grid) -> Any:
            rows, columns = grid
            cut = images[:, :, : rows * side, : columns * side]
            self.trace.leave_table(cut.new_empty(len(cut)))
            return forward(self.tower, cut, image_sizes=[(rows * side, columns * side)] * len(cut), **kwargs)

        places: dict[Grid, list[int]] = {}
        for place, grid in enumerate(grids):
            places.setdefault(grid, []).append(place)
        if len(places) == 1:
            return run(pixel_values, grids[0])
        groups = {grid: Group(torch.tensor(images), grid[0] * grid[1]) for grid, images in places.items()}
        grid_of = {id(group): grid for grid, group in groups.items()}

        def call(group: Group) -> Any:
            output = run(group.take(pixel_values, cut=False), grid_of[id(group)])
            return _map(output, lambda x: x.view(len(group.images), group.patches, x.shape[2]))

        counts = [rows * columns for rows, columns in grids]
        joined = run_groups(self.tower, self.trace, list(groups.values()), max(counts), call)
        return _map(joined, lambda x: _packed(x, counts))


def _packed(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Images (B, P, C) of so many patches each as one sequence (1, sum, C)."""
    return torch.cat([image[:count] for image, count in zip(x, counts, strict=True)]).unsqueeze(0)


def _map(output: Any, change: Any) -> Any:
    """An output of the library with every tensor changed."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, Mapping):
        return type(output)(**{key: _map(value, change) for key, value in output.items()})
    return tuple(_map(value, change) for value in output) if isinstance(output, tuple) else output


class HFPixtral(TransformersHost):
    """Hugging Face Pixtral: the image tower. What follows joins neighbouring tokens: it reads every patch."""

    name = "transformers Pixtral"
    purpose = "vision-language models"
    heads = ("grid",)
    hook_class = NoMapsHook
    reduced_blocks = (ReducedPixtralAttentionLayer,)
    trunk_classes = (PixtralVisionModel,)
    layers_name = "transformer.layers"
    num_prefix = 0
    has_class_token = False
    tokens_of_images = False  # it hands out one sequence of all images

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        return replace(super().facts(model), dense=True)

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        return cls.trunk(model).patch_conv  # type: ignore[no-any-return]

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        super().install(model, trace)
        trunk = cls.trunk(model)
        trunk.forward = PackedForward(trunk, trace)

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        super().uninstall(model)
        del cls.trunk(model).forward
