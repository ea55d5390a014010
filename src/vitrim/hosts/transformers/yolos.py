"""Hugging Face YOLOS: model and object detector. Detection tokens, behind the patches, are never reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_convert
from transformers.models.yolos import modeling_yolos as yolos

from vitrim.core.block import Installed
from vitrim.core.library import Size
from vitrim.core.plan import HostFacts, Part
from vitrim.core.tokens import TokenState, Trace
from vitrim.hosts.shared.blocks import hand_stamp
from vitrim.hosts.transformers.common import LayerCall, ReducedOlderLayer, TransformersHost, refuse_mask
from vitrim.hosts.transformers.library import TransformersLibrary


def prefix_in_front(x: Tensor, behind: int) -> Tensor:
    """Rows (..., N, C) of class token, patches, ``behind`` detection tokens, with the patches moved to the end."""
    end = x.shape[-2] - behind
    return torch.cat([x[..., :1, :], x[..., end:, :], x[..., 1:end, :]], dim=-2)


def prefix_behind(x: Tensor, behind: int) -> Tensor:
    """Undo `prefix_in_front`, for any number of patches."""
    start = 1 + behind
    return torch.cat([x[..., :1, :], x[..., start:, :], x[..., 1:start, :]], dim=-2)


@dataclass(eq=False)
class YolosCall(LayerCall):
    """``table`` are the mid positions (L - 1, 1, N0, C), with the prefix in front; None without them."""

    table: Tensor | None = None


class ReducedYolosLayer(ReducedOlderLayer, yolos.YolosLayer):
    """Reduced `YolosLayer`.

    Between the blocks, detection tokens are part of the prefix; in everything that the host or a user reads they are
    where the library has them. A table of mid positions is added at the start of the next block, since hidden states
    exclude it. A merged token gets its anchor's row; a pruned one that comes back has missed the tables in between.
    """

    attention_classes = (yolos.YolosSelfAttention,)
    call_class = YolosCall
    trace: Any

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # outside the part that gradient checkpointing repeats, when the trace may hold another forward's table
        table = self.trace.call.table
        if self.last:
            self.trace.call.table = None
        return super().__call__(hidden_states, *args, table=table, **kwargs)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, table: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        refuse_mask(attention_mask)
        return self.run(hidden_states, table)

    def receive(self, x: Tensor, state: TokenState, given: Any) -> tuple[Tensor, TokenState]:
        if self.depth == 0 or state.asked.full_grids:
            x = prefix_in_front(x, self.num_prefix - 1)
        x, state = super().receive(x, state, given)
        table: Tensor | None = given
        if table is not None and self.depth > 0:
            own = table[self.depth - 1].to(x.device)
            # A token that was reduced has the row of its anchor.
            x = x + (F.embedding(state.position, own[0]) if state.reduced else own)
        return x, state

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        x = super().outgoing(x, state)
        if not (self.last or state.asked.full_grids):
            return x
        moved = prefix_behind(x, self.num_prefix - 1)
        hand_stamp(x, moved)
        return moved

    def map_for_host(self, found: Tensor) -> Tensor:
        # Keys first, then queries: both sides of a map have tokens in the host's order.
        columns_moved = prefix_behind(found.transpose(-2, -1), self.num_prefix - 1).transpose(-2, -1)
        return prefix_behind(columns_moved, self.num_prefix - 1)

    def map_from_host(self, host_map: Tensor) -> Tensor:
        columns_moved = prefix_in_front(host_map.transpose(-2, -1), self.num_prefix - 1).transpose(-2, -1)
        return prefix_in_front(columns_moved, self.num_prefix - 1)


@dataclass(eq=False, repr=False)
class TableHook(Installed):
    """Runs after the module that makes the tables of mid positions (L - 1, 1, N0, C), and stores them.

    The encoder, which would add them to all N0 tokens in its own order, gets zeros.
    """

    trace: Any
    behind: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        self.trace.call.table = prefix_in_front(output, self.behind)
        return output.new_zeros(output.shape[0], 1, 1, 1)


class HFYolos(TransformersHost):
    """The detector reads the detection tokens, which are protected like the class token; mid positions are gathered.
    See [dense tasks](dense.md#dense-models-of-hugging-face)."""

    name = "transformers YOLOS"
    purpose = "segmentation, detection, poses, depth"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedYolosLayer,)
    trunk_classes = (yolos.YolosModel,)
    prefix_readers = (yolos.YolosForObjectDetection,)
    pools = False

    @classmethod
    def prefix_of(cls, trunk: Any) -> int:
        return 1 + int(trunk.config.num_detection_tokens)  # which are behind the patches in the library

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        detects = isinstance(model, yolos.YolosForObjectDetection)
        return replace(super().facts(model), num_classes=model.config.num_labels if detects else 0)

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        super().install(model, trace)
        encoder = cls.trunk(model).encoder
        if encoder.interpolation is not None:
            hook = TableHook(trace, cls.prefix_of(cls.trunk(model)) - 1)
            encoder.interpolation.register_forward_hook(hook)


class YolosLibrary(TransformersLibrary):
    """Detects objects, by its detection tokens."""

    learns = False
    sees_unpadded = True
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        **TransformersLibrary.parts,
        "tokens": ("*_token", "*_tokens"),
        "head": ("class_labels_classifier", "bbox_predictor"),
        "positions": ("position_embeddings", "mid_position_embeddings"),
    }

    def num_classes(self, model: Any) -> int | None:
        return model.config.num_labels if isinstance(model, yolos.YolosForObjectDetection) else None

    def tasks(self, model: nn.Module) -> tuple[str, ...]:
        return ("detection",) if isinstance(model, yolos.YolosForObjectDetection) else ()

    def readers(self, model: Any) -> list[nn.Module]:
        return [model.class_labels_classifier] if hasattr(model, "class_labels_classifier") else super().readers(model)

    def detections(
        self, model: nn.Module, images: Tensor, sizes: Sequence[Size] | None = None
    ) -> list[dict[str, Tensor]]:
        """One object per detection token, of its best class: the library's post-processing, without a threshold.

        Boxes are relative to the image without its padding.
        """
        output = model(images)
        scores, labels = output.logits.float().softmax(-1)[..., :-1].max(-1)
        boxes = box_convert(output.pred_boxes.float(), "cxcywh", "xyxy")
        whole = [(images.shape[2], images.shape[3])] * len(images) if sizes is None else sizes
        scales = boxes.new_tensor([(width, height, width, height) for height, width in whole])
        found = zip(boxes * scales[:, None], labels, scores, strict=True)
        return [{"boxes": box, "labels": label, "scores": score} for box, label, score in found]

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        return prefix_in_front(super().tokens(model, images), HFYolos.prefix_of(model) - 1)
