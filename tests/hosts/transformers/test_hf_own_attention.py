"""A user's attention function: reduced blocks call it as the library does, or refuse what it does not show.

The oracle is the library's own model with the same function, and a function of few lines that does what the library's
does.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.vit import modeling_vit

import tiny
import vitrim
from vitrim.core.registry import host_of

SEEN: list[tuple[nn.Module, dict[str, Any]]] = []


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, bend: float) -> Tensor:
    logits = q @ k.transpose(-1, -2) * scaling
    logits = bend * torch.tanh(logits / bend) if bend else logits
    logits = logits if mask is None else logits + mask
    return (logits.softmax(-1) @ v).transpose(1, 2).contiguous()


def bent(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **given: Any) -> Any:
    """Logits that cannot leave -1 to 1, or what the call of the model asks for."""
    SEEN.append((module, given))
    return attended(q, k, v, attention_mask, given["scaling"], given.get("bend", 1.0)), None


def straight(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **given: Any) -> Any:
    """What the library computes."""
    return attended(q, k, v, attention_mask, given["scaling"], 0.0), None


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    AttentionInterface.register("bent", bent)
    AttentionInterface.register("straight", straight)
    SEEN.clear()


def made(host: str, function: str = "bent") -> Any:
    model = {**tiny.HOSTS, **tiny.FURTHER}[host]().double()
    model.set_attn_implementation(function)
    return model


def output(model: nn.Module, images: Tensor, **more: Any) -> Tensor:
    torch.manual_seed(5)  # an MAE shuffles its patches
    with torch.no_grad():
        found = tiny.logits(model(images, **more))
    return found[0] if isinstance(found, tuple) else found


# attention that is written out, or chosen by its class, calls no function
WRITTEN_OUT = ("hf_blip", "hf_sam", "hf_sam_eager", "hf_vitdet", "hf_vitdet_backbone")
OF_THE_LIBRARY = [host for host in (*tiny.HOSTS, *tiny.FURTHER) if host.startswith("hf_") and host not in WRITTEN_OUT]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("host", OF_THE_LIBRARY)
def test_reduced_blocks_call_it_as_the_library_does(host: str) -> None:
    model, images = made(host), tiny.given(host).double()
    assert host_of(model).facts(model).own_attention
    wanted, dense = output(model, images), list(SEEN)
    model.set_attn_implementation("eager")
    assert not torch.allclose(output(model, images), wanted, atol=1e-6)
    model.set_attn_implementation("bent")
    vitrim.reduce_(model, "tome:r=0,proportional=false")
    SEEN.clear()
    torch.testing.assert_close(output(model, images), wanted, atol=1e-9, rtol=1e-9)
    assert [module for module, _ in SEEN] == [module for module, _ in dense] != []
    for (_, found), (_, expected) in zip(SEEN, dense, strict=True):
        assert found["scaling"] == expected["scaling"]
        assert found["dropout"] == expected["dropout"]
        assert found.get("is_causal") in (None, False)
        assert found.get("is_causal") is not None or "is_causal" not in expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize("host", OF_THE_LIBRARY)
def test_merged_tokens_weigh_as_many_as_they_are(host: str) -> None:
    """A function that does what the library's does, and reads its mask, gives what the library's gives."""
    model, images = made(host, "straight"), tiny.given(host).double()
    reduction = vitrim.reduce_(model, "tome:r=4,proportional=true")
    found = output(model, images)
    assert reduction.state.num_patches < reduction.state.initial_patches
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, output(model, images), atol=1e-6, rtol=1e-6)
    for block in tiny.blocks(model):
        block.proportional = False
    assert not torch.allclose(found, output(model, images), atol=1e-6)


def test_dropout_and_arguments_of_the_call_reach_it() -> None:
    model, images = made("hf_vit_model"), tiny.given("hf_vit_model").double()
    for layer in tiny.blocks(model):
        layer.attention.attention_dropout = 0.25
    wanted = output(model, images, bend=0.5)
    vitrim.reduce_(model, "tome:r=0")
    torch.testing.assert_close(output(model, images, bend=0.5), wanted, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(output(model, images), wanted, atol=1e-6)
    assert {given["dropout"] for _, given in SEEN} == {0.0}
    SEEN.clear()
    output(model.train(), images)
    assert {given["dropout"] for _, given in SEEN} == {0.25}


# ---- what it does not show -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["topk", "topk:score=column_mean", "evit", "mctf", "ats", "gtp", "zero_tprune", "kmedoids", "diffrate"]
)
def test_methods_that_read_attention_are_refused_before_any_edit(method: str) -> None:
    model = made("hf_deit")
    before, kind = model.state_dict().keys(), type(tiny.blocks(model)[0])
    with pytest.raises(vitrim.UnsupportedModelError, match=r"reads attention probabilities.*set_attn_impl"):
        vitrim.reduce_(model, method)
    assert vitrim.get_reduction(model) is None
    assert type(tiny.blocks(model)[0]) is kind
    assert model.state_dict().keys() == before
    model.set_attn_implementation("sdpa")
    vitrim.reduce_(model, method)


@pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())
def test_methods_say_whether_they_read_attention(config: vitrim.MethodConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not say so run; those that do cannot, even if they are let through."""
    model = tiny.traceable("hf_deit", config)
    model.set_attn_implementation("bent")
    if config.needs().reads_attention:
        monkeypatch.setattr(host_of(model), "own_attention", lambda model: False)
    vitrim.reduce_(model, config)
    if not config.needs().reads_attention:
        assert output(model, tiny.images()).isfinite().all()
        return
    with pytest.raises(vitrim.UnsupportedModelError, match="attention probabilities are read here"):
        output(model, tiny.images())


