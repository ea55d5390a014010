"""What timm's plain ViTs share: the projection of q, k and v, what is refused; and models by their names."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from timm.layers import HybridEmbed
from timm.models import naflexvit, vision_transformer
from torch import Tensor, nn

import tiny
import vitrim
from vitrim.core.registry import host_of

SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 4, "num_classes": 5}
IMAGES: dict[str, Any] = {"img_size": 32, "patch_size": 8}
NAFLEX: dict[str, Any] = {"patch_size": 8, "pos_embed_grid_size": (4, 4)}
OF_IMAGES = (
    *("vit_tiny_patch16_224", "vit_base_patch32_plus_256", "vit_huge_patch14_224.mae", "vit_base_patch16_clip_224"),
    *("vit_base_patch16_siglip_224", "vit_small_patch14_dinov2", "vit_base_patch16_rpn_224"),
    *("vit_base_patch16_xp_224", "vit_small_patch16_36x1_224", "vit_small_patch16_18x2_224"),
    *("vit_medium_patch16_rope_reg1_gap_256", "vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_ape_224"),
    *("vit_small_patch16_dinov3", "vit_pe_core_tiny_patch16_384", "vit_pe_spatial_tiny_patch16_512"),
    *("vit_relpos_small_patch16_rpn_224", "vit_srelpos_small_patch16_224", "deit_tiny_distilled_patch16_224"),
    *("deit3_small_patch16_224", "eva_giant_patch14_224", "eva02_tiny_patch14_224"),
    *("beit_base_patch16_224", "beitv2_base_patch16_224"),
)
NAMED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(OF_IMAGES, IMAGES),
    "vit_giant_patch14_reg4_dinov2": {**IMAGES, "mlp_ratio": 4.0},
    "naflexvit_base_patch16_gap": NAFLEX,
    "naflexvit_base_patch16_siglip": NAFLEX,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMED)
def test_models_by_name(name: str) -> None:
    """Reducing nothing is the dense model, merging changes it a little, and it comes back bit for bit."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name, **{**SMALL, **NAMED[name]}).eval()
    for parameter in model.parameters():  # initial heads and layer scales are nearly zero
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    images = tiny.images(size=NAMED[name].get("img_size", 32))
    with torch.no_grad():
        dense = model(images)
        vitrim.reduce_(model, "none")
        torch.testing.assert_close(model(images), dense, atol=1e-5, rtol=1e-5)
        vitrim.restore_(model)
        reduction = vitrim.reduce_(model, "tome:r=2")
        merged = model(images)
        assert reduction.state.num_patches == 16 - 3 * 2
        assert merged.shape == dense.shape
        assert not torch.equal(merged, dense)
        assert torch.nn.functional.cosine_similarity(merged, dense).min() > 0.5
        vitrim.restore_(model)
        assert torch.equal(model(images), dense)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "naflexvit_base_patch16_gap", "volo_d1_224"])
@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_other_channels_than_three(name: str, channels: int) -> None:
    """The channels of the images are the model's: in itself, in its embedding or, in older timm, in its stem alone."""
    model: Any = timm.create_model(name, in_chans=channels, num_classes=2).eval()
    assert host_of(model).facts(model).input_size[0] == channels


def test_a_convolutional_stem_takes_images_not_its_own_channels() -> None:
    stem = partial(HybridEmbed, backbone=nn.Conv2d(3, 8, 2, 2), patch_size=2)
    model = tiny.vit(embed_layer=stem)()
    facts = host_of(model).facts(model)
    assert facts.input_size == (3, 24, 24)
    assert facts.grid_size == (3, 3)
    reduction = vitrim.reduce_(model, "tome:r=1")
    model(tiny.images())
    assert reduction.state.num_patches == 9 - 4


PROJECTED = [
    "vit",
    "no_qkv_bias",
    "eva",
    "eva02_avg",
    "eva_dinov3",
    "eva_grouped",
    "beit",
    "beit_shared_swiglu",
    "relpos",
]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", PROJECTED)
def test_parts_of_the_projection_are_those_of_the_whole(name: str, separate: bool) -> None:
    model = tiny.HOSTS[name]()
    block: Any = tiny.blocks(model)[0]
    block.__class__, attn = host_of(model).reduced_class(block), block.attn
    if separate:  # the bias beside the layer, or a layer that must be called
        attn.qkv_bias_separate = True
        called = attn.qkv if attn.qkv is not None else attn.k_proj
        called.register_forward_hook(lambda module, args, out: out + 1)
    y = torch.randn(2, 7, 32)
    vars(block)["reducer"] = SimpleNamespace(fresh_values=False)
    q, k, v = block.project_qkv(attn, y, None)
    assert v is not None
    for rows in (None, 1, 3):
        for skip in (False, True):
            block.reducer.fresh_values = skip
            a, b, c = block.project_qkv(attn, y, rows)
            torch.testing.assert_close(a, q[:, :, :rows])
            torch.testing.assert_close(b, k)
            assert c is not None or (skip and rows is None)
            if c is not None:
                torch.testing.assert_close(c, v)
    torch.testing.assert_close(block.project_values(attn, y), v)


def refuses(model: nn.Module, message: str) -> None:
    classes = [type(block) for block in model.blocks]
    with pytest.raises(vitrim.UnsupportedModelError, match=message):
        vitrim.reduce_(model, "tome:r=1")
    assert [type(block) for block in model.blocks] == classes


PLAIN = ("vit", "eva", "beit", "relpos", "naflex")


