"""Dense outputs of every host, with norms and biases as after training: what a map, a norm and a head make of tokens.

The oracle is a loop over patches: a pruned one is a row of zeros, another one is what its token is, normed by the
library's own norm where the call norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BeitBackbone,
    BeitConfig,
    Dinov2Backbone,
    Dinov2Config,
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersConfig,
    DINOv3ViTBackbone,
    DINOv3ViTConfig,
)

import tiny
import vitrim
from dense_models import segmenter
from tiny_hosts.common import seeded
from tiny_hosts.transformers_vit import GEOMETRY
from vitrim.core.registry import host_of

METHOD = "random:keep_rate=0.7"
CREATE = {**tiny.HOSTS, **tiny.FURTHER}
NORMS = {"open_clip": "ln_post"}
"""The last norm, by the first word of a host; ``norm`` elsewhere."""


def pools_or_hands_out(host: str) -> bool:
    """Whether pruned patches stay away: a dense head gets them back."""
    model = CREATE[host]()
    return not host_of(model).facts(model).dense


def laid_out(tokens: Tensor, state: vitrim.TokenState) -> Tensor:
    """Tokens (B, N, C) at the places (B, N0, C) of the patches that they stand for, zeros elsewhere, one by one."""
    out = tokens.new_zeros(len(tokens), state.num_inputs, tokens.shape[2])
    for image, sources in enumerate(state.source.tolist()):
        for place, token in enumerate(sources):
            if token >= 0:
                out[image, place] = tokens[image, token]
    return out


def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        return call(*args, **kwargs)


def recorded(model: nn.Module, images: Tensor, method: str = METHOD) -> tuple[list[Tensor], Any]:
    """The tokens that the blocks of a reduced model hand on in an ordinary forward, and its states after each."""
    reduction = vitrim.reduce_(model, method, record=True)
    found: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, i, out: found.append(out)) for block in tiny.blocks(model)]
    run(model, images)
    for hook in hooks:
        hook.remove()
    return [out[0] if isinstance(out, list | tuple) else out for out in found], reduction.states[1:]


# ---- calls for maps -------------------------------------------------------------------------------------------------


def maps(model: Any, images: Tensor, norm: bool) -> list[Tensor]:
    """(B, P, C) of the patches after every block, by the library's call."""
    if hasattr(model, "get_intermediate_layers") and not hasattr(model, "forward_intermediates"):
        return list(model.get_intermediate_layers(images, n=4))
    if type(model).__module__.startswith("open_clip"):
        found = model.forward_intermediates(images, normalize_intermediates=norm, output_fmt="NLC")
        return found["image_intermediates"]  # type: ignore[no-any-return]
    return model.forward_intermediates(images, norm=norm, output_fmt="NLC", intermediates_only=True)  # type: ignore[no-any-return]


