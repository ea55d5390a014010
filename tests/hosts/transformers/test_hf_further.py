"""Hosts of `test_further_hosts.py`: their task models, what else they take, and what of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AltCLIPConfig,
    AltCLIPModel,
    ChineseCLIPConfig,
    ChineseCLIPModel,
    CLIPConfig,
    CLIPModel,
    IJepaConfig,
    IJepaModel,
    OwlViTConfig,
    OwlViTForObjectDetection,
    OwlViTModel,
    SamVisionConfig,
    SamVisionModel,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    VitDetConfig,
    VitDetModel,
    ViTMAEConfig,
    ViTMAEModel,
    VitPoseBackbone,
)

import tiny
import vitrim
from tiny_hosts.common import seeded
from tiny_hosts.transformers_clip import VISION
from tiny_hosts.transformers_sam import DET, SAM
from tiny_hosts.transformers_video import MAE
from tiny_hosts.transformers_vit import GEOMETRY
from tiny_hosts.transformers_vitpose import backbone

TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "project_dim": 16,
}
IDS = torch.tensor([[3, 4, 2], [5, 6, 2]])
TOWERS: dict[str, Callable[[], nn.Module]] = {
    "alt_clip": lambda: AltCLIPModel(AltCLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=8)),
    "chinese_clip": lambda: ChineseCLIPModel(
        ChineseCLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=8)
    ),
    "clip": lambda: CLIPModel(CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=8)),
    "owlvit": lambda: OwlViTModel(OwlViTConfig(vision_config=VISION, text_config=TEXT, projection_dim=8)),
}


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_image_embeddings_of_two_towers_read_the_class_token(name: str) -> None:
    model = seeded(TOWERS[name])()

    def run() -> Tensor:
        return model(input_ids=IDS, pixel_values=tiny.images()).logits_per_image

    dense = run()
    vitrim.reduce_(model, "tome:r=0")
    torch.testing.assert_close(run(), dense, atol=1e-6, rtol=1e-6)
    vitrim.restore_(model)
    vitrim.reduce_(model, "tome:r=4")
    found = run()
    assert not torch.equal(found, dense)
    vitrim.restore_(model)
    reduction = vitrim.reduce_(model, "tome:r=4,last_block=class_token", record=True)
    torch.testing.assert_close(run(), found, atol=1e-6, rtol=1e-5)
    assert reduction.tokens_per_block == [33, 29, 25, 1]
    vitrim.restore_(model)
    assert torch.equal(run(), dense)


@torch.no_grad()
def test_the_open_vocabulary_detector_has_a_box_for_every_patch() -> None:
    config = OwlViTConfig(vision_config=VISION, text_config={**TEXT, "hidden_size": 8}, projection_dim=8)
    model = seeded(lambda: OwlViTForObjectDetection(config))()

    def run() -> list[Tensor]:
        output = model(input_ids=IDS, pixel_values=tiny.images())
        return [output.logits, output.pred_boxes]

    dense = run()
    for method in ("tome:r=4", "topk"):  # merged patches share their box, pruned ones come back
        vitrim.reduce_(model, method)
        assert [part.shape for part in run()] == [part.shape for part in dense] == [(2, 36, 1), (2, 36, 4)]
        assert not torch.equal(run()[1], dense[1])
        vitrim.restore_(model)
    assert torch.equal(run()[0], dense[0])


@torch.no_grad()
def test_packed_images_of_several_sizes_get_what_each_gets_alone() -> None:
    model = tiny.FURTHER["hf_pixtral"]().double()
    images, sizes = tiny.images(3).double(), [(24, 24), (16, 24), (24, 24)]
    dense = model(images, image_sizes=sizes).last_hidden_state
    vitrim.reduce_(model, "tome:r=0")
    torch.testing.assert_close(model(images, image_sizes=torch.tensor(sizes)).last_hidden_state, dense)
    vitrim.restore_(model)
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    output = model(images, image_sizes=sizes, output_hidden_states=True)
    assert output.last_hidden_state.shape == dense.shape == (1, 36 + 24 + 36, 32)
    assert {part.shape for part in output.hidden_states} == {dense.shape}
    states = [state.num_tokens for state in reduction.states]
    assert states == [36, 32, 28, 24, 20]
    assert reduction.state.mask is not None
    assert reduction.state.mask.sum(1).tolist() == [20, 8, 20]
    alone = [
        model(image[None, :, :height], image_sizes=[(height, width)]).last_hidden_state
        for image, (height, width) in zip(images, sizes, strict=True)
    ]
    torch.testing.assert_close(output.last_hidden_state, torch.cat(alone, dim=1))


def mae(**options: Any) -> nn.Module:
    return ViTMAEModel(ViTMAEConfig(**{**VISION, **options}))


def experts() -> nn.Module:
    config = backbone()
    config.num_experts = 2
    config.part_features = 8
    return VitPoseBackbone(config)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "padded windows": (
        lambda: SamVisionModel(SamVisionConfig(**{**VISION, **SAM, "window_size": 5})),
        r"^windows of 5 x 5 do not divide 12 x 12 patches: .* use an image size of 10 x 10 or 15 x 15 patches$",
    ),
    "convolutions": (
        lambda: VitDetModel(VitDetConfig(**{**VISION, **DET, "residual_block_indices": [1]})),
        r"^VitDetModel with residual_block_indices is not supported: convolutions between",
    ),
    "masked": (mae, r"^ViTMAEModel with mask_ratio=0.75 drops patches at random before its layers; set model.config"),
    "pooling the first patch": (
        lambda: IJepaModel(IJepaConfig(**VISION), add_pooling_layer=True),
        r"^IJepaModel with add_pooling_layer=True is not supported: it pools the first patch",
    ),
    "classifying the first patch": (
        lambda: VideoMAEForVideoClassification(VideoMAEConfig(**{**GEOMETRY, **MAE}, use_mean_pooling=False)),
        r"^VideoMAEForVideoClassification with use_mean_pooling=False is not supported: it reads the first patch",
    ),
    "experts": (experts, r"^VitPoseBackbone with 2 experts is not supported: each image has an expert of its own$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forms_that_cannot_be_reduced_faithfully_are_refused(name: str) -> None:
    create, message = REFUSED[name]
    model = create()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(vitrim.UnsupportedModelError, match=message):
        vitrim.reduce_(model, "tome:r=4")
    assert [type(module) for module in model.modules()] == classes


def test_a_mask_ratio_that_is_set_later_is_refused() -> None:
    model = mae(mask_ratio=0.0).eval()
    vitrim.reduce_(model, "tome:r=4")
    model.config.mask_ratio = 0.5
    with pytest.raises(vitrim.UnsupportedModelError, match="was changed after it was reduced"):
        model(tiny.images())


def test_padded_images_are_refused_and_a_mask_of_nothing_is_not() -> None:
    model = tiny.FURTHER["hf_idefics3"]()
    vitrim.reduce_(model, "tome:r=4")
    mask = torch.ones(2, 6, 6, dtype=torch.bool)
    with torch.no_grad():
        whole = model(tiny.images()).last_hidden_state
        assert torch.equal(model(tiny.images(), patch_attention_mask=mask).last_hidden_state, whole)
        mask[0, 5] = False
        with pytest.raises(vitrim.UnsupportedModelError, match=r"^a reduced Idefics3VisionTransformer takes no padded"):
            model(tiny.images(), patch_attention_mask=mask)


@pytest.mark.parametrize("host", ["hf_sam_eager", "hf_vitdet", "hf_pixtral"])
def test_maps_are_refused_where_rows_are_not_of_images(host: str) -> None:
    model = tiny.FURTHER[host]()
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(vitrim.UnsupportedModelError, match="hands out no attention maps"):
        model(tiny.images(), output_attentions=True)
    model(tiny.images())


@pytest.mark.parametrize("method", ["mctf:r=4", "zero_tprune", "gtp", "kmedoids"])
def test_methods_that_read_a_map_are_refused_across_windows(method: str) -> None:
    with pytest.raises(vitrim.UnsupportedModelError, match="some blocks of this model attend across windows"):
        vitrim.reduce_(tiny.FURTHER["hf_sam"](), method)
