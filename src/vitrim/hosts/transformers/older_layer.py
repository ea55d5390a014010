"""The form of a layer that several families of the library share: VideoMAE, ViTPose, YOLOS."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitrim.hosts.transformers.common import ReducedLayer


class ReducedOlderLayer(ReducedLayer):
    """A layer of the library's older form: ``attention.attention`` projects, ``attention.output`` projects back."""

    projections = ("query", "key", "value")
    head_dim_name = "attention_head_size"
    dropout_name = "dropout_prob"

    attention: Any
    intermediate: Any
    output: Any
    layernorm_before: Any
    layernorm_after: Any

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [block.attention, block.attention.attention, block.output]  # the last adds what it is given

    @property
    def attn(self) -> Any:
        return self.attention.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.layernorm_before(x)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.attention.output(out, None)  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        hidden = self.intermediate(self.layernorm_after(x))
        return self.output.dropout(self.output.dense(hidden))  # type: ignore[no-any-return]
