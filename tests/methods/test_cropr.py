"""Cropr against its reference vectors (classification, segmentation, operators), in evaluation and training."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.eva import Eva
from torch import Tensor, nn

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.methods.cropr import CrossAttention, curriculum, objective
from vitrim.training.step import Step

AVERAGE = {"global_pool": "avg", "pool_include_prefix": True}
RENAME = {"cross_attn.mlp_norm": "cross_attn.mlp.norm"}
CASES: dict[str, tuple[vitrim.Cropr, dict[str, Any]]] = {
    "cropr/cropr_cls_llf": (vitrim.Cropr(r=8), AVERAGE),
    "cropr/cropr_cls_nollf_tokenpool": (vitrim.Cropr(r=8, fusion="none"), {}),
    "cropr/cropr_cls_nomlp_kproj": (vitrim.Cropr(r=9, fusion="none", mlp=False, k_proj=True), AVERAGE),
}
every_case = pytest.mark.parametrize("name", CASES)


def reduced(name: str) -> tuple[dict[str, Any], nn.Module, vitrim.Reduction]:
    config, host = CASES[name]
    ref = golden.load(name)
    model = golden.vit(ref, **host)
    reduction = vitrim.reduce_(model, config, record=True)
    learned.load_reducers(model, ref, {depth: f"cropr.{depth - 1}." for depth in config.routers(6)}, RENAME)
    return ref, model, reduction


@every_case
def test_reference(name: str) -> None:
    ref, model, reduction = reduced(name)
    routers = CASES[name][0].routers(6)
    scores: dict[int, Tensor] = {}
    for depth in routers:
        model.blocks[depth].reducer.register_forward_hook(
            lambda m, args, out: scores.__setitem__(m.layer.depth, m.cross_attn.scores(args[0]))
        )
    learned.check_outputs(ref, model, reduction, lengths=False)
    assert [reduction.states[depth + 1].num_tokens for depth in routers] == ref["tokens_after_module"].tolist()
    assert [state.num_tokens for state in reduction.states[1:]] == ref["tokens_per_block"].tolist()
    assert reduction.config.counts(64, 6) == [count - 1 for count in ref["tokens_per_block"].tolist()]
    gone: set[int] = set()
    for depth in routers:
        state = reduction.states[depth + 1]
        for image in range(3):
            assert set(state.position[image].tolist()) == set(ref[f"kept/{depth - 1}"][image].tolist())
        gone |= {(image, token) for image in range(3) for token in ref[f"pruned/{depth - 1}"][image].tolist()}
        assert {(i, t) for i in range(3) for t in range(65) if state.source[i, t] < 0} == gone
        expected = golden.tensor(ref, f"scores/{depth - 1}").double()[:, 1:]  # the class token's is infinite there
        atol = 2e-6 * expected.abs().max().item()
        found = scores[depth][:, 1:]
        torch.testing.assert_close(found.sort(1).values, expected.sort(1).values, atol=atol, rtol=0)
    assert reduction.state.aux == ()  # no auxiliary heads outside training
    assert reduction.state.pruned == (CASES[name][0].fusion == "none")
    learned.check_float32(ref, model)


@every_case
def test_training_losses_and_isolated_gradients(name: str) -> None:
    ref, model, reduction = reduced(name)
    model.train()
    logits = model(golden.images(ref))
    torch.testing.assert_close(logits, golden.tensor(ref, "train/logits"), atol=1e-9, rtol=0)
    for index, auxiliary in enumerate(reduction.aux("auxiliary_logits")):
        torch.testing.assert_close(auxiliary, golden.tensor(ref, f"train/aux_logits/{index}"), atol=1e-9, rtol=0)
    losses = objective(reduction, logits, torch.tensor(ref["config"]["targets"]))
    found = torch.cat([losses["main"][None], losses["auxiliary"]])
    torch.testing.assert_close(found, golden.tensor(ref, "train/losses"), atol=1e-9, rtol=0)
    losses["total"].backward()
    learned.check_gradients(ref, model, renamed(name), "train/")


def renamed(name: str) -> dict[str, str]:
    return {
        f"cropr.{depth - 1}.{old}": f"blocks.{depth}.reducer.{new}"
        for depth in CASES[name][0].routers(6)
        for old, new in {"": "", **RENAME}.items()
    }


@every_case
def test_a_step_has_the_losses_and_gradients_of_the_reference(name: str) -> None:
    ref, model, reduction = reduced(name)
    targets = torch.tensor(ref["config"]["targets"])
    step = Step(model.train(), reduction, golden.images(ref), targets, nn.functional.cross_entropy)
    losses = reduction.config.losses(step)
    stored = golden.tensor(ref, "train/losses")
    torch.testing.assert_close(losses["main"], stored[0], atol=1e-9, rtol=0)
    torch.testing.assert_close(losses["auxiliary"], stored[1:].mean(), atol=1e-9, rtol=0)
    torch.testing.assert_close(losses["total"], stored.sum(), atol=1e-9, rtol=0)
    losses["total"].backward()
    learned.check_gradients(ref, model, renamed(name), "train/")


def test_the_criterion_is_that_of_the_model_and_of_all_routers() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, vitrim.Cropr(r=4))
    soft = torch.tensor([[0.5, 0.5, 0, 0, 0], [0, 0, 0.2, 0.8, 0]])
    doubled = Step(model, reduction, tiny.images(), soft, lambda *pair: 2 * nn.functional.cross_entropy(*pair))
    single = Step(model, reduction, tiny.images(), soft, nn.functional.cross_entropy)
    ours, half = reduction.config.losses(doubled), reduction.config.losses(single)
    assert all(torch.equal(ours[key], 2 * half[key]) for key in ("total", "main", "auxiliary"))


def test_one_output_per_query_has_no_loss_of_the_image() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, vitrim.Cropr(r=4, num_queries=36))
    step = Step(model, reduction, tiny.images(), torch.tensor([1, 2]), nn.functional.cross_entropy)
    with pytest.raises(vitrim.VitrimError, match=r"\(2, 36, 5\), one output per query, and the model \(2, 5\)"):
        reduction.config.losses(step)


def test_the_reference_without_pruning() -> None:
    ref = golden.load("cropr/cropr_cls_noprune")
    model = golden.vit(ref, **AVERAGE)
    reduction = vitrim.reduce_(model, vitrim.NoReduction(), record=True)
    learned.check_outputs(ref, model, reduction)
    loss = nn.functional.cross_entropy(model.train()(golden.images(ref)), torch.tensor(ref["config"]["targets"]))
    torch.testing.assert_close(loss[None], golden.tensor(ref, "train/losses"), atol=1e-9, rtol=0)
    loss.backward()
    learned.check_gradients(ref, model, {}, "train/")


def segmenter(ref: dict[str, Any]) -> nn.Module:
    """The EVA-02 behind the segmentation files: the head reads every patch. float64, evaluation mode."""
    geometry = ref["config"]["model"]
    model = Eva(
        img_size=geometry["image_size"],
        norm_layer=partial(nn.LayerNorm, eps=geometry["norm_eps"]),
        global_pool="",
        use_fc_norm=True,
        **{key: value for key, value in geometry.items() if key not in ("image_size", "norm_eps")},
    )
    expected = set(model.state_dict())
    state = {name: value for name, value in golden.published(ref).items() if name in expected}
    model.load_state_dict(state, strict=True)
    model = model.double().eval()
    table = golden.tensor(ref, "rope")
    torch.testing.assert_close(model.rope.get_embed(), table, atol=1e-6, rtol=0)
    model.rope.pos_embed = table  # timm computes it in float32
    return model


SEGMENTERS: dict[str, vitrim.MethodConfig] = {
    "cropr/cropr_segm_llf": vitrim.Cropr(r=8, num_queries=64),
    "cropr/cropr_segm_noprune": vitrim.NoReduction(),
}


def segmenting(name: str) -> tuple[dict[str, Any], nn.Module, vitrim.Reduction, range]:
    ref, config = golden.load(name), SEGMENTERS[name]
    model = segmenter(ref)
    reduction = vitrim.reduce_(model, config, record=True)
    routers = config.routers(6) if isinstance(config, vitrim.Cropr) else range(0)
    learned.load_reducers(model, ref, {depth: f"cropr.{depth - 1}." for depth in routers}, RENAME)
    return ref, model, reduction, routers


def enlarged(logits: Tensor) -> Tensor:
    """(B, P, classes) on 8 x 8 patches to masks (B, classes, 64, 64)."""
    return nn.functional.interpolate(logits.transpose(1, 2).unflatten(2, (8, 8)), size=(64, 64), mode="bilinear")


@pytest.mark.parametrize("name", SEGMENTERS)
def test_segmentation_reference(name: str) -> None:
    ref, model, reduction, routers = segmenting(name)
    with torch.no_grad():
        logits = model(golden.images(ref))[:, 1:]
        torch.testing.assert_close(logits, golden.tensor(ref, "logits_tokens"), atol=1e-9, rtol=0)
        row = golden.tensor(ref, "masks_row").double()
        torch.testing.assert_close(enlarged(logits)[:, :, ::7], row, atol=2e-6 * row.abs().max().item(), rtol=0)
    assert [reduction.states[depth + 1].num_tokens for depth in routers] == ref["tokens_after_module"].tolist()
    for depth in routers:
        for found, kept in zip(reduction.states[depth + 1].position, ref[f"kept/{depth - 1}"], strict=True):
            assert set(found.tolist()) == set(kept.tolist())
    with torch.no_grad():
        logits = model.float()(golden.images(ref).float())[:, 1:]
    torch.testing.assert_close(logits, golden.tensor(ref, "logits_tokens_f32"), atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", SEGMENTERS)
def test_segmentation_training(name: str) -> None:
    ref, model, reduction, routers = segmenting(name)
    labels = np.random.RandomState(7).randint(0, 7, (2, 64, 64))
    labels[:, :5] = 255
    masks, grid = torch.from_numpy(labels), golden.tensor(ref, "train/label_grid").long()
    cross_entropy = partial(nn.functional.cross_entropy, ignore_index=255)
    losses = [cross_entropy(enlarged(model.train()(golden.images(ref))[:, 1:]), masks)]
    for index, auxiliary in enumerate(reduction.aux("auxiliary_logits") if routers else []):
        maps = auxiliary.transpose(1, 2).unflatten(2, (8, 8))
        if f"train/aux_logits/{index}" in ref:
            stored = golden.tensor(ref, f"train/aux_logits/{index}")[0].double()
            torch.testing.assert_close(maps, stored, atol=2e-6 * stored.abs().max().item(), rtol=0)
        losses.append(cross_entropy(maps, grid))
    torch.testing.assert_close(torch.stack(losses), golden.tensor(ref, "train/losses"), atol=1e-9, rtol=0)
    torch.stack(losses).sum().backward()
    names = {
        f"cropr.{depth - 1}.{old}": f"blocks.{depth}.reducer.{new}"
        for depth in routers
        for old, new in {"": "", **RENAME}.items()
    }
    learned.check_gradients(ref, model, names, "train/")


@pytest.mark.parametrize("term", ["main", "auxiliary"])
def test_gradients_are_isolated_in_both_directions(term: str) -> None:
    ref, model, reduction = reduced("cropr/cropr_cls_llf")
    logits = model.train()(golden.images(ref))
    objective(reduction, logits, torch.tensor([1, 4, 7]))[term].sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached
    assert all((".reducer." in name) == (term == "auxiliary") for name in reached)


@pytest.mark.parametrize("case", ["case0", "case2", "case5"])
def test_operators(case: str) -> None:
    ref = golden.load("cropr/ops_cropr_crossattn")
    options = dict(ref["config"]["args"][case])
    dim = options.pop("embed_dim")
    layer = CrossAttention(vitrim.Cropr(**options), dim).double()
    state = {name.replace("mlp_norm", "mlp.norm"): value for name, value in golden.published(ref).items()}
    own = {name.removeprefix(f"{case}."): value for name, value in state.items() if name.startswith(case)}
    layer.load_state_dict(own, strict=True)
    x = torch.from_numpy(golden.weights.tensors(ref)[f"{case}/x"]).double()
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[:, 0], golden.tensor(ref, f"{case}/aggregated"), atol=1e-9, rtol=0)
        torch.testing.assert_close(layer.scores(x), golden.tensor(ref, f"{case}/scores"), atol=1e-9, rtol=0)


@pytest.mark.parametrize("projected", [False, True])
def test_folded_score_is_the_sum_over_queries_and_heads(projected: bool) -> None:
    torch.manual_seed(0)
    config = vitrim.Cropr(num_queries=5, num_heads=2, q_proj=projected, k_proj=projected)
    layer = CrossAttention(config, 16).double()
    x = torch.randn(2, 7, 16).double()
    q = layer.queries if layer.q is None else layer.q(layer.queries)
    k = x if layer.k is None else layer.k(x)
    torch.testing.assert_close(layer.scores(x), (q @ k.transpose(1, 2)).sum(1))


def test_curriculum_matches_reference_and_drives_the_model() -> None:
    ref = golden.load("cropr/cropr_segm_llf")
    config = ref["config"]["args"]
    assert curriculum(config["pruning_rate"], config["epochs"]) == ref["pruning_rate_curriculum"].tolist()
    assert curriculum(40, 64)[:8] == [0, 1, 2, 3, 5, 6, 7, 9]
    assert len(curriculum(8, 5)) == 5
    assert curriculum(8, 2) == [0, 8]
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.Cropr(r=8), record=True)
    for r, counts in ((0, [37, 36, 36, 37]), (4, [37, 32, 28, 37])):
        reduction.set(r=r)
        with torch.no_grad():
            model(tiny.images())
        assert reduction.tokens_per_block == counts


def test_published_schedule_of_vit_large() -> None:
    counts = [count + 1 for count in vitrim.Cropr(r=8).counts(196, 24)]
    assert counts[:3] == [197, 188, 180]
    assert counts[-3:] == [28, 20, 197]
    assert vitrim.Cropr(r=8, fusion="none").counts(196, 24)[-1] == 196 - 8 * 23 - 1


def test_token_concat_rejoins_after_the_last_block() -> None:
    model = tiny.vit(class_token=False, global_pool="avg", fc_norm=False)()
    images = tiny.images()
    outputs = {}
    for fusion in ("last_layer", "concat"):
        reduction = vitrim.reduce_(model, vitrim.Cropr(r=5, first_extra=0, fusion=fusion), record=True)
        for depth in (1, 2):
            with torch.no_grad():
                model.blocks[depth].reducer.cross_attn.queries.copy_(torch.linspace(-1, 1, 32))
        seen = []
        hook = model.blocks[3].mlp.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out.shape[1]))
        with torch.no_grad():
            outputs[fusion] = model.forward_features(images)
        hook.remove()
        assert seen == [36 if fusion == "last_layer" else 26]
        assert reduction.state.num_patches == 36
        assert not reduction.state.pruned
        vitrim.restore_(model)
    assert outputs["concat"].shape == outputs["last_layer"].shape == (2, 36, 32)  # in raster order again
    assert not torch.allclose(outputs["concat"], outputs["last_layer"])


def test_token_concat_leaves_a_pruned_token_as_it_was() -> None:
    model = tiny.vit(class_token=False, global_pool="avg", fc_norm=False)().double()
    reduction = vitrim.reduce_(model, vitrim.Cropr(r=5, first_extra=0, fusion="concat"), record=True)
    outs = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, out: outs.append(out))
    with torch.no_grad():
        model(tiny.images().double())
    gone = reduction.states[2].source < 0
    assert gone.sum() == 2 * 5
    assert torch.equal(outs[3][gone], outs[0][gone])


def test_many_queries_give_one_output_each_and_headless_models_their_tokens() -> None:
    model = tiny.HOSTS["headless"]().train()
    reduction = vitrim.reduce_(model, vitrim.Cropr(r=4, num_queries=36))
    model(tiny.images())
    assert [tuple(out.shape) for out in reduction.aux("auxiliary_logits")] == [(2, 36, 32)] * 2


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(vitrim.VitrimError, match="does not divide the 32 channels"):
        vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.Cropr(num_heads=3))
    with pytest.raises(vitrim.VitrimError, match="needs more than 2 blocks"):
        vitrim.reduce_(tiny.vit(depth=2)(), vitrim.Cropr())
    with pytest.raises(vitrim.UnsupportedModelError, match="acts after the last block"):
        vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.Cropr(fusion="concat", last_block="class_token"))
    with pytest.warns(vitrim.ReductionWarning, match="asks for more than 36 patch tokens allow"):
        vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.Cropr(r=20))
