"""Hugging Face SigLIP 2 (NaFlex): the vision tower on patches with a mask, alone, with a classifier, or beside text."""

from __future__ import annotations

import inspect
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.siglip2 import modeling_siglip2 as siglip2

from vitrim.core.block import Installed
from vitrim.core.library import no_embedding
from vitrim.core.plan import Preprocessing
from vitrim.core.tokens import Trace
from vitrim.errors import VitrimError
from vitrim.hosts.shared.padding import Group, groups_of, run_groups
from vitrim.hosts.transformers.common import PatchTower, ReducedClipLayer
from vitrim.hosts.transformers.library import Processed, TransformersLibrary
from vitrim.hosts.transformers.versions import tower


class ReducedSiglip2EncoderLayer(ReducedClipLayer, siglip2.Siglip2EncoderLayer):
    attention_classes = (siglip2.Siglip2Attention,)


class PaddingHook(Installed):
    """Runs before a forward with a ``pixel_attention_mask``, and drops a mask that masks nothing.

    The classifier's head would apply it to all N0 tokens.
    """

    def __init__(self, module: nn.Module) -> None:
        self.positional = tuple(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self.positional, args)), **kwargs}  # noqa: B905 - as in `TrunkHook`
        mask: Tensor | None = given.get("pixel_attention_mask")
        if mask is None or not mask.all():
            return None
        return (), {**given, "pixel_attention_mask": None}


