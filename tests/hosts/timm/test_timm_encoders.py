"""timm's image encoders of language models and VOLO: what is reduced, what maps show, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import tiny
import vitrim
from vitrim.core.registry import ask, host_of
from vitrim.hosts.timm.eva import expand_groups

ENCODERS = [name for name in tiny.FURTHER if name.startswith(("qwen3", "deepseek", "gemma4"))]


@pytest.mark.parametrize("name", ENCODERS)
def test_a_classifier_is_reduced_in_its_encoder_and_keeps_its_head(name: str) -> None:
    model: Any = tiny.FURTHER[name]()
    host = host_of(model)
    facts = host.facts(model)
    assert (facts.grid_size, facts.num_prefix, facts.dense, facts.input_size) == ((6, 6), 0, True, (3, 24, 24))
    assert facts.num_classes == (5 if name.endswith("classifier") else 0)
    assert len(host.blocks(model)) == 4
    assert [layer.out_features for layer in ask(model).classifiers(model)] == ([5] if facts.num_classes else [])


@torch.no_grad()
@pytest.mark.parametrize("name", [*ENCODERS, "volo"])
def test_maps_of_every_block_are_tokens_at_the_places_of_their_patches(name: str) -> None:
    """The oracle is a loop over patches; DeepSeek's map can be normed, VOLO has one for every stage."""
    model: Any = tiny.shaken(tiny.FURTHER[name]().double())
    images = tiny.given(name).double()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    left: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, i, out: left.append(out)) for block in host_of(model).blocks(model)]
    model(images)
    for hook in hooks:
        hook.remove()
    states, normed = reduction.states[1:], name.startswith("deepseek")
    stages = [3] if name == "volo" else range(4)  # all are one stage
    maps = model.forward_intermediates(images, norm=normed, intermediates_only=True)[-len(stages) :]
    for found, depth in zip(maps, stages, strict=True):
        tokens, state = left[depth], states[depth]
        if depth == 3:  # behind the last block all are there
            tokens = tokens.flatten(1, 2) if tokens.dim() == 4 else tokens
        else:
            tokens = torch.stack([row[source] for row, source in zip(tokens, state.source, strict=True)])
        if normed:
            norm = getattr(model, "encoder", model).norm
            tokens = nn.functional.rms_norm(tokens.float(), (32,), norm.weight.float(), norm.eps).double()
        torch.testing.assert_close(found.flatten(2).transpose(1, 2), tokens, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_vit_avg", "gemma4_vit"])
def test_images_of_another_size(name: str) -> None:
    model: Any = tiny.FURTHER[name]().double()
    images = tiny.images(size=48).double()
    dense = model(images)
    vitrim.reduce_(model, "none")
    torch.testing.assert_close(model(images), dense, atol=1e-9, rtol=1e-9)
    vitrim.restore_(model)
    reduction = vitrim.reduce_(model, "l2:keep_rate=0.5", record=True)
    assert model(images).shape == dense.shape
    assert reduction.states[0].grid == (12, 12)
    assert min(reduction.tokens_per_block) < reduction.states[0].num_tokens == 144


def test_padded_patches_are_refused_by_gemma() -> None:
    model: Any = tiny.FURTHER["gemma4_vit_grouped"]()
    vitrim.reduce_(model, "tome:r=1")
    places = torch.tensor([[[0, 0], [0, 1], [-1, -1]]])
    with pytest.raises(ValueError, match="a reduced model takes no attn_mask"):
        model(torch.randn(1, 3, 48), patch_coord=places)


def test_a_subclass_of_a_classifier_with_a_head_of_its_own_is_refused() -> None:
    model: Any = tiny.FURTHER["qwen3_vit_classifier"]()
    model.__class__ = type("Mine", (type(model),), {"forward_head": lambda self, x: x})
    with pytest.raises(vitrim.UnsupportedModelError, match="Mine overrides forward_head of timm's Qwen3VitClassifier"):
        vitrim.reduce_(model, "tome:r=1")


def test_all_transformer_blocks_of_volo_are_reduced_and_no_outlooker() -> None:
    model: Any = tiny.FURTHER["volo"]()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    assert [len(list(stage.children())) for stage in model.network[2:]] == [4]
    model(tiny.INPUTS["volo"](2))
    assert reduction.tokens_per_block == [32, 28, 24, 20]
    facts = host_of(model).facts(model)
    assert (facts.grid_size, facts.input_size, facts.num_classes, facts.num_heads) == ((6, 6), (3, 48, 48), 5, 2)
    assert ask(model).classifiers(model) == [model.head]
    assert isinstance(model.head, nn.Linear)


def test_rows_and_columns_of_a_wide_image_are_those_of_its_pixels() -> None:
    """12 x 36 px in patches of 4 are 3 rows and 9 columns, of which CubistMerge takes one and three."""
    model = tiny.FURTHER["gemma4_vit"]()
    reduction = vitrim.reduce_(model, "cubist_merge:rows=1,columns=3", record=True)
    with torch.no_grad():
        model(torch.randn(2, 3, 12, 36))
    assert reduction.tokens_per_block == [27, 2 * 6, 2 * 6, 2 * 6]


def test_all_stages_of_volo_behind_the_outlookers_are_reduced() -> None:
    model = tiny.FURTHER["volo_stages"]()
    kinds = [type(module).__name__ for stage in model.network for module in stage.modules()]
    assert len(tiny.blocks(model)) == kinds.count("Transformer") == 4
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    with torch.no_grad():
        model(tiny.INPUTS["volo_stages"](1))
    assert reduction.tokens_per_block == [32, 28, 24, 20]


def test_grouped_keys_are_those_that_pytorch_gives_each_head() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    found = torch.nn.functional.scaled_dot_product_attention(q, expand_groups(k, 6), expand_groups(v, 6))
    torch.testing.assert_close(found, expected)


def test_attention_drops_in_training_alone() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, attn_drop_rate=0.5, num_classes=5)
    vitrim.reduce_(model, "tome:r=2")
    images = torch.randn(2, 3, 64, 64)
    assert model.blocks[0].attn.fused_attn
    with torch.no_grad():
        assert torch.equal(model.eval()(images), model(images))
        assert not torch.equal(model.train()(images), model(images))


@pytest.mark.parametrize(("pool", "rows"), [("token", 1), ("avg", None), ("max", None), ("map", None)])
def test_a_head_that_reads_all_tokens_gets_them_all(pool: str, rows: int | None) -> None:
    """The block's own steps, of which the last has queries for what the head reads alone, against the library."""
    options = {"class_token": pool == "token", "global_pool": pool, "fc_norm": False}
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=5, **options)
    tiny.shaken(model).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
        vitrim.reduce_(model, "none")
        for block in model.blocks:
            block.plain = False  # or the library's own forward would run
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)
    assert host_of(model).facts(model).head_rows == rows
