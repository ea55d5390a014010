"""Image towers of Hugging Face's vision-language models: Idefics3, SmolVLM, InternVL. The connector reads a map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.idefics3 import modeling_idefics3 as idefics3
from transformers.models.internvl import modeling_internvl as internvl
from transformers.models.smolvlm import modeling_smolvlm as smolvlm

from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import ConnectedTower, ReducedClipLayer, ReducedLayer


class _UnmaskedLayer(ReducedClipLayer):
    """Layers that get a mask of patches, which `check_inputs` ensures masks nothing."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self.run(hidden_states)


class ReducedIdefics3EncoderLayer(_UnmaskedLayer, idefics3.Idefics3EncoderLayer):
    attention_classes = (idefics3.Idefics3VisionAttention,)


class ReducedSmolVLMEncoderLayer(_UnmaskedLayer, smolvlm.SmolVLMEncoderLayer):
    attention_classes = (smolvlm.SmolVLMVisionAttention,)


class ReducedInternVLVisionLayer(ReducedLayer, internvl.InternVLVisionLayer):
    """Reduced `InternVLVisionLayer`: queries and keys may have norms over all heads."""

    attention_classes = (internvl.InternVLVisionAttention,)
    output_names = ("projection_layer", "projection_dropout")
    update_names = ("lambda_1",)
    mlp_names = ("layernorm_after", "mlp", "dropout", "lambda_2")
    norms_heads = True
    scale_name = "scale"


class _Padded(ConnectedTower):
    """A tower whose images may come padded."""

    layers_name = "encoder.layers"
    num_prefix = 0
    any_size = True

    @classmethod
    def check_inputs(cls, trunk: Any, given: Mapping[str, Any]) -> None:
        mask = given.get("patch_attention_mask")
        if mask is not None and not mask.all():  # padding lies among the patches, row by row
            raise UnsupportedModelError(
                f"a reduced {type(trunk).__name__} takes no padded images: give images of one size, or one by one"
            )


class HFIdefics3(_Padded):
    """The image tower, on images without padding."""

    name = "transformers Idefics3"
    reduced_blocks = (ReducedIdefics3EncoderLayer,)
    trunk_classes = (idefics3.Idefics3VisionTransformer,)


class HFSmolVLM(_Padded):
    """The image tower, on images without padding."""

    name = "transformers SmolVLM"
    reduced_blocks = (ReducedSmolVLMEncoderLayer,)
    trunk_classes = (smolvlm.SmolVLMVisionTransformer,)


class HFInternVL(ConnectedTower):
    """The image tower."""

    name = "transformers InternVL"
    reduced_blocks = (ReducedInternVLVisionLayer,)
    trunk_classes = (internvl.InternVLVisionModel,)
