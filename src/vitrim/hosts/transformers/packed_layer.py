"""Layers of towers that get the images of one size in one sequence: Pixtral and Qwen-VL."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrim.core.tokens import STAMP
from vitrim.hosts.transformers.common import ReducedLayer


class PackedLayer(ReducedLayer):
    """A layer that is told how many images its sequence has, and gives them on as the second host argument."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # outside of what gradient checkpointing repeats: by then the trace may hold another forward's images
        table = self.trace.table
        images = 1 if table is None else table.shape[0]
        return super().__call__(hidden_states, *args, images=images, **kwargs)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        mask_or_lengths: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        images: int = 1,
        **kwargs: Any,
    ) -> Tensor:
        return self.run(hidden_states, position_embeddings, images)


def hand_stamp(source: Tensor, target: Tensor) -> None:
    """Let the state that is stamped on ``source`` go on with ``target``, the same tokens in another shape."""
    if hasattr(source, STAMP):
        setattr(target, STAMP, getattr(source, STAMP))
