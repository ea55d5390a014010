"""What connectors leave out of the tokens of a tower, and towers that a connector needs whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Cohere2Config,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Dinov2WithRegistersConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ModernBertConfig,
    ModernVBertConfig,
    ModernVBertModel,
    SiglipVisionConfig,
)

import tiny
import tiny_vlms
import vitrim
from tiny_hosts.common import seeded
from tiny_vlms import TEXT, VISION
from vitrim.core.registry import host_of

# ---- LLaVA's strategy "default" leaves out the first token, whatever it is ---------------------------------------

REGISTERS = Dinov2WithRegistersConfig(**VISION, mlp_ratio=2, num_register_tokens=3)
SIGLIP = SiglipVisionConfig(**VISION)
TOWERS: dict[str, tuple[Any, Any, int]] = {
    "registers": (REGISTERS, -2, 3),
    "registers, two blocks": (REGISTERS, [-2, -1], 3),
    "no prefix": (SIGLIP, -2, -1),
    "no prefix, two blocks": (SIGLIP, [-3, -1], -1),
}
"""The config, the blocks that are read, and how many more places than patches a prompt has."""


def llava(vision: Any, layer: Any) -> nn.Module:
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**TEXT),
        image_token_id=1,
        vision_feature_layer=layer,
        vision_feature_select_strategy="default",
    )
    return tiny.shaken(seeded(lambda: LlavaForConditionalGeneration(config))()).double()


def prompt(places: int) -> dict[str, Tensor]:
    ids = torch.tensor([[7, *[1] * places, 8]] * 2)
    return {"input_ids": ids, "pixel_values": tiny.images().double()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TOWERS)
def test_reducing_nothing_is_the_library_whatever_default_leaves_out(name: str) -> None:
    vision, layer, more = TOWERS[name]
    given = prompt(36 + more)
    with torch.no_grad():
        dense = llava(vision, layer)(**given).logits
        model = llava(vision, layer)
        vitrim.reduce_(model, "tome:r=0", compact=True)
        torch.testing.assert_close(model(**given).logits, dense, atol=1e-7, rtol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TOWERS)
def test_merged_features_are_those_of_the_anchors_behind_the_first_token(name: str) -> None:
    """Beside the features that the same tower gives with ``compact=False``: there is one for every place."""
    vision, layer, more = TOWERS[name]
    given = prompt(36 + more)
    whole, model = llava(vision, layer), llava(vision, layer)
    vitrim.reduce_(whole.model.vision_tower, "tome:r=5")
    reduction = vitrim.reduce_(model, "tome:r=5", compact=True, record=True)
    seen: list[Tensor] = []
    model.model.language_model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        grids = whole.model.get_image_features(
            given["pixel_values"], vision_feature_layer=layer, vision_feature_select_strategy="default"
        ).pooler_output
        model(**given)
    read = layer if isinstance(layer, int) else max(layer)
    state = reduction.states[read]
    prefix = state.num_prefix
    for image, (row, grid) in enumerate(zip(seen[0], grids, strict=True)):
        places = []
        for token, anchor in enumerate(state.position[image].tolist()):
            own = (state.source[image] == token).nonzero().flatten().tolist()
            places += [anchor] if anchor >= 1 else [place for place in own if place >= 1][:1]
        kept = sorted(place - 1 for place in places)
        assert len(kept) == reduction.image_tokens[image]
        expected = torch.stack([grid[place] for place in kept])
        torch.testing.assert_close(row[-1 - len(kept) : -1], expected, atol=1e-9, rtol=1e-9)
    assert prefix in (0, 4)


def test_a_first_patch_that_others_joined_stands_at_the_next_of_them() -> None:
    """All patches are alike but the last three: one token holds patch 0 and many others."""
    model = llava(SIGLIP, -2)
    images = torch.zeros_like(tiny.images()).double()
    for tensor in model.model.vision_tower.embeddings.parameters():
        nn.init.zeros_(tensor)
    reduction = vitrim.reduce_(model, "tome:r=[18,9,4,0]", compact=True, record=True)
    with torch.no_grad():
        model(input_ids=torch.tensor([[7, *[1] * 35, 8]] * 2), pixel_values=images)
    state = reduction.states[-2]
    alone = [int((state.source[image] == state.source[image, 0]).sum()) == 1 for image in range(2)]
    assert reduction.image_tokens == [state.num_tokens - one for one in alone]


def test_gemma_3_whose_config_makes_no_cells_is_refused_in_one_line() -> None:
    text = Gemma3TextConfig(**TEXT, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(vision_config=SIGLIP, text_config=text, image_token_id=1)  # 256 tokens of 36 patches
    model = Gemma3ForConditionalGeneration(config)
    with pytest.raises(vitrim.UnsupportedModelError, match="16 image tokens a side are more than the 6 patches"):
        vitrim.reduce_(model, "tome:r=4", compact=True)


# ---- a tower in a model that reads all of its tokens ----------------------------------------------------------------


def cohere2() -> nn.Module:
    config = Cohere2VisionConfig(
        vision_config=SIGLIP,
        text_config=Cohere2Config(**TEXT),
        image_token_id=1,
        downsample_factor=2,
        alignment_intermediate_size=32,
    )
    return Cohere2VisionForConditionalGeneration(config)


def modern_vbert() -> nn.Module:
    plain = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
    text = ModernBertConfig(**plain, cls_token_id=2, sep_token_id=3)
    return ModernVBertModel(
        ModernVBertConfig(vision_config=SIGLIP, text_config=text, image_token_id=1, pixel_shuffle_factor=2)
    )


class Counting(nn.Module):
    """A model of one's own, which lays the tokens of its tower out as a map."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tiny.HOSTS["hf_siglip_model"]()
        self.head = nn.Conv2d(32, 3, 2, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.tower(images).last_hidden_state.transpose(1, 2).reshape(-1, 32, 6, 6))  # type: ignore[no-any-return]


