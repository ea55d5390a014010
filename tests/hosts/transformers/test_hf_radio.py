"""C-RADIO of transformers: what its summary and its features read, and what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
import vitrim
from vitrim.core.registry import host_of


def made() -> Any:
    return tiny.shaken(tiny.FURTHER["hf_radio"]().double())


def test_class_tokens_and_registers_are_in_front() -> None:
    model = made()
    facts = host_of(model).facts(model)
    assert (facts.num_prefix, facts.has_class_token, facts.grid_size) == (5, True, (6, 6))
    assert host_of(model).hands_out_tokens(model)


@torch.no_grad()
def test_features_are_the_patches_that_are_left() -> None:
    model, images = made(), tiny.images().double()
    dense = model(images)
    reduction = vitrim.reduce_(model, "topk:keep_rate=0.5")
    output = model(images)
    assert output.summary.shape == dense.summary.shape
    assert output.features.shape[1] == reduction.state.num_patches < 36
    assert torch.equal(output.features, output.last_hidden_state[:, 5:])


@torch.no_grad()
def test_methods_that_read_rows_and_columns_see_those_of_the_image() -> None:
    model = made()
    reduction = vitrim.reduce_(model, "l2:keep_rate=0.5", record=True)
    model(tiny.images(size=32).double())
    assert reduction.states[0].grid == (8, 8)
    model(tiny.images(size=32)[:, :, :16].double())
    assert reduction.states[0].grid == (4, 8)


def test_packed_images_are_refused() -> None:
    model = made()
    vitrim.reduce_(model, "tome:r=4")
    patches = torch.randn(8, 48).double()
    with pytest.raises(vitrim.UnsupportedModelError, match="takes no image_grid_hw"):
        model(patches, image_grid_hw=torch.tensor([[2, 4]]))
