"""Cropr against its reference vectors (classification, segmentation, operators), in evaluation and training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from vitrim.data.objects import Boxes
from vitrim.loading import create_model
from vitrim.methods.cropr import CrossAttention
from vitrim.models.segmenter import LinearDecoder, Segmenter
from vitrim.tasks.detection import Detection
from vitrim.tasks.options import Loss
from vitrim.tasks.segmentation import Segmentation
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses as losses_of
from vitrim.training.objectives.cropr import curriculum, objective

AVERAGE = {"global_pool": "avg", "pool_include_prefix": True}
RENAME = {"cross_attn.mlp_norm": "cross_attn.mlp.norm"}
CASES: dict[str, tuple[vitrim.Cropr, dict[str, Any]]] = {
    "cropr/cropr_cls_llf": (vitrim.Cropr(r=8), AVERAGE),
    "cropr/cropr_cls_nollf_tokenpool": (vitrim.Cropr(r=8, fusion="none"), {}),
    "cropr/cropr_cls_nomlp_kproj": (vitrim.Cropr(r=9, fusion="none", mlp=False, k_proj=True), AVERAGE),
}
TRAINING = ("train/*",)
EVALUATION = ("logits", "logits_f32", "tokens_*", "cls_per_block", "scores/*", "kept/*", "pruned/*")


def reduced(ref: golden.Reference) -> tuple[nn.Module, vitrim.Reduction]:
    config, host = CASES[ref.part.file]
    model = golden.vit(ref, **host)
    reduction = vitrim.reduce_(model, config, record=True)
    learned.load_reducers(model, ref, {depth: f"cropr.{depth - 1}." for depth in config.stages(6)}, RENAME)
    return model, reduction


@golden.cases(CASES, arrays=EVALUATION)
def test_reference(ref: golden.Reference) -> None:
    model, reduction = reduced(ref)
    routers = CASES[ref.part.file][0].stages(6)
    scores = router_scores(model, routers)
    learned.check_outputs(ref, model, reduction, lengths=False)
    ref.check("tokens_per_block", [state.num_tokens for state in reduction.states[1:]], Tensor.tolist)
    assert reduction.config.counts(64, 6) == [count - 1 for count in ref["tokens_per_block"].tolist()]
    check_routers(ref, reduction, routers, scores)
    assert reduction.state.aux == ()  # no auxiliary heads outside training
    assert reduction.state.pruned == (CASES[ref.part.file][0].fusion == "none")
    learned.check_float32(ref, model)


def router_scores(model: nn.Module, routers: Iterable[int]) -> dict[int, Tensor]:
    """(B, N) scores of the tokens, class token included, filled by a forward."""
    return learned.caught(model, routers, lambda m, x, *rest: m.cross_attn.scores(x))


def check_routers(
    ref: golden.Reference, reduction: vitrim.Reduction, routers: Sequence[int], scores: dict[int, Tensor]
) -> None:
    """What each router scores, keeps and prunes. Tokens are named by their place in the image, 0 the class token."""
    ref.check("tokens_after_module", [reduction.states[depth + 1].num_tokens for depth in routers], Tensor.tolist)
    for depth in routers:
        before, after = reduction.states[depth].position.tolist(), reduction.states[depth + 1].position.tolist()
        ref.check(f"kept/{depth - 1}", [set(row) for row in after], learned.as_sets)
        gone = [set(old) - set(new) for old, new in zip(before, after, strict=True)]
        ref.check(f"pruned/{depth - 1}", gone, learned.as_sets)
        # the order of the tokens is that of the published code's earlier choices; its class token's score is infinite
        published = [list(range(65)), *(ref[f"kept/{other - 1}"].tolist() for other in routers)][routers.index(depth)]
        order = published if isinstance(published[0], list) else [published] * len(before)
        places = [[old.index(token) for token in row] for old, row in zip(before, order, strict=True)]
        found = scores[depth].gather(1, torch.tensor(places))
        infinite = torch.tensor(order) == 0
        ref.check(f"scores/{depth - 1}", found.masked_fill(infinite, torch.inf))


@golden.cases(CASES, arrays=TRAINING)
def test_training_losses_and_isolated_gradients(ref: golden.Reference) -> None:
    model, reduction = reduced(ref)
    model.train()
    logits = model(golden.images(ref))
    ref.check("train/logits", logits)
    for index, auxiliary in enumerate(reduction.aux("auxiliary_logits")):
        ref.check(f"train/aux_logits/{index}", auxiliary)
    targets = torch.tensor(ref["config"]["targets"])
    losses = objective(reduction, logits, targets)
    ref.check("train/losses", torch.cat([losses["main"][None], losses["auxiliary"]]))
    losses = losses_of(Step(model, reduction, golden.images(ref), targets, nn.functional.cross_entropy))
    ref.check("train/losses", losses["main"], lambda stored: stored[0])
    ref.check("train/losses", losses["auxiliary"], lambda stored: stored[1:].mean())
    ref.check("train/losses", losses["total"], torch.sum)
    losses["total"].backward()
    learned.check_gradients(ref, model, renamed(ref.part.file), "train/")


def renamed(name: str) -> dict[str, str]:
    return {
        f"cropr.{depth - 1}.{old}": f"blocks.{depth}.reducer.{new}"
        for depth in CASES[name][0].stages(6)
        for old, new in {"": "", **RENAME}.items()
    }


def test_the_criterion_is_that_of_the_model_and_of_all_routers() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, vitrim.Cropr(r=4))
    soft = torch.tensor([[0.5, 0.5, 0, 0, 0], [0, 0, 0.2, 0.8, 0]])
    doubled = Step(model, reduction, tiny.images(), soft, lambda *pair: 2 * nn.functional.cross_entropy(*pair))
    single = Step(model, reduction, tiny.images(), soft, nn.functional.cross_entropy)
    ours, half = losses_of(doubled), losses_of(single)
    assert all(torch.equal(ours[key], 2 * half[key]) for key in ("total", "main", "auxiliary"))


def test_one_output_per_query_has_no_loss_of_the_image() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, vitrim.Cropr(r=4, num_queries=36))
    step = Step(model, reduction, tiny.images(), torch.tensor([1, 2]), nn.functional.cross_entropy)
    with pytest.raises(
        vitrim.VitrimError,
        match="one output per query, and the task has one target per image: use num_queries=1",
    ):
        losses_of(step)


@golden.cases(["cropr/cropr_cls_noprune"])
def test_the_reference_without_pruning(ref: golden.Reference) -> None:
    model = golden.vit(ref, **AVERAGE)
    reduction = vitrim.reduce_(model, vitrim.NoReduction(), record=True)
    learned.check_outputs(ref, model, reduction)
    check_routers(ref, reduction, [], {})
    logits = model.train()(golden.images(ref))
    ref.check("train/logits", logits)
    loss = nn.functional.cross_entropy(logits, torch.tensor(ref["config"]["targets"]))
    ref.check("train/losses", loss[None])
    loss.backward()
    learned.check_gradients(ref, model, {}, "train/")
    learned.check_float32(ref, model.eval())


WHOLE = ("", "segmenter")
"""Segmentation as a bare host whose head reads every patch, and as a `Segmenter` around it."""


def segmenter(ref: dict[str, Any], whole: str) -> Any:
    """The EVA-02 behind the segmentation files. float64, evaluation mode."""
    geometry = ref["config"]["model"]
    named = {key: value for key, value in geometry.items() if key not in ("image_size", "norm_eps")}
    model: Any = Eva(
        img_size=geometry["image_size"],
        norm_layer=partial(nn.LayerNorm, eps=geometry["norm_eps"]),
        global_pool="",
        use_fc_norm=True,
        **{**named, "num_classes": 0 if whole else named["num_classes"]},
    )
    given = golden.published(ref)
    if whole:
        model = Segmenter(model, LinearDecoder(model.embed_dim, named["num_classes"]), named["num_classes"])
        given = {whole_name(name): value for name, value in given.items()}
    expected = set(model.state_dict())
    model.load_state_dict({name: value for name, value in given.items() if name in expected}, strict=True)
    model = model.double().eval()
    table, rope = golden.tensor(ref, "rope"), bare(model).rope
    ref.check("rope", rope.get_embed(), Tensor.float)  # timm computes it in float32
    rope.pos_embed = table
    return model


def whole_name(name: str) -> str:
    """The name in a `Segmenter` of a weight of the bare host."""
    return f"decoder.{name}" if name.startswith("head.") else f"backbone.{name}"


def bare(model: Any) -> Any:
    """The host, alone or in a `Segmenter`."""
    return getattr(model, "backbone", model)


SEGMENTERS: dict[str, vitrim.MethodConfig] = {
    "cropr/cropr_segm_llf": vitrim.Cropr(r=8, num_queries=64),
    "cropr/cropr_segm_noprune": vitrim.NoReduction(),
}
SEGMENTING = [(name, whole) for name in SEGMENTERS for whole in WHOLE]


def segmenting(ref: golden.Reference, whole: str) -> tuple[Any, vitrim.Reduction, Sequence[int]]:
    config = SEGMENTERS[ref.part.file]
    model = segmenter(ref, whole)
    reduction = vitrim.reduce_(model, config, record=True)
    routers = config.stages(6) if isinstance(config, vitrim.Cropr) else range(0)
    learned.load_reducers(bare(model), ref, {depth: f"cropr.{depth - 1}." for depth in routers}, RENAME)
    return model, reduction, routers


def enlarged(logits: Tensor) -> Tensor:
    """(B, P, classes) on 8 x 8 patches to masks (B, classes, 64, 64)."""
    return nn.functional.interpolate(logits.transpose(1, 2).unflatten(2, (8, 8)), size=(64, 64), mode="bilinear")


def segmented(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of the patches (B, P, classes), and the masks (B, classes, H, W)."""
    if isinstance(model, Segmenter):
        seen: list[Tensor] = []
        hook = model.decoder.register_forward_hook(lambda module, args, out: seen.append(out))
        masks = model(images)
        hook.remove()
        return seen[0], masks
    logits = model(images)[:, 1:]
    return logits, enlarged(logits)


