"""LV-ViT against its reference vectors, dense and under methods; its counts, its training, its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
import vitrim.models
from vitrim.engines.macs import count_macs
from vitrim.models.lv_vit import Box, DenseLogits, LVViT, checkpoint_filter_fn, objective, sample_box, swap_box
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses as losses_of

DENSE = ["lvvit_lam2", "lvvit_headdim16", "lvvit_nodense"]


def lv_vit(ref: dict[str, Any]) -> LVViT:
    """The LV-ViT behind a reference file, float64, eval mode."""
    options = ref["config"]["model"]
    model = LVViT(
        **golden.geometry(ref, "patch_size"),
        head_dim=options.get("head_dim"),
        skip_lambda=options["skip_lam"],
        dense_head=options["return_dense"],
    )
    state = golden.published(ref)
    own = {name: value for name, value in state.items() if not name.startswith("score_predictor.")}
    model.load_state_dict(own, strict=True)
    return model.double().eval()


@golden.cases([f"backbones/{name}" for name in DENSE])
def test_reference(ref: golden.Reference) -> None:
    model = lv_vit(ref)
    images = golden.images(ref)
    with torch.no_grad():
        ref.check("patch_embed", model.patch_embed(images), lambda stored: stored.flatten(2).transpose(1, 2))
        if model.aux_head is not None:
            logits = model.forward_dense(images)
            ref.check("cls_logits", logits.class_token)
            ref.check("aux_logits", logits.patches)
        else:
            ref.check("cls_logits", model(images))
    reduction = vitrim.reduce_(model, "none", record=True)
    learned.check_outputs(ref, model, reduction)
    vitrim.restore_(model)
    with torch.no_grad():
        ref.check("logits", model(images))
    learned.check_float32(ref, model)


@golden.cases(["backbones/lvvit_mixtoken_train"])
def test_reference_of_mixed_tokens(ref: golden.Reference) -> None:
    model, box = lv_vit(ref).train(), Box(*ref["config"]["args"]["box"])
    model.patch_embed.eval()  # the reference keeps its batch norms in evaluation
    with torch.no_grad():
        logits = model.forward_dense(golden.images(ref), box)
        ref.check("cls_logits_f32", model.float().forward_dense(golden.images(ref).float(), box).class_token)
    ref.check("cls_logits", logits.class_token)
    ref.check("aux_logits", logits.patches)


@golden.cases(["pruning/dynamicvit_lvvit_eval_rho0.7"])
def test_reference_under_dynamicvit(ref: golden.Reference) -> None:
    model = lv_vit(ref)
    blocks = ref["config"]["args"]["blocks"]
    reduction = vitrim.reduce_(model, vitrim.DynamicViT(keep_rate=0.7, blocks=blocks), record=True)
    prefixes = {block: f"score_predictor.{stage}." for stage, block in enumerate(blocks)}
    learned.load_reducers(model, ref, prefixes, {"in_conv": "predictor.in_conv", "out_conv": "predictor.out_conv"})
    model.double()
    learned.check_outputs(ref, model, reduction)
    learned.check_kept(ref, reduction)
    learned.check_float32(ref, model)


@golden.cases(["pruning/gtp_lvvit_mixed_p5"])
def test_reference_under_gtp(ref: golden.Reference) -> None:
    model = lv_vit(ref)
    args = ref["config"]["args"]
    method = vitrim.GTP(
        num_prop=args["num_prop"],
        num_neighbours=args["num_neighbours"],
        alpha=args["alpha"],
        token_scale=args["token_scale"],
        graph=args["graph_type"].lower(),
    )
    reduction = vitrim.reduce_(model, method, record=True)
    learned.check_outputs(ref, model, reduction)
    learned.check_kept_sets(ref, reduction)
    learned.check_float32(ref, model)


@pytest.mark.parametrize(
    ("name", "params", "gmacs"),
    [
        ("lv_vit_tiny", 8_534_720, 2.8787),
        ("lv_vit_small", 26_151_824, 6.5688),
        pytest.param("lv_vit_medium", 55_830_544, 12.7035, marks=pytest.mark.slow),  # a deeper one
    ],
)
def test_counts_of_the_tables(name: str, params: int, gmacs: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
        images = torch.zeros(1, 3, 224, 224)
    assert sum(parameter.numel() for parameter in model.parameters()) == params
    assert count_macs(model, images).total / 1e9 == pytest.approx(gmacs, abs=5e-5)


def test_small_without_its_auxiliary_head_is_the_base_of_mctf() -> None:
    with torch.device("meta"):
        model = timm.create_model("lv_vit_small", dense_head=False)
        images = torch.zeros(1, 3, 224, 224)
    assert count_macs(model, images).total / 1e9 == pytest.approx(6.4935, abs=5e-5)


def official(model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint of the authors: their names are ours."""
    return {f"module.{name}": torch.rand_like(value.float()) for name, value in model.state_dict().items()}


