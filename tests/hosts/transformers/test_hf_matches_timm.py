"""The same ViT in timm's and in Hugging Face's form: same logits on the same weights, same tokens, same MACs."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import tiny
from tiny_hosts.transformers_vit import GEOMETRY
from vitrim import reduce_
from vitrim.engines.macs import profile_of

METHODS = ("none", "tome:r=4", "tome:r=4,last_block=class_token", "topk", "evit", "mctf:r=4", "ats")

NAMES = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def hugging_face_weights(model: nn.Module, depth: int) -> dict[str, Tensor]:
    """timm's parameters under the names of `ViTForImageClassification`."""
    own = model.state_dict()
    weights = {
        "vit.embeddings.cls_token": own["cls_token"],
        "vit.embeddings.position_embeddings": own["pos_embed"],
    }
    for kind in ("weight", "bias"):
        weights[f"vit.embeddings.patch_embeddings.projection.{kind}"] = own[f"patch_embed.proj.{kind}"]
        weights[f"vit.layernorm.{kind}"] = own[f"norm.{kind}"]
        weights[f"classifier.{kind}"] = own[f"head.{kind}"]
        for block in range(depth):
            for name, theirs in NAMES.items():
                weights[f"vit.layers.{block}.{theirs}.{kind}"] = own[f"blocks.{block}.{name}.{kind}"]
            parts = own[f"blocks.{block}.attn.qkv.{kind}"].chunk(3)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                weights[f"vit.layers.{block}.attention.{name}.{kind}"] = part
    return weights


def pair() -> tuple[nn.Module, Any]:
    theirs = tiny.vit(num_classes=5)()
    config = ViTConfig(**{**GEOMETRY, "intermediate_size": 128}, layer_norm_eps=1e-6)
    ours = ViTForImageClassification(config).eval()
    ours.load_state_dict(hugging_face_weights(theirs, 4))
    return theirs, ours


@pytest.mark.parametrize("method", METHODS)
def test_logits_and_tokens_agree(method: str) -> None:
    theirs, ours = pair()
    images = tiny.images()
    with torch.no_grad():
        torch.testing.assert_close(ours(images).logits, theirs(images), atol=1e-5, rtol=1e-5)
        a, b = reduce_(theirs, method, record=True), reduce_(ours, method, record=True)
        torch.testing.assert_close(ours(images).logits, theirs(images), atol=1e-5, rtol=1e-5)
    assert a.tokens_per_block == b.tokens_per_block
    assert torch.equal(a.state.source, b.state.source)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["none", "tome:r=13,last_block=class_token"])
def test_macs_and_tokens_of_a_base_model_agree(method: str) -> None:
    with torch.device("meta"):
        theirs = timm.create_model("vit_base_patch16_224")
        ours = ViTForImageClassification(ViTConfig(num_labels=1000))
        images = torch.zeros(1, 3, 224, 224)
    a, b = profile_of(theirs, method, images), profile_of(ours, method, images)
    assert a.params == b.params
    assert a.macs == b.macs
    assert a.tokens_per_block == b.tokens_per_block
