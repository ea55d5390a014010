"""Models that hold a supported host: it is reduced inside them, and they go on working."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import tiny
import vitrim
from tiny_containers import (
    CONTAINERS,
    DENSE,
    plain,
    upernet,
)
from vitrim.core.block import access


@pytest.mark.parametrize("name", [*CONTAINERS, *DENSE])
@torch.no_grad()
def test_a_container_is_reduced_at_the_one_host_in_it(name: str) -> None:
    create, part, run, tokens = {**CONTAINERS, **DENSE}[name]
    torch.manual_seed(0)
    model = create().eval()
    if name in DENSE:
        tiny.shaken(model)
    host = eval(part, {"model": model})
    dense = run(model)
    vitrim.reduce_(model, "tome:r=0")
    torch.testing.assert_close(run(model), dense, atol=1e-6, rtol=1e-6)
    for given in (model, host):  # in whichever way it is named, the same is reduced
        reduction = vitrim.reduce_(given, "tome:r=4")
        reduced = run(model)
        assert reduction.model is host
        assert vitrim.get_reduction(model) is vitrim.get_reduction(host) is reduction
        assert reduced.shape == dense.shape
        assert torch.isfinite(reduced).all()
        assert not torch.equal(reduced, dense)
        assert reduction.state.num_tokens == tokens
        vitrim.reduce_(model, "tome:r=4")  # once more, in place of the first
        assert torch.equal(run(model), reduced)
        vitrim.restore_(model)
        vitrim.restore_(model)
        assert torch.equal(run(model), dense)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_what_a_pruned_patch_is_in_a_map_is_said_by_restore(name: str) -> None:
    create, _, run, _ = DENSE[name]
    torch.manual_seed(0)
    model = tiny.shaken(create().eval())
    maps = [run(vitrim.reduce_(model, method) and model) for method in ("none", "topk", "topk:restore=end")]
    assert maps[0].shape == maps[1].shape == maps[2].shape
    assert all(found.isfinite().all() for found in maps)
    assert not any(torch.equal(*pair) for pair in combinations(maps, 2))


@torch.no_grad()
def test_every_feature_map_of_a_reduced_backbone_is_full() -> None:
    model: Any = upernet().eval().backbone
    vitrim.reduce_(model, "topk:restore=end")
    maps = model(tiny.images()).feature_maps
    assert [entry.shape for entry in maps] == [(2, 32, 6, 6)] * 4
    assert all((entry.abs().sum(dim=1) > 0).all() for entry in maps)


def test_a_reduction_of_a_container_is_saved_and_loaded(tmp_path: Path) -> None:
    model, twin = CONTAINERS["Sequential"].create().eval(), CONTAINERS["Sequential"].create().eval()
    twin.load_state_dict(model.state_dict())
    vitrim.reduce_(model, "tome:r=4").save(tmp_path)
    assert vitrim.Reduction.load(twin, tmp_path).model is twin[0]
    with torch.no_grad():
        assert torch.equal(plain(twin), plain(model))


def test_of_many_supported_parts_the_first_two_are_named() -> None:
    model = nn.ModuleDict({"a b": tiny.HOSTS["vit"](), "c": nn.ModuleList([tiny.HOSTS["vit"](), tiny.HOSTS["vit"]()])})
    with pytest.raises(vitrim.UnsupportedModelError) as caught:
        vitrim.reduce_(model, "tome:r=4")
    assert "reduce model['a b'] (VisionTransformer) or model.c[0] (VisionTransformer) or 1 others instead" in str(
        caught.value
    )


def test_of_several_reduced_parts_one_must_be_given() -> None:
    model = nn.ModuleDict({"a": tiny.HOSTS["vit"](), "b": tiny.HOSTS["vit"]()})
    for part in model.values():
        vitrim.reduce_(part, "tome:r=4")
    with pytest.raises(vitrim.VitrimError, match=r"ModuleDict are reduced, model.a and model.b: give one of them$"):
        vitrim.restore_(model)


def test_a_part_that_is_refused_is_named_with_the_reason() -> None:
    class Altered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.HOSTS["vit"]()
            self.inner.blocks[0].attn.forward = lambda x: x

    with pytest.raises(vitrim.UnsupportedModelError) as caught:
        vitrim.reduce_(Altered(), "tome:r=4")
    assert str(caught.value).startswith("Altered is not a supported host itself, and model.inner is refused: timm ")


@torch.no_grad()
def test_an_eva_clip_of_open_clip_is_reduced_in_its_trunk() -> None:
    """EVA-CLIP, MobileCLIP-B and SigLIP of open_clip are a tower of timm's and a projection."""
    towers = pytest.importorskip("open_clip.timm_model")
    torch.manual_seed(0)
    model = tiny.shaken(towers.TimmModel("eva02_tiny_patch14_224", embed_dim=8, pool="token")).eval()
    images = tiny.images(1, size=224)
    dense = model(images)
    assert vitrim.reduce_(model, "tome:r=0").model is model.trunk
    torch.testing.assert_close(model(images), dense, atol=1e-4, rtol=1e-4)
    reduction = vitrim.reduce_(model, "tome:r=8")
    assert not torch.equal(model(images), dense)
    assert reduction.state.num_tokens == 257 - 12 * 8