def test_authors_checkpoint_loads() -> None:
    model = tiny.HOSTS["lv_vit"]()
    weights = official(model)
    model.load_state_dict(checkpoint_filter_fn({"state_dict": {}, "state_dict_ema": weights, "epoch": 3}, model))
    assert torch.equal(model.aux_head.weight, weights["module.aux_head.weight"])
    bare = tiny.HOSTS["lv_vit_no_aux"]()
    bare.load_state_dict(checkpoint_filter_fn(weights, bare))
    assert torch.equal(bare.blocks[3].mlp.fc2.bias, weights["module.blocks.3.mlp.fc2.bias"])


def test_authors_checkpoint_loads_at_another_image_size() -> None:
    small, large = tiny.HOSTS["lv_vit"](), lv_vit_of(img_size=32)
    large.load_state_dict(checkpoint_filter_fn(small.state_dict(), large))
    assert large.pos_embed.shape == (1, 65, 32)
    assert torch.equal(large.pos_embed[:, 0], small.pos_embed[:, 0])
    torch.testing.assert_close(large.pos_embed[:, 1:].mean(), small.pos_embed[:, 1:].mean(), atol=0.02, rtol=0)
    small.set_input_size(32)
    assert torch.equal(small.pos_embed, large.pos_embed)
    images = tiny.images(size=32)
    assert torch.equal(small(images), large(images))
    with pytest.raises(vitrim.VitrimError, match="patch size of this stem is fixed to 4 x 4"):
        small.set_input_size(32, patch_size=8)


def test_a_local_checkpoint_by_timm(tmp_path) -> None:
    geometry = {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2}
    weights = official(timm.create_model("lv_vit_tiny", **{**geometry, "img_size": 64}))
    torch.save({"state_dict": weights}, tmp_path / "lvvit_t.pth")
    overlay = {"file": str(tmp_path / "lvvit_t.pth")}
    model = timm.create_model("lv_vit_tiny", **geometry, pretrained=True, pretrained_cfg_overlay=overlay)
    assert torch.equal(model.patch_embed.conv1.weight, weights["module.patch_embed.conv1.weight"])
    other = timm.create_model(
        "lv_vit_tiny", **geometry, num_classes=3, in_chans=1, pretrained=True, pretrained_cfg_overlay=overlay
    )
    assert torch.equal(other.patch_embed.proj.bias, weights["module.patch_embed.proj.bias"])
    assert other(torch.zeros(1, 1, 32, 32)).shape == (1, 3)


def lv_vit_of(**kwargs: Any) -> LVViT:
    return LVViT(**{**tiny.GEOMETRY, "skip_lambda": 2.0, "stem_width": 8, **kwargs}).eval()


def test_image_sizes() -> None:
    fixed, dynamic, padding = lv_vit_of(), lv_vit_of(dynamic_img_size=True), lv_vit_of(dynamic_img_pad=True)
    padding.patch_embed.strict_img_size = False
    for other in (dynamic, padding):
        other.load_state_dict(fixed.state_dict())
        torch.testing.assert_close(other(tiny.images()), fixed(tiny.images()))
    assert dynamic(tiny.images(size=32)).shape == (2, 5)
    assert dynamic.forward_dense(tiny.images(size=32), Box(1, 2, 7, 8)).patches.shape == (2, 64, 5)
    assert padding(tiny.images(size=24)[:, :, :22, :23]).shape == (2, 5)
    with pytest.raises(vitrim.VitrimError, match="images are 32 x 32, this model takes 24 x 24"):
        fixed(tiny.images(size=32))
    with pytest.raises(vitrim.VitrimError, match="30 x 32, not a multiple of the patch size 4 x 4"):
        dynamic(tiny.images(size=32)[:, :, :30])


