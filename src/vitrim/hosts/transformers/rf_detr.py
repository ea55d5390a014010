"""RF-DETR's DINOv2: windows are batch rows, as in `vitrim.hosts.transformers.detr`."""

from __future__ import annotations

from typing import Any

from transformers.models.rf_detr import modeling_rf_detr as rf_detr

from vitrim.hosts.transformers.common import ReducedDinoLayer
from vitrim.hosts.transformers.detr import ReducedRowLayer, RowsHost


class ReducedRfDetrLayer(ReducedRowLayer, ReducedDinoLayer, rf_detr.RfDetrDinov2Layer):
    """`RfDetrDinov2Layer` under reduction."""

    attention_classes = (rf_detr.RfDetrDinov2Attention,)

    @property
    def crosses(self) -> bool:
        return bool(self.global_attention)


class HFRfDetr(RowsHost):
    """RF-DETR's DINOv2, alone or in the detector: as LW-DETR's, and every window has a class token of its own."""

    name = "transformers RF-DETR"
    reduced_blocks = (ReducedRfDetrLayer,)
    trunk_classes = (rf_detr.RfDetrDinov2Backbone,)

    @classmethod
    def windows_a_side(cls, config: Any) -> int:
        return int(config.num_windows)
