"""Models that hold a supported host: it is reduced inside them, and they go on working."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import (
    BeitConfig,
    BeitForSemanticSegmentation,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    GPT2Config,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SamConfig,
    SamMaskDecoderConfig,
    SamModel,
    SamPromptEncoderConfig,
    SamVisionConfig,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

import tiny
import vitrim
from tiny_hosts.common import seeded
from tiny_hosts.transformers_vit import GEOMETRY
from tiny_vlms import SECOND, VISION, VLMS
from vitrim.core.block import access


class Container(NamedTuple):
    """Description of one: a function that makes it, the host in it, and its output (a tensor) on ``tiny.images()``."""

    create: Callable[[], nn.Module]
    part: str
    run: Callable[[Any], Tensor]
    tokens: int = 37 - 4 * 4
    """After the last block under ``tome:r=4``."""


def plain(model: Any) -> Tensor:
    return model(tiny.images())


def depth(model: Any) -> Tensor:
    return model(tiny.images()).predicted_depth


class Adapted(nn.Module):
    """Holds its base as peft's models do, and hands attributes on."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model").model, name)

    def forward(self, images: Tensor) -> Tensor:
        return tiny.logits(self.base_model.model(images))  # type: ignore[operator, return-value]


class OpenClip(nn.Module):
    """Laid out as open_clip's models with a timm tower."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.trunk = tiny.HOSTS["vit"]()
        self.visual.head = nn.Linear(5, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.visual.head(self.visual.trunk(images))  # type: ignore[operator]


def backbone(reshape: bool = False) -> Dinov2Config:
    return Dinov2Config(
        **VISION, mlp_ratio=2, out_indices=[1, 2, 3, 4], reshape_hidden_states=reshape, apply_layernorm=True
    )


def depth_anything() -> nn.Module:
    config = DepthAnythingConfig(
        backbone_config=backbone(), patch_size=4, neck_hidden_sizes=[8] * 4, head_hidden_size=8,
        reassemble_hidden_size=32, reassemble_factors=[4, 2, 1, 0.5], fusion_hidden_size=8,
    )  # fmt: skip
    model = DepthAnythingForDepthEstimation(config)
    model.head.conv3.bias.data.fill_(1.0)  # no depth is negative: random weights would give zeros
    return model


def dpt() -> nn.Module:
    config = DPTConfig(
        backbone_config=backbone(), patch_size=4, is_hybrid=False, hidden_size=32, neck_hidden_sizes=[8] * 4,
        reassemble_factors=[4, 2, 1, 1], fusion_hidden_size=8,
    )  # fmt: skip
    model = DPTForDepthEstimation(config)
    [*model.head.modules()][-2].bias.data.fill_(1.0)  # as above
    return model


def upernet() -> nn.Module:
    config = UperNetConfig(
        backbone_config=backbone(reshape=True), hidden_size=16, num_labels=5, use_auxiliary_head=False,
        pool_scales=[1, 2],
    )  # fmt: skip
    return UperNetForSemanticSegmentation(config)


def mask2former() -> nn.Module:
    widths = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
    config = Mask2FormerConfig(
        **widths, backbone_config=backbone(reshape=True), encoder_feedforward_dim=16, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=4, num_labels=5,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config)


def beit() -> nn.Module:
    config = BeitConfig(**GEOMETRY, use_relative_position_bias=True, out_indices=[1, 2, 3, 4], pool_scales=[1, 2])
    return seeded(lambda: BeitForSemanticSegmentation(config))()


def smp_dpt() -> nn.Module:
    models = pytest.importorskip("segmentation_models_pytorch")
    model: nn.Module = models.DPT("tu-test_vit", encoder_weights=None, classes=5)
    return model


def sam() -> nn.Module:
    vision = {
        **VISION,
        "patch_size": 2,
        "window_size": 6,
        "global_attn_indexes": [3],
        "output_channels": 16,
        "num_pos_feats": 8,
    }
    decoder = SamMaskDecoderConfig(
        hidden_size=16, num_attention_heads=2, mlp_dim=16, num_hidden_layers=1, iou_head_hidden_dim=16
    )
    prompts = SamPromptEncoderConfig(hidden_size=16, image_size=24, patch_size=2, mask_input_channels=4)
    return SamModel(
        SamConfig(vision_config=SamVisionConfig(**vision), mask_decoder_config=decoder, prompt_encoder_config=prompts)
    )


def sam_run(model: Any) -> Tensor:
    return model(tiny.images(), input_points=torch.tensor([[[[5.0, 7.0]]], [[[9.0, 3.0]]]])).pred_masks


def of_language(name: str, part: str, tokens: int = 37 - 4 * 4) -> Container:
    """A vision-language model, of a prompt with an image in each of two rows."""
    given = VLMS[name].prompt([[7, 11], [13, 17]], [VLMS[name].tokens, SECOND.get(name, VLMS[name].tokens)])
    return Container(VLMS[name].create, part, lambda model: model(**given).logits, tokens)


def encoder_decoder() -> nn.Module:
    decoder = GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, add_cross_attention=True
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**VISION), decoder)
    return VisionEncoderDecoderModel(config)


def timm_wrapper() -> nn.Module:
    args = {"img_size": 24, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
    return TimmWrapperForImageClassification(
        TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=args, num_labels=5)
    )


CONTAINERS: dict[str, Container] = {
    "DataParallel": Container(lambda: nn.DataParallel(tiny.HOSTS["vit"]()), "model.module", plain),
    "OptimizedModule": Container(
        lambda: torch.compile(tiny.HOSTS["vit"](), backend="eager"),  # type: ignore[return-value]
        "model._orig_mod",
        plain,
    ),
    "FeatureGetterNet": Container(
        lambda: timm.create_model("vit_tiny_patch16_224", features_only=True, img_size=24, patch_size=4, depth=4),
        "model.model",
        lambda model: model(tiny.images())[-1],
    ),
    "Adapted": Container(lambda: Adapted(tiny.HOSTS["hf_vit"]()), "model.base_model.model", plain),
    "OpenClip": Container(OpenClip, "model.visual.trunk", plain),
    "Sequential": Container(lambda: nn.Sequential(tiny.HOSTS["vit"](), nn.Linear(5, 2)), "model[0]", plain),
    "TimmWrapperForImageClassification": Container(
        timm_wrapper, "model.timm_model", lambda model: model(tiny.images()).logits
    ),
    "LLaVA": of_language("llava", "model.model.vision_tower"),
    "Pixtral": of_language("pixtral", "model.model.vision_tower", 36 - 4 * 4),
    "InternVL": of_language("internvl", "model.model.vision_tower"),
    "SmolVLM": of_language("smolvlm", "model.model.vision_model", 36 - 4 * 4),
    "SamModel": Container(seeded(sam), "model.vision_encoder", sam_run, 4 * (36 - 4 * 4)),
    "VisionEncoderDecoderModel": Container(
        encoder_decoder,
        "model.encoder",
        lambda model: model(pixel_values=tiny.images(), decoder_input_ids=torch.zeros(2, 3, dtype=torch.int64)).logits,
    ),
}


DENSE = {
    "BEiT": Container(beit, "model", lambda model: model(tiny.images()).logits),
    "UperNet": Container(upernet, "model.backbone", lambda model: model(tiny.images()).logits),
    "Mask2Former": Container(
        mask2former,
        "model.model.pixel_level_module.encoder",
        lambda model: model(tiny.images()).masks_queries_logits,
    ),
    "DPT": Container(dpt, "model.backbone", depth),
    "DepthAnything": Container(depth_anything, "model.backbone", depth),
    "segmentation_models_pytorch": Container(
        smp_dpt, "model.encoder.model", lambda model: model(tiny.images(size=160)), 101 - 6 * 4
    ),
}
"""Those that make a map of the patches."""


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
        assert "\n" not in str(caught.value)
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
