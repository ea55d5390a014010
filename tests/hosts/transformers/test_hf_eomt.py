"""EoMT: the layers before the queries join are reduced; those behind see every patch at its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EomtConfig,
    EomtDinov3Config,
    EomtDinov3ForUniversalSegmentation,
    EomtForUniversalSegmentation,
)

import tiny
import vitrim
from cli_runs import runner, succeeded
from tiny_hosts.transformers_eomt import SIZES
from tiny_hosts.transformers_vit import hf
from vitrim.core.registry import ask, host_of
from vitrim.errors import VitrimError

CLASSES: dict[str, tuple[Any, Any]] = {
    "dinov2": (EomtForUniversalSegmentation, EomtConfig),
    "dinov3": (EomtDinov3ForUniversalSegmentation, EomtDinov3Config),
}
QUERIES, PREFIX, BLOCKS = 3, 3, 4
MASKED = {"masked": 1.0, "half": 0.5, "unmasked": 0.0}
"""The share of queries whose attention is masked in the last layers."""


def segmenter(layers: str = "dinov2", masked: float = 0.0, **options: Any) -> Any:
    model_class, config_class = CLASSES[layers]
    model = hf(model_class, config_class, **{**SIZES, **options})()
    model.attn_mask_probs.fill_(masked)
    return model


def everything(model: Any, images: Tensor) -> dict[str, Tensor]:
    """All tensors of an output with hidden states and attention maps, by name."""
    torch.manual_seed(0)  # which queries are masked
    with torch.no_grad():
        output = model(images, output_hidden_states=True, output_attentions=True)
    found = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    for name in ("hidden_states", "attentions"):
        found |= {f"{name} {depth}": value for depth, value in enumerate(output[name])}
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", ["none", "tome:r=0", "topk:keep_rate=1.0", "cropr:r=0,first_extra=0", "mctf:r=0"])
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("layers", CLASSES)
def test_nothing_reduced_is_the_library(layers: str, masked: str, method: str) -> None:
    """Masks, classes, last and all other hidden states and attention maps."""
    model, images = segmenter(layers, MASKED[masked], attn_implementation="eager"), tiny.images()
    dense = everything(model, images)
    vitrim.reduce_(model, method)
    found = everything(model, images)
    assert found.keys() == dense.keys()
    assert {"masks_queries_logits", "class_queries_logits", "hidden_states 5", "attentions 4"} <= dense.keys()
    for name, value in dense.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6)
    vitrim.restore_(model)
    assert all(torch.equal(value, dense[name]) for name, value in everything(model, images).items())


@pytest.mark.parametrize("layers", CLASSES)
def test_facts_and_roles(layers: str) -> None:
    model = segmenter(layers)
    host = host_of(model)
    facts = host.facts(model)
    assert facts.dense
    assert facts.head == "grid"
    assert (facts.num_prefix, facts.num_classes, facts.grid_size) == (PREFIX, 5, (6, 6))
    assert host.blocks(model) == list(model.layers)[:BLOCKS]
    roles = ask(model).roles(model)
    assert roles["layers.4.norm1.weight"].layer == BLOCKS + 1  # a layer that is never reduced has its place, too
    assert roles["query.weight"] == roles["mask_head.fc1.weight"] == roles["class_predictor.bias"]
    assert (roles["query.weight"].part, roles["query.weight"].layer) == ("head", BLOCKS + 2)
    assert roles["embeddings.register_tokens"].part == roles["embeddings.cls_token"].part == "tokens"
    with pytest.raises(VitrimError, match="hands out no tokens"):
        ask(model).without_head(model)


def oracle(model: Any, images: Tensor, banked: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Masks and classes by the library's own layers where block 2 keeps the patches of ``banked[2]`` only, the others
    waiting until the queries join."""
    x = model.embeddings(images)
    kept = torch.cat([torch.arange(PREFIX), PREFIX + banked[2]])
    for depth, layer in enumerate(model.layers):
        if depth == 2:
            waiting, x = x, x[:, kept]
        if depth == BLOCKS:
            x = waiting.index_copy(1, kept, x)
            x = torch.cat([model.query.weight[None].expand(len(x), -1, -1), x], dim=1)
        x = layer(x, None)
    return model.predict(model.layernorm(x))  # type: ignore[no-any-return]


