"""Loss: distances and errors of merging against libraries, one block at a time, and the figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cosine
from torch import nn
from torch.utils.data import TensorDataset

import vitrim
from made_subjects import IMAGES, LAYERS, PATCHES, reduced, subject
from made_tables import rows
from tiny import configs
from vitrim.analysis.families.loss import (
    draw_class_tokens,
    draw_loss_alone,
    draw_merging_error,
    loss,
    merging_error,
    spread_in_groups,
)
from vitrim.analysis.family import FamilyResult, Tables
from vitrim.report import Table


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 999))
def test_the_error_of_a_pair_is_definition_2_within_theorem_1(n_i: int, n_j: int, seed: int) -> None:
    x_i, x_j = (x / np.linalg.norm(x) for x in np.random.default_rng(seed).normal(size=(2, 5)))
    merged = (n_i * x_i + n_j * x_j) / (n_i + n_j)
    distance = cosine(x_i, x_j)
    found = merging_error([3 * x_i, x_j], [n_i, n_j], [0, 0])  # a token's length does not matter
    assert found.error == pytest.approx(n_i * cosine(x_i, merged) + n_j * cosine(x_j, merged), abs=1e-9)
    assert found.least == pytest.approx(n_i * n_j / (n_i + n_j) * distance, abs=1e-9)
    assert found.most == pytest.approx(2 * n_i * n_j / (n_i + n_j) * distance, abs=1e-9)


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 999))
def test_errors_of_groups_are_sums_over_their_members(images: int, tokens: int, groups: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, sizes = random.normal(size=(images, tokens, 4)), random.integers(1, 9, (images, tokens))
    labels, merged = random.integers(-1, groups, (images, tokens)), random.normal(size=(images, groups, 4))
    found, spread = merging_error(x, sizes, labels), spread_in_groups(x, sizes, labels, merged)
    for image in range(images):
        unit = x[image] / np.linalg.norm(x[image], axis=-1, keepdims=True)
        error = squared = apart = length = 0.0
        for group in range(groups):
            members = np.flatnonzero(labels[image] == group)
            if len(members):
                mean = np.average(unit[members], axis=0, weights=sizes[image, members])
                error += sum(sizes[image, i] * cosine(unit[i], mean) for i in members)
                squared += sum(sizes[image, i] * ((unit[i] - mean) ** 2).sum() for i in members)
                apart += sum(sizes[image, i] * ((x[image, i] - merged[image, group]) ** 2).sum() for i in members)
                length += sum(sizes[image, i] * (x[image, i] ** 2).sum() for i in members)
        assert found.error[image] == pytest.approx(error, abs=1e-9)
        assert found.most[image] == pytest.approx(squared, abs=1e-9)
        assert found.least[image] - 1e-9 <= found.error[image] <= found.most[image] + 1e-9
        if length:
            assert spread[image] == pytest.approx(apart / length, abs=1e-9)
        else:
            assert np.isnan(spread[image])


@pytest.fixture(scope="module")
def lost(model: nn.Module, data: TensorDataset) -> FamilyResult:
    return loss(subject(model, data, "tome:r=4", "atm", "topk", "ats", "cropr:r=4"))


@pytest.mark.parametrize(
    ("method", "kind", "value", "block", "alone"),
    [
        ("tome:r=4", "share removed", 0.25, 1, "tome:r=[0,9,0,0]"),
        ("topk", "share removed", 0.375, 2, "topk:blocks=[2],keep_rate=0.625"),
        ("atm", "threshold", 0.8, 0, "atm:theta=[0.8,1.0,1.0,1.0]"),
    ],
)
@torch.no_grad()
def test_one_block_alone(
    model: nn.Module,
    data: TensorDataset,
    lost: FamilyResult,
    method: str,
    kind: str,
    value: float,
    block: int,
    alone: str,
) -> None:
    found = next(
        row
        for row in rows(lost, "loss_alone")
        if (row["method"], row["setting"], row["value"], row["block"]) == (method, kind, value, block)
    )
    own = reduced(model, alone).model
    distances, divergences = [], []
    for images in data.tensors[0].split(16):  # atm decides by the batch
        dense, other = (net(images).double().log_softmax(1) for net in (model, own))
        divergences.append((dense.exp() * (dense - other)).sum(1))
        features = [net.forward_head(net.forward_features(images), pre_logits=True) for net in (model, own)]
        distances.append(1 - torch.cosine_similarity(*(one.double() for one in features)))
    assert found["images"] == IMAGES
    assert found["kl_nats"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-6)
    assert found["cosine_distance"] == pytest.approx(torch.cat(distances).mean().item(), rel=1e-5)
    assert found["kl_nats_low"] <= found["kl_nats"] <= found["kl_nats_high"]


def test_every_block_and_amount_has_its_row_and_what_has_none_its_line(lost: FamilyResult) -> None:
    assert len(rows(lost, "loss_alone")) == 3 * 4 * LAYERS
    one = [row for row in rows(lost, "loss_alone") if row["method"] == "topk" and row["block"] == 3]
    mean = next(row for row in rows(lost, "loss_alone_mean") if row["method"] == "topk" and row["block"] == 3)
    assert mean["kl_nats"] == pytest.approx(np.mean([row["kl_nats"] for row in one]))
    assert any("ats is left out of one block at a time: it takes no amount" in note for note in lost.notes)
    assert any("cropr:r=4 is left out of one block at a time: what it learned" in note for note in lost.notes)


@torch.no_grad()
def test_errors_of_merging_are_of_the_tokens_between_attention_and_mlp(
    model: nn.Module, data: TensorDataset, lost: FamilyResult
) -> None:
    reduction = reduced(model, "tome:r=4")
    reduction.model(data.tensors[0])
    groups = reduction.states[1].source[:, 1:]
    block, seen = model.blocks[0], []
    block.norm2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(data.tensors[0])
    block.norm2._forward_pre_hooks.clear()
    errors = []
    for x, group in zip(seen[0][:, 1:].double(), groups, strict=True):
        total = 0.0
        for label in group.unique():
            members = torch.nn.functional.normalize(x[group == label], dim=-1)
            total += (1 - torch.cosine_similarity(members, members.mean(0, keepdim=True))).sum().item()
        errors.append(total)
    found = next(row for row in rows(lost, "merging_error") if row["method"] == "tome:r=4" and row["block"] == 0)
    assert found["merged"] == 4
    assert found["error"] == pytest.approx(np.mean(errors), rel=1e-5)
    for row in rows(lost, "merging_error"):
        assert row["error_least"] - 1e-9 <= row["error"] <= row["error_most"] + 1e-9
        assert row["error_least"] == pytest.approx(row["error_most"] / 2)


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.describe())
def test_one_block_alone_is_one_block_alone(config: vitrim.MethodConfig) -> None:
    """Over the registry: nothing is removed anywhere else."""
    if config.tunable is None or config.tunable.per_layer is None or not config.traits.training_free:
        return
    for depth in range(2, LAYERS):
        value = 0.5 if config.tunable.similarity else config.tunable.removing(0.5, PATCHES)
        alone = config.tunable.alone(config, depth, value, LAYERS)
        assert alone is not None
        counts = alone.counts(PATCHES, LAYERS, (6, 6))
        if counts is not None and config.name not in ("cropr", "evo_vit"):
            removed = -np.diff([PATCHES, *counts])
            assert removed[depth] > 0
            assert not np.delete(removed, depth).any() or config.name == "evo_vit"  # whose patches come back


def test_losses_block_by_block() -> None:
    columns = ("method", "block", "images", "cosine", "cosine_std", "cosine_low", "cosine_high")
    made = [("tome", block, 40, 1 - 0.1 * block, 0.1, 0.5, 1.0) for block in range(3)]
    figure = draw_class_tokens(Tables({"class_tokens": Table("class_tokens", "", columns, made)}))
    assert figure.axes[0].lines[0].get_ydata().tolist() == pytest.approx([1.0, 0.9, 0.8])
    columns = ("method", "setting", "value", "block", "cosine_distance", "kl_nats")
    made = [("tome", "r", value, block, value * block, 1.0) for value in (1, 3) for block in range(3)]
    axis = draw_loss_alone(Tables({"loss_alone": Table("loss_alone", "", columns, made)})).axes[0]
    assert [line.get_ydata().tolist() for line in axis.lines] == [[0, 1, 2], [0, 3, 6]]
    assert [bar.get_height() for bar in axis.patches] == [0, 2, 4]
    columns = ("method", "block", "error", "error_low", "error_high", "error_least", "error_most")
    made = [("tome", block, 2.0, 1.9, 2.1, 1.0, 3.0) for block in range(2)]
    lines = draw_merging_error(Tables({"merging_error": Table("merging_error", "", columns, made)})).axes[0].lines
    assert [line.get_ydata()[0] for line in lines] == [1.0, 3.0, 2.0]