DENSE = ("samvit", "qwen3", "deepseek", "gemma4", "volo", "windowed")
"""Hosts in which every patch is read: pruned ones come back (`tests/hosts/timm/test_timm_encoders.py`)."""
WITH_MAPS = [
    host for host in CREATE if host.partition("_")[0] not in ("hf", "torchvision", *DENSE) and host != "open_clip_coca"
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("host", WITH_MAPS)
def test_normed_maps_have_zeros_where_patches_went_and_normed_tokens_elsewhere(host: str) -> None:
    model: Any = tiny.shaken(CREATE[host]().double())
    images = tiny.given(host).double()
    tokens, states = recorded(model, images)
    norm = getattr(model, "ln_post" if host.startswith("open_clip") else "norm")
    always = host.startswith("dino")  # their call norms unless told otherwise, and the re-created one always
    for normed in (True,) if always else (False, True):
        for found, token, state in zip(run(maps, model, images, normed), tokens, states, strict=True):
            rows = type(norm).forward(norm, token) if normed else token  # no hook runs
            expected = laid_out(rows, state)[:, state.num_prefix :]
            gone = state.source[:, state.num_prefix :] < 0
            assert gone.any() or state is states[0] or not gone.numel()
            assert not found[gone].any()
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


# ---- hidden states --------------------------------------------------------------------------------------------------

HUGGING_FACE = [host for host in CREATE if host.startswith("hf_") and pools_or_hands_out(host)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", [METHOD, "patchmerger:keep_rate=0.5,blocks=[1]"])
@pytest.mark.parametrize("host", HUGGING_FACE)
def test_hidden_states_are_full_grids_beside_the_output_of_an_ordinary_call(host: str, method: str) -> None:
    model: Any = tiny.shaken(CREATE[host]().double())
    images = tiny.given(host).double()
    tokens, states = recorded(model, images, method)
    plain, out = run(model, images), run(model, images, output_hidden_states=True)
    close(out, plain)
    hidden = out.hidden_states[1 : 1 + len(tokens)]
    behind = tiny.num_behind(model)
    for found, token, state in list(zip(hidden, tokens, states, strict=True))[:-1]:
        if behind:  # YOLOS has its detection tokens there
            found = torch.cat([found[:, :1], found[:, -behind:], found[:, 1:-behind]], dim=1)
        torch.testing.assert_close(found, laid_out(token, state), atol=1e-9, rtol=1e-9)
    last, gone = hidden[-1], (states[-1].source < 0).sum()
    assert last.shape[1] == states[-1].num_inputs
    assert (last == 0).all(-1).sum() == gone
    assert (gone > 0) == (method == METHOD)


def close(found: Any, expected: Any) -> None:
    """Every tensor of an output but hidden states; the image tokens of a class-token tower may be more rows."""
    for key, value in expected.items():
        if isinstance(value, Tensor) and key != "last_hidden_state":
            torch.testing.assert_close(found[key], value, atol=1e-9, rtol=1e-9)


BACKBONES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dinov2": (Dinov2Backbone, Dinov2Config, {"mlp_ratio": 2}),
    "dinov2_registers": (Dinov2WithRegistersBackbone, Dinov2WithRegistersConfig, {"mlp_ratio": 2}),
    "dinov3": (DINOv3ViTBackbone, DINOv3ViTConfig, {"num_register_tokens": 3}),
    "beit": (BeitBackbone, BeitConfig, {"add_fpn": False, "use_relative_position_bias": True}),
}
STAGES = ["stage2", "stage3", "stage4"]


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("name", BACKBONES)
def test_feature_maps_of_backbones_have_zeros_where_patches_went(name: str, normed: bool) -> None:
    kind, config, options = BACKBONES[name]
    if name == "beit":
        if normed:
            pytest.skip("its maps are never normed")
    else:
        options = {**options, "apply_layernorm": normed}
    plain = {key: value for key, value in GEOMETRY.items() if key != "num_labels"}
    model = tiny.shaken(seeded(lambda: kind(config(**plain, **options, out_features=STAGES)))().double())
    images = tiny.images().double()
    dense = [tokens_of(feature) for feature in run(model, images).feature_maps]
    reduction = vitrim.reduce_(model, METHOD, record=True)
    found: list[Tensor] = []
    for block in tiny.blocks(model):
        block.register_forward_hook(lambda m, i, out: found.append(out))
    features = [tokens_of(feature) for feature in run(model, images).feature_maps]
    states = reduction.states[1:]
    assert [feature.shape for feature in features] == [feature.shape for feature in dense]
    for feature, state, grid in zip(features, states[1:], found[1:], strict=True):
        gone = state.source[:, state.num_prefix :] < 0
        assert gone.any()
        grid = grid if grid.shape[1] == state.num_inputs else laid_out(grid, state)
        rows = grid[:, state.num_prefix :]
        if normed or (name == "dinov3" and state is states[-1]):  # which norms the last one always
            norm: Any = getattr(model, "layernorm", None) or model.norm
            rows = nn.functional.layer_norm(rows, (32,), norm.weight, norm.bias, norm.eps)
        torch.testing.assert_close(feature, rows * ~gone.unsqueeze(-1), atol=1e-9, rtol=1e-9)
        assert not feature[gone].any()


def tokens_of(feature: Tensor) -> Tensor:
    return feature.flatten(2).transpose(1, 2)


# ---- heads ----------------------------------------------------------------------------------------------------------

OPEN_CLIP = [
    {},
    {"pool_type": "avg", "final_ln_after_pool": True},
    {"pool_type": "avg"},
    {"attentional_pool": True, "attn_pooler_queries": 3, "attn_pooler_heads": 2},
]


@pytest.mark.parametrize("options", OPEN_CLIP, ids=str)
@pytest.mark.parametrize("method", [METHOD, "tome:r=4", "patchmerger:keep_rate=0.5,blocks=[1]"])
def test_open_clip_pools_the_same_tokens_beside_its_maps(options: dict[str, Any], method: str) -> None:
    open_clip_vit = pytest.importorskip("tiny_hosts.open_clip_vit")
    model: Any = tiny.shaken(open_clip_vit.tower(**options)().double())
    images = tiny.images().double()
    vitrim.reduce_(model, method)
    beside = run(model.forward_intermediates, images, output_fmt="NLC")
    torch.testing.assert_close(beside["image_features"], run(model, images), atol=1e-9, rtol=1e-9)
    assert [part.shape[1] for part in beside["image_intermediates"]] == [36] * 4


def test_zeros_come_back_as_zeros_to_a_dense_head() -> None:
    """``restore=zeros``: the last norm is in front of the head."""
    model: Any = segmenter(dtype=torch.float64)
    reduction = vitrim.reduce_(tiny.shaken(model), "random:keep_rate=0.7,restore=zeros")
    with torch.no_grad():
        tokens, _ = model.tokens(tiny.images().double())
    gone = reduction.state.source[:, 1:] < 0
    assert gone.any()
    assert torch.equal((tokens == 0).all(-1), gone)


def test_hooks_on_norms_go_with_the_reduction() -> None:
    model = CREATE["vit"]()
    before = sum(len(module._forward_hooks) for module in model.modules())
    vitrim.reduce_(model, METHOD)
    assert sum(len(module._forward_hooks) for module in model.modules()) > before
    vitrim.restore_(model)
    assert sum(len(module._forward_hooks) for module in model.modules()) == before
