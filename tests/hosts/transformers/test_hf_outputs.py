"""What a reduced Hugging Face model hands out and takes in, the same for every family."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BeitConfig,
    BeitForMaskedImageModeling,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionModelWithProjection,
    ViTConfig,
    ViTForMaskedImageModeling,
    ViTModel,
)

import tiny
import vitrim
from tiny_hosts.transformers_vit import GEOMETRY
from vitrim.core.registry import host_of, parse_method
from vitrim.core.tokens import take
from vitrim.core.versions import is_older
from vitrim.hosts.transformers import common

FAMILIES = ("hf_vit", "hf_deit", "hf_dinov2", "hf_dinov2_registers", "hf_clip", "hf_siglip", "hf_dinov3", "hf_beit")
every_family = pytest.mark.parametrize("host", FAMILIES)


def trunk(model: nn.Module) -> Any:
    return host_of(model).trunk(model)


@every_family
def test_hidden_states_cover_the_full_grid_however_they_are_asked_for(host: str) -> None:
    model, images = tiny.HOSTS[host](), tiny.images()
    tokens = 36 + tiny.num_prefix(model)
    vitrim.reduce_(model, "tome:r=4")
    with torch.no_grad():
        by_argument = model(images, output_hidden_states=True).hidden_states
        if not is_older("transformers", "5.23"):  # which counts layers otherwise
            some = trunk(model)(images, output_hidden_states=[1, -1]).hidden_states
            assert [layer is None for layer in some] == [True, False, True, True, False]
            assert torch.equal(some[1], by_argument[1])
            assert torch.equal(some[4], by_argument[4])
        trunk(model).config.output_hidden_states = True
        by_config = trunk(model)(images).hidden_states
        without = trunk(model)(images, output_hidden_states=False).hidden_states
    assert [tuple(layer.shape) for layer in by_argument] == [(2, tokens, 32)] * 5
    for a, b in zip(by_argument, by_config, strict=True):
        assert torch.equal(a, b)
    assert without is None


@every_family
def test_masks_are_refused_in_one_line(host: str) -> None:
    model, images = tiny.HOSTS[host](), tiny.images()
    vitrim.reduce_(model, "tome:r=4")
    inner = trunk(model)
    mask = torch.ones(2, 36 + tiny.num_prefix(model), dtype=torch.long)
    mask[:, -3:] = 0
    with pytest.raises(vitrim.UnsupportedModelError, match="takes no attention_mask"):
        inner(images, attention_mask=mask)
    names = list(inspect.signature(inner.forward).parameters)
    if "attention_mask" in names:
        place = names.index("attention_mask")
        with pytest.raises(vitrim.UnsupportedModelError, match="takes no attention_mask"):
            inner(images, *[None] * (place - 1), mask)


# ---- attention maps -------------------------------------------------------------------------------------------------


def maps_of(model: Any, images: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(5)
    return model(images, output_attentions=True).attentions


@every_family
def test_attention_maps_are_those_of_the_dense_model_where_nothing_is_reduced(host: str) -> None:
    model, images = tiny.HOSTS[host]().double(), tiny.images().double()
    trunk(model).set_attn_implementation("eager")
    with torch.no_grad():
        dense = maps_of(model, images)
        vitrim.reduce_(model, "tome:r=0")
        for ours, theirs in zip(maps_of(model, images), dense, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)  # the library's softmax is of float32
        assert not model(images).get("attentions")
        trunk(model).config.output_attentions = True
        assert len(model(images).attentions) == len(dense)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())
def test_an_attention_map_is_what_the_layer_attends_by(config: vitrim.MethodConfig) -> None:
    """The map times the values is what the output projection gets; a selection takes only some of its rows."""
    model, images = tiny.HOSTS["hf_vit"]().double(), tiny.images().double()
    model.set_attn_implementation("eager")
    reduction = vitrim.reduce_(model, config, record=True)
    values: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for depth, layer in enumerate(tiny.blocks(model)):
        layer.attention.v_proj.register_forward_hook(lambda m, i, o, depth=depth: values.__setitem__(depth, o))
        layer.attention.o_proj.register_forward_pre_hook(lambda m, i, depth=depth: outputs.__setitem__(depth, i[0]))
    with torch.no_grad():
        logits = tiny.run(model, images)
        maps = maps_of(model, images)
        assert torch.equal(tiny.run(model, images)[0], logits[0])
    assert len(maps) == 4
    for depth, attention_map in enumerate(maps):
        rows, columns = attention_map.shape[2:]
        assert columns in (reduction.states[depth].num_tokens, reduction.states[depth + 1].num_tokens)
        if config.name not in ("gtp", "ats"):  # their attention need not sum to 1, or counts padding
            torch.testing.assert_close(attention_map.sum(-1), torch.ones_like(attention_map[..., 0]))
        if values[depth].shape[1] == columns and outputs[depth].shape[1] == rows:
            expected = attention_map @ values[depth].unflatten(-1, (2, 16)).transpose(1, 2)
            torch.testing.assert_close(outputs[depth], expected.transpose(1, 2).flatten(2), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", ["ats", "dynamicvit", "gtp"])
def test_a_method_that_changes_attention_attends_the_same_with_maps(method: str) -> None:
    """In training, where some attend by a mask of their own: nothing depends on who looks."""
    model, images = tiny.HOSTS["hf_vit_eager"]().double().train(), tiny.images().double()
    reduction = vitrim.reduce_(model, tiny.fits(parse_method(method), model))
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    for layer in tiny.blocks(model):
        layer.attention.v_proj.register_forward_hook(lambda m, i, o: values.append(o))
        layer.attention.o_proj.register_forward_pre_hook(lambda m, i: outputs.append(i[0]))
    torch.manual_seed(5)
    plain = model(images).logits
    kept = reduction.state.position
    values.clear()
    outputs.clear()
    found = maps_of(model, images)
    torch.manual_seed(5)
    torch.testing.assert_close(model(images, output_attentions=True).logits, plain)
    assert torch.equal(reduction.state.position, kept)
    for own, value, output in zip(found, values, outputs, strict=False):
        if own.shape[2:] == (output.shape[1], value.shape[1]):
            expected = own @ value.unflatten(-1, (2, 16)).transpose(1, 2)
            torch.testing.assert_close(output, expected.transpose(1, 2).flatten(2), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_maps_come_with_hidden_states_as_tuples_and_not_from_sdpa(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(common.logger, "warning_once", said.append)
    model, images = tiny.HOSTS["hf_vit"](), tiny.images()
    model.set_attn_implementation(kind)
    vitrim.reduce_(model, "tome:r=4")
    with torch.no_grad():
        found = model(images, output_attentions=True, output_hidden_states=True)
        assert [layer.shape[1] for layer in found.hidden_states] == [37] * 5
        sizes = [tuple(layer.shape) for layer in found.attentions or ()]
        assert sizes == ([(2, 2, n, n) for n in (37, 33, 29, 25)] if kind == "eager" else [])
        assert len(model(images, output_attentions=True, return_dict=False)) == 2
        assert model(images).attentions is None
    assert [line.split(". ")[0] for line in said[:1]] == (
        [] if kind == "eager" else ["`sdpa` attention does not support `output_attentions=True`"]
    )


def test_attention_maps_of_checkpointed_layers_come_once() -> None:
    model, images = tiny.HOSTS["hf_vit_eager"]().train(), tiny.images()
    model.gradient_checkpointing_enable()
    vitrim.reduce_(model, "tome:r=4")
    found = model(images, output_attentions=True)
    found.logits.sum().backward()
    assert len(found.attentions) == 4


@every_family
def test_signatures_stay(host: str) -> None:
    """Trainer drops the columns of a data set that are not arguments of forward."""
    model = tiny.HOSTS[host]()
    before = inspect.signature(model.forward), inspect.signature(type(model).forward)
    vitrim.reduce_(model, "tome:r=4")
    assert (inspect.signature(model.forward), inspect.signature(type(model).forward)) == before


@every_family
def test_other_image_sizes(host: str) -> None:
    model, images = tiny.HOSTS[host](), tiny.images(size=32)[:, :, :24]
    takes = "interpolate_pos_encoding" in inspect.signature(trunk(model).forward).parameters
    asked = {"interpolate_pos_encoding": True} if takes else {}
    with torch.no_grad():
        dense = model(images, **asked)[0]
        reduction = vitrim.reduce_(model, "tome:r=0")
        torch.testing.assert_close(model(images, **asked)[0], dense, atol=1e-6, rtol=1e-6)
        reduction.set(r=4)
        assert model(images, **asked)[0].shape == dense.shape
    assert reduction.state.num_patches == 48 - 4 * 4


class Adapted(nn.Module):
    """A linear layer with a low-rank update, in the place of the layer, as PEFT puts it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@every_family
