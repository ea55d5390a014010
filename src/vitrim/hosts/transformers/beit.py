"""Hugging Face BEiT: model, classifier, backbone, segmentation. Tokens keep the position bias of their own place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.models.beit.modeling_beit import BeitAttention, BeitForImageClassification, BeitLayer, BeitModel

from vitrim.core.attention import Attention, add_bias
from vitrim.core.tokens import TokenState
from vitrim.hosts.transformers.common import ReducedLayer, TransformersHost, refuse_mask


class ReducedBeitLayer(ReducedLayer, BeitLayer):
    """`BeitLayer` under reduction."""

    host_class = BeitLayer
    attention_class = BeitAttention

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        shared = None
        if self.attn.config.use_shared_relative_position_bias and attention_mask is not None:
            # the model hands its shared bias to the layers as a mask; a mask of the user's own is refused by the trunk
            shared = attention_mask[0]
        else:
            refuse_mask(attention_mask)
        return self.run(hidden_states, shared, interpolate_pos_encoding, resolution)

    @property
    def attn(self) -> Any:
        return self.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.layernorm_before(x)  # type: ignore[no-any-return]

    def projected(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        attention = super().projected(x, state, rows)
        table = self._position_bias(state.num_inputs, *host_args)
        if table is None:
            return attention
        position = state.pair_bias(table).to(attention.q.dtype)
        position = position if rows is None else position[:, :, :rows]
        return replace(attention, bias=add_bias(position, attention.bias))

    def _position_bias(
        self, n: int, shared: Tensor | None, interpolate: bool, resolution: tuple[int, int]
    ) -> Tensor | None:
        """(H, n, n) between the input tokens, this layer's and the shared one together; None without either."""
        if self.relative_position_bias is None:
            return shared
        patch: Any = self.patch_size
        window = (resolution[0] // patch, resolution[1] // patch)
        own: Tensor = self.relative_position_bias(window, interpolate, dim_size=n)[0]
        return add_bias(own, shared)

    def attention_branch(self, out: Tensor) -> Tensor:
        update = self.lambda_1 * self.dropout(self.attn.o_proj(out))
        return self.drop_path(update)  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        update = self.lambda_2 * self.dropout(self.mlp(self.layernorm_after(x)))
        return self.drop_path(update)  # type: ignore[no-any-return]


class HFBeit(TransformersHost):
    """Hugging Face BEiT. Its classifier averages the patches, or reads the class token, as the config says."""

    name = "transformers BEiT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedBeitLayer,)
    trunk_classes = (BeitModel,)
    layers_name = "layers"

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        pools_class_token = isinstance(model, BeitForImageClassification) and not model.config.use_mean_pooling
        return 1 if pools_class_token else None
