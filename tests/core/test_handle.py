"""What the handle says: tokens per block without recording, and a text that a person can read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from test_hf_siglip2 import TOWER
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PixtralVisionConfig, PixtralVisionModel

import tiny
import vitrim
from tiny_vlms import VLMS
from vitrim.engines import macs

EVERY = {**tiny.HOSTS, **tiny.FURTHER}


def tokens(text: str, way: str) -> list[float]:
    """The numbers of the rows called ``way`` in what a handle prints."""
    rows = [line.removeprefix(f"  {way}") for line in text.splitlines() if line.startswith(f"  {way}")]
    return [float(number) for row in rows for number in row.split()]


def saved(text: str) -> float:
    return float(text.rpartition("about ")[2].partition(" %")[0])


def says_what_runs(model: nn.Module, config: vitrim.MethodConfig | str, host: str) -> None:
    """The text and the counts of a handle, before a forward and behind it, are those that a forward records."""
    with vitrim.reduced(model, config) as reduction:
        planned = reduction.tokens_per_block
    with vitrim.reduced(model, config, record=True) as reduction:
        before = str(reduction)
        with torch.no_grad():
            tiny.run(model, tiny.given(host, 1))
        counts = [state.num_tokens for state in reduction.states]
        rows = tiny.blocks(model)[-1].head_rows
        assert planned == tokens(before, "tokens out") == [*counts[1:-1], rows or counts[-1]]
        assert planned == reduction.tokens_per_block
        assert tokens(before, "tokens in")[:-1] == counts[:-2]
        assert str(reduction) == before.partition("\nas planned for images of")[0]


# every method on the plain host of each library; what else there is to hosts is the same for all methods of a kind
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("host", "config"), tiny.matrix(tiny.static_configs(), tiny.LIBRARIES, thorough=["vit"], once=tiny.LIBRARIES)
)
def test_planned_counts_are_those_of_a_forward(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]()
    try:
        says_what_runs(model, tiny.fits(config, model), host)
    except vitrim.UnsupportedModelError:
        pytest.skip("the method does not fit this head")


@pytest.mark.parametrize("host", EVERY)
def test_planned_counts_are_those_of_a_forward_on_every_host(host: str) -> None:
    model = EVERY[host]()
    for method in ("topk:keep_rate=0.6", "tome:r=4"):
        says_what_runs(model, tiny.fits(vitrim.parse_method(method), model), host)


@pytest.mark.parametrize(
    "method",
    [
        *("topk", "evit", "zero_tprune", "ppt:r=4", "saint:r=[6,4,0,0]", "gtp:num_prop=4", "l1:keep_rate=0.5"),
        *("tofu:keep_rate=0.8", "tofu:keep_rate=0.8,prune_until=-1", "diffrate:r=4"),
        "diffrate:prune_kept=[33,30,27,24],merge_kept=[31,28,27,20]",
    ],
)
@pytest.mark.parametrize("restore", ["end", "last_block", "zeros"])
def test_patches_that_come_back_are_counted(method: str, restore: str) -> None:
    config = vitrim.parse_method(f"{method},restore={restore}" if ":" in method else f"{method}:restore={restore}")
    says_what_runs(tiny.HOSTS["vit"](), config, "vit")


@pytest.mark.parametrize("r", [[3, 4], [8, 4], [6, 40]])
def test_windows_of_a_grid_with_odd_sides_are_counted(r: list[int]) -> None:
    for rows, columns in ((5, 7), (1, 10), (3, 4)):
        model = VisionTransformer(
            img_size=(4 * rows, 4 * columns), patch_size=4, embed_dim=32, depth=4, num_heads=2, num_classes=5
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", vitrim.ReductionWarning)
            reduction = vitrim.reduce_(model.eval(), f"algm:r={r}".replace(" ", ""), record=True)
        before = tokens(str(reduction), "tokens out")
        with torch.no_grad():
            model(torch.zeros(1, 3, 4 * rows, 4 * columns))
        merged = 3 * min(r[0], (rows // 2) * (columns // 2))
        assert before == reduction.tokens_per_block
        assert before[0] == 1 + rows * columns - merged


@pytest.mark.parametrize("host", ["vit", "distilled", "hf_vit"])
def test_a_last_block_of_a_few_rows_is_counted_with_those(host: str) -> None:
    model = tiny.HOSTS[host]()
    says_what_runs(model, "tome:r=4,last_block=auto", host)
    assert vitrim.reduce_(model, "tome:r=4,last_block=auto").tokens_per_block[-1] == tiny.num_prefix(model)


def test_planned_counts_follow_the_size_of_the_images() -> None:
    model = tiny.HOSTS["dynamic_img_size"]()
    reduction = vitrim.reduce_(model, "topk:keep_rate=0.5")
    own = reduction.tokens_per_block
    with torch.no_grad():
        model(torch.zeros(1, 3, 64, 96))
    recorded = vitrim.reduce_(tiny.HOSTS["dynamic_img_size"](), "topk:keep_rate=0.5", record=True)
    with torch.no_grad():
        recorded.model(torch.zeros(1, 3, 64, 96))
    assert reduction.tokens_per_block == recorded.tokens_per_block != own


def test_counts_that_depend_on_images_need_recording() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "atm:alpha=0.9,beta=0.2")
    with pytest.raises(vitrim.VitrimError, match=r"depend on the images, .* kept only when recording"):
        _ = reduction.tokens_per_block
    assert "depends on the images: reduce with record=True" in str(reduction)
    reduction = vitrim.reduce_(model, "atm:alpha=0.9,beta=0.2", record=True)
    assert "depends on the images" in reduction._repr_html_()
    with torch.no_grad():
        model(tiny.images())
    out = next(line for line in str(reduction).splitlines() if line.startswith("  tokens out"))
    assert out.split()[2:] == [f"{count:g}" for count in reduction.mean_tokens_per_block]


def test_options_set_since_the_last_forward_are_those_printed() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    with torch.no_grad():
        model(tiny.images())
    reduction.set(r=6)
    assert tokens(str(reduction), "tokens out") == [31, 25, 19, 13]
    reduction = vitrim.reduce_(model, "atm:alpha=0.9,beta=0.2", record=True)
    with torch.no_grad():
        model(tiny.images())
    assert "MACs" in str(reduction)
    reduction.set(alpha=0.8)
    assert "depends on the images" in str(reduction)


def of_sizes(shapes: list[tuple[int, int]]) -> dict[str, Tensor]:
    """A padded batch for SigLIP 2, of images with so many rows and columns of patches."""
    most = max(rows * columns for rows, columns in shapes)
    mask = torch.tensor([[place < rows * columns for place in range(most)] for rows, columns in shapes]).int()
    patches = torch.randn(len(shapes), most, 48, generator=torch.Generator().manual_seed(3)) * mask[..., None]
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}


@pytest.mark.parametrize("shapes", [[(3, 5)], [(3, 5)] * 2, [(3, 5), (6, 6), (3, 5)], [(6, 6), (3, 5)]])
@pytest.mark.parametrize("method", ["tome:r=2", "l2:keep_rate=0.5"])
def test_images_of_several_sizes_count_as_each_does_alone(shapes: list[tuple[int, int]], method: str) -> None:
    model = TOWER()
    counts, spent, dense = [], 0.0, 0.0
    for shape in shapes:
        dense += counted(model, lambda shape=shape: model(**of_sizes([shape])))
        with vitrim.reduced(model, method, record=True) as reduction:
            spent += counted(model, lambda shape=shape: model(**of_sizes([shape])))
            counts.append(reduction.tokens_per_block)
    for record in (True, False):
        with vitrim.reduced(model, method, record=record) as reduction, torch.no_grad():
            model(**of_sizes(shapes))
            text, most = str(reduction), reduction.tokens_per_block
        assert most == [max(each) for each in zip(*counts, strict=True)]
        means = [sum(each) / len(each) for each in zip(*counts, strict=True)]
        assert tokens(text, "tokens out") == pytest.approx(means, rel=1e-4)
        assert saved(text) == pytest.approx(100 * (1 - spent / dense), abs=1.0)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_a_handle_prints_behind_a_prompt(name: str) -> None:
    vlm = VLMS[name]
    model = vlm.create()
    reduction = vitrim.reduce_(model, "tome:r=1", compact=True)
    before = str(reduction).splitlines()
    with torch.no_grad():
        model(**vlm.prompt([[7, 8]]))
    assert [state.num_tokens for state in reduction._trace.call.states][1:] == reduction.tokens_per_block
    assert tokens(str(reduction), "tokens out") == reduction.tokens_per_block
    assert str(reduction).splitlines()[0] == before[0]
    assert "<td>" in reduction._repr_html_()


def test_a_handle_prints_behind_a_prompt_whose_counts_depend_on_images() -> None:
    vlm = VLMS["llava"]
    model = vlm.create()
    reduction = vitrim.reduce_(model, "atm:alpha=0.9,beta=0.2", compact=True)
    with torch.no_grad():
        model(**vlm.prompt([[7, 8]]))
    assert "depends on the images: reduce with record=True" in str(reduction)


def test_a_handle_prints_behind_an_empty_batch() -> None:
    model = tiny.HOSTS["torchvision_vit"]()
    reduction = vitrim.reduce_(model, "tome:r=1")
    before = str(reduction)
    with torch.no_grad():
        model(tiny.images()[:0])
    assert str(reduction) == before


# ---- multiply-accumulates --------------------------------------------------------------------------------------------


def counted(model: nn.Module, run: Callable[[], Any]) -> int:
    """MACs of projections, attention and MLPs in all blocks, by PyTorch's counter."""
    counter = FlopCounterMode(display=False, custom_mapping=macs._MAPPING)
    with macs._as_written(model, torch.device("cpu")), counter:
        run()
    names, by_module = {id(module): name for name, module in macs._named(model)}, counter.get_flop_counts()
    parts = [macs._parts_of(by_module, model, names[id(block)]) for block in tiny.blocks(model)]
    return sum(part["linear"] + part["attention"] for part in parts)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("host", "methods"),
    [
        ("vit", ["evit:keep_rate=0.6", "mctf:r=4", "topk:last_block=class_token", "topk:restore=last_block"]),
        ("vit", ["cropr:r=4", "topk:restore=end", "cubist_merge", "none:last_block=auto"]),
        ("parallel", ["tome:r=4", "evit:keep_rate=0.6", "topk"]),
        *((host, ["tome:r=4", "topk:score=column_mean"]) for host in ("samvit", "hf_sam", "hf_vitdet", "hf_lw_detr")),
        ("hf_vitdet_backbone", ["mctf:r=4"]),
        *((host, ["mctf:r=4", "mctf:r=8,attention=precise"]) for host in ("dinov3_storage", "hf_vit")),
        *((host, ["tome:r=4", "random"]) for host in ("hf_rf_detr", "hf_vit", "torchvision_vit", "volo", "lv_vit")),
    ],
)
def test_macs_saved_are_about_those_that_are_counted(host: str, methods: list[str]) -> None:
    model, images = EVERY[host](), tiny.given(host, 1)
    dense = counted(model, lambda: tiny.run(model, images))
    for method in methods:
        with vitrim.reduced(model, method) as reduction:
            said = saved(str(reduction))
            left = counted(model, lambda: tiny.run(model, images))
        assert said == pytest.approx(100 * (1 - left / dense), abs=1.5), method


