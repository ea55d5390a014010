"""Parts of models with two streams of tokens: a classifier on each stream, the loss on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, calculate_drop_path_rates, to_2tuple, trunc_normal_
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrim.core.plan import Grid
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from vitrim.tasks.step import Step


def join_keys_and_values(state: dict[str, Tensor], module: str) -> None:
    """Join the layers ``k`` and ``v`` of ``module`` in a checkpoint into one layer ``kv``, in place."""
    for kind in ("weight", "bias"):
        state[f"{module}.kv.{kind}"] = torch.cat([state.pop(f"{module}.{name}.{kind}") for name in ("k", "v")])


def grid_of(size: Sequence[int], patch_size: int) -> Grid:
    """Rows and columns of patches in an image of ``size`` (height, width) in pixels, which they must divide."""
    height, width = size
    if height % patch_size or width % patch_size:
        raise VitrimError(f"images of {height}x{width} px do not divide into patches of {patch_size} px")
    return height // patch_size, width // patch_size


class TwoStreamClassifier(nn.Module):
    """Base class of models with two streams of tokens and a classifier on each; the first one predicts.

    A subclass defines ``embed`` and the ``layers`` that process both streams. In both modes ``model(images)`` returns
    the logits of the prediction, and `forward_streams` those of both classifiers for the papers' loss, `objective`.

    Attributes:
        embed: a method or module from images (B, 3, H, W) to tokens (B, N, C) and auxiliary tokens (B, M, C).
        layers: modules from both streams and `shared_parts` to both streams.
    """

    embed: Callable[[Tensor], tuple[Tensor, Tensor]]
    layers: nn.ModuleList

    def __init__(
        self,
        img_size: int | tuple[int, int],
        in_chans: int,
        dim: int,
        num_classes: int,
        global_pool: str,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.check_pool(global_pool)
        self.img_size: Grid = to_2tuple(img_size)
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = self.embed_dim = dim
        self.fc_norm = LayerNorm(dim, eps=1e-6)
        self.auxiliary_fc_norm = LayerNorm(dim, eps=1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = classifier(dim, num_classes)
        self.auxiliary_head = classifier(dim, num_classes)
        self.grad_checkpointing = False

    @classmethod
    def check_pool(cls, global_pool: str) -> None:
        if global_pool != "avg":
            raise VitrimError(f"{cls.__name__} pools by the mean (avg) over its tokens, not '{global_pool}'")

    @property
    def shared_parts(self) -> tuple[nn.Module, ...]:
        """Modules that all layers share; each layer gets them after the two streams."""
        return ()

    def run_layer(self, layer: nn.Module, tokens: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        """Run both streams through ``layer``; with gradient checkpointing, recompute it in the backward pass."""
        inputs = (tokens, auxiliary, *self.shared_parts)
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(*inputs)  # type: ignore[no-any-return]

    def forward_layers(self, tokens: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        """Run both streams, (B, N, C) and (B, M, C), through all layers."""
        for layer in self.layers:
            tokens, auxiliary = self.run_layer(layer, tokens, auxiliary)
        return tokens, auxiliary

    def forward_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute predicting (B, N, C) and auxiliary tokens (B, M, C) of images (B, 3, H, W)."""
        return self.forward_layers(*self.embed(x))

    def forward_head(self, x: tuple[Tensor, Tensor], pre_logits: bool = False) -> Tensor:
        """Compute logits (B, K) from the first stream, or with ``pre_logits`` its pooled feature (B, C)."""
        # The first stream predicts; the second one only trains.
        pooled: Tensor = self.head_drop(self.fc_norm(x[0].mean(1)))
        return pooled if pre_logits else self.head(pooled)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logits (B, K) of both streams for `objective`, the predicting one first."""
        streams = self.forward_features(x)
        auxiliary = self.auxiliary_head(self.head_drop(self.auxiliary_fc_norm(streams[1].mean(1))))
        return self.forward_head(streams), auxiliary

    def losses(self, step: Step) -> dict[str, Tensor]:
        return objective(self.forward_streams(step.images), step.targets, criterion=step.criterion)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            self.check_pool(global_pool)
        weight = self.fc_norm.weight
        self.num_classes = num_classes
        self.head = classifier(self.embed_dim, num_classes).to(weight)
        self.auxiliary_head = classifier(self.embed_dim, num_classes).to(weight)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if parameter.ndim == 3}


def position_table(grid: Grid, dim: int, num_prefix: int = 0) -> nn.Parameter:
    """Create a table of zeros (1, prefix + H * W, C), positions of prefix tokens and of a ``grid`` (H, W)."""
    return nn.Parameter(torch.zeros(1, num_prefix + grid[0] * grid[1], dim))


def transformer_blocks(dim: int, num_heads: int, depth: int, drop_path: float, **options: Any) -> list[Block]:
    """Build ``depth`` blocks of timm with ``options``; stochastic depth grows linearly from 0 to ``drop_path``."""
    rates: Any = calculate_drop_path_rates(drop_path, depth)  # floats: nested only for models with stages
    return [Block(dim, num_heads, drop_path=rate, norm_layer=LayerNorm, **options) for rate in rates]


def classifier(dim: int, num_classes: int) -> nn.Module:
    """Create a zero-initialised linear classifier, or the identity for 0 classes."""
    if num_classes == 0:
        return nn.Identity()
    head = nn.Linear(dim, num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def initialise(*modules: nn.Module) -> None:
    """Initialise linear layers and position tables as timm does in ViTs: truncated normal of 0.02, biases 0."""
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, nn.Linear):
            trunc_normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        for parameter in part.parameters(recurse=False):
            if parameter.ndim == 3:  # (1, N, C): positions and class tokens
                trunc_normal_(parameter, std=0.02)


def objective(
    logits: tuple[Tensor, Tensor],
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, Tensor]:
    """Training loss of two-stream models: the criterion on both classifiers, added with weight 1.

    Returns "prediction" and "auxiliary", and their sum "total", of the logits of `TwoStreamClassifier.forward_streams`.
    """
    prediction, auxiliary = (criterion(stream, targets) for stream in logits)
    return {"prediction": prediction, "auxiliary": auxiliary, "total": prediction + auxiliary}
