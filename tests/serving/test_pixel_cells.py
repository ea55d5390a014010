"""Images changed before the tower: what vLLM's towers are told, and which pixels they get."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrim
from vitrim.errors import VitrimError

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")

GRIDS = [[1, 6, 4], [1, 4, 10]]
TOWERS = ("qwen2_vl.Qwen2VisionTransformer", "qwen2_5_vl.Qwen2_5_VisionTransformer", "qwen3_vl.Qwen3_VisionTransformer")
STD = (0.25, 0.5, 0.2)


def tower(name: str, backend: str) -> Any:
    """A tower of vLLM without weights: its own tables for attention, and numbers of patches in place of the others."""
    from importlib import import_module

    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    module, kind = name.split(".")
    own = getattr(import_module(f"vllm.model_executor.models.{module}"), kind)

    class Bare(own):  # type: ignore[misc]
        device = torch.device("cpu")

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.attn_backend = AttentionBackendEnum[backend]
            self.spatial_merge_size, self.spatial_merge_unit, self.embed_dim = 2, 4, 24
            if module != "qwen2_vl":
                self.hidden_size, self.tp_size, self.fp8_padded_hidden_size = 24, 2, None
            self.window_size, self.patch_size, self._rope_by_thw_cache = 32, 8, {}

        def rot_pos_emb(self, grids: Any) -> tuple[Tensor, Tensor]:
            table = torch.cat([100.0 * image + torch.arange(prod(grid)) for image, grid in enumerate(grids)])[:, None]
            return table, -table

        def rotary_pos_emb_thw(self, *grid: int) -> tuple[Tensor, Tensor]:
            table = torch.arange(float(prod(grid))).view(-1, 4, 1)
            return table, -table

        def fast_pos_embed_interpolate(self, grids: Any) -> Tensor:
            return 2 * self.rot_pos_emb(grids)[0]

        def forward(self, x: Tensor, grid: Any, *, encoder_metadata: dict[str, Any]) -> Tensor:
            self.told = encoder_metadata
            return x[::4]

    return Bare()


BACKENDS = [(name, backend) for name in TOWERS for backend in ("TORCH_SDPA", "FLASH_ATTN", "FLASHINFER")]
BACKENDS.remove((TOWERS[0], "FLASHINFER"))  # which vLLM does not run there


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_tower_that_gets_every_cell_is_told_what_vllm_tells_it(name: str, backend: str) -> None:
    from vitrim.serving.vllm.cells import features_of

    made = tower(name, backend)
    patches, kept = torch.arange(64.0)[:, None], [torch.ones(prod(grid) // 4, dtype=torch.bool) for grid in GRIDS]
    expected = made.prepare_encoder_metadata(GRIDS)
    first, second = features_of(made, patches, GRIDS, kept)
    assert torch.equal(torch.cat([first, second]), patches[::4])
    assert [len(first), len(second)] == [6, 10]
    assert {name for name, value in expected.items() if value is not None} <= made.told.keys()
    for key, value in expected.items():
        assert made.told[key] is None if value is None and key != "max_seqlen" else True
        assert value is None or torch.equal(torch.as_tensor(made.told[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_is_told_of_the_cells_that_it_gets(name: str) -> None:
    """Images of 3 x 2 and 2 x 5 cells. Windows are of 2 x 2 cells: one without cells is no window."""
    from vitrim.serving.vllm.cells import features_of

    made = tower(name, "FLASH_ATTN")
    kept = [torch.tensor([0, 1, 0, 1, 1, 0]).bool(), torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0, 0]).bool()]
    features = features_of(made, torch.arange(24.0)[:, None], GRIDS, kept)
    assert [len(own) for own in features] == [3, 3]
    assert made.told["cu_seqlens"].tolist() == [0, 12, 24]
    if name != TOWERS[1]:
        places = [4, 12, 16, 116, 120, 124]  # of a cell's first patch
        own = [place + part for place in places for part in range(4)]
        assert made.told["rotary_pos_emb_cos"][:, 0].tolist() == own
        assert made.told["rotary_pos_emb_sin"][:, 0].tolist() == [-row for row in own]
        assert made.told["max_seqlen"].item() == 12
        assert name != TOWERS[2] or made.told["pos_embeds"][:, 0].tolist() == [2 * row for row in own]
        return
    # of the first image, windows are of cells 0 1 2 3 and 4 5, of the second of 0 1 5 6, 2 3 7 8 and 4 9
    assert made.told["window_index"].tolist() == [0, 1, 2, 4, 5, 3]
    assert made.told["reverse_indices"].tolist() == [0, 1, 2, 5, 3, 4]
    assert made.told["rotary_pos_emb_cos"][::4, 0].tolist() == [4, 12, 16, 20, 24, 16]
    assert made.told["cu_window_seqlens"].tolist() == [0, 8, 12, 20, 24]
    assert [made.told[key].item() for key in ("max_seqlen_full", "max_seqlen_window")] == [12, 8]


def info() -> Any:
    vision = SimpleNamespace(spatial_merge_size=2, patch_size=4, temporal_patch_size=2)
    return SimpleNamespace(
        get_hf_config=lambda: SimpleNamespace(vision_config=vision),
        get_image_processor=lambda: SimpleNamespace(image_std=STD),
    )


def processed(normalized: bool) -> dict[str, Tensor]:
    """Patches of 3 x 2 and 2 x 5 cells whose pixels differ by up to 40 of 255, as bytes or as a processor's numbers."""
    draw = torch.Generator().manual_seed(3)
    shades = torch.randint(0, 40, (16, 1, 3, 1, 1), generator=draw).expand(-1, 4, -1, 2, 16).reshape(64, 96)
    values = shades.to(torch.uint8)
    if normalized:
        values = (shades.view(64, 3, 32) / 255 - 0.4).div(torch.tensor(STD)[:, None]).view(64, 96)
    return {"pixel_values": values, "image_grid_thw": torch.tensor(GRIDS)}


