"""Qwen's vision towers: packed images of any size, whole cells of 2 x 2 patches, what follows reads every place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_further_hosts import tensors
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import tiny
import vitrim
from tiny_vlms import QWEN, VLMS
from vitrim.core.cells import CellReducer
from vitrim.core.registry import host_of

TOWERS = ("qwen2_vl", "qwen3_vl")
GRIDS = ((1, 6, 6), (2, 4, 6), (1, 6, 6))
"""Two images and a clip of two frames."""

every_tower = pytest.mark.parametrize("name", TOWERS)


def tower(name: str) -> Any:
    return VLMS[name].create().double().model.visual  # type: ignore[union-attr]


def patches(grids: tuple[tuple[int, ...], ...] = GRIDS, seed: int = 3) -> tuple[Tensor, Tensor]:
    grid = torch.tensor(grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64), grid


def run(model: Any, given: tuple[Tensor, Tensor]) -> list[Tensor]:
    torch.manual_seed(5)
    with torch.no_grad():
        return tensors(model(*given))


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@every_tower
def test_reducing_nothing_gives_what_the_library_gives(name: str) -> None:
    model = tower(name)
    dense = run(model, patches())
    for method in ("none", "tome:r=0"):
        vitrim.reduce_(model, method)
        close(run(model, patches()), dense, 1e-6)  # angles are applied in float32
        vitrim.restore_(model)
        assert all(torch.equal(*pair) for pair in zip(run(model, patches()), dense, strict=True))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "config", list({config.name: config for config in reversed(tiny.configs())}.values()), ids=lambda c: c.name
)
@pytest.mark.filterwarnings("ignore::vitrim.ReductionWarning")  # there are nine cells
@every_tower
def test_methods_reduce_whole_cells_or_are_refused(name: str, config: vitrim.MethodConfig) -> None:
    """Every patch has its row again, images alone give what they give together, and copies the same."""
    model, given = tower(name), patches()
    dense = run(model, given)
    try:
        reduction = vitrim.reduce_(model, tiny.fits(config, model), record=True)
    except (vitrim.UnsupportedModelError, pytest.skip.Exception):
        assert config.name not in ("tome", "topk", "random", "none", "pitome", "evit", "dpc_knn")
        assert not any(hasattr(block, "reducer") for block in model.blocks)
        return
    out = run(model, given)
    assert [part.shape for part in out] == [part.shape for part in dense]
    assert all(part.isfinite().all() for part in out)
    for state in reduction.states:
        assert state.size.shape[0] == 4  # frames are rows
        if state.mask is None:
            cells = state.position.unflatten(1, (-1, 4))
            assert torch.equal(cells, cells[..., :1] // 4 * 4 + torch.arange(4))
    if config.kind not in ("none",) and not reduction.states[-1].banking and config.name != "random":
        assert reduction.states[-1].num_tokens < 36
    assert all(torch.equal(*pair) for pair in zip(run(copy.deepcopy(model), given), out, strict=True))
    if config.name != "random" and not config.traits.batch_dependent:
        single = run(model, (given[0][36:84], given[1][1:2]))
        torch.testing.assert_close(out[0][36:84], single[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(out[1][9:21], single[1], atol=1e-6, rtol=1e-6)
    vitrim.restore_(model)
    assert all(torch.equal(*pair) for pair in zip(run(model, given), dense, strict=True))


@every_tower
def test_merging_equal_cells_changes_nothing(name: str) -> None:
    """Without positions: groups weigh as much as they hold in attention, and the merger reads each of them everywhere.

    The first two blocks do not merge, so that sizes matter to those behind.
    """
    model = tower(name)
    angles = model.rotary_pos_emb
    angles.register_forward_hook(lambda m, a, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
    if name == "qwen3_vl":
        torch.nn.init.zeros_(model.pos_embed.weight)
    values, grid = patches(((1, 6, 8), (1, 6, 8)))
    cells = values.unflatten(0, (-1, 2, 4))
    cells[:, 1] = cells[:, 0]  # every second cell repeats its neighbour
    given = cells.flatten(0, 2), grid
    dense = run(model, given)
    reduction = vitrim.reduce_(model, "tome:r=[4,0,0,0]")
    close(run(model, given), dense, 1e-6)
    assert reduction.state.size.unique().tolist() == [1.0, 2.0]


@every_tower
def test_pruned_cells_come_back_and_gradients_flow(name: str, tmp_path: Path) -> None:
    model, given = tower(name), patches()
    reduction = vitrim.reduce_(model, "topk:keep_rate=0.5,score=column_mean")
    out = run(model, given)
    assert reduction.state.num_inputs >= 36
    assert out[0].abs().amax(dim=1).min() > 0  # no row of zeros
    gradients = []
    for checkpointed in (False, True):
        model.train()
        model.zero_grad()
        if checkpointed:
            model.gradient_checkpointing_enable()
        sum(part.square().sum() for part in tensors(model(*given))).backward()  # type: ignore[union-attr]
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(*pair) for pair in zip(*gradients, strict=True))
    reduction.save(tmp_path)
    twin = tower(name)
    vitrim.Reduction.load(twin, tmp_path)
    assert all(torch.equal(*pair) for pair in zip(run(twin, given), out, strict=True))


def test_amounts_are_of_cells() -> None:
    model = tower("qwen2_vl")
    reduction = vitrim.reduce_(model, "tome:r=2", record=True)
    run(model, patches(((1, 6, 6),)))
    assert reduction.tokens_per_block == [28, 20, 12, 8]  # half of the cells at most
    assert all(isinstance(block.reducer, CellReducer) for block in model.blocks)
    assert host_of(model).facts(model).units == (16, 16)


def test_windowed_towers_are_refused_with_the_reason() -> None:
    model = Qwen2_5_VisionTransformerPretrainedModel(
        Qwen2_5_VLVisionConfig(**QWEN, hidden_size=32, intermediate_size=32, out_hidden_size=16, window_size=16)
    )
    with pytest.raises(vitrim.UnsupportedModelError, match="attends within windows of"):
        vitrim.reduce_(model, "tome:r=2")


@pytest.mark.parametrize(
    "grids",
    [[[1, 5, 6]], [[0, 6, 6]], [[1, -6, -6]], [[1, 6, 6], [1, 6, 6]], [[1, 6.0, 6]], [[6, 6]], [[1, 3, 12]]],
    ids=str,
)
def test_grids_that_are_not_those_of_the_patches_are_refused(grids: list[list[float]]) -> None:
    model, (packed, _) = tower("qwen2_vl"), patches(((1, 6, 6),))
    vitrim.reduce_(model, "tome:r=1")
    with pytest.raises(
        vitrim.VitrimError, match=r"expected grid_thw .* with 36 patches in all, .* multiples of 2, got"
    ):
        model(packed, grid_thw=torch.tensor(grids))