def test_classifiers_are_reset_together() -> None:
    model = tiny.HOSTS["lv_vit"]()
    model.reset_classifier(7)
    assert model(tiny.images()).shape == (2, 7)
    assert model.get_classifier().out_features == model.aux_head.out_features == 7
    model.reset_classifier(0)
    assert model.aux_head is None
    assert model(tiny.images()).shape == (2, 32)
    with pytest.raises(vitrim.VitrimError, match="no auxiliary head"):
        model.forward_dense(tiny.images())


def test_a_call_gives_the_class_token_and_half_the_maximum() -> None:
    model = tiny.HOSTS["lv_vit"]().double()
    images = tiny.images().double()
    apart = model.forward_dense(images)
    torch.testing.assert_close(model(images), apart.class_token + 0.5 * apart.patches.max(1).values)
    model.aux_head = None
    torch.testing.assert_close(model(images), apart.class_token)
    assert type(tiny.HOSTS["lv_vit"]().train()(tiny.images())) is Tensor  # in training too


@pytest.mark.parametrize("method", ["ats", "a_vit:gate_scale=1.0,gate_center=1.0"])
def test_padding_takes_no_part_in_the_maximum(method: str) -> None:
    model = tiny.HOSTS["lv_vit"]().double()
    reduction = vitrim.reduce_(model, method)
    images = tiny.images(4).double()
    with torch.no_grad():
        features = model.forward_features(images)
        logits = model.forward_head(features)
    mask = reduction.state.mask
    assert mask is not None
    assert not mask[:, 1:].all()
    patches = model.aux_head(features[:, 1:])
    for image, row in enumerate(mask[:, 1:]):
        if row.any():
            expected = model.head(features[image, 0]) + 0.5 * patches[image, row].amax(0)
            torch.testing.assert_close(logits[image], expected)


def test_a_class_token_alone_is_read_of_images_that_keep_different_numbers() -> None:
    """The last block then computes that row only, and there is no padding in it."""
    model = tiny.HOSTS["lv_vit_no_aux"]().double()
    vitrim.reduce_(model, "atm:alpha=0.9,beta=0.2,theta_min=0.1,granularity=image")
    images = tiny.images(4).double().flip(0)  # the last one keeps fewer than another
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(model(images), alone)


@pytest.mark.parametrize("method", ["tome:r=4", "topk"])
def test_dense_logits_of_a_reduced_model_cover_the_grid(method: str) -> None:
    model = tiny.HOSTS["lv_vit"]().double()
    reduction = vitrim.reduce_(model, method)
    images = tiny.images().double()
    with torch.no_grad():
        logits = model(images)
        dense = model.forward_dense(images, Box(0, 0, 2, 3))
        plain = model.forward_dense(images)
    assert dense.patches.shape == (2, 36, 5)
    left = (reduction.state.source[:, 1:] >= 0).unsqueeze(-1)
    highest = plain.patches.masked_fill(~left, -torch.inf).amax(1)
    torch.testing.assert_close(logits, plain.class_token + 0.5 * highest)
    vitrim.restore_(model)
    assert "forward_dense" not in vars(model)


def test_swapped_boxes() -> None:
    grid = torch.arange(2 * 3 * 4).view(2, 3, 4)
    box = Box(0, 1, 2, 3)
    mixed = swap_box(grid, box)
    assert torch.equal(mixed[0, :2, 1:3], grid[1, :2, 1:3])
    assert torch.equal(mixed[0, 2], grid[0, 2])
    assert torch.equal(swap_box(mixed, box), grid)


def test_sampled_boxes_lie_on_the_grid_and_vary() -> None:
    generator = torch.Generator().manual_seed(0)
    areas = []
    for _ in range(300):
        box = sample_box((8, 12), generator)
        assert 0 <= box.top <= box.bottom <= 8
        assert 0 <= box.left <= box.right <= 12
        areas.append((box.bottom - box.top) * (box.right - box.left) / 96)
    assert min(areas) == 0
    assert max(areas) > 0.6
    assert 0.2 < sum(areas) / 300 < 0.45


