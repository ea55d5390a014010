"""Layers and trunks that are not the library's own are refused before anything is changed."""

from __future__ import annotations

import pytest
from transformers.models.vit.modeling_vit import ViTAttention, ViTModel

import tiny
import vitrim


class OtherAttention(ViTAttention):
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        out, weights = super().forward(hidden_states, attention_mask, **kwargs)
        return 2 * out, weights


class OtherTrunk(ViTModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_another_attention_class_is_refused() -> None:
    model = tiny.HOSTS["hf_vit"]()
    model.vit.layers[1].attention.__class__ = OtherAttention
    with pytest.raises(vitrim.UnsupportedModelError, match="attention of class OtherAttention is not supported"):
        vitrim.reduce_(model, "tome:r=4")
    assert not hasattr(model, "vitrim_reduction")


def test_a_trunk_with_a_forward_of_its_own_is_refused() -> None:
    model = tiny.HOSTS["hf_vit"]()
    model.vit.__class__ = OtherTrunk
    with pytest.raises(vitrim.UnsupportedModelError, match="OtherTrunk overrides the forward of ViTModel"):
        vitrim.reduce_(model, "tome:r=4")