class PaddedForward(Installed):
    """The forward of the tower: padded batches run grid by grid, see `vitrim.hosts.shared.padding`.

    If every patch has a value, the output has as many rows as the input, with zeros for padding; if patches were
    pruned, the remaining ones, padded to the longest. With ``averaged``, the remaining tokens are followed by their
    mean up to the full length, because the classifier averages its rows under the original mask.
    """

    def __init__(self, tower: nn.Module, trace: Trace, averaged: bool) -> None:
        self.tower = tower
        self.trace = trace
        self.averaged = averaged
        self.__signature__ = inspect.signature(tower.forward)  # what export and trainers read
        self.positional = tuple(self.__signature__.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = type(self.tower).forward
        given = {**dict(zip(self.positional, args)), **kwargs}  # noqa: B905 - as in `TrunkHook`
        mask: Tensor | None = given.get("pixel_attention_mask")
        if mask is None:
            return forward(self.tower, *args, **kwargs)
        values, shapes = given["pixel_values"], given["spatial_shapes"]

        def run(group: Group) -> Any:
            own = {"pixel_values": group.take(values), "spatial_shapes": group.take(shapes, cut=False)}
            output = forward(self.tower, **{**given, **own, "pixel_attention_mask": None})
            return fill(output, group.patches) if self.averaged else output

        return run_groups(self.tower, self.trace, groups_of(mask, shapes), values.shape[1], run)


def fill(output: Any, num_patches: int) -> Any:
    """The tower's output with tokens (B, M, C) extended by their mean to ``num_patches`` rows."""
    tokens: Tensor = output[0]
    if tokens.shape[1] == num_patches:
        return output
    mean = tokens.mean(dim=1, keepdim=True).expand(-1, num_patches - tokens.shape[1], -1)
    tokens = torch.cat([tokens, mean], dim=1)
    if isinstance(output, tuple):
        return (tokens, *output[1:])
    output["last_hidden_state"] = tokens
    return output


GRID = "vitrim_grid"
"""Attribute of ``spatial_shapes`` whose images all have this grid; a traced tensor has no values to read."""


def vision_of(model: Any) -> Any:
    """The config of the vision tower."""
    return getattr(model.config, "vision_config", model.config)


def in_sheets(config: Any, images: Tensor) -> bool:
    """True for tensors of `ProcessedPatches`; no image has that width, which is not of whole patches."""
    return images.shape[1] == 1 and images.shape[3] == config.num_channels * config.patch_size**2 + 2


class ProcessedPatches(Processed):
    """The processor of patches, with what it makes of an image in one tensor, (1, N, values + 2).

    Each of N rows has the values of a patch, then its row and column, counted from 1; rows of padding are 0.
    """

    def __call__(self, image: Any) -> Tensor:
        found = self.processor(images=image, return_tensors="pt")
        patches, real = found["pixel_values"][0], found["pixel_attention_mask"][0].bool()
        columns = int(found["spatial_shapes"][0][1])
        place = torch.arange(len(patches))
        # Counted from 1: a row of zeros is padding. In the values' dtype they stay exact up to 256 in bfloat16.
        places = torch.stack([place // columns, place % columns], dim=1) + 1
        sheet = torch.cat([patches, places.to(patches.dtype)], dim=1) * real[:, None]
        return sheet[None]  # type: ignore[no-any-return]


class Siglip2Library(TransformersLibrary):
    """A library of models whose inputs are patches, with a mask and the rows and columns of every image."""

    def inputs_of(self, model: Any, images: Tensor) -> dict[str, Any]:
        """The inputs for ``images``: whole patches (B, C, H, W), or (B, 1, N, values + 2) of `ProcessedPatches`."""
        config = vision_of(model)
        side = config.patch_size
        if in_sheets(config, images):
            patches, places = images[:, 0, :, :-2], images[:, 0, :, -2:]
            if images.is_meta:  # only counted: all patches, on one row
                return self.of_one_grid(patches, 1, patches.shape[1])
            # Rows and columns are counted from 1, so their largest are the grid.
            shapes, real = places.amax(dim=1).round().long(), (places[..., 0] > 0).long()
            return {"pixel_values": patches, "pixel_attention_mask": real, "spatial_shapes": shapes}
        height, width = images.shape[2:]
        if images.shape[1] != config.num_channels or height % side or width % side:
            raise VitrimError(
                f"{type(model).__name__} takes images of {config.num_channels} channels and whole patches of {side} x "
                f"{side} px, not {tuple(images.shape[1:])}"
            )
        # Pixel by pixel, channel last, as the processor lays out the values of a patch.
        cut = images.unflatten(3, (width // side, side)).unflatten(2, (height // side, side))
        patches = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return self.of_one_grid(patches, height // side, width // side)

    def of_one_grid(self, patches: Tensor, rows: int, columns: int) -> dict[str, Any]:
        """The inputs for ``patches`` (B, N, values) without padding."""
        shapes: Any = torch.tensor([[rows, columns]]).expand(patches.shape[0], 2)  # on the CPU, where it is read
        setattr(shapes, GRID, (rows, columns))
        return {"pixel_values": patches, "pixel_attention_mask": None, "spatial_shapes": shapes}

    def padding(self, model: Any, images: Tensor) -> int:
        return int((images[..., -1] == 0).sum()) if in_sheets(vision_of(model), images) else 0

    def embedding(self, model: Any, images: Tensor) -> Tensor:
        if not hasattr(model, "get_image_features"):
            return super().embedding(model, images)
        vectors = self.vector(model, model.get_image_features(**self.inputs_of(model, images)))
        if vectors is None:
            raise no_embedding(model)
        return vectors

    def preprocessing(self, model: Any) -> Preprocessing:
        """The processor of patches, and, where images have the size of the position table, its resizing to that."""
        own, source = super().preprocessing(model), model.config._name_or_path
        size = HFSiglip2.image_size(vision_of(model))
        if not isinstance(own.transform, Processed):
            return replace(own, size=own.size or size)
        patches = ProcessedPatches(source)
        resample = Image.Resampling(int(patches.processor.resample)).name.lower()
        squashed: dict[str, Any] = {"interpolation": resample, "crop_share": 1.0, "crop_mode": "squash"}
        return replace(own, size=size, **squashed, transform=patches, in_patches=True)


class HFSiglip2(PatchTower):
    """No class token; the head attends to patches with a probe, or averages them.

    Takes [padded batches](hosts.md#padded-batches).
    """

    name = "transformers SigLIP 2"
    reduced_blocks = (ReducedSiglip2EncoderLayer,)
    trunk_classes = (tower(siglip2, "Siglip2"),)
    tokens_of_images = False  # of patches
    any_size = True
    maker_name = "embeddings"

    @classmethod
    def image_size(cls, config: Any) -> tuple[int, int]:
        side = isqrt(config.num_patches) * config.patch_size  # for a square image
        return side, side

    @classmethod
    def grid_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        if hasattr(args[1], GRID):
            return getattr(args[1], GRID)  # type: ignore[no-any-return]
        shapes = args[1].tolist()  # rows and columns of every image; the embedding reads them, too
        return tuple(shapes[0]) if shapes and all(shape == shapes[0] for shape in shapes) else None

    @classmethod
    def patches_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> int | None:
        return args[0].shape[1]  # type: ignore[no-any-return] # padding included; the grid reads values

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        super().install(model, trace)
        trunk = cls.trunk(model)
        trunk.forward = PaddedForward(trunk, trace, averaged=isinstance(model, siglip2.Siglip2ForImageClassification))
        # the classifier's own mean reads the mask, too; the model of two towers passes it on
        for module in dict.fromkeys((model, trunk)):
            module.register_forward_pre_hook(PaddingHook(module), with_kwargs=True)
