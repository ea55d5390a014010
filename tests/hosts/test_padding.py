"""Padded batches: how they are split and put together. What models make of it is tested with their families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
import vitrim
from vitrim.core.tokens import unmerge
from vitrim.hosts.shared import padding
from vitrim.hosts.shared.padding import Group, groups_of, run_groups


def test_images_of_one_number_of_patches_but_another_grid_run_apart() -> None:
    valid = torch.arange(6) < torch.tensor([[6], [6], [4], [6]])
    groups = groups_of(valid, torch.tensor([[2, 3], [3, 2], [2, 2], [2, 3]]))
    assert [(group.images.tolist(), group.patches) for group in groups] == [([0, 3], 6), ([1], 6), ([2], 4)]


def test_an_empty_batch_is_one_group() -> None:
    (group,) = groups_of(torch.ones(0, 6), torch.zeros(0, 2))
    assert (group.images.tolist(), group.patches) == ([], 6)


@pytest.mark.parametrize(
    ("valid", "message"),
    [([[1, 0, 1]], "behind an image's patches only"), ([[1, 1, 1], [0, 0, 0]], "its mask is all padding")],
)
def test_what_is_no_padding_is_refused(valid: list[list[int]], message: str) -> None:
    with pytest.raises(vitrim.UnsupportedModelError, match=message):
        groups_of(torch.tensor(valid), torch.ones(len(valid), 2))


def test_a_group_takes_its_images_without_padding() -> None:
    values = torch.arange(12).view(3, 4)
    group = Group(torch.tensor([0, 2]), 3)
    assert torch.equal(group.take(values), values[[0, 2], :3])
    assert torch.equal(group.take(values, cut=False), values[[0, 2]])


def model_and_groups(config: str) -> tuple[Any, vitrim.Reduction, list[Group]]:
    model = tiny.HOSTS["naflex"]()
    reduction = vitrim.reduce_(model, config, record=True)
    return model, reduction, [Group(torch.tensor([1]), 12), Group(torch.tensor([0, 2]), 36)]


def test_the_states_of_groups_become_that_of_the_batch() -> None:
    model, reduction, groups = model_and_groups("tome:r=4")
    shapes = {12: (12, 16), 36: (24, 24)}

    def call(group: Group) -> dict[str, Any]:
        images = tiny.images(len(group.images), seed=group.patches)[..., : shapes[group.patches][0], :]
        tokens = type(model).forward_features(model, images[..., : shapes[group.patches][1]])
        seen.append(reduction.state)
        return {"tokens": tokens, "list": [tokens[:, 0]], "none": None}

    seen: list[vitrim.TokenState] = []
    found = run_groups(model, reduction._trace, groups, 40, call)
    state, (few, many) = reduction.state, seen
    assert [s.num_tokens for s in reduction.states] == [37, 33, 29, 25, 21]
    assert state.mask is not None
    assert state.mask.sum(dim=1).tolist() == [21, few.num_tokens, 21]
    assert torch.equal(state.size[0], many.size[0])
    assert torch.equal(state.size[1][state.mask[1]], few.size[0])
    assert state.source.shape == (3, 41)
    assert (state.source[:, 37:] == -1).all()
    assert torch.equal(state.source[1, :13], few.source[0])
    assert found["none"] is None
    assert found["tokens"].shape == (3, 21, 32)
    assert not found["tokens"][1, few.num_tokens :].any()
    assert torch.equal(found["list"][0], found["tokens"][:, 0])
    laid_out = unmerge(found["tokens"], state)
    assert not laid_out[1, 13:].any()
    assert torch.equal(laid_out[1, :13], unmerge(found["tokens"][1:2, : few.num_tokens], few)[0])


def test_several_grids_on_a_sharded_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with other numbers of grids would call the blocks, and so gather their weights, at other times."""
    model, reduction, groups = model_and_groups("tome:r=4")
    monkeypatch.setattr(padding, "sharded", lambda block: isinstance(block, nn.Module))
    with pytest.raises(vitrim.UnsupportedModelError, match="images of 2 grids, each of which takes a pass"):
        run_groups(model, reduction._trace, groups, 40, lambda group: None)
