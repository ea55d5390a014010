"""Hugging Face VideoMAE and V-JEPA 2: tokens of space and time, without a class token.

The grid has three axes, so methods that read rows and columns of an image are refused.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.videomae import modeling_videomae as videomae
from transformers.models.vjepa2 import modeling_vjepa2 as vjepa2

from vitrim.core.attention import Attention
from vitrim.core.plan import Head, HostFacts
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import ReducedLayer, ReducedOlderLayer, TransformersHost
from vitrim.hosts.transformers.library import TransformersLibrary


class ReducedVideoMAELayer(ReducedOlderLayer, videomae.VideoMAELayer):
    attention_classes = (videomae.VideoMAESelfAttention,)


class ReducedVJEPA2Layer(ReducedLayer, vjepa2.VJEPA2Layer):
    """Reduced `VJEPA2Layer`: a token keeps the angles of its anchor's frame, row and column."""

    attention_classes = (vjepa2.VJEPA2RopeAttention,)
    norm_name = "norm1"
    output_names = ("proj",)
    update_names = ("drop_path",)
    mlp_names = ("norm2", "mlp", "drop_path")
    projections = ("query", "key", "value")
    head_dim_name = "attention_head_size"
    dropout_name = "dropout_prob"

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if position_mask is not None:
            raise UnsupportedModelError("a reduced layer takes no position_mask; vitrim.restore_(model) first")
        return self.run(hidden_states), None

    def projected(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attention = super().projected(x, state, rows, given)
        # The library computes frame, row and column from the number of a place: the anchor's.
        places = self.attention.get_position_ids(x, masks=state.position if state.reduced else None)
        q, k = (self.attention.apply_rotary_embeddings(each, places) for each in (attention.q, attention.k))
        return replace(attention, q=q, k=k, k_raw=attention.k)


class _Video(TransformersHost):
    """`HostFacts.grid_size` is (frames times rows, columns); `HostFacts.input_size` is that of one frame."""

    purpose = "video and audio"
    heads: ClassVar[tuple[Head, ...]] = ("no class token",)
    num_prefix = 0
    tokens_of_images = False  # of clips
    maker_name = None  # its map has three axes
    frames_name: ClassVar[str] = "num_frames"
    """The config's name of the frames per clip."""

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        config, facts = cls.trunk(model).config, super().facts(model)
        rows, columns = facts.grid_size
        return replace(facts, grid_size=(getattr(config, cls.frames_name) // config.tubelet_size * rows, columns))


class VideoLibrary(TransformersLibrary):
    """A library of models that take clips (B, T, C, H, W): an image is a clip of equal frames."""

    def inputs_of(self, model: Any, images: Tensor) -> dict[str, Any]:
        config = model.config
        frames = getattr(config, "num_frames", None) or config.frames_per_clip
        first = tuple(inspect.signature(type(model).forward).parameters)[1]
        return {first: images.unsqueeze(1).expand(-1, frames, -1, -1, -1)}


class HFVideoMAE(_Video):
    """The encoder on whole clips; the classifier averages the tokens. Refused: one that reads the first patch."""

    name = "transformers VideoMAE"
    reduced_blocks = (ReducedVideoMAELayer,)
    counter_name = "embeddings.patch_embeddings.projection"
    trunk_classes = (videomae.VideoMAEModel,)

    @classmethod
    def check(cls, model: Any) -> None:
        super().check(model)
        if isinstance(model, videomae.VideoMAEForVideoClassification) and not model.config.use_mean_pooling:
            raise UnsupportedModelError(
                f"{type(model).__name__} with use_mean_pooling=False is not supported: it reads the first patch, as if "
                "it were a class token"
            )


class HFVJEPA2(_Video):
    """The encoder. The classifier attends to tokens; the predictor reads each at its place."""

    name = "transformers V-JEPA 2"
    heads = ("no class token", "grid")
    reduced_blocks = (ReducedVJEPA2Layer,)
    counter_name = "encoder.embeddings.patch_embeddings.proj"
    trunk_classes = (vjepa2.VJEPA2Model,)
    size_names = ("crop_size",)
    grid_readers = (vjepa2.VJEPA2Model,)  # for its predictor
    channels_name = "in_chans"
    frames_name = "frames_per_clip"