def read_by_prompt(model: Any) -> Tensor:
    images = tiny.images()
    return model(input_ids=torch.tensor([[7, *[1] * 9, 8]] * 2), pixel_values=images)[0]  # type: ignore[no-any-return]


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "Gemma 3": (tiny_vlms.gemma3, read_by_prompt),
    "Cohere 2 Vision": (cohere2, read_by_prompt),
    "ModernVBERT": (
        modern_vbert,
        lambda model: (
            model(input_ids=torch.tensor([[7, *[1] * 9, 8]] * 2), pixel_values=tiny.images()[:, None]).last_hidden_state
        ),
    ),
    "PaliGemma": (
        tiny_vlms.paligemma,
        lambda model: model(input_ids=torch.tensor([[7, *[1] * 36, 8]] * 2), pixel_values=tiny.images()).logits,
    ),
    "one's own": (Counting, lambda model: model(tiny.images())),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONTAINERS)
def test_what_follows_a_tower_gets_every_patch_under_pruning(name: str) -> None:
    create, run = CONTAINERS[name]
    model = seeded(create)().eval()
    with torch.no_grad():
        dense = run(model)
        for method in ("random:keep_rate=0.5", "tome:r=4"):
            reduction = vitrim.reduce_(model, method)
            assert run(model).shape == dense.shape
            if method.startswith("random"):
                assert reduction.state.source.min() >= 0  # those that went are back
                reduction.set(keep_rate=0.7)
                assert run(model).shape == dense.shape
            vitrim.restore_(model)
        reduction = vitrim.reduce_(model, "random:keep_rate=1.0")  # nothing pruned: the dense model
        torch.testing.assert_close(run(model), dense, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("method", ["patchmerger", "a_vit:score=column_mean", "ia_red2"])
def test_methods_that_leave_no_grid_are_refused_at_once_with_what_to_do(method: str) -> None:
    config = vitrim.parse_method(method.partition(":")[0])
    with pytest.raises(vitrim.VitrimError) as told:
        vitrim.reduce_(Counting(), config)
    if not config.needs().class_token:
        assert str(told.value).endswith(
            "so may what follows this tower; use a merging method, or reduce the tower itself"
        )


def test_a_tower_by_itself_and_in_a_wrapper_hands_out_what_is_left() -> None:
    wrapped = nn.DataParallel(tiny.HOSTS["hf_siglip_model"]())
    for model, tower in ((wrapped, wrapped.module), (own := Counting().tower, own)):
        vitrim.reduce_(model, "random:keep_rate=0.5,blocks=[1]")
        assert tower(tiny.images()).last_hidden_state.shape[1] == 18


@pytest.mark.parametrize("module", ["", "tower"])
def test_a_loaded_reduction_hands_out_what_the_saved_one_did(module: str, tmp_path: Path) -> None:
    """Every patch to what follows, or, of a tower that was reduced by itself, those that are left."""
    for given in ("container", "tower"):
        model, twin = seeded(Counting)().eval(), seeded(Counting)().eval()
        vitrim.reduce_(model if given == "container" else model.tower, "l2:keep_rate=0.5").save(
            tmp_path / given, module=module
        )
        assert vitrim.Reduction.load(twin, tmp_path / given).model is twin.tower
        with torch.no_grad():
            mine, theirs = (one.tower(tiny.images()).last_hidden_state for one in (twin, model))
            assert torch.equal(mine, theirs)
            assert mine.shape[1] == (36 if given == "container" else 4)


# ---- gradients of hidden states and attention maps ------------------------------------------------------------------

EAGER = ["hf_vit", "hf_beit", "hf_clip", "hf_dinov3", "hf_siglip", "hf_yolos"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("host", EAGER)
def test_gradients_of_hidden_states_and_maps_are_those_of_the_library(host: str) -> None:
    model: Any = tiny.shaken(tiny.HOSTS[host]().double())
    host_of(model).trunk(model).set_attn_implementation("eager")  # type: ignore[attr-defined]

    def gradients() -> list[Tensor]:
        out = model(tiny.images().double(), output_hidden_states=True, output_attentions=True)
        parts = [*out.hidden_states, *out.attentions]
        for part in parts:
            part.retain_grad()
        tiny.logits(out)[0].flatten()[0].backward()
        return [part.grad for part in parts]

    dense = gradients()
    assert all(one is not None for one in dense)
    vitrim.reduce_(model, "tome:r=0")
    for found, expected in zip(gradients(), dense, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)  # the library's softmax is of float32
    vitrim.restore_(model)
    for method in ("tome:r=4", "random:keep_rate=0.7"):
        vitrim.reduce_(model, method)
        maps = gradients()[5:]
        assert all(one is not None and one.any() for one in maps[:3])
        vitrim.restore_(model)
