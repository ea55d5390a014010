"""Copies of a model that share its weights: dense with each kernel, and reduced."""

import pytest
import torch
from timm.models import VisionTransformer
from torch import nn

import tiny
import vitrim
from vitrim.core.block import ReducedBlock
from vitrim.engines.copies import apart, dense_copies, reduced_copy, shared_copy


def model(**options):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return VisionTransformer(**(sizes | options)).eval()


def test_shared_copy_shares_weights_and_nothing_else():
    original = model(depth=1)
    original.register_buffer("extra", torch.ones(2))
    copied = shared_copy(original)
    for mine, its in zip(original.parameters(), copied.parameters(), strict=True):
        assert mine is its
    assert copied.extra is original.extra
    assert all(mine is not its for mine, its in zip(original.modules(), copied.modules(), strict=True))


def test_reduced_copy_leaves_the_model_alone():
    original = model()
    images = torch.randn(2, 3, 32, 32)
    before = original(images)
    reduced = reduced_copy(original, "tome:r=2")
    reduced(images)
    assert reduced.vitrim_reduction.state.num_tokens == 17 - 3 * 2
    assert not any(isinstance(module, ReducedBlock) for module in original.modules())
    assert torch.equal(original(images), before)


def test_dense_copies_are_the_host_with_either_kernel():
    original = model()
    original.blocks[0].attn.fused_attn = False
    images = torch.randn(2, 3, 32, 32)
    copies = dense_copies(original)
    switches = {name: {block.attn.fused_attn for block in dense.blocks} for name, dense in copies.items()}
    assert switches == {"fused": {True}, "unfused": {False}}
    assert [block.attn.fused_attn for block in original.blocks] == [False, True, True]
    torch.testing.assert_close(copies["fused"](images), copies["unfused"](images))
    torch.testing.assert_close(copies["fused"](images), original(images))


def test_attention_pooling_is_switched_too():
    copies = dense_copies(model(global_pool="map", class_token=False))
    assert [copies[name].attn_pool.fused_attn for name in ("fused", "unfused")] == [True, False]


def test_a_model_without_the_switch_is_its_own_baseline():
    layer = nn.Linear(2, 2)
    copies = dense_copies(layer)
    assert list(copies) == ["host"]
    assert copies["host"] is not layer


def test_copies_are_made_of_dense_models() -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, "topk")
    with pytest.raises(vitrim.VitrimError, match=r"reduced already: call vitrim.restore_\(model\) first"):
        reduced_copy(model, "tome:r=4")


def test_a_reduced_model_comes_apart_and_stays_as_it_is() -> None:
    model = tiny.HOSTS["vit"]()
    with torch.no_grad():
        dense = model(tiny.images())
        reduction = vitrim.reduce_(model, "dynamicvit:keep_rate=0.5")  # learns
        expected = model(tiny.images())
        with apart(model) as own:
            assert own.method is reduction.config
            torch.testing.assert_close(own.model(tiny.images()), dense, rtol=0, atol=0)
            assert own.with_own([vitrim.ToMe(r=2), reduction.config]) == [reduction.config, vitrim.ToMe(r=2)]
            again = reduced_copy(own.model, own.method, own.learned)
        torch.testing.assert_close(again(tiny.images()), expected, rtol=0, atol=0)
        torch.testing.assert_close(model(tiny.images()), expected, rtol=0, atol=0)
    assert vitrim.get_reduction(model) is reduction
    with apart(again) as other:
        assert other.learned != own.learned