@pytest.mark.parametrize("tau", [0, 0.05, 0.1])
def test_bytes_and_numbers_leave_the_same_cells(tau: float) -> None:
    from vitrim.serving.vllm.cells import CELLS, changed

    selector: Any = vitrim.parse_selector(f"pixelprune:tau={tau}")
    shades = processed(False)["pixel_values"].view(16, 4, 3, 2, 16)[:, 0, :, 0].flatten(1) / 255
    expected = [selector.kept_cells(own).flatten() for own in (shades[:6].view(3, 2, -1), shades[6:].view(2, 5, -1))]
    for normalized in (False, True):
        given = processed(normalized)
        found = changed(info(), given, "image", selector)
        assert all(torch.equal(own, other) for own, other in zip(found[CELLS], expected, strict=True))
        rows = torch.cat(expected).repeat_interleave(4)
        assert torch.equal(found["pixel_values"], given["pixel_values"][rows])
    assert sum(int(own.sum()) for own in expected) < 16 or not tau


def test_a_smaller_image_of_bytes_is_that_of_numbers() -> None:
    from vitrim.serving.vllm.cells import changed

    selector: Any = vitrim.parse_selector("resize:tokens=4")
    own, numbers = (changed(info(), processed(normalized), "image", selector) for normalized in (False, True))
    assert torch.equal(own["image_grid_thw"], numbers["image_grid_thw"])
    assert own["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 6]]
    scaled = (own["pixel_values"].view(-1, 3, 32) / 255 - 0.4) / torch.tensor(STD)[:, None]
    torch.testing.assert_close(scaled.flatten(1), numbers["pixel_values"], atol=1e-5, rtol=0)
    assert own["pixel_values"].frac().abs().max() > 0.1


@pytest.mark.parametrize("select", ["pixelprune", "resize:tokens=4"])
def test_what_has_no_pixels_is_refused(select: str) -> None:
    from vitrim.serving.vllm.cells import changed

    selector: Any = vitrim.parse_selector(select)
    given = {"image_embeds": torch.zeros(16, 8), "image_grid_thw": torch.tensor(GRIDS)}
    with pytest.raises(
        VitrimError, match=r" acts on pixels, and images came as embeddings: ask for vitrim_select=none"
    ):
        changed(info(), given, "image", selector)


def test_videos_have_no_cells() -> None:
    from vitrim.serving.vllm.cells import changed

    found = processed(True)
    given = {"pixel_values_videos": found["pixel_values"], "video_grid_thw": found["image_grid_thw"]}
    selector: Any = vitrim.parse_selector("pixelprune")
    with pytest.raises(
        VitrimError, match=r"^pixelprune leaves out cells of images: for a video ask for vitrim_select=no"
    ):
        changed(info(), given, "video", selector)
