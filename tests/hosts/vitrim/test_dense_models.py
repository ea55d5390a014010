"""Whole dense models as hosts: what training asks, saving, counting, timing, copies, compilation and export."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tiny
import vitrim
from dense_models import CLASSES, segmenter
from vitrim.core.registry import ask, host_of
from vitrim.engines.macs import profile_of
from vitrim.hosts.vitrim.dense import DenseHost
from vitrim.loading import create_model
from vitrim.models.vitdet import Detector
from vitrim.training.build import starting_model
from vitrim.training.recipe import Recipe
from vitrim.weights import load_host

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": CLASSES}
TINY_SHAPE = {key: value for key, value in TINY.items() if key != "num_classes"}
DETECTOR = {**TINY, "channels": 8, "hidden": 8, "rpn_layers": 1, "box_layers": 1}


def detector(**options: object) -> Detector:
    torch.manual_seed(0)
    model = create_model("vitdet:vit_tiny_patch16_224", options={**DETECTOR, **options})
    assert isinstance(model, Detector)
    return model


@pytest.mark.parametrize("host", tiny.PLAIN_BACKBONES)
def test_facts_are_those_of_the_backbone_with_a_head_that_reads_every_place(host: str) -> None:
    model = segmenter(host)
    inner = host_of(model.backbone).facts(model.backbone)
    facts = host_of(model).facts(model)
    assert host_of(model) is DenseHost
    assert facts.dense
    assert facts.head == "grid"
    assert facts.head_rows is None
    assert facts.num_classes == ask(model).num_classes(model) == CLASSES
    assert (facts.dim, facts.num_prefix, facts.grid_size) == (inner.dim, inner.num_prefix, inner.grid_size)
    assert ask(model).input_size(model) == (3, 24, 24)
    assert not ask(model).classifiers(model)


@pytest.mark.parametrize("host", tiny.PLAIN_BACKBONES)
def test_every_parameter_has_the_role_it_has_in_the_backbone_or_is_of_the_head(host: str) -> None:
    model = segmenter(host)
    inner = ask(model.backbone).roles(model.backbone)
    roles = ask(model).roles(model)
    assert set(roles) == {name for name, _ in model.named_parameters()}
    for name, role in roles.items():
        if name.startswith("backbone."):
            assert role == inner[name.removeprefix("backbone.")]
        else:
            assert role.part == "head"
            assert role.layer == 5  # behind four blocks
    decoder = segmenter(host, "mask_transformer")
    assert not ask(decoder).roles(decoder)["decoder.cls_emb"].decays
    vitrim.reduce_(model, "cropr")
    assert any(role.part == "method" for role in ask(model).roles(model).values())


def test_heads_of_detectors_are_head() -> None:
    model = detector(masks=True)
    roles = ask(model).roles(model)
    parts = {name.split(".")[0] for name, role in roles.items() if role.part == "head"}
    assert parts == {"pyramid", "rpn", "roi_heads"}
    ask(model).reset_head(model, 9)
    assert ask(model).num_classes(model) == 9
    assert model.roi_heads.box_predictor.cls_score.out_features == 10


def test_preprocessing_checkpointing_and_names_are_the_backbones() -> None:
    model = create_model("segmenter:vit_tiny_patch16_224", options=TINY)
    assert ask(model).preprocessing(model) == ask(model.backbone).preprocessing(model.backbone)
    assert ask(model).preprocessing(model).size == (32, 32)
    assert ask(model).architecture(model) == "segmenter:vit_tiny_patch16_224"
    assert ask(detector()).architecture(detector()) == "vitdet:vit_tiny_patch16_224"
    ask(model).checkpoint_gradients(model)
    assert model.backbone.grad_checkpointing
    model.train()(torch.zeros(1, 3, 32, 32)).sum().backward()
    assert ask(model).class_layers(model) == {"decoder.head": 0}
    assert ask(model).readers(model) == [model.decoder]
    assert ask(found := detector()).readers(found) == [found.pyramid]


@pytest.mark.parametrize("method", ["cropr:r=2,num_queries=16", "topk:restore=last_block", "gtp:num_prop=2"])
def test_a_saved_reduction_is_that_of_the_whole_model(method: str, tmp_path: Path) -> None:
    model = create_model("segmenter:vit_tiny_patch16_224", options=TINY)
    reduction = vitrim.reduce_(model, method)
    reduction.save(tmp_path)
    twin = copy.deepcopy(model)
    vitrim.restore_(twin)
    vitrim.Reduction.load(twin, tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(twin(images), model(images))


HEADS = {
    "linear": ("segmenter", {}),
    "mask_transformer": ("segmenter", {"decoder": "mask_transformer", "decoder_heads": 2}),
    "boxes": ("vitdet", DETECTOR),
    "cascade": ("vitdet", {**DETECTOR, "cascade": True, "masks": True}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", HEADS)
def test_weights_of_other_classes_bring_their_head(kind: str, tmp_path: Path) -> None:
    library, options = HEADS[kind]
    name = f"{library}:vit_tiny_patch16_224"
    trained = create_model(name, options={**TINY, **options, "num_classes": 3})
    save_file(dict(trained.state_dict()), tmp_path / "model.safetensors")
    model = create_model(name, options={**TINY, **options, "num_classes": 7})
    load_host(model, tmp_path / "model.safetensors")
    assert ask(model).num_classes(model) == 3
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in trained.state_dict().items())


def test_a_recipe_gives_its_model_as_many_classes_as_the_data_has() -> None:
    recipe = Recipe(model="segmenter:vit_tiny_patch16_224", model_options=TINY_SHAPE, epochs=1)
    assert ask(model := starting_model(recipe, 11, None)).num_classes(model) == 11


def test_routers_learn_one_output_per_class_and_patch() -> None:
    model = create_model("segmenter:vit_tiny_patch16_224", options={**TINY, "depth": 4}).train()
    reduction = vitrim.reduce_(model, "cropr:r=2,num_queries=16,per=16")
    model(torch.randn(2, 3, 32, 32))
    assert [tuple(out.shape) for out in reduction.aux("auxiliary_logits")] == [(2, 16, CLASSES)] * 2
    assert reduction.config.counts(16, 4) == [16, 13, 11, 16]


def test_detectors_are_profiled_on_the_meta_device() -> None:
    options = {**DETECTOR, "masks": True}
    model = create_model("vitdet:vit_tiny_patch16_224", options=options, device="meta")
    found = profile_of(model, "tome:r=4", torch.empty(1, 3, 32, 32, device="meta"))
    box = 1000 * (49 * 8 * 8 * 9 + 49 * 8 * 8 + 8 * (CLASSES + 1) * 5)
    assert found.macs.linear > box
    assert found.tokens_per_block == (13, 9, 5)


def test_a_pruned_fixed_grid_is_asked_of_the_backbones_patches() -> None:
    """GTP and the ring patterns read the grid of every forward, at other sizes too."""
    model = segmenter("dynamic_img_size")
    vitrim.reduce_(model, "gtp:num_prop=4")
    with torch.no_grad():
        assert model(tiny.images(size=32)[:, :, :28]).shape == (2, CLASSES, 28, 32)


def test_amounts_follow_the_image() -> None:
    model = segmenter("dynamic_img_size")
    reduction = vitrim.reduce_(model, "tome:r=4,per=36", record=True)
    with torch.no_grad():
        model(tiny.images())
        assert reduction.tokens_per_block == [33, 29, 25, 21]
        model(tiny.images(size=48))
        assert reduction.tokens_per_block == [145 - 16 * block for block in (1, 2, 3, 4)]


def test_a_model_without_blocks_has_nothing_to_reduce() -> None:
    options = {"img_size": 56, "depth": 1, "embed_dim": 32, "num_heads": 2}
    model = create_model("segmenter:vittm_small_28_28", options=options)
    assert isinstance(model.decoder.head, nn.Linear)
    with pytest.raises(vitrim.UnsupportedModelError, match="has no blocks: there is nothing to reduce"):
        vitrim.reduce_(model, "tome")
    assert profile_of(model, None, torch.zeros(1, 3, 56, 56)).tokens_per_block == ()