def test_adapters_in_the_place_of_projections_are_used(host: str) -> None:
    images, plain, model = tiny.images(), tiny.HOSTS[host](), tiny.HOSTS[host]()
    vitrim.reduce_(model, "tome:r=0")
    torch.manual_seed(0)
    for bare, reduced in zip(tiny.blocks(plain), tiny.blocks(model), strict=True):
        attention = "attention" if hasattr(bare, "attention") else "self_attn"
        for name in ("q_proj", "v_proj"):
            adapted = Adapted(getattr(getattr(bare, attention), name))
            setattr(getattr(bare, attention), name, adapted)
            setattr(getattr(reduced, attention), name, adapted)
    with torch.no_grad():
        torch.testing.assert_close(model(images)[0], plain(images)[0], atol=1e-6, rtol=1e-6)
    assert not torch.equal(plain(images)[0], tiny.HOSTS[host]()(images)[0])
    model(images)[0].sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".down." in name or ".up." in name)


class OtherTrunk(ViTModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ("vit.layers.2", None, "Custom are not supported in transformers ViT"),
        ("vit.layers.1.attention", None, "attention of class Custom is not supported"),
        ("vit", OtherTrunk, "OtherTrunk overrides the forward of ViTModel"),
    ],
)
def test_parts_of_another_class_are_refused_before_anything_changes(part: str, kind: Any, message: str) -> None:
    model: Any = tiny.HOSTS["hf_vit"]()
    altered, layer = model.get_submodule(part), type(tiny.blocks(model)[0])
    altered.__class__ = kind or type("Custom", (type(altered),), {})
    with pytest.raises(vitrim.UnsupportedModelError, match=message):
        vitrim.reduce_(model, "tome:r=4")
    assert type(tiny.blocks(model)[0]) is layer
    assert not hasattr(model, "vitrim_reduction")


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (ViTForMaskedImageModeling, ViTConfig(**GEOMETRY, encoder_stride=4)),
        (BeitForMaskedImageModeling, BeitConfig(**GEOMETRY, vocab_size=7)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_masked_images_are_refused_by_the_reduced_part(model_class: Any, config: Any) -> None:
    model = model_class(config).eval()
    vitrim.reduce_(model, "tome:r=4")
    masked = torch.zeros(2, 36, dtype=torch.bool)
    with pytest.raises(vitrim.UnsupportedModelError, match="a reduced model takes no bool_masked_pos"):
        model(tiny.images(), bool_masked_pos=masked)


def test_text_is_refused() -> None:
    model = CLIPTextModel(CLIPTextConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^CLIPTextModel .*is not a supported host"):
        vitrim.reduce_(model, "tome:r=4")


def test_a_forward_of_the_users_own_gets_every_token() -> None:
    class Mean(CLIPVisionModelWithProjection):
        def forward(self, pixel_values: Tensor) -> Tensor:  # type: ignore[override]
            return self.vision_model(pixel_values).last_hidden_state.mean(1)

    model = tiny.HOSTS["hf_clip"]()
    model.__class__ = Mean
    reduction = vitrim.reduce_(model.double(), "tome:r=4")
    with torch.no_grad():
        tokens = model.vision_model(tiny.images().double()).last_hidden_state
        mean = model(tiny.images().double())
    size, few = reduction.state.size[..., None], take(tokens, reduction.state.position)
    torch.testing.assert_close(mean, (few * size).sum(1) / size.sum(1))
