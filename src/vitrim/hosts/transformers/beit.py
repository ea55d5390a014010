"""Hugging Face BEiT: model, classifier, backbone, segmentation. Tokens keep the position bias of their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.models.beit.modeling_beit import BeitAttention, BeitLayer, BeitModel

from vitrim.core.attention import Attention, add_bias
from vitrim.core.tokens import TokenState
from vitrim.hosts.transformers.common import ReducedLayer, TransformersHost, refuse_mask


class ReducedBeitLayer(ReducedLayer, BeitLayer):
    attention_classes = (BeitAttention,)
    update_names = ("dropout", "lambda_1", "drop_path")
    mlp_names = ("layernorm_after", "mlp", "dropout", "lambda_2", "drop_path")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        shared = None
        if self.attention.config.use_shared_relative_position_bias and attention_mask is not None:
            # the model passes its shared bias to the layers as a mask; the trunk refuses a user's own mask
            shared = attention_mask[0]
        else:
            refuse_mask(attention_mask)
        return self.run(hidden_states, (shared, interpolate_pos_encoding, resolution))

    def projected(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attention = super().projected(x, state, rows, given)
        # (H, N0, N0) between input tokens: this layer's bias and the shared one
        table, interpolate, resolution = given
        if self.relative_position_bias is not None:
            side: Any = self.patch_size
            window = (resolution[0] // side, resolution[1] // side)
            table = add_bias(self.relative_position_bias(window, interpolate, dim_size=state.num_inputs)[0], table)
        if table is None:
            return attention
        position = state.pair_bias(table, rows).to(attention.q.dtype)
        return replace(attention, bias=add_bias(position, attention.bias))


class HFBeit(TransformersHost):
    """The classifier averages the patches, or reads the class token, as the config says."""

    name = "transformers BEiT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedBeitLayer,)
    trunk_classes = (BeitModel,)
    layers_name = "layers"
