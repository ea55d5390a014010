"""ViTTM: reference vectors with losses and gradients, Table 8, published checkpoints, image sizes, pre-training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import golden_models
from cli_runs import exit_code
from full_matrix import cells
from golden_models import published
from golden_streams import check_gradients, loaded, table_8, with_random_heads
from vitrim.core.registry import ask
from vitrim.data import eval_transform
from vitrim.engines.macs import count_macs, profile_of
from vitrim.errors import VitrimError
from vitrim.models import vittm, vittm_mae
from vitrim.models.common import resample_positions
from vitrim.models.segmenter import LinearDecoder, Segmenter
from vitrim.models.streams import objective
from vitrim.models.vittm import ViTTM, checkpoint_filter_fn, unused_names
from vitrim.models.vittm_mae import MaskedViTTM, StreamMask, matched_mask, pixels, random_mask
from vitrim.tasks.step import Step

HEADS = {"lin": "linear", "ca": "cross", "lca": "latent_cross", "la": "latent", "tl": "token_learner"}
FUSIONS = {"residual": "add", "erase": "erase", "add_erase": "add_erase"}
EQUAL = ("eq_lin", "eq_ca", "eq_tl", "eq_lin_adderase", "eq_lin_memmlp")
UNEQUAL = ("neq_la", "neq_lca", "neq_lin_erase", "neq_lin_scale1")


def build(ref: dict[str, Any]) -> ViTTM:
    args = ref["config"]["args"]
    return ViTTM(
        **golden_models.geometry(ref),
        process_patch_size=args["process_patch"],
        memory_patch_size=args["memory_patch"],
        read_write=HEADS[args["head"]],
        fusion=FUSIONS[args["fusion"]],
        latent_scale=args["latent_size_scale"],
        memory_mlp=args["memory_blocks"] == "mlp",
    )


def tiny(**options: Any) -> ViTTM:
    geometry = {"process_patch_size": 8, "memory_patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return ViTTM(32, num_classes=5, **{**geometry, **options})


# ---- reference vectors -----------------------------------------------------------------------------------------------


@golden_models.cases(
    [f"vittm/vittm_{name}" for name in EQUAL + UNEQUAL],
    arrays=("logits_memory*", "logits_process*", "tokens_*", "*_features"),
)
@torch.no_grad()
def test_logits_and_tokens(ref: golden_models.Reference) -> None:
    model, images = loaded(ref, build(ref), checkpoint_filter_fn), golden_models.images(ref)
    memory, process = model.forward_streams(images)
    ref.check("logits_memory", memory)
    ref.check("logits_process", process)
    assert torch.equal(model(images), memory)
    stride = ref["config"]["feature_stride"]
    for found, stream in zip(model.forward_features(images), ("memory", "process"), strict=True):
        ref.check(f"tokens_{stream}", found.shape[1], Tensor.item)
        ref.check(f"{stream}_features", found[:, ::stride])
    if "logits_memory_other" in ref:
        other = torch.from_numpy(golden_models.weights.inputs(ref, "input_other")).double()
        assert other.shape[-1] != ref["config"]["model"]["image_size"]
        memory, process = model.forward_streams(other)
        ref.check("logits_memory_other", memory)
        ref.check("logits_process_other", process)
    memory, process = model.float().forward_streams(images.float())
    ref.check("logits_memory_f32", memory)
    ref.check("logits_process_f32", process)


@golden_models.cases(
    [("vittm/vittm_eq_lin", False), ("vittm/vittm_eq_lin", True)], "checkpointing", arrays=("train/*",)
)
def test_loss_and_gradients(ref: golden_models.Reference, checkpointing: bool) -> None:
    model = loaded(ref, build(ref), checkpoint_filter_fn).train()
    model.set_grad_checkpointing(checkpointing)
    images, targets = golden_models.images(ref), torch.tensor(ref["config"]["targets"])
    losses = Step(model, None, images, targets, nn.functional.cross_entropy).base_losses()
    assert torch.equal(losses["total"], objective(model.forward_streams(images), targets)["total"])
    losses["total"].backward()
    ref.check("train/loss", losses["total"])
    check_gradients(ref, model, checkpoint_filter_fn)
    assert unused_names(published(ref), model) == ref["train/params_without_grad"]


@golden_models.cases(["vittm/vittm_seg_eq_lin"])
@torch.no_grad()
def test_segmentation_features(ref: golden_models.Reference) -> None:
    model = loaded(ref, build(ref), checkpoint_filter_fn)
    blocks, stride = ref["config"]["args"]["out_blocks"], ref["config"]["channel_stride"]
    maps = model.forward_intermediates(golden_models.images(ref), blocks, intermediates_only=True)
    assert [list(found.shape) for found in maps] == ref["config"]["feature_shapes"]
    for block, found in zip(blocks, maps, strict=True):
        ref.check(f"features/{block}", found[:, ::stride])


@golden_models.cases([golden_models.Part("vittm/vittm_seg_eq_lin", ("features/5",))])
@torch.no_grad()
def test_a_segmenter_reads_the_last_map(ref: golden_models.Reference) -> None:
    model = loaded(ref, build(ref), checkpoint_filter_fn)
    whole = Segmenter(model, LinearDecoder(192, 7).double(), num_classes=7)
    tokens, grid = whole.tokens(golden_models.images(ref))
    assert grid == (8, 8)
    ref.check("features/5", tokens.transpose(1, 2).unflatten(2, grid)[:, :: ref["config"]["channel_stride"]])
    assert whole(golden_models.images(ref)).shape == (2, 7, 64, 64)


@golden_models.cases(["vittm/vittm_mae_eq_lin_normpix", "vittm/vittm_mae_neq_lin"])
@torch.no_grad()
def test_pre_training(ref: golden_models.Reference) -> None:
    args = ref["config"]["args"]
    decoder = args["decoder_embed_dim"], args["decoder_depth"], args["decoder_num_heads"]
    model = MaskedViTTM(build(ref), *decoder, normalise=args["norm_pix_loss"])
    model = loaded(ref, model, vittm_mae.checkpoint_filter_fn)
    images = golden_models.images(ref)
    masks = [
        StreamMask(*(golden_models.tensor(ref, f"{part}_{stream}").long() for part in ("keep", "mask")))
        for stream in ("memory", "process")
    ]
    losses = model.objective(images, *masks)
    assert torch.equal(losses["total"], losses["memory"] + losses["process"])
    stride = ref["config"]["prediction_stride"]
    for stream, found in zip(("memory", "process"), model(images, *masks), strict=True):
        ref.check(f"{stream}_loss", losses[stream])
        ref.check(f"{stream}_pred", found[:, ::stride])
    losses = model.float().objective(images.float(), *masks)
    for stream in ("memory", "process"):
        ref.check(f"{stream}_loss_f32", losses[stream])


# ---- Table 8 ---------------------------------------------------------------------------------------------------------

IMAGE = torch.empty(1, 3, 224, 224, device="meta")
ROWS = {
    # name: row of the table, parameters as published, of which unused
    "vittm_small_28_28": ("ViTTM-S (process 28, memory 28)", 33_182_288, 3_919_488),
    "vittm_base_28_28": ("ViTTM-B (process 28, memory 28)", 126_524_624, 14_916_864),
    "vittm_base_32_16": ("ViTTM-B (process 32, memory 16)", 125_360_336, 14_326_272),
}


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return timm.create_model(name)


def closed_form(model: ViTTM) -> int:
    """What fvcore counts of the published code (specification B5), less its second classifier, which we do not run."""
    dim, depth, heads = model.embed_dim, len(model.layers), 12 * model.embed_dim // 768
    latent = dim // 4
    (memory, process) = (rows * columns for rows, columns in model.embed.grids)
    both = memory + process
    conv = 3 * dim * sum(n * patch**2 for n, patch in zip((memory, process), model.embed.patch_sizes, strict=True))
    linear = depth * (12 * process * dim**2 + 2 * both * latent * dim + both * dim**2) + dim * 1000
    norm = 5 * (depth * (2 * memory * dim + 4 * process * dim) + process * dim + dim)
    exchange = depth * sum(
        n * latent * dim // heads + m * latent + m * latent * dim // heads
        for n, m in ((memory, process), (process, memory))
    )
    return conv + linear + norm + exchange


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROWS)
def test_table_8(name: str) -> None:
    row, published_params, unused = ROWS[name]
    model = on_meta(name)
    found = profile_of(model, None, IMAGE)
    assert (found.params + found.unused_params, found.unused_params) == (published_params, unused)
    assert f"{published_params / 1e6:.0f}" == table_8()[row]["params_m"]
    assert f"{found.macs.under('no-attention') / 1e9:.2f}" == table_8()[row]["gflops"]
    assert found.macs.under("no-attention") == closed_form(model)
    tokens = model.embed.process_pos.shape[1]
    assert found.macs.attention - found.macs.exchange == 2 * tokens**2 * model.embed_dim * len(model.layers)


CROSS_VIT = {
    "crossvit_small_240": "CrossViT-S",
    "crossvit_15_240": "CrossViT-15",
    "crossvit_15_dagger_240": "CrossViT-15 dagger",
    "crossvit_base_240": "CrossViT-B",
    "crossvit_18_240": "CrossViT-18",
    "crossvit_18_dagger_240": "CrossViT-18 dagger",
}


# a model that is no host is counted; others of its kind run in `make test-full`
@pytest.mark.parametrize("name", cells(CROSS_VIT, ("crossvit_small_240",)))
def test_table_8_crossvit(name: str) -> None:
    """At 240 px, attention counted. It is not a host of vitrim, and can be profiled all the same."""
    row = table_8()[CROSS_VIT[name]]
    found = profile_of(on_meta(name), None, torch.empty(1, 3, 240, 240, device="meta"))
    assert f"{found.macs.total / 1e9:.2f}" == row["gflops"]
    assert f"{found.params / 1e6:.0f}" == row["params_m"]
    assert found.tokens_per_block == ()


@pytest.mark.slow  # `cli/test_profile.py` runs the command
def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "profile", "vittm_small_28_28", "--convention", "no-attention", "--json", "-") == 0
    out, err = capsys.readouterr()
    assert "29.26 M parameters; the published 33.18 M include 3.92 M that are never used" in err
    assert '"unused_params": 3919488' in out
    assert " 1.84 " in err


@pytest.mark.parametrize("head", vittm.HEADS)
def test_products_of_all_heads_are_exchange(head: str) -> None:
    found = count_macs(tiny(read_write=head), torch.zeros(1, 3, 32, 32))
    blocks = 2 * 2 * 16 * 16 * 32
    assert found.exchange == found.attention - blocks > 0


# ---- published checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EQUAL)
def test_count_of_unused_parameters_is_that_of_the_authors(name: str) -> None:
    ref = golden_models.load(f"vittm/vittm_{name}")
    model, state = build(ref), published(ref)
    unused = sum(state[key].numel() for key in unused_names(state, model))
    assert unused == model.published_unused_params > 0
    live = sum(parameter.numel() for parameter in model.parameters())
    assert live + unused == sum(value.numel() for value in state.values())


def test_every_parameter_gets_a_gradient() -> None:
    for head in vittm.HEADS:
        model = with_random_heads(tiny(read_write=head, fusion="add_erase", memory_mlp=True))
        objective(model.forward_streams(torch.randn(2, 3, 32, 32)), torch.tensor([0, 1]))["total"].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_timm_loads_an_authors_checkpoint_at_another_image_size(tmp_path: Path) -> None:
    ref = golden_models.load("vittm/vittm_eq_lin")
    torch.save({"state_dict": published(ref)}, tmp_path / "vittm.pth")
    geometry = {"process_patch_size": 8, "memory_patch_size": 8, "embed_dim": 96, "depth": 6, "num_heads": 3}
    model = timm.create_model(
        "vittm_small_28_28",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "vittm.pth"), "num_classes": 10},
        img_size=96,
        num_classes=10,
        **geometry,
    ).eval()
    assert model.embed.memory_pos.shape == (1, 144, 96)
    images = torch.from_numpy(golden_models.weights.inputs(ref, "input_other"))
    with torch.no_grad():
        expected = golden_models.tensor(ref, "logits_memory_other")
        torch.testing.assert_close(model(images).double(), expected, atol=5e-5, rtol=0)


def test_own_checkpoints_pass_and_unknown_names_stay() -> None:
    model = tiny()
    state = checkpoint_filter_fn(model.state_dict(), tiny())
    assert list(state) == list(model.state_dict())
    assert "surprise" in checkpoint_filter_fn({**model.state_dict(), "surprise": torch.zeros(1)}, tiny())


# ---- as a timm model -------------------------------------------------------------------------------------------------


def test_registered_with_both_classifiers() -> None:
    assert all(timm.is_model(name) for name in ROWS)
    model = timm.create_model("vittm_small_28_28", num_classes=7, depth=1, drop_path_rate=0.1)
    assert model.pretrained_cfg["input_size"] == (3, 224, 224)
    assert model.get_classifier().out_features == model.auxiliary_head.out_features == 7
    model.reset_classifier(3)
    assert [logits.shape for logits in model.forward_streams(torch.zeros(1, 3, 224, 224))] == [(1, 3), (1, 3)]
    features = model.forward_head(model.forward_features(torch.zeros(1, 3, 224, 224)), pre_logits=True)
    assert features.shape == (1, model.num_features)
    assert {"embed.memory_pos", "embed.process_pos"} == model.no_weight_decay()


def test_features_only() -> None:
    geometry = {"embed_dim": 32, "num_heads": 2, "depth": 3, "img_size": 64}
    model = timm.create_model("vittm_base_32_16", features_only=True, out_indices=(0, 2), **geometry)
    maps = model(torch.zeros(1, 3, 64, 96))
    assert [found.shape for found in maps] == [(1, 32, 2, 3)] * 2  # other grids: the process stream alone
    assert model.feature_info.channels() == [32, 32]
    equal = {"process_patch_size": 16, "memory_patch_size": 16}
    model = timm.create_model("vittm_base_28_28", features_only=True, out_indices=(1,), **geometry, **equal)
    assert model(torch.zeros(1, 3, 64, 64))[0].shape[1] == model.feature_info.channels()[0] == 64


def test_intermediates_of_all_kinds() -> None:
    model, images = tiny().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        (memory, process), maps = model.forward_intermediates(images, norm=True, output_fmt="NLC")
        assert torch.equal(maps[-1], torch.cat((process, memory), -1))
        first = model.forward_intermediates(images, [0], stop_early=True, intermediates_only=True)
    assert torch.equal(memory, model.forward_features(images)[0])
    assert [tuple(found.shape) for found in first] == [(2, 64, 4, 4)]
    with pytest.raises(VitrimError, match="unknown output format 'HWC'"):
        model.forward_intermediates(images, output_fmt="HWC")


def test_one_patch_embedding_where_patches_are_equal() -> None:
    convolutions = [
        sum(isinstance(module, nn.Conv2d) for module in model.modules())
        for model in (tiny(), tiny(memory_patch_size=4))
    ]
    assert convolutions == [1, 2]


def test_no_output_depends_on_the_mode() -> None:
    model, images = with_random_heads(tiny()), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.train()(images), model.eval()(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read_write": "linaer"}, "unknown read/write head 'linaer'; did you mean 'linear'?"),
        ({"fusion": "mul"}, "unknown fusion 'mul'; valid: add, add_erase, erase"),
        ({"process_patch_size": 5}, "32x32 px do not divide into patches of 5 px"),
        ({"global_pool": "token"}, "not 'token'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        tiny(**options)


def test_bad_images() -> None:
    with pytest.raises(VitrimError, match="36x32 px do not divide into patches of 8 px"):
        tiny()(torch.zeros(1, 3, 36, 32))
    for options in ({"read_write": "token_learner"}, {"fusion": "add_erase"}):
        with pytest.raises(VitrimError, match=r"made for \(16, 16\) memory and process tokens, got \(24, 24\)"):
            tiny(**options)(torch.zeros(1, 3, 48, 32))
    with pytest.raises(VitrimError, match="mean"):
        tiny().reset_classifier(3, "token")


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_random_masks_are_a_partition() -> None:
    model = MaskedViTTM(tiny(memory_patch_size=4), 16, 1, 2)
    for matched in (False, True):
        masks = model.random_masks(3, 0.75, matched=matched)
        for mask, number in zip(masks, (64, 16), strict=True):
            assert mask.kept.shape == (3, number // 4)
            assert torch.equal(torch.cat(mask, 1).sort(1).values, torch.arange(number).expand(3, -1))
    process = torch.zeros(3, 16).scatter_(1, masks[1].masked, 1.0)
    memory = torch.zeros(3, 64).scatter_(1, masks[0].masked, 1.0)
    areas = process.reshape(3, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.equal(memory, areas.flatten(1))


def test_pixels_are_in_the_order_row_column_channel() -> None:
    images = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    found = pixels(images, 2)
    assert found.shape == (2, 6, 12)
    assert torch.equal(found[1, 4], images[1, :, 2:4, 2:4].permute(1, 2, 0).flatten())


def test_bad_masks() -> None:
    for ratio in (0.0, 1.0, -0.5):
        with pytest.raises(VitrimError, match="mask ratio"):
            random_mask(1, 16, ratio)
    with pytest.raises(VitrimError, match="not a multiple"):
        matched_mask(random_mask(1, 9), (3, 3), (4, 4))
    with pytest.raises(VitrimError, match="a part of the tokens"):
        MaskedViTTM(tiny(fusion="add_erase"))


def test_pre_training_reaches_every_parameter_but_the_classifiers() -> None:
    model = MaskedViTTM(tiny(), 16, 1, 2)
    model.objective(torch.randn(2, 3, 32, 32), *model.random_masks(2))["total"].backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    names = ("fc_norm", "auxiliary_fc_norm", "head", "auxiliary_head")
    assert without == {f"encoder.{name}.{kind}" for name in names for kind in ("weight", "bias")}


def test_a_pre_training_step_draws_masks_anew_and_reads_no_targets() -> None:
    model = MaskedViTTM(tiny(), 16, 1, 2)
    step = Step(model, None, torch.randn(2, 3, 32, 32), torch.zeros(0), nn.functional.cross_entropy)
    torch.manual_seed(3)
    losses = step.base_losses()
    torch.manual_seed(3)
    expected = model.objective(step.images, *model.random_masks(2))
    assert set(losses) == {"memory", "process", "total"}
    assert torch.equal(losses["total"], expected["total"])
    assert not torch.equal(step.base_losses()["total"], losses["total"])


def resampled(table: Tensor) -> Tensor:
    return resample_positions(table, (4, 4), (6, 3))


def test_positions_are_resampled_as_timm_does() -> None:
    table = torch.randn(1, 16, 8)
    expected = timm.layers.resample_abs_pos_embed(table, [6, 3], [4, 4], num_prefix_tokens=0)
    torch.testing.assert_close(resampled(table), expected)
    assert resampled(table.double()).dtype == torch.float64
    assert resample_positions(table, (4, 4), (4, 4)) is table


def test_images_are_of_the_size_that_the_model_was_made_for() -> None:
    """Not of the size in the settings of its published weights."""
    model = timm.create_model("vittm_small_28_28", img_size=56, depth=1)
    assert ask(model).preprocessing(model).size == (56, 56)
    assert eval_transform(model)(Image.new("RGB", (80, 60))).shape == (3, 56, 56)
