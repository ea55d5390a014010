"""Throughput: every combination is timed, and counts are aligned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tiny_hosts
from made_subjects import PATCHES, reduced, subject
from made_tables import rows
from vitrim.analysis.families.throughput import (
    _variants,
    draw_one_token_less,
    draw_throughput,
    throughput,
    without_last,
)
from vitrim.analysis.family import Tables
from vitrim.core.registry import host_of
from vitrim.errors import VitrimError
from vitrim.measure.latency import Budget
from vitrim.report import Table

QUICK = Budget(min_rounds=1, min_seconds=0.0, warmup_rounds=0)


@pytest.mark.slow
def test_speed_of_all_combinations(model: nn.Module, data: TensorDataset) -> None:
    own = subject(model, data, "tome:r=2", "bat:keep_rate=0.5", batch_size=2, sizes=(24, 16))
    result = throughput(own, QUICK)
    found = rows(result, "throughput")
    settings = {(r["method"], r["size"], r["precision"], r["kernel"], r["tokens"]) for r in found}
    kinds = [(m, t) for m in ("dense", "tome:r=2", "bat:keep_rate=0.5") for t in ("own", "M", "M-1")]
    kinds += [("tome:r=2", "aligned")]
    assert settings == {
        (method, size, precision, kernel, tokens)
        for method, tokens in kinds
        for size in (24, 16)
        for precision in ("fp32", "autocast")
        for kernel in ("fused", "unfused")
    }
    assert len(found) == len(settings)
    for row in found:
        assert row["images_per_second"] == pytest.approx(2000 / row["latency_ms"])
        assert row["peak_memory_mib"] > 0
        if (row["method"], row["tokens"]) == ("dense", "own"):
            assert (row["speedup"], row["speedup_q1"], row["speedup_q3"]) == (1, 1, 1)
    assert result.notes == ["bat:keep_rate=0.5 is left out of aligned counts: it has none to round"]
    assert model.patch_embed.img_size == (24, 24)


def test_a_model_in_half_precision_is_called_by_it(model: nn.Module, data: TensorDataset) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    found = rows(throughput(subject(half, data, "tome:r=2", batch_size=2), QUICK), "throughput")
    assert {row["precision"] for row in found} == {"bf16"}


def test_a_model_of_one_size(data: TensorDataset) -> None:
    host = tiny_hosts.families(True)["timm_volo"]["volo"]()
    with pytest.raises(VitrimError, match="VOLO cannot be given images of 16 px: it has no set_input_size"):
        throughput(subject(host, data, sizes=(16,)), QUICK)


@torch.no_grad()
def test_one_patch_fewer(model: nn.Module, data: TensorDataset) -> None:
    images = data.tensors[0][:2]
    for number in (1, 2):
        x = model._pos_embed(model.patch_embed(images))[:, :-number]
        expected = model.head(model.norm(model.blocks(x))[:, 0])
        assert torch.allclose(without_last(copy.deepcopy(model), number)(images), expected, atol=1e-6)
    reduction = reduced(model, "topk:keep_rate=0.5")
    without_last(reduction.model, 1)(images)
    assert reduction.tokens_per_block == [36, 18, 9, 5]


@torch.no_grad()
def test_m_tokens_are_as_many_as_patches_with_the_class_token(model: nn.Module) -> None:
    """The paper ignores the class token: with it, timm's model of 1,024 patches would run on 1,025 tokens."""
    seen: list[int] = []
    for _, variant in list(_variants(model, [], [])):  # all first: copies take hooks along
        host_of(variant).blocks(variant)[1].register_forward_pre_hook(
            lambda module, args: seen.append(args[0].shape[1])
        )
        variant(torch.zeros(1, 3, 24, 24))
    assert seen == [PATCHES + 1, PATCHES, PATCHES - 1] * 2


def test_bars_of_one_size_and_lines_over_several() -> None:
    columns = ("method", "size", "precision", "kernel", "tokens", "images_per_second", "speedup")
    one = [("dense", 32, "fp32", "fused", "own", 10.0, 1.0), ("tome", 32, "fp32", "fused", "own", 15.0, 1.5)]
    one.append(("tome", 32, "fp32", "fused", "aligned", 16.0, 1.6))
    bars = draw_throughput(Tables({"throughput": Table("throughput", "", columns, one)})).axes[0]
    assert [bar.get_height() for bar in bars.patches] == [10, 15, 16]
    assert [text.get_text() for text in bars.texts] == ["1.00", "1.50", "1.60"]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["own", "own", "x 8"]
    two = [*one, ("tome", 64, "fp32", "fused", "own", 8.0, 2.0), ("dense", 64, "fp32", "fused", "own", 4.0, 1.0)]
    axis = draw_throughput(Tables({"throughput": Table("throughput", "", columns, two)})).axes[0]
    assert [line.get_ydata().tolist() for line in axis.lines] == [[1, 1], [1.5, 2]]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["32 px\n10/s", "64 px\n4/s"]


def test_one_token_less_is_dotted_over_several_sizes() -> None:
    columns = ("method", "size", "precision", "kernel", "tokens", "images_per_second", "speedup")
    made = [
        ("dense", size, "fp32", "fused", tokens, rate / size, rate / 100)
        for size in (64, 32)
        for tokens, rate in (("own", 80.0), ("M", 100.0), ("M-1", 70.0))
    ]
    axis = draw_one_token_less(Tables({"throughput": Table("throughput", "", columns, made)})).axes[0]
    assert [(line.get_linestyle(), line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axis.lines] == [
        ("-", [32, 64], [100 / 32, 100 / 64]),
        (":", [32, 64], [70 / 32, 70 / 64]),
    ]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axis.texts] == ["1.00", "1.00", "0.70", "0.70"]
    alone = [row for row in made if row[1] == 32]
    assert draw_one_token_less(Tables({"throughput": Table("throughput", "", columns, alone)})) is None
    bare = [row for row in made if row[4] != "M"]  # a model without a class token
    axis = draw_one_token_less(Tables({"throughput": Table("throughput", "", columns, bare)})).axes[0]
    assert [line.get_ydata().tolist() for line in axis.lines] == [[80 / 32, 80 / 64], [70 / 32, 70 / 64]]