@golden.cases(
    SEGMENTING, "whole", arrays=(*EVALUATION, "logits_tokens*", "masks_row", "rope", "pruning_rate_curriculum")
)
def test_segmentation_reference(ref: golden.Reference, whole: str) -> None:
    model, reduction, routers = segmenting(ref, whole)
    scores = router_scores(bare(model), routers)
    with torch.no_grad():
        logits, masks = segmented(model, golden.images(ref))
    ref.check("logits_tokens", logits)
    ref.check("masks_row", masks[:, :, ::7])
    check_routers(ref, reduction, routers, scores)
    if "pruning_rate_curriculum" in ref:
        args = ref["config"]["args"]
        ref.check("pruning_rate_curriculum", curriculum(args["pruning_rate"], args["epochs"]), Tensor.tolist)
    with torch.no_grad():
        ref.check("logits_tokens_f32", segmented(model.float(), golden.images(ref).float())[0])


@pytest.mark.sampled(2)
@golden.cases(SEGMENTING, "whole", arrays=TRAINING)
def test_segmentation_training(ref: golden.Reference, whole: str) -> None:
    model, reduction, routers = segmenting(ref, whole)
    labels = np.random.RandomState(7).randint(0, 7, (2, 64, 64))
    labels[:, :5] = 255
    masks = torch.from_numpy(labels)
    grid = masks[:, ::8, ::8]  # nearest label of every patch
    ref.check("train/label_grid", grid)
    cross_entropy = partial(nn.functional.cross_entropy, ignore_index=255)
    losses = [cross_entropy(segmented(model.train(), golden.images(ref))[1], masks)]
    for index, auxiliary in enumerate(reduction.aux("auxiliary_logits") if routers else []):
        maps = auxiliary.transpose(1, 2).unflatten(2, (8, 8))
        if f"train/aux_logits/{index}" in ref:
            ref.check(f"train/aux_logits/{index}", maps, lambda stored: stored[0])
        losses.append(cross_entropy(maps, grid))
    ref.check("train/losses", torch.stack(losses))
    torch.stack(losses).sum().backward()
    prefix = "backbone." if whole else ""
    names = {
        f"cropr.{depth - 1}.{old}": f"{prefix}blocks.{depth}.reducer.{new}"
        for depth in routers
        for old, new in {"": "", **RENAME}.items()
    }
    own = {"": "backbone.", "head.": "decoder.head."} if whole else {}
    learned.check_gradients(ref, model, {**own, **names}, "train/")


