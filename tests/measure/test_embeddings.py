"""Towers without a classifier are scored by their embeddings, the ones that their library means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from torch import nn

import vitrim
from vitrim.core.registry import ask
from vitrim.errors import VitrimError

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"image_size": 32, "patch_size": 8}


def tower(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, kind.replace("Model", "Config").removesuffix("WithProjection"))
    return getattr(transformers, kind)(config(**SMALL, **IMAGES, **options)).eval()


def embedding(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return ask(model).embedding(model, images)


@pytest.mark.parametrize(("pool", "name"), [("token", "class token"), ("avg", "mean of patches")])
def test_timms_is_what_its_head_reads(pool: str, name: str) -> None:
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "global_pool": pool, "num_classes": 3}
    model, images = timm.create_model("test_vit", **options).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = model.forward_head(model.forward_features(images), pre_logits=True)
    assert torch.equal(embedding(model, images), wanted)
    model.reset_classifier(0)
    assert torch.equal(embedding(model, images), wanted)
    assert ask(model).embedding_name(model) == name
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_transformers_is_the_projection_the_pooler_or_the_class_token() -> None:
    images = torch.randn(2, 3, 32, 32)
    clip = tower("CLIPVisionModelWithProjection", projection_dim=16)
    siglip, dino = tower("SiglipVisionModel"), tower("Dinov2Model")
    bare = tower("ViTModel")
    bare.pooler = None
    with torch.no_grad():
        wanted = {
            "projection": (clip, clip(images).image_embeds),
            "pooler": (siglip, siglip(images).pooler_output),
            "class token": (dino, dino(images).last_hidden_state[:, 0]),
        }
        token = bare(images).last_hidden_state[:, 0]
    for name, (model, vectors) in wanted.items():
        assert torch.equal(embedding(model, images), vectors)
        assert ask(model).embedding_name(model) == name
    assert torch.equal(embedding(bare, images), token)
    with pytest.raises(VitrimError, match="ResNetModel gives no embedding, one vector per image"):
        embedding(
            transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])), images
        )


def test_both_towers_together_give_the_projection_of_images() -> None:
    text = {"vocab_size": 20, "max_position_embeddings": 8}
    config = transformers.CLIPConfig(
        text_config={**SMALL, **text}, vision_config={**SMALL, **IMAGES}, projection_dim=16
    )
    model, images = transformers.CLIPModel(config).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = model.visual_projection(model.vision_model(images).pooler_output)
    assert torch.equal(embedding(model, images), wanted)


def test_a_tower_is_evaluated_without_being_told_the_task() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=0).eval()
    batches = [(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    report = vitrim.evaluate(model, ["none", "tome:r=4"], batches)
    dense, none, merged = report.rows
    assert report.facts["task"] == "embedding"
    assert report.facts["embedding"] == "class token"
    assert (none["neighbours"], none["loss"], none["recall1"]) == (1.0, 0.0, dense["recall1"])
    assert none["cosine"] == pytest.approx(1.0)
    vitrim.reduce_(model, "tome:r=4")
    own = torch.cat([embedding(model, images) for images, _ in batches]).double()
    vitrim.restore_(model)
    full = torch.cat([embedding(model, images) for images, _ in batches]).double()
    assert merged["cosine"] == pytest.approx(nn.functional.cosine_similarity(own, full).mean().item())
    labels = torch.tensor([0, 1] * 6)
    for name, database in (("recall1", own), ("recall1_dense", full)):
        cosines = nn.functional.normalize(own, dim=1) @ nn.functional.normalize(database, dim=1).T
        nearest = cosines.fill_diagonal_(-2).argmax(1)
        assert merged[name] == pytest.approx((labels[nearest] == labels).double().mean().item())


def test_a_classifier_has_an_embedding_too_if_it_is_asked_for() -> None:
    model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
    batches = [(torch.randn(4, 3, 32, 32), torch.tensor([0, 9, 0, 9]))]  # classes that the model does not have
    assert vitrim.evaluate(model, "tome:r=2", vitrim.ScoredData(batches, task="embedding")).rows[1]["neighbours"] <= 1.0
    with pytest.raises(VitrimError, match="one image has no neighbours"):
        vitrim.evaluate(
            model, "tome:r=2", vitrim.ScoredData([(torch.randn(1, 3, 32, 32), torch.tensor([0]))], task="embedding")
        )


def test_a_search_is_told_the_distance_of_embeddings_and_no_divergence() -> None:
    """`vitrim tune` and `analyze`: an embedding is a feature, and no row of logits."""
    from vitrim.measure.contestants import contestants
    from vitrim.measure.run import Measurement
    from vitrim.tasks import make_task
    from vitrim.tuning.proxy import Damage

    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=0).eval()
    task, images = make_task("embedding", 0), torch.randn(3, 3, 32, 32)
    measurement = Measurement(contestants(model, ["tome:r=2"], task), [Damage(task)], task)
    measurement.follow([(images, torch.arange(3))])
    dense = embedding(model, images).double().numpy()
    with vitrim.reduced(model, "tome:r=2"):
        own = embedding(model, images).double().numpy()
    values = {name: one.each().tolist() for name, one in measurement.gauges[1][0].values.items() if len(one.each())}
    norms = [np.linalg.norm(each, axis=1) for each in (own, dense)]
    assert values["cosine"] == pytest.approx(1 - (own * dense).sum(1) / norms[0] / norms[1], abs=1e-6)
    assert values["feature"] == pytest.approx(np.linalg.norm(own - dense, axis=1) / norms[1], abs=1e-5)
    assert "kl" not in values
