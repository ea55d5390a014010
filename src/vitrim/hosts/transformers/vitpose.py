"""Hugging Face ViTPose: the backbone, alone or in the pose estimator, whose head reads a map."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.vitpose_backbone import modeling_vitpose_backbone as vitpose_backbone

from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import DenseBackbone, ReducedNestedLayer


class ReducedVitPoseBackboneLayer(ReducedNestedLayer, vitpose_backbone.VitPoseBackboneLayer):
    attention_classes = (vitpose_backbone.VitPoseBackboneSelfAttention,)
    mlp_names = ("layernorm_after", "mlp")

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, dataset_index: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        return self.run(hidden_states)  # there is one expert, so no index to choose it


class HFVitPose(DenseBackbone):
    """Models with one expert."""

    name = "transformers ViTPose"
    reduced_blocks = (ReducedVitPoseBackboneLayer,)
    trunk_classes = (vitpose_backbone.VitPoseBackbone,)
    num_prefix = 0

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        experts = cls.trunk(model).config.num_experts
        if experts != 1:
            raise UnsupportedModelError(
                f"{type(model).__name__} with {experts} experts is not supported: each image has an expert of its own"
            )