@pytest.mark.parametrize("name", PLAIN)
def test_subclasses_of_blocks_and_attention_are_refused(name: str) -> None:
    model: Any = tiny.HOSTS[name]()
    block = model.blocks[2]
    block.__class__ = type("Mine", (type(block),), {})
    refuses(model, r"blocks of class Mine are not supported in timm \w+; supported: ")
    model = tiny.HOSTS[name]()
    attn = model.blocks[2].attn
    attn.__class__ = type("Mine", (type(attn),), {})
    refuses(model, r"timm \w+ with attention of class Mine is not supported; supported: ")


@pytest.mark.parametrize("name", ["vit", "eva", "eva_pe"])
def test_gated_attention_is_refused(name: str) -> None:
    model: Any = tiny.HOSTS[name]()
    model.blocks[1].attn.gate = nn.Linear(32, 32)
    refuses(model, "with gated attention")


@pytest.mark.parametrize(
    ("host", "call"),
    [
        *(("vit", call) for call in ("forward_head", "forward_features", "pool")),
        *(("eva", "pool"), ("beit", "forward_head"), ("relpos", "forward_features"), ("naflex", "_pool")),
    ],
)
def test_models_with_a_call_of_their_own_are_refused(host: str, call: str) -> None:
    model = tiny.HOSTS[host]()
    kind = type(model)
    model.__class__ = type("Mine", (kind,), {call: lambda self, x: x})
    refuses(model, f"Mine overrides {call} of timm's {kind.__name__}")
    model.__class__ = type("Renamed", (kind,), {})  # which changes nothing that vitrim relies on
    vitrim.reduce_(model, "tome:r=1")


def test_differential_attention_is_refused() -> None:
    kinds = vision_transformer.DiffParallelScalingBlock, vision_transformer.ParallelThingsBlock
    refuses(tiny.vit(block_fn=kinds[0])(), "blocks of class DiffParallelScalingBlock are not supported")
    for model in (
        tiny.vit(attn_layer="diff")(),
        tiny.vit(block_fn=kinds[1], attn_layer="diff")(),
        naflexvit.NaFlexVit(embed_dim=32, depth=3, num_heads=2, attn_layer="diff"),
    ):
        refuses(model, "attention of class DiffAttention is not supported")


@pytest.mark.parametrize("name", ["vit", "eva", "naflex", "naflex_rope", "parallel", "parallel_things"])
def test_a_mask_is_refused(name: str) -> None:
    model: Any = tiny.HOSTS[name]()
    vitrim.reduce_(model, "tome:r=1")
    with pytest.raises(ValueError, match="a reduced model takes no attn_mask"):
        model.forward_features(tiny.images(), attn_mask=torch.zeros(37, 37))
    if name == "vit":
        with pytest.raises(ValueError, match="takes no attn_mask and no is_causal"):
            model(tiny.images(), is_causal=True)


def test_naflex_without_a_size_of_its_own_is_refused() -> None:
    model = naflexvit.NaFlexVit(embed_dim=32, depth=3, num_heads=2, pos_embed="none", pos_embed_grid_size=None)
    refuses(model, "has no image size of its own: create it with img_size=")


def test_the_heads_of_several_attentions_count_as_those_of_one() -> None:
    model: Any = tiny.HOSTS["parallel_things"]()
    vitrim.reduce_(model, "tome:r=4")
    assert {block.reducer.layer.num_heads for block in model.blocks} == {4}


class OwnEmbed(nn.Module):
    """A patch embedding that does not say its geometry."""

    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.proj = embed.proj

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("host", ["vit", "registers_no_embed_class", "no_class_token_avg"])
def test_a_patch_embedding_of_the_users_own_works(host: str) -> None:
    model: Any = tiny.HOSTS[host]()
    expected, facts = copy.deepcopy(model), host_of(model).facts(model)
    model.patch_embed, model.pretrained_cfg = OwnEmbed(model.patch_embed), {"input_size": (3, 24, 24)}
    assert host_of(model).facts(model) == facts
    for each in (model, expected):
        vitrim.reduce_(each, "tome:r=4")
    with torch.no_grad():
        assert torch.equal(model(tiny.images()), expected(tiny.images()))


def test_a_patch_embedding_that_says_nothing_is_refused_where_nothing_else_does() -> None:
    model: Any = tiny.HOSTS["vit"]()
    model.patch_embed = OwnEmbed(model.patch_embed)
    refuses(model, r"does not say how many patches it was made for: give its patch_embed grid_size=\(rows, columns\)")
    model.patch_embed.grid_size, model.patch_embed.img_size = (6, 6), (24, 24)
    vitrim.reduce_(model, "tome:r=4")
    assert model(tiny.images()).shape == (2, 5)


@pytest.mark.parametrize("call", ["forward_features", "pool"])
def test_calls_put_on_the_model_are_refused_as_those_of_a_subclass(call: str) -> None:
    """NVIDIA's C-RADIO puts its own patch generator and forward on a timm model, and takes the embedding away."""
    model: Any = tiny.HOSTS["vit"]()
    model.patch_embed = model.pos_embed = model.cls_token = None
    setattr(model, call, lambda images: images)
    refuses(model, rf"^this VisionTransformer has a {call} of its own, so vitrim cannot know what its head reads")


def test_the_remote_code_of_c_radio_says_what_to_load_instead() -> None:
    model: Any = tiny.HOSTS["vit"]()
    model.patch_generator, model.patch_embed = nn.Identity(), None
    model.forward_features = lambda images: images
    refuses(model, r"has a patch_generator in place of its embedding.*; load the model as RadioModel of transformers")


def test_a_forward_that_was_wrapped_on_the_model_is_the_models_own() -> None:
    """accelerate and automatic mixed precision do that."""
    model: Any = tiny.HOSTS["vit"]()
    own = model.forward
    model.forward = lambda images: own(images)
    reduction = vitrim.reduce_(model, "tome:r=4")
    assert model(tiny.images()).shape == (2, 5)
    assert reduction.state.num_tokens == 21
