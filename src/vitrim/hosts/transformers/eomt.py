"""Hugging Face EoMT, with the layers of DINOv2 or DINOv3: those before the queries join are reduced.

The last ``num_blocks`` layers run on queries and every patch at its place, so the layer before them un-merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import masks_to_boxes
from transformers.models.eomt import modeling_eomt as eomt
from transformers.models.eomt_dinov3 import modeling_eomt_dinov3 as eomt_dinov3

from vitrim.core.library import Size
from vitrim.core.plan import HostFacts, Part
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import DenseBackbone, ReducedDinoLayer
from vitrim.hosts.transformers.dino import ReducedRotaryLayer
from vitrim.hosts.transformers.library import TransformersLibrary


class ReducedEomtLayer(ReducedDinoLayer, eomt.EomtLayer):
    attention_classes = (eomt.EomtAttention,)
    output_names = ("out_proj",)
    scale_name = "scale"
    dropout_name = "dropout"


class ReducedEomtDinov3Layer(ReducedRotaryLayer, eomt_dinov3.EomtDinov3Layer):
    attention_classes = (eomt_dinov3.EomtDinov3Attention,)


def _enlarged(output: Any, images: Tensor) -> Tensor:
    """Logits (B, Q, H, W) of the queries' masks at every pixel of ``images`` (B, C, H, W)."""
    return F.interpolate(
        output.masks_queries_logits.float(), size=images.shape[2:], mode="bilinear", align_corners=False
    )


class _Eomt(DenseBackbone):
    layers_name = "layers"
    tokens_of_images = False  # its head cannot be removed: queries run through the last layers

    @classmethod
    def check(cls, model: Any) -> None:
        super().check(model)
        size, patch = model.config.image_size, model.config.patch_size
        if not (isinstance(size, int) and isinstance(patch, int) and size % patch == 0):
            raise UnsupportedModelError(
                f"{type(model).__name__} is supported for square images of whole square patches, got image_size="
                f"{size} and patch_size={patch}"
            )

    @classmethod
    def check_inputs(cls, trunk: Any, given: Mapping[str, Any]) -> None:
        images, side = given.get("pixel_values"), trunk.config.image_size  # its mask head has one square grid
        if isinstance(images, Tensor) and tuple(images.shape[2:]) != (side, side):
            raise UnsupportedModelError(
                f"this {type(trunk).__name__} takes square images of {side} x {side} pixels, got "
                f"{images.shape[2]} x {images.shape[3]}"
            )

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.layers)[: model.num_hidden_layers - model.config.num_blocks]

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        return replace(super().facts(model), num_classes=model.config.num_labels)


class HFEomt(_Eomt):
    """Masks and classes of queries that join in the last layers; the layers before are reduced. Square images only."""

    name = "transformers EoMT"
    reduced_blocks = (ReducedEomtLayer,)
    trunk_classes = (eomt.EomtForUniversalSegmentation,)


class HFEomtDinov3(_Eomt):
    """EoMT on DINOv3: as EoMT, with rotary positions."""

    name = "transformers EoMT DINOv3"
    reduced_blocks = (ReducedEomtDinov3Layer,)
    trunk_classes = (eomt_dinov3.EomtDinov3ForUniversalSegmentation,)


class EomtLibrary(TransformersLibrary):
    """Segments, and detects objects: what the queries predict."""

    runs_on_meta = False  # it reads whether attention is masked from a buffer
    learns = False
    takes_one_size = True
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        **TransformersLibrary.parts,
        "tokens": ("*_token", "*_tokens"),
        "head": ("query", "upscale_block", "mask_head", "class_predictor"),
    }

    def num_classes(self, model: Any) -> int:
        return model.config.num_labels  # type: ignore[no-any-return]

    def tasks(self, model: nn.Module) -> tuple[str, ...]:
        return ("segmentation", "instances", "detection")  # its weights decide which; the config does not tell

    def trunk_layers(self, model: Any) -> list[nn.Module]:
        return list(model.layers)

    def readers(self, model: Any) -> list[nn.Module]:
        return [model.layers[len(_Eomt.blocks(model))]]  # the first with queries

    def pixel_scores(self, model: nn.Module, images: Tensor) -> Tensor:
        """The sum over queries of class probability times mask probability, as in the library's post-processing."""
        output = model(images)
        masks = _enlarged(output, images).sigmoid()
        classes = output.class_queries_logits.float().softmax(-1)[..., :-1]
        return torch.einsum("bqk,bqhw->bkhw", classes, masks)

    def detections(
        self, model: nn.Module, images: Tensor, sizes: Sequence[Size] | None = None
    ) -> list[dict[str, Tensor]]:
        """One object per query with a mask, of its best class: the library's post-processing, without a threshold.

        The score is the class probability times the mean mask probability; the box encloses the mask.
        """
        output = model(images)
        whole = [(images.shape[2], images.shape[3])] * len(images) if sizes is None else sizes
        scores, labels = output.class_queries_logits.float().softmax(-1)[..., :-1].max(-1)
        found = []
        for logits, label, score, (height, width) in zip(_enlarged(output, images), labels, scores, whole, strict=True):
            masks = logits > 0  # (Q, H, W)
            # What lies in the padding is no part of an object.
            masks[:, height:] = False
            masks[:, :, width:] = False
            # The mean of the mask's probabilities over its pixels, as in the library's score.
            inside = (logits.sigmoid() * masks).sum((1, 2)) / (masks.sum((1, 2)) + 1e-6)
            some = masks.any(dim=2).any(dim=1)
            boxes = masks_to_boxes(masks[some])
            boxes[:, 2:] += 1  # from the last pixel to its far edge
            objects = {"boxes": boxes.float(), "labels": label[some], "scores": (score * inside)[some]}
            found.append({**objects, "masks": masks[some]})
        return found
