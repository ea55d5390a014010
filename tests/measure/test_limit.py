"""The plain slice beside a method: its counts, its tokens, and what the report says of it."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from vitrim.core.registry import parse_method
from vitrim.engines.copies import reduced_copy
from vitrim.measure.bench import bench
from vitrim.measure.latency import Budget
from vitrim.measure.limit import PLAIN_SLICE, sliced_copy, why_no_slice

ONCE = Budget(1, min_seconds=0.0, max_rounds=1, warmup_rounds=0, slice=True)


def model(**options: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 4, "num_classes": 3}
    return timm.create_model("test_vit", **{**sizes, **options}).eval()


def tokens_of(reduced: nn.Module, images: torch.Tensor) -> list[int]:
    found: list[int] = []
    for block in reduced.blocks:
        block.register_forward_hook(lambda module, given, output: found.append(output.shape[1]))
    with torch.inference_mode():
        reduced(images)
    return found


@pytest.mark.parametrize(
    "method", ["tome:r=3", "mctf:r=2,min_patches=4", "pitome:keep_rate=0.8", "evit", "topk", "patchmerger", "sit"]
)
def test_as_many_tokens_as_the_method_leaves_after_every_block(method: str) -> None:
    config, images = parse_method(method), torch.randn(2, 3, 32, 32)
    wanted = tokens_of(reduced_copy(model(), config), images)
    assert tokens_of(sliced_copy(model(), config), images) == wanted
    assert wanted[-2] < 17


def test_it_is_the_first_tokens_at_the_place_of_the_method() -> None:
    """Twenty plain lines with timm's own blocks: attention among all, then a slice, then the MLP."""
    own, images = model(), torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        found = sliced_copy(own, parse_method("tome:r=3,last_block=full"))(images)
        x = own.norm_pre(own.patch_drop(own._pos_embed(own.patch_embed(images))))
        for block, kept in zip(own.blocks, (14, 11, 8, 5), strict=True):
            x = x + block.ls1(block.attn(block.norm1(x)))
            x = x[:, :kept]
            x = x + block.ls2(block.mlp(block.norm2(x)))
        torch.testing.assert_close(found, own.forward_head(own.norm(x)))


def test_at_the_query_rows_that_go_do_not_attend() -> None:
    own, images = model(), torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        found = sliced_copy(own, parse_method("topk:keep_rate=0.5,blocks=[1],last_block=full"))(images)
        x = own.norm_pre(own.patch_drop(own._pos_embed(own.patch_embed(images))))
        for place, block in enumerate(own.blocks):
            update = block.ls1(block.attn(block.norm1(x)))
            x = (x + update)[:, :9] if place == 1 else x + update
            x = x + block.ls2(block.mlp(block.norm2(x)))
        torch.testing.assert_close(found, own.forward_head(own.norm(x)))


def test_the_model_is_not_changed_and_weights_are_shared() -> None:
    own = model()
    copied = sliced_copy(own, parse_method("tome:r=3"))
    assert copied.head.weight is own.head.weight
    assert type(own.blocks[0]) is not type(copied.blocks[0])


def test_what_cannot_be_sliced_says_why() -> None:
    own = model()
    assert why_no_slice(own, parse_method("tome:r=3")) is None
    assert "freeze it first" in str(why_no_slice(own, parse_method("atm")))
    assert why_no_slice(own, parse_method("none")) == "it removes no tokens"
    assert why_no_slice(own, parse_method("evo_vit")) == "it brings tokens back"


def test_bench_puts_the_limit_beside_the_method_and_says_what_it_is() -> None:
    report = bench(model(), ["tome:r=3", "none"], batch_size=1, budget=ONCE)
    assert [row["method"] for row in report.rows] == ["dense", "tome:r=3", f"{PLAIN_SLICE}tome:r=3", "none"]
    _, row, limit, _ = report.rows
    assert row["of_limit"] == limit["latency_ms"]["p50"] / row["latency_ms"]["p50"]  # one round
    assert "of_limit" not in limit
    assert limit["macs_speedup"] >= row["macs_speedup"]
    text = str(report)
    assert "which is the limit and no method to use" in text
    assert f"tome:r=3 reaches {row['of_limit']:.2f} " in text
    assert "none has no plain slice beside it: it removes no tokens" in text
    assert not any(line.startswith(PLAIN_SLICE) for line in report.words[0])  # no verdict on it


def test_without_being_asked_there_is_no_limit() -> None:
    report = bench(model(), "tome:r=3", batch_size=1, budget=Budget(1, min_seconds=0.0, max_rounds=1))
    assert len(report.rows) == 2
    assert "of limit" not in str(report)