def test_a_step_of_the_segmentation_task_has_the_losses_of_the_reference() -> None:
    ref = golden.load("cropr/cropr_segm_llf")
    model, reduction, _ = segmenting(ref, "segmenter")
    labels = np.random.RandomState(7).randint(0, 7, (2, 64, 64))
    labels[:, :5] = 255
    task, loss = Segmentation(7), Loss(name="pixel_cross_entropy")
    criterion, auxiliary = task.criterion(loss), task.auxiliary(loss)
    targets = torch.from_numpy(labels)
    step = Step(model.train(), reduction, golden.images(ref), targets, criterion, auxiliary=auxiliary)
    losses = losses_of(step)
    ref.check("train/losses", losses["main"], lambda stored: stored[0])
    ref.check("train/losses", losses["auxiliary"], lambda stored: stored[1:].mean())
    ref.check("train/losses", losses["total"], torch.sum)


def test_routers_of_a_detector_learn_which_classes_are_there() -> None:
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2, "num_classes": 3}
    model = create_model("vitdet:vit_tiny_patch16_224", options={**options, "channels": 8, "hidden": 8}).train()
    reduction = vitrim.reduce_(model, "cropr:r=2,first_extra=0")
    box = {"boxes": torch.tensor([[2.0, 2.0, 20.0, 20.0]]), "labels": torch.tensor([1])}
    none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    task, loss = Detection(3), Loss(name="rcnn")
    targets, auxiliary = Boxes([box, none]), task.auxiliary(loss)
    step = Step(model, reduction, torch.randn(2, 3, 32, 32), targets, task.criterion(loss), auxiliary=auxiliary)
    losses = losses_of(step)
    present = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    heads = reduction.aux("auxiliary_logits")
    expected = torch.stack([nn.functional.binary_cross_entropy_with_logits(out, present) for out in heads])
    torch.testing.assert_close(losses["auxiliary"], expected.mean())
    torch.testing.assert_close(losses["total"], losses["main"] + expected.sum())
    parts = ("rpn_objectness", "rpn_box", "roi_class", "roi_box")
    torch.testing.assert_close(losses["main"], sum(losses[part] for part in parts))