def test_what_is_refused_as_a_class_says_what_to_use_instead() -> None:
    from transformers import ConvNextConfig, ConvNextModel, Sam2HieraDetConfig
    from transformers.models.sam2.modeling_sam2 import Sam2HieraDetModel

    with torch.device("meta"):
        models = {
            "convolutions": ConvNextModel(ConvNextConfig()),
            "SamModel or Sam3Model": Sam2HieraDetModel(Sam2HieraDetConfig()),
            "samvit_base_patch16_224": timm.create_model("sam2_hiera_tiny"),
            "deit_small_distilled_patch16_224": timm.create_model("pit_ti_224"),
        }
    for words, model in models.items():
        with pytest.raises(vitrim.UnsupportedModelError, match=rf"^model \(\w+\) is refused: .*{words}.*") as caught:
            vitrim.reduce_(model, "tome:r=4")
        assert "use " in str(caught.value)
    holder = nn.ModuleDict({"encoder": models["SamModel or Sam3Model"]})
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^model.encoder \(Sam2HieraDetModel\) is refused: "):
        vitrim.reduce_(holder, "tome:r=4")


def test_a_convolutional_part_is_no_reason() -> None:
    model = nn.Sequential(timm.create_model("test_resnet"), nn.Linear(2, 2))
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^Sequential .* is not a supported host; `vitrim list"):
        vitrim.reduce_(model, "tome:r=4")


def test_a_model_without_a_host_says_where_hosts_are_listed() -> None:
    with pytest.raises(vitrim.UnsupportedModelError, match=r"`vitrim list hosts` prints those that are$"):
        vitrim.reduce_(nn.Sequential(nn.Linear(2, 2)), "tome:r=4")


def test_the_reduction_of_a_part_is_replaced_by_one_of_the_whole() -> None:
    model: Any = tiny.HOSTS["hf_vit"]()
    vitrim.reduce_(model.vit, "topk")
    reduction = vitrim.reduce_(model, "tome:r=4")
    assert vitrim.get_reduction(model) is reduction
    assert reduction.model is model
    whole = tiny.HOSTS["hf_vit"]()
    vitrim.reduce_(whole, "tome:r=4")
    assert torch.equal(tiny.run(model, tiny.images()), tiny.run(whole, tiny.images()))


@pytest.mark.parametrize(
    ("name", "path"), [("a.b", "model.a.b"), ("0", "model[0]"), ("a.1.x y", "model.a[1]['x y']"), ("", "model")]
)
def test_how_a_submodule_is_reached(name: str, path: str) -> None:
    assert access(name) == path