def test_a_plan_says_which_images_it_is_for_where_they_have_sizes_of_their_own() -> None:
    """Pixtral's own size is the largest it takes; what is saved of an image of 4 x 6 patches is counted."""
    config = PixtralVisionConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=128, patch_size=4
    )
    model = PixtralVisionModel(config).eval()
    given = {"pixel_values": torch.zeros(1, 3, 16, 24), "image_sizes": [(16, 24)]}
    dense = counted(model, lambda: model(**given))
    for method in ("tome:r=3", "tome:keep_rate=0.7"):
        reduction = vitrim.reduce_(model, method)
        lines = str(reduction).splitlines()
        assert lines[-1] == "as planned for images of 128 x 128 px; print again after a forward of yours"
        assert "1024" in lines[2]
        assert max(map(len, lines)) <= 80
        left = counted(model, lambda: model(**given))
        assert not any("as planned" in line for line in str(reduction).splitlines())
        assert saved(str(reduction)) == pytest.approx(100 * (1 - left / dense), abs=1.5)
        vitrim.restore_(model)
    plain = vitrim.reduce_(tiny.HOSTS["vit"](), "tome:r=3")
    assert "as planned" not in str(plain)


def test_the_text_fits_a_terminal() -> None:
    model = timm.create_model("vit_large_patch16_224", depth=30, embed_dim=64, num_heads=2)
    reduction = vitrim.reduce_(model, "tome:r=4")
    lines = str(reduction).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == repr(reduction)[len("Reduction(") : -1] == "tome:r=4 on VisionTransformer"
    assert sum(line.startswith("  tokens out") for line in lines) == 2
    numbers = [int(word) for line in lines if line.startswith("  tokens out") for word in line.split()[2:]]
    assert numbers == reduction.tokens_per_block == [197 - 4 * depth for depth in range(1, 31)]


def test_a_notebook_shows_a_row_per_block() -> None:
    text = vitrim.reduce_(tiny.HOSTS["vit"](), "tome:r=4")._repr_html_()
    assert text.count("<tr>") == 5
    assert "<td>37</td><td>33</td>" in text
    assert "% of the MACs of its blocks are saved" in text
    assert "language model" not in text


def test_a_handle_that_was_undone_says_so() -> None:
    model = tiny.HOSTS["vit"]()
    old = vitrim.reduce_(model, "tome:r=4")
    vitrim.reduce_(model, "topk")
    assert str(old) == "tome:r=4 on VisionTransformer: undone since"
    assert old._repr_html_() == "<p>tome:r=4 on VisionTransformer: undone since</p>"
    with pytest.raises(vitrim.VitrimError, match="this reduction was undone"):
        _ = old.tokens_per_block
