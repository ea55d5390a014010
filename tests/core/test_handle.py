"""What the handle says: tokens per block without recording, and a text that a person can read."""

from __future__ import annotations

from functools import cache

import pytest
import timm
import torch
from torch import nn

import tiny
import vitrim
from vitrim.measure.macs import profile_of

HOSTS = [*tiny.LIBRARIES, "distilled", "avg_fc_norm", "hf_eomt", "hf_yolos", "lv_vit"]


# every method on the plain host of each library; what else there is to hosts is the same for all methods of a kind
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("host", "config"), tiny.matrix(tiny.static_configs(), HOSTS, thorough=["vit"], once=tiny.LIBRARIES)
)
def test_planned_counts_are_those_of_a_forward(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]()
    fitting = tiny.fits(config, model)
    try:
        reduction = vitrim.reduce_(model, fitting)
    except vitrim.UnsupportedModelError:
        pytest.skip("the method does not fit this head")
    planned = reduction.tokens_per_block
    text = str(reduction)
    recorded = vitrim.reduce_(tiny.HOSTS[host](), fitting, record=True)
    with torch.no_grad():
        for one in (reduction, recorded):
            tiny.run(one.model, tiny.INPUTS.get(host, tiny.images)(1))
    assert planned == reduction.tokens_per_block  # of the forward's own images
    counts = recorded.tokens_per_block
    if tiny.blocks(model)[-1].restore in ("end", "last_block"):
        assert planned[:-1] == counts[:-1]
        assert planned[-1] <= counts[-1]  # which has the patches that are back
    else:
        assert planned == counts
        assert str(recorded) == text


@pytest.mark.parametrize("host", ["vit", "distilled", "hf_vit"])
def test_a_last_block_of_a_few_rows_is_counted_with_those(host: str) -> None:
    planned = vitrim.reduce_(tiny.HOSTS[host](), "tome:r=4,last_block=auto").tokens_per_block
    recorded = vitrim.reduce_(tiny.HOSTS[host](), "tome:r=4,last_block=auto", record=True)
    with torch.no_grad():
        tiny.run(recorded.model, tiny.images())
    assert planned == recorded.tokens_per_block
    assert planned[-1] == tiny.num_prefix(recorded.model)


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


@cache
def deit() -> nn.Module:
    """Drawing its weights takes as long as counting."""
    model: nn.Module = timm.create_model("deit_tiny_patch16_224")
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "method",
    [
        *("none", "random", "topk", "evit:keep_rate=0.5", "evit:fuse_token=false", "tome:r=13", "tome:r=[40,0,0,40]"),
        *("pitome", "mctf", "topk:last_block=class_token", "none:last_block=auto"),
    ],
)
def test_macs_saved_are_about_those_that_are_counted(method: str) -> None:
    model = deit()
    counted = []
    for config in (None, vitrim.parse_method(method)):
        macs = profile_of(model, config, [torch.zeros(1, 3, 224, 224)], name="deit").macs
        counted.append(macs.linear + macs.attention - 196 * 192 * 768 - 192 * 1000)  # without patches and head
    saved = 100 * (1 - counted[1] / counted[0])
    with vitrim.reduced(model, method) as reduction:
        said = float(str(reduction).rpartition("about ")[2].partition(" %")[0])
    assert said == pytest.approx(saved, abs=1.0)


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
