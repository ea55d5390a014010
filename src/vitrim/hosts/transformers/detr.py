"""Detector backbones whose windows are batch rows from the start: LW-DETR's ViT and RF-DETR's DINOv2.

Tokens travel as (B*W, n, C), W square windows of n tokens per image. In RF-DETR every window has its own class token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.lw_detr import modeling_lw_detr as lw_detr
from transformers.models.rf_detr import modeling_rf_detr as rf_detr

from vitrim.core.attention import Attention
from vitrim.core.block import ReducedBlock
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.windows import AcrossWindows, WindowBlock, Windows, WindowState
from vitrim.hosts.transformers.common import DenseBackbone, ReducedDinoLayer, ReducedLayer


class ReducedRowLayer(WindowBlock, ReducedLayer):
    """The reduced form of a layer whose input and output have windows as batch rows."""

    OWN = (*ReducedBlock.OWN, "windows_a_side")

    windows_a_side: int
    """Windows in a row of the image, set by the host on every layer."""

    def incoming(self, x: Tensor) -> TokenState:
        state = ReducedBlock.incoming(self, x)
        if isinstance(state, WindowState):
            return state
        # Windows are square: their number of tokens tells the side.
        side, number = isqrt(x.shape[1] - state.num_prefix), self.windows_a_side
        return self.begin(state, Windows(number, number, side, side))

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        assert isinstance(state, WindowState)
        x = ReducedBlock.outgoing(self, x, state)
        if self.last:
            self.leave_states_of_images()
        return x

    def projected(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        assert isinstance(state, WindowState)
        attention = super().projected(x, state, rows, given)
        if not self.crosses or state.windows.number == 1:
            return attention
        bias = state.windows.bias_of_images(attention.bias)
        return AcrossWindows(**{**attention.parts(), "bias": bias}, windows=state.windows)


class ReducedLwDetrLayer(ReducedRowLayer, lw_detr.LwDetrViTLayer):
    attention_classes = (lw_detr.LwDetrViTAttention,)
    update_names = ("gamma_1",)
    mlp_names = ("layernorm_after", "intermediate", "gamma_2")

    @property
    def crosses(self) -> bool:
        return not self.window


class ReducedRfDetrLayer(ReducedRowLayer, ReducedDinoLayer, rf_detr.RfDetrDinov2Layer):
    attention_classes = (rf_detr.RfDetrDinov2Attention,)

    @property
    def crosses(self) -> bool:
        return bool(self.global_attention)


class _RowsBackbone(DenseBackbone):
    """A backbone whose windows are batch rows."""

    has_maps = False
    tokens_of_images = False  # of windows

    windows_name: ClassVar[str]
    """The config's name of the windows in a row of the image."""

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        facts, side = super().facts(model), cls.windows_a_side(model)
        rows, columns = facts.grid_size
        if rows != columns or rows % side:
            raise UnsupportedModelError(
                f"{side} x {side} windows of equal size do not make up {rows} x {columns} patches: use square images "
                f"whose sides are multiples of {side} patches"
            )
        return replace(
            facts,
            # a window's class token attends to other windows, too, so no method may score patches by it
            has_class_token=facts.has_class_token and side == 1,
            grid_size=(rows // side, columns // side),
            windows=side**2,
            across_windows=side > 1,
        )

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        cls.facts(model)

    @classmethod
    def grid_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        return None  # it would be the image's; windows have their own

    @classmethod
    def check_inputs(cls, trunk: Any, given: Mapping[str, Any]) -> None:
        height, width = given["pixel_values"].shape[-2:]
        if height != width:
            raise UnsupportedModelError(f"a reduced {type(trunk).__name__} takes square images, not {height} x {width}")

    @classmethod
    def install(cls, model: nn.Module, trace: Any) -> None:
        super().install(model, trace)
        for block in cls.blocks(model):
            block.windows_a_side = cls.windows_a_side(model)  # type: ignore[assignment]

    @classmethod
    def windows_a_side(cls, model: nn.Module) -> int:
        return int(getattr(cls.trunk(model).config, cls.windows_name))


class HFLwDetr(_RowsBackbone):
    """LW-DETR's ViT, alone or in the detector: [windows](hosts.md#windows) that are batch rows. Square images only."""

    name = "transformers LW-DETR"
    reduced_blocks = (ReducedLwDetrLayer,)
    trunk_classes = (lw_detr.LwDetrViTBackbone,)
    maker_name = "embeddings.projection"
    num_prefix = 0
    windows_name = "num_windows_side"


class HFRfDetr(_RowsBackbone):
    """RF-DETR's DINOv2, alone or in the detector: as LW-DETR, with a class token in every window."""

    name = "transformers RF-DETR"
    reduced_blocks = (ReducedRfDetrLayer,)
    trunk_classes = (rf_detr.RfDetrDinov2Backbone,)
    windows_name = "num_windows"
