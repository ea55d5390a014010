"""A model at another image size, against what its library computes on such images."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

import tiny_hosts
import vitrim
from vitrim.core.image_size import at_size
from vitrim.core.registry import ask, input_size_of
from vitrim.data import eval_transform
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.loading import ModelSpec

HOSTS = {
    name: make
    for further in (False, True)
    for hosts in tiny_hosts.families(further).values()
    for name, make in hosts.items()
}
REFUSED = {
    "in sizes of their own": "naflex naflex_map_registers naflex_rope naflex_rope_mixed hf_idefics3 hf_smolvlm "
    "hf_pixtral hf_siglip2 hf_qwen2_vl hf_qwen3_vl",
    "has no set_input_size": "qwen3_vit qwen3_vit_avg qwen3_vit_classifier deepseek_vit deepseek_vit_classifier "
    "gemma4_vit gemma4_vit_grouped gemma4_vit_classifier samvit samvit_rope samvit_no_neck volo volo_stages volo_avg",
    "transformers does not resample": "hf_beit hf_beit_mean hf_beit_shared hf_beit_model hf_yolos hf_yolos_model "
    "hf_aimv2 hf_vitpose_backbone",
    "its tokens are not those of one image": "hf_eomt hf_eomt_dinov3 hf_lw_detr hf_rf_detr hf_rf_detr_one_window "
    "hf_sam hf_sam_eager hf_sam3 hf_vitdet hf_vitdet_backbone hf_videomae hf_videomae_model hf_vjepa2 "
    "hf_vjepa2_model",
    "only square ones can be resized": "hf_ast hf_ast_model",
    "its config has no image_size": "hf_vitpose",
}
REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}
ABLE = [name for name in HOSTS if name not in REASONS]


def first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("name", ABLE)
def test_every_family_that_can_runs_and_reduces_at_another_size(name: str) -> None:
    model = HOSTS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    size = 36 if name.startswith("windowed") else 32  # six patches in a window
    found = at_size(model, size)
    assert input_size_of(found) == (3, size, size)
    assert input_size_of(model) == (3, 24, 24)
    with torch.no_grad():
        for parameter in found.parameters():  # a copy: nothing of the model follows
            parameter.mul_(1.5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    before = {key: value.clone() for key, value in found.state_dict().items()}
    back = at_size(found, size)
    assert all(torch.equal(value, before[key]) for key, value in back.state_dict().items())
    vitrim.reduce_(found, "tome:r=3,proportional=true")
    with torch.no_grad():
        found(torch.randn(1, 3, size, size))


@pytest.mark.parametrize("name", [name for name in HOSTS if name in REASONS])
def test_a_family_that_cannot_says_why(name: str) -> None:
    model = HOSTS[name]()
    own = ask(model).input_size(model)
    with pytest.raises(UnsupportedModelError, match=REASONS[name]):
        at_size(model, 48 if own is None else 2 * own[1])


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "no_embed_class": True}, {"class_token": False}])
def test_positions_are_resampled_as_timm_does(options: dict[str, Any]) -> None:
    """The model that timm makes at the size, with the checkpoint that it resamples."""
    if not options.get("class_token", True):
        options["global_pool"] = "avg"
    how = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, **options}
    model, theirs = VisionTransformer(24, **how).eval(), VisionTransformer(32, **how).eval()
    nn.init.normal_(model.pos_embed)
    theirs.load_state_dict(checkpoint_filter_fn(model.state_dict(), theirs))
    ours = at_size(model, 32)
    assert all(torch.equal(value, ours.state_dict()[key]) for key, value in theirs.state_dict().items())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))
    assert type(ours.pos_embed) is nn.Parameter
    assert ours.pos_embed.requires_grad


@pytest.mark.parametrize("name", ["hf_vit", "hf_deit", "hf_clip", "hf_siglip", "hf_dinov2_registers", "hf_ijepa"])
@pytest.mark.parametrize("size", [16, 32])
def test_positions_are_resampled_as_transformers_does(name: str, size: int) -> None:
    """What the dense model computes of such images when it is asked to interpolate."""
    model, images = HOSTS[name](), torch.randn(2, 3, size, size)
    ours = at_size(model, size)
    with torch.no_grad():
        expected, found = model(images, interpolate_pos_encoding=True), ours(images)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    fresh = type(ours)(ours.config).state_dict()
    assert {key: value.shape for key, value in fresh.items()} == {k: v.shape for k, v in ours.state_dict().items()}
    assert ask(model).preprocessing(model).size == (24, 24)


@pytest.mark.parametrize("name", ["dynamic_img_size", "hf_dinov3", "hf_radio", "dinov3_storage", "windowed_rope"])
def test_a_model_of_any_size_computes_the_same(name: str) -> None:
    model, images = HOSTS[name](), torch.randn(2, 3, 36, 36)
    with torch.no_grad():
        torch.testing.assert_close(first(at_size(model, 36)(images)), first(model(images)))


def test_positions_are_resampled_as_torchvision_does() -> None:
    from torchvision.models import ViT_B_16_Weights
    from torchvision.models.vision_transformer import interpolate_embeddings

    model = HOSTS["torchvision_vit"]()
    model.eval_transform = ViT_B_16_Weights.IMAGENET1K_V1.transforms(crop_size=24, resize_size=27)
    theirs = type(model)(32, 4, 4, 2, 32, 64, num_classes=5).eval()
    theirs.load_state_dict(interpolate_embeddings(32, 4, OrderedDict(model.state_dict())))
    ours, images = at_size(model, 32), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))
    assert ours.seq_length == theirs.seq_length
    assert (ours.eval_transform.crop_size, ours.eval_transform.resize_size) == ([32], [36])
    assert (model.eval_transform.crop_size, model.eval_transform.resize_size) == ([24], [27])
    assert eval_transform(ours)(Image.new("RGB", (60, 50))).shape == (3, 32, 32)


def test_positions_are_resampled_as_open_clip_does() -> None:
    open_clip = pytest.importorskip("open_clip")

    def made(size: int) -> Any:
        vision = {"image_size": size, "layers": 2, "width": 64, "patch_size": 8}
        text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
        return open_clip.CLIP(8, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**text)).eval()

    model, theirs = made(24), made(40)
    model.visual.preprocess_cfg = {"size": 24, "mode": "RGB", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    weights = dict(model.state_dict())
    open_clip.model.resize_pos_embed(weights, theirs)
    theirs.load_state_dict(weights)
    images = torch.randn(2, 3, 40, 40)
    with torch.no_grad():
        expected = theirs.encode_image(images)
        assert torch.equal(at_size(model, 40).encode_image(images), expected)
        assert torch.equal(at_size(model.visual, 40)(images), expected)
    found = ModelSpec(at_size(model, 40)).load().preprocessing
    assert found.size == (40, 40)
    assert found.transform is not None
    assert found.transform(Image.new("RGB", (60, 50))).shape == (3, 40, 40)
    assert model.visual.preprocess_cfg["size"] == 24


def test_the_images_follow_the_models_own_transform() -> None:
    """Crop ratio, interpolation and normalisation stay: timm's transform at the size, 208 / 0.9 = 231 px."""
    loaded = ModelSpec("vit_tiny_patch16_224", options={"depth": 1}).load()
    found = loaded.at_size(208)
    assert (found.preprocessing.size, found.preprocessing.resize) == ((208, 208), (231, 231))
    assert (loaded.preprocessing.size, loaded.preprocessing.resize) == ((224, 224), (248, 248))
    config = timm.data.resolve_data_config({"img_size": 208}, model=loaded.model)
    picture = Image.effect_noise((300, 260), 80).convert("RGB")
    expected = timm.data.create_transform(**config)(picture)
    assert torch.equal(eval_transform(found.model)(picture), expected)
    assert (found.name, found.weights, found.options) == (loaded.name, loaded.weights, loaded.options)
    assert found.num_classes == 1000


