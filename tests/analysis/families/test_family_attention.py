"""Attention: given to fused tokens, and computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from made_subjects import PATCHES, class_row, reduced, subject
from made_tables import rows
from vitrim.analysis.families.attention import attention, draw_attention_maps
from vitrim.analysis.families.router import draw_router, router
from vitrim.analysis.family import Tables
from vitrim.measure.reducer_calls import ReducerCalls


@torch.no_grad()
def test_attention_given_and_computed(model: nn.Module, data: TensorDataset) -> None:
    result = attention(subject(model, data, "mctf:r=6", "tome:r=4", limit=8, batch_size=8))
    arrays = result.arrays
    assert arrays["mctf:r=6/blocks"].tolist() == [1, 2, 3]
    assert arrays["images"].shape == (8, 24, 24, 3)
    reduction = reduced(model, "mctf:r=6")
    calls = ReducerCalls(reduction)
    images = data.tensors[0][subject(model, data, limit=8).places()]
    reduction.model(images)
    decision, state = calls.take()[0], reduction.states[2]
    x, source = model.blocks[0](model._pos_embed(model.patch_embed(images))), state.source
    before = class_row(model, x)
    given = torch.zeros(8, state.num_tokens).scatter_add(1, source, before)
    assert decision.assignment is not None
    precise = class_row(model, decision.assignment.pool(x, torch.ones(8, PATCHES + 1)), state.size)
    for name, row in (("given", given), ("precise", precise)):
        spread = (row / state.size).gather(1, source)[:, 1:]
        assert np.allclose(arrays[f"mctf:r=6/{name}"][:, 0], spread.numpy(), atol=1e-6)
    found = rows(result, "attention")[0]
    assert (found["method"], found["block"], found["images"]) == ("mctf:r=6", 1, 8)
    assert found["mean_absolute"] == pytest.approx((given - precise).abs().mean().item(), rel=1e-4)
    divergence = (precise.double() * (precise / given).double().log()).sum(1).mean().item()
    assert found["kl_nats"] == pytest.approx(divergence, rel=1e-3)


@pytest.mark.parametrize("method", ["tome:r=4", "mctf:r=4,attention=precise"])
def test_methods_that_compute_their_attention_are_left_out(model: nn.Module, data: TensorDataset, method: str) -> None:
    result = attention(subject(model, data, method))
    assert not result.tables
    assert result.notes == ["attention skipped: it needs a method that fuses its attention map, such as mctf"]


def titles(figure) -> list[str]:
    """The titles of the pictures that are of one block, in order."""
    return [title for axis in figure.axes if (title := axis.get_title()).startswith("block")]


def test_the_maps_are_of_the_blocks_that_were_asked_for(model: nn.Module, data: TensorDataset) -> None:
    topk = "topk:keep_rate=0.7,blocks=[2,3]"
    for family, draw, method in ((attention, draw_attention_maps, "mctf:r=6"), (router, draw_router, topk)):
        result = family(subject(model, data, method, limit=4, batch_size=4, blocks=(3, 0, 2)))
        place = result.arrays[f"{method}/blocks"].tolist()
        assert [block in place for block in (0, 2, 3)] == [False, True, True]
        assert result.notes == [f"{method} has no map of block 0 to draw"]
        shown = titles(draw(Tables.of({family.__name__: result})))
        assert list(dict.fromkeys(shown)) == ["block 2", "block 3"]


@pytest.mark.slow
def test_a_picture_is_of_the_block_that_it_names(model: nn.Module, data: TensorDataset) -> None:
    """The map of one block asked for alone is drawn as the map of that block among all."""
    pictures = []
    for blocks in ((), (2,)):
        result = attention(subject(model, data, "mctf:r=6", limit=4, batch_size=4, blocks=blocks))
        axes = draw_attention_maps(Tables.of({"attention": result})).axes
        pictures.append(next(axis.images[0].get_array() for axis in axes if axis.get_title() == "block 2"))
    assert np.array_equal(*pictures)