def test_pruned_patches_come_back_before_the_queries_join() -> None:
    model, images = segmenter().double(), tiny.images().double()
    reduction = vitrim.reduce_(model, "l1:blocks=[2],keep_rate=0.5", record=True)
    with torch.no_grad():
        found = model(images)
        kept = reduction.states[3].position[0, PREFIX:] - PREFIX
        vitrim.restore_(model)
        masks, classes = oracle(model, images, {2: kept})
    torch.testing.assert_close(found.masks_queries_logits, masks, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.class_queries_logits, classes, atol=1e-6, rtol=1e-6)


METHODS = (
    "tome:r=4",
    "topk",
    "topk:restore=last_block",
    "topk:restore=zeros",
    "evit",
    "cropr",
    "mctf:r=4",
    "tofu:keep_rate=0.8",
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layers", CLASSES)
def test_the_last_layers_get_every_patch(layers: str, method: str) -> None:
    model = segmenter(layers, masked=1.0)
    seen: list[Tensor] = []
    model.layers[BLOCKS].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    reduction = vitrim.reduce_(model, method, record=True)
    with torch.no_grad():
        output = model(tiny.images(), output_hidden_states=True)
    assert seen[0].shape == (2, QUERIES + PREFIX + 36, 32)
    assert output.masks_queries_logits.shape == (2, QUERIES, 12, 12)
    assert [state.shape[1] for state in output.hidden_states] == [PREFIX + 36] * (BLOCKS + 1) + [QUERIES + PREFIX + 36]
    assert output.masks_queries_logits.isfinite().all()
    assert min(state.num_tokens for state in reduction.states) < PREFIX + 36


@pytest.mark.parametrize("method", ["patchmerger", "ats"])
def test_methods_that_give_no_patch_a_place_are_refused(method: str) -> None:
    with pytest.raises(vitrim.UnsupportedModelError, match="a dense head reads every patch at its place"):
        vitrim.reduce_(segmenter(), method)


@pytest.mark.parametrize("layers", CLASSES)
def test_masked_attention_in_training(layers: str) -> None:
    pytest.importorskip("scipy")
    model = segmenter(layers, masked=0.5, train_num_points=20).train()
    vitrim.reduce_(model, "tome:r=4")
    labels = {
        "mask_labels": [torch.rand(2, 24, 24).round() for _ in range(2)],
        "class_labels": [torch.tensor([1, 2])] * 2,
    }
    loss = model(tiny.images(), **labels).loss
    loss.backward()
    assert loss.isfinite()
    assert model.layers[0].attention.q_proj.weight.grad.abs().sum() > 0
    assert model.query.weight.grad.abs().sum() > 0


def test_only_square_images_of_the_models_own_size() -> None:
    model = segmenter("dinov3")
    vitrim.reduce_(model, "tome:r=4")
    for height, width in ((16, 36), (48, 48)):
        with pytest.raises(vitrim.UnsupportedModelError, match=f"of 24 x 24 pixels, got {height} x {width}"):
            model(torch.zeros(1, 3, height, width))
    odd = segmenter()
    odd.config.image_size = [24, 32]
    with pytest.raises(vitrim.UnsupportedModelError, match=r"square images of whole square patches, got image_size=\["):
        vitrim.reduce_(odd, "tome:r=4")


def test_it_is_profiled_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not on the meta device, where the library cannot read whether attention is masked."""
    segmenter().save_pretrained(tmp_path)
    run = runner(monkeypatch, capsys, "profile")
    out = succeeded(run, f"hf:{tmp_path}", "-m", "tome:r=4", "--model-option", "hidden_dropout_prob=0.1")
    assert "35 31 27 23" in out