def test_the_processor_of_a_folder_follows(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    model = HOSTS["hf_vit"]()
    model.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    found = ModelSpec(f"hf:{tmp_path}").load().at_size(36)
    assert found.preprocessing.size == (36, 36)
    assert eval_transform(found.model)(Image.new("RGB", (60, 50))).shape == (3, 36, 36)


def test_a_model_without_weights_is_resized_too() -> None:
    """On the meta device, where MACs are counted."""
    with torch.device("meta"):
        models = [HOSTS["vit"]().to("meta"), HOSTS["hf_clip"]().to("meta"), HOSTS["torchvision_vit"]().to("meta")]
    for model in models:
        found = at_size(model, 32)
        assert input_size_of(found) == (3, 32, 32)
        assert next(found.parameters()).is_meta


def test_swin_is_given_other_windows_by_timm() -> None:
    how = {"patch_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4, "num_classes": 5}
    model, images = timm.models.SwinTransformer(img_size=32, **how).eval(), torch.randn(1, 3, 64, 64)
    theirs = copy.deepcopy(model)
    theirs.set_input_size((64, 64))
    with torch.no_grad():
        assert torch.equal(at_size(model, 64)(images), theirs(images))
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_a_convolutional_model_takes_any_size() -> None:
    found = ModelSpec("test_resnet").load().at_size(96)
    assert found.preprocessing.size == (96, 96)
    assert input_size_of(found.model) == (3, 96, 96)


def test_the_mode_of_a_model_and_its_statistics_stay() -> None:
    model = timm.create_model("test_resnet").train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    found = at_size(model, 96)
    assert found.training
    assert all(torch.equal(value, before[name]) for name, value in found.named_buffers())
    assert at_size(model.eval(), 96).training is False


@pytest.mark.parametrize("name", ["hf_vit", "hf_siglip", "torchvision_vit", "open_clip", "vit"])
def test_dtype_and_frozen_tables_stay(name: str) -> None:
    model = HOSTS[name]().bfloat16().requires_grad_(False)
    found = at_size(model, 32)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in found.parameters())


@pytest.mark.parametrize(("size", "said"), [(200, "take 192 or 208"), (207, "take 192 or 208"), (8, "take 16$")])
def test_images_of_no_whole_patches_are_refused(size: int, said: str) -> None:
    with pytest.raises(VitrimError, match=f"{size} px is not a multiple of the patch size.*16 px.*{said}"):
        at_size(timm.create_model("test_vit"), size)


def test_windows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(VitrimError, match="windows of 6 x 6 do not divide 16 x 16 patches"):
        at_size(HOSTS["windowed_vit"](), 32)


def test_a_transform_of_one_size_is_refused() -> None:
    model = HOSTS["vit"]()
    model.eval_transform = lambda image: torch.zeros(3, 24, 24)
    with pytest.raises(UnsupportedModelError, match="its eval_transform makes images of 24 x 24 px"):
        at_size(model, 32)


def test_of_a_reduced_model_the_dense_one_is_resized() -> None:
    model, images = HOSTS["vit"](), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = at_size(model, 32)(images)
        reduction = vitrim.reduce_(model, "tome:r=2")
        assert torch.equal(at_size(model, 32)(images), expected)
    assert vitrim.get_reduction(model) is reduction


class Own(nn.Module):
    """A model of a user's, of which only one part follows ``set_input_size``, or all do."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.image_size, self.whole = 24, whole
        self.patches, self.head = nn.Conv2d(3, 4, 4, 4), nn.Linear(4, 2)
        self.positions = nn.Parameter(torch.zeros(1, 4, 6, 6))

    def set_input_size(self, size: tuple[int, int]) -> None:
        self.image_size = size[0]
        if self.whole:
            table = nn.functional.interpolate(self.positions, (size[0] // 4, size[1] // 4))
            self.positions = nn.Parameter(table.detach())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head((self.patches(images) + self.positions).mean((2, 3)))  # type: ignore[no-any-return]


def test_a_model_of_a_users_own_needs_set_input_size() -> None:
    assert at_size(Own(whole=True), 32).positions.shape == (1, 4, 8, 8)
    with pytest.raises(UnsupportedModelError, match="Own cannot be given images of 32 px: The size of tensor a"):
        at_size(Own(whole=False), 32)
    with pytest.raises(VitrimError, match="Sequential does not say what images it takes"):
        at_size(nn.Sequential(nn.Conv2d(3, 4, 4)), 32)


@pytest.mark.parametrize("name", ["segmenter:test_vit", "vitdet:test_vit"])
def test_a_dense_model_is_resized_by_its_backbone(name: str) -> None:
    model = vitrim.create_model(name, options={"img_size": 32, "depth": 2, "num_classes": 3})
    found = at_size(model, 48)
    assert (input_size_of(found), input_size_of(model)) == ((3, 48, 48), (3, 32, 32))


def test_the_patches_of_a_tower_count_for_two() -> None:
    open_clip = pytest.importorskip("open_clip")
    vision = open_clip.CLIPVisionCfg(image_size=24, layers=1, width=64, patch_size=8)
    text = open_clip.CLIPTextCfg(context_length=8, vocab_size=50, width=16, heads=2, layers=1)
    model = open_clip.CLIP(8, vision, text)
    model.visual.preprocess_cfg = {"size": 24, "mode": "RGB", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    with pytest.raises(VitrimError, match="36 px is not a multiple of the patch size of CLIP, 8 px: take 32 or 40"):
        at_size(model, 36)
