"""YOLOS: detection tokens behind the patches, mid positions, the rows its heads read, the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor, YolosModel, pipeline

import tiny
import vitrim
from tiny_hosts.transformers_vit import hf
from tiny_hosts.transformers_yolos import SIZES
from vitrim.core.registry import ask, host_of
from vitrim.engines.macs import count_macs

MID = {"with": True, "without": False}
"""Tables of positions that are added between the blocks."""
QUERIES = 3


def detector(mid: bool = True, **options: Any) -> Any:
    return hf(YolosForObjectDetection, YolosConfig, **SIZES, use_mid_position_embeddings=mid, **options)()


def everything(model: Any, images: Tensor) -> dict[str, Tensor]:
    """All tensors of an output with hidden states and attention maps, by name."""
    with torch.no_grad():
        output = model(images, output_hidden_states=True, output_attentions=True)
    found = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    for name in ("hidden_states", "attentions"):
        found |= {f"{name} {depth}": value for depth, value in enumerate(output[name])}
    return found


@pytest.mark.parametrize("method", ["none", "tome:r=0", "topk:keep_rate=1.0", "cropr:r=0,first_extra=0", "mctf:r=0"])
@pytest.mark.parametrize("mid", MID)
def test_nothing_reduced_is_the_library(mid: str, method: str) -> None:
    """Logits, boxes, last and all other hidden states and attention maps, in the library's order of tokens."""
    model, images = detector(MID[mid], attn_implementation="eager").double(), tiny.images().double()
    dense = everything(model, images)
    vitrim.reduce_(model, method)
    found = everything(model, images)
    assert found.keys() == dense.keys()
    assert {"logits", "pred_boxes", "last_hidden_state", "hidden_states 4", "attentions 3"} <= dense.keys()
    for name, value in dense.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    vitrim.restore_(model)
    assert all(torch.equal(value, dense[name]) for name, value in everything(model, images).items())


@pytest.mark.parametrize("mid", MID)
def test_the_bare_model_in_single_precision_and_at_another_size(mid: str) -> None:
    model = hf(YolosModel, YolosConfig, **SIZES, use_mid_position_embeddings=MID[mid])()
    for images in (tiny.images(), tiny.images(size=32)[:, :, :28]):
        dense = everything(model, images)
        reduction = vitrim.reduce_(model, "tome:r=0")
        found = everything(model, images)
        for name, value in dense.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
        vitrim.restore_(model)
        reduction = vitrim.reduce_(model, "tome:r=3")
        with torch.no_grad():
            output = model(images)
        assert output.last_hidden_state.shape == dense["last_hidden_state"].shape  # un-merged
        assert reduction.state.num_tokens < dense["last_hidden_state"].shape[1]
        vitrim.restore_(model)


def test_facts() -> None:
    facts = host_of(detector()).facts(detector())
    assert (facts.num_prefix, facts.head_rows, facts.num_classes) == (1 + QUERIES, 1 + QUERIES, 5)
    assert facts.head == "class token"
    assert not facts.dense
    bare = hf(YolosModel, YolosConfig, **SIZES)()
    assert host_of(bare).facts(bare).head_rows is None
    with pytest.raises(vitrim.UnsupportedModelError, match="has no classifier"):
        ask(bare).readers(bare)


@pytest.mark.parametrize("method", ["tome:r=4", "topk", "mctf:r=4"])
def test_the_last_block_computes_what_the_heads_read(method: str) -> None:
    model, images = detector().double(), tiny.images().double()
    reduction = vitrim.reduce_(model, method, record=True)
    with torch.no_grad():
        full = model(images)
        vitrim.restore_(model)
        reduction = vitrim.reduce_(model, f"{method},last_block=auto" if ":" in method else f"{method}:last_block=auto")
        rows = model(images)
    torch.testing.assert_close(rows.logits, full.logits, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(rows.pred_boxes, full.pred_boxes, atol=1e-12, rtol=1e-12)
    assert rows.last_hidden_state.shape == (2, 1 + QUERIES, 32)
    assert reduction.state.num_prefix == 1 + QUERIES


def oracle(model: Any, images: Tensor, keep: Tensor, block: int) -> Tensor:
    """Logits of the library's own layers where from before ``block`` on only the patches ``keep`` are left."""
    vit = model.vit
    x = vit.embeddings(images)
    table = vit.encoder.interpolation(images.shape[-2:]) if vit.encoder.interpolation is not None else None
    rows = torch.cat([torch.tensor([0]), 1 + keep, 1 + 36 + torch.arange(QUERIES)])
    for depth, layer in enumerate(vit.encoder.layer):
        if depth == block:
            x = x[:, rows]
            table = None if table is None else table[:, :, rows]
        x = layer(x)
        if table is not None and depth < len(vit.encoder.layer) - 1:
            x = x + table[depth]
    return model.class_labels_classifier(vit.layernorm(x)[:, -QUERIES:])  # type: ignore[no-any-return]


@pytest.mark.parametrize("mid", MID)
def test_pruned_tokens_leave_the_others_their_own_mid_positions(mid: str) -> None:
    model, images = detector(MID[mid]).double(), tiny.images().double()
    reduction = vitrim.reduce_(model, "l1:blocks=[1],keep_rate=0.5", record=True)
    with torch.no_grad():
        found = model(images).logits
        patches = reduction.states[-1].position[0, 1 + QUERIES :] - 1 - QUERIES
        vitrim.restore_(model)
        torch.testing.assert_close(found, oracle(model, images, patches.sort().values, 1), atol=1e-10, rtol=0)


def test_prefix_mean_is_the_mean_attention_of_all_prefix_rows() -> None:
    model, images = detector(attn_implementation="eager").double(), tiny.images().double()
    with torch.no_grad():
        maps = model(images, output_attentions=True).attentions[0]
    rows = torch.cat([maps[:, :, :1], maps[:, :, -QUERIES:]], dim=2).mean(dim=(1, 2))[:, 1 : 1 + 36]
    expected = rows.topk(12, dim=1).indices
    for score, equal in (("prefix_mean", True), ("class_token", False)):
        reduction = vitrim.reduce_(model, f"topk:blocks=[0],keep_rate=0.3333,rule=floor_current,score={score}")
        with torch.no_grad():
            model(images)
        kept = reduction.state.position[:, 1 + QUERIES :] - 1 - QUERIES
        assert torch.equal(kept[:, : expected.shape[1]], expected[:, : kept.shape[1]]) == equal
        vitrim.restore_(model)


@pytest.mark.parametrize("method", ["topk", "evit", "bat", "evo_vit", "diffrate:r=4"])
def test_methods_that_score_take_prefix_mean(method: str) -> None:
    model = detector()
    text = f"{method},score=prefix_mean" if ":" in method else f"{method}:score=prefix_mean"
    vitrim.reduce_(model, text)
    with torch.no_grad():
        assert model(tiny.images()).logits.isfinite().all()


def test_prefix_mean_needs_a_prefix() -> None:
    model = tiny.HOSTS["hf_siglip"]()
    with pytest.raises(vitrim.UnsupportedModelError, match="in front of the patches, and this model has none; use sc"):
        vitrim.reduce_(model, "topk:score=prefix_mean")


@pytest.mark.parametrize(("share", "method"), [(0.75, "tome:r=6"), (0.5, "topk:blocks=[0],keep_rate=0.4")])
def test_the_pipeline_detects_with_fewer_macs(share: float, method: str, tmp_path: Path) -> None:
    model = detector()
    processor = YolosImageProcessor(size={"height": 24, "width": 24})
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 48, 3), dtype=np.uint8))
    detect = pipeline("object-detection", model=str(tmp_path / "model"))
    dense = detect(picture, threshold=0.0)
    images = torch.zeros(1, 3, 24, 24)
    full = count_macs(detect.model, images).total
    reduction = vitrim.reduce_(detect.model, method)
    found = detect(picture, threshold=0.0)
    assert len(found) == len(dense) == QUERIES
    assert found != dense
    assert {"score", "label", "box"} == set(found[0])
    assert reduction.state.reduced
    assert count_macs(detect.model, images).total / full == pytest.approx(share, abs=0.06)