def test_a_function_chosen_later_is_called_or_refused() -> None:
    model, images = made("hf_vit_model", "sdpa"), tiny.given("hf_vit_model").double()
    vitrim.reduce_(model, "tome:r=0")
    model.set_attn_implementation("bent")
    found = output(model, images)
    vitrim.restore_(model)
    torch.testing.assert_close(found, output(model, images), atol=1e-9, rtol=1e-9)
    model.set_attn_implementation("sdpa")
    vitrim.reduce_(model, "topk")
    model.set_attn_implementation("bent")
    with pytest.raises(vitrim.UnsupportedModelError, match="attention probabilities are read here"):
        output(model, images)


def test_maps_are_refused() -> None:
    model = made("hf_vit_model")
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(vitrim.UnsupportedModelError, match="attention probabilities are read here"):
        output(model, tiny.given("hf_vit_model").double(), output_attentions=True)


@pytest.fixture(scope="module")
def llava() -> Any:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=24, patch_size=4
    )
    text = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)).eval()


def test_selectors_that_read_attention_are_refused(llava: Any) -> None:
    model = copy.deepcopy(llava)
    model.base_model.vision_tower.set_attn_implementation("bent")
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^visionzip reads attention probabilities, and a function"):
        vitrim.reduce_(model, select="visionzip:tokens=9")
    assert vitrim.get_reduction(model) is None
    vitrim.reduce_(model, select="divprune:tokens=9")
    vitrim.restore_(model)
    model.base_model.vision_tower.set_attn_implementation("sdpa")
    vitrim.reduce_(model, select="visionzip:tokens=9")


# ---- which functions are the user's ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["replaced eager", "sdpa", "eager", "a wrapper"])
def test_a_function_in_place_of_the_librarys_is_the_users(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under the name of the library's, and one that wraps it."""
    library = AttentionInterface()["sdpa"]

    @functools.wraps(library)
    def doubled(*args: Any, **given: Any) -> Any:
        return 2 * library(*args, **given)[0], None

    name, images = (
        {"replaced eager": "eager", "a wrapper": "doubled"}.get(way, way),
        tiny.given("hf_vit_model").double(),
    )
    plain = output(made("hf_vit_model", "sdpa"), images)
    if way == "replaced eager":
        monkeypatch.setattr(modeling_vit, "eager_attention_forward", bent)
    else:
        AttentionInterface.register(name, doubled if way == "a wrapper" else bent)
    model = made("hf_vit_model", name)
    assert host_of(model).facts(model).own_attention
    wanted = output(model, images)
    assert not torch.allclose(wanted, plain, atol=1e-6)
    vitrim.reduce_(model, "tome:r=0")
    torch.testing.assert_close(output(model, images), wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["eager", *AttentionInterface._global_mapping])
def test_the_librarys_own_functions_take_the_fast_way(name: str) -> None:
    model = made("hf_vit_model", "sdpa")
    model.config._attn_implementation = name  # some need packages to be set
    assert not host_of(model).facts(model).own_attention


@pytest.mark.slow
def test_it_is_compiled_and_exported() -> None:
    model, images = made("hf_vit_model"), tiny.given("hf_vit_model").double()
    vitrim.reduce_(model, "tome:r=4")
    wanted = output(model, images)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(output(compiled, images), wanted, atol=1e-9, rtol=1e-9)
    with torch.no_grad():
        program = torch.export.export(model, (images,), strict=False).module()
    torch.testing.assert_close(output(program, images), wanted, atol=1e-9, rtol=1e-9)
