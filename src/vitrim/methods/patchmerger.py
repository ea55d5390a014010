"""PatchMerger: learned queries mix the patches into a few tokens (Renggli et al., Learning to Merge Tokens, 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from vitrim.core.assignment import Soft
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.method import StagedConfig, Traits
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.tokens import TokenState, decision_dtype
from vitrim.errors import VitrimError


class SoftMixing(StagedConfig):
    """Options of methods whose learned weights mix all patches into K new tokens at a few stages.

    K_s follows from ``keep_rate`` at the model's own image size, and shapes learned parameters: it cannot change.
    """

    kind = "soft"
    traits = Traits(training_free=False)
    runtime = frozenset()

    def tokens_at(self, layer: Layer) -> tuple[int, int]:
        """Patches entering and leaving ``layer`` at the model's own image size."""
        counts = [layer.initial_patches, *self.counts_of(layer.amounts, layer.initial_patches)]
        return counts[layer.depth], counts[layer.depth + 1]


C = TypeVar("C", bound=SoftMixing)


class SoftReducer(Reducer[C]):
    """Refuse images of another size than its parameters are for; subclasses implement `mix`."""

    site = "before"
    spares_block = True

    @property
    def num_tokens(self) -> int:
        """K, the patches that leave this layer."""
        return self.config.tokens_at(self.layer)[1]

    def forward(self, x: Tensor, attention: Attention | None, state: TokenState) -> Soft:
        # for another image size the amount does not matter: mix refuses it
        return self.assign(x, cast(Attention, attention), state)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Soft:
        if state.initial_patches != self.layer.initial_patches:
            rows, columns = self.layer.grid_size
            raise VitrimError(
                f"{self.config.name} has learned parameters for {rows} x {columns} = {rows * columns} patches, and "
                f"this image has {state.initial_patches}: resize images, or create and reduce the model at their size"
            )
        return self.mix(x[:, state.num_prefix :])

    def mix(self, patches: Tensor) -> Soft:
        """Mix the patches (B, P, C) into new tokens."""
        raise NotImplementedError


R = TypeVar("R", bound=SoftReducer[Any])


def mixes(config: type[SoftMixing]) -> Callable[[type[R]], type[R]]:
    """Class decorator: `vitrim.register`, for layers that leave fewer tokens than enter."""

    def enter(reducer: type[R]) -> type[R]:
        def choose(config: SoftMixing, layer: Layer) -> type[R] | None:
            before, after = config.tokens_at(layer)
            return reducer if after < before else None

        register(config)(choose)
        return reducer

    return enter


class PatchMerger(SoftMixing):
    """Let K learned queries attend to the layer-normed patches; each becomes one token (section 3 of the paper).

    Formulas and deviations are in docs/methods/patchmerger.md.

    Example:
        >>> PatchMerger(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "patchmerger"
    paper = "Learning to Merge Tokens in Vision Transformers (arXiv 2022)"


@mixes(PatchMerger)
class PatchMergerReducer(SoftReducer[PatchMerger]):
    """Parameters: ``queries`` (K, C) and the layer norm ``norm``."""

    def __init__(self, config: PatchMerger, layer: Layer) -> None:
        super().__init__(config, layer)
        self.queries = nn.Parameter(torch.randn(self.num_tokens, layer.dim))
        self.norm = nn.LayerNorm(layer.dim)

    def mix(self, patches: Tensor) -> Soft:
        values = self.norm(patches)
        logits = (self.queries @ values.transpose(-1, -2)).to(decision_dtype(values.dtype))
        return Soft(logits.softmax(dim=-1), values)