def test_objective() -> None:
    torch.manual_seed(0)
    logits = DenseLogits(torch.randn(3, 5), torch.randn(3, 4, 5))
    classes = torch.tensor([0, 3, 1])
    entropy = nn.functional.cross_entropy
    losses = objective(logits, classes, box_share=0.25, dense_weight=0.5)
    mixture = 0.75 * nn.functional.one_hot(classes, 5) + 0.25 * nn.functional.one_hot(classes.flip(0), 5)
    torch.testing.assert_close(losses["class"], entropy(logits.class_token, mixture))
    each = torch.stack([entropy(logits.patches[:, patch], classes) for patch in range(4)])
    torch.testing.assert_close(losses["patches"], each.mean())
    torch.testing.assert_close(losses["total"], losses["class"] + 0.5 * losses["patches"])
    soft = nn.functional.one_hot(classes, 5).float()
    again = objective(logits, soft, patch_targets=soft[:, None].expand(3, 4, 5), box_share=0.25, dense_weight=0.5)
    torch.testing.assert_close(again["total"], losses["total"])
    doubled = objective(logits, classes, criterion=lambda *pair: 2 * entropy(*pair), box_share=0.25, dense_weight=0.5)
    torch.testing.assert_close(doubled["total"], 2 * losses["total"])


def step_of(model: nn.Module, teacher: nn.Module | None = None, reduction: vitrim.Reduction | None = None) -> Step:
    soft = torch.tensor([[0.9, 0.1, 0, 0, 0], [0, 0, 0.2, 0.8, 0]])
    return Step(model, reduction, tiny.images(), soft, nn.functional.cross_entropy, teacher)


def test_a_step_learns_from_mixed_tokens() -> None:
    model = tiny.HOSTS["lv_vit"]().train()
    model.patch_embed.eval()  # its batch norms would differ between the forwards
    step = step_of(model)
    areas = set()
    for seed in range(6):
        torch.manual_seed(seed)
        losses = step.base_losses()
        torch.manual_seed(seed)
        box = sample_box((6, 6))
        areas.add(box.area)
        logits = model.forward_dense(step.images, box)
        expected = objective(logits, step.targets, box_share=box.area / 36)
        assert set(losses) == {"class", "patches", "total"}
        torch.testing.assert_close(losses["total"], expected["total"])
    assert len(areas) > 2
    losses["total"].backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    plain = objective(model.forward_dense(step.images), step.targets)
    torch.testing.assert_close(step_of(model.eval()).base_losses()["total"], plain["total"])


def test_a_criterion_that_sums_weighs_an_image_as_much_as_its_patches() -> None:
    model = tiny.HOSTS["lv_vit"]().eval()
    step = step_of(model)
    step = replace(step, criterion=nn.CrossEntropyLoss(reduction="sum"))
    losses = step.base_losses()
    logits = model.forward_dense(step.images)
    patches = logits.patches.shape[1]
    each = [F.cross_entropy(logits.patches[:, place], step.targets, reduction="sum") for place in range(patches)]
    own = F.cross_entropy(logits.class_token, step.targets, reduction="sum")
    torch.testing.assert_close(losses["total"], own + torch.stack(each).mean())


def test_a_step_of_a_model_that_drops_patches_mixes_none() -> None:
    model = lv_vit_of(patch_drop_rate=0.5).train()
    torch.manual_seed(1)
    losses = step_of(model).base_losses()
    assert losses["total"].isfinite()
    torch.testing.assert_close(losses["total"], losses["class"] + losses["patches"])


@pytest.mark.parametrize("method", ["tome:r=4", "topk", "dynamicvit"])
def test_a_step_of_a_reduced_model_learns_from_the_logits_of_its_call(method: str) -> None:
    model = tiny.HOSTS["lv_vit"]().train()
    model.patch_embed.eval()
    reduction = vitrim.reduce_(model, method)
    step = step_of(model, reduction=reduction)
    torch.manual_seed(1)
    losses = losses_of(step)
    torch.manual_seed(1)
    task = step.criterion(model(step.images), step.targets)
    torch.testing.assert_close(losses["base"] if method == "dynamicvit" else losses["total"], task)
    losses["total"].backward()
    assert model.aux_head.weight.grad.any()  # of the maximum


def test_a_teacher_of_images_is_refused_where_patches_are_labelled() -> None:
    teacher = tiny.HOSTS["lv_vit"]()
    with pytest.raises(vitrim.VitrimError, match="leave teacher and distil out"):
        step_of(tiny.HOSTS["lv_vit"]().train(), teacher).base_losses()
    assert set(step_of(tiny.HOSTS["lv_vit_no_aux"]().train(), teacher).base_losses()) == {"total"}


def test_features_by_timm() -> None:
    model = timm.create_model("lv_vit_tiny", img_size=32, features_only=True, out_indices=(0, 2))
    assert [tuple(level.shape) for level in model(torch.zeros(1, 3, 32, 32))] == [(1, 240, 2, 2)] * 2