@pytest.mark.parametrize("term", ["main", "auxiliary"])
def test_gradients_are_isolated_in_both_directions(term: str) -> None:
    ref = golden.load("cropr/cropr_cls_llf")
    model, reduction = reduced(ref)
    logits = model.train()(golden.images(ref))
    objective(reduction, logits, torch.tensor([1, 4, 7]))[term].sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached
    assert all((".reducer." in name) == (term == "auxiliary") for name in reached)


@golden.cases(
    [(golden.Part("cropr/ops_cropr_crossattn", (f"{case}/*",)), case) for case in ("case0", "case2", "case5")], "case"
)
def test_operators(ref: golden.Reference, case: str) -> None:
    options = dict(ref["config"]["args"][case])
    dim = options.pop("embed_dim")
    layer = CrossAttention(vitrim.Cropr(**options), dim).double()
    state = {name.replace("mlp_norm", "mlp.norm"): value for name, value in golden.published(ref).items()}
    own = {name.removeprefix(f"{case}."): value for name, value in state.items() if name.startswith(case)}
    layer.load_state_dict(own, strict=True)
    x = torch.from_numpy(golden.weights.tensors(ref)[f"{case}/x"]).double()
    with torch.no_grad():
        ref.check(f"{case}/aggregated", layer(x)[:, 0])
        ref.check(f"{case}/scores", layer.scores(x))


@pytest.mark.parametrize("projected", [False, True])
def test_folded_score_is_the_sum_over_queries_and_heads(projected: bool) -> None:
    torch.manual_seed(0)
    config = vitrim.Cropr(num_queries=5, num_heads=2, q_proj=projected, k_proj=projected)
    layer = CrossAttention(config, 16).double()
    x = torch.randn(2, 7, 16).double()
    q = layer.queries if layer.q is None else layer.q(layer.queries)
    k = x if layer.k is None else layer.k(x)
    torch.testing.assert_close(layer.scores(x), (q @ k.transpose(1, 2)).sum(1))


def test_curriculum_drives_the_model() -> None:
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


def test_more_than_there_is_is_told() -> None:
    with pytest.warns(vitrim.ReductionWarning, match="asks for more than 36 patch tokens allow"):
        vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.Cropr(r=20))