@pytest.mark.slow  # `core/test_contract.py` compiles a model of transformers
def test_it_compiles_whole() -> None:
    model, images = detector(num_hidden_layers=2), tiny.images()
    vitrim.reduce_(model, "tome:r=4")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images).logits, model(images).logits, atol=1e-5, rtol=1e-5)


def test_losses_of_two_sizes_before_one_backward_under_checkpointing() -> None:
    """A block that is computed again finds the mid positions of its own forward."""
    model = detector().double().train()
    vitrim.reduce_(model, "tome:r=3")
    batches = [tiny.images().double(), tiny.images(size=32, seed=4).double()]
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            ask(model).checkpoint_gradients(model)
        model.zero_grad()
        sum(model(batch).logits.square().sum() for batch in batches).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-12, rtol=1e-12)


def test_the_library_computes_its_loss_on_the_reduced_model() -> None:
    pytest.importorskip("scipy")
    model = detector().train()
    vitrim.reduce_(model, "tome:r=4")
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3]])} for _ in range(2)]
    loss = model(tiny.images(), labels=labels).loss
    loss.backward()
    table = model.vit.encoder.interpolation.mid_position_embeddings
    assert loss.isfinite()
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


def input_of(layer: Any, model: Any, images: Tensor) -> Tensor:
    """The tokens that a layer's attention reads, (B, N, C), mid positions included."""
    seen: list[Tensor] = []
    handle = layer.layernorm_before.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(images)
    handle.remove()
    return seen[0]


def test_a_patch_that_comes_back_missed_the_tables_since() -> None:
    """As Cropr brings it back, so does ``restore=last_block``: as it was when pruned."""
    model, images = detector().double(), tiny.images().double()
    _, _, third, last = model.vit.encoder.layer
    when_pruned = input_of(third, model, images)
    vitrim.reduce_(model, "l1:blocks=[2],keep_rate=0.5")
    left = input_of(last, model, images)
    vitrim.restore_(model)
    vitrim.reduce_(model, "l1:blocks=[2],keep_rate=0.5,restore=last_block")
    found = input_of(last, model, images)
    kept = left.shape[1]
    assert found.shape == when_pruned.shape
    assert kept < found.shape[1]
    torch.testing.assert_close(found[:, :kept], left, atol=1e-12, rtol=0)
    assert torch.cdist(found[:, kept:], when_pruned).amin(dim=2).max() < 1e-5  # each is one of the rows there


def test_detections_are_those_of_the_library_s_own_processor() -> None:
    """On images that are wider than high, each with a size of its own: `post_process_object_detection`."""
    model = tiny.shaken(detector())
    images, sizes = tiny.images()[:, :, :16], [(16, 24), (12, 20)]
    with torch.no_grad():
        found = ask(model).detections(model, images, sizes)
        output = model(images)
    expected = YolosImageProcessor().post_process_object_detection(output, -1.0, torch.tensor(sizes))
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("boxes", "labels", "scores"):
            torch.testing.assert_close(mine[key], theirs[key])
    with torch.no_grad():
        whole = ask(model).detections(model, images)
    same = YolosImageProcessor().post_process_object_detection(output, -1.0, torch.tensor([[16, 24]] * 2))
    torch.testing.assert_close(whole[1]["boxes"], same[1]["boxes"])
