"""Cells of patches that are left out in front of the towers of Qwen.

What is right: the tower's own layers in plain lines, on the patches that stay, at their places in the whole image; and
the library's language model on the shorter prompt, at the positions of the whole one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import vitrim
from tiny_other_vlms import OTHERS
from tiny_vlms import IMAGE, VLMS

ALL = {**VLMS, **OTHERS}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
SIDE, CELL = 4, 2
SIZES = [(5, 6), (3, 4)]
KEPT = [[0, 14, 17, 26], [0, 6, 7, 10, 11]]
"""Cells that stay of 5 x 6 and 3 x 4: the worked example of the spec, and a square in the corner of a page."""
PAGES = ["1 1 1 1 1 1 1 1 1 1 1 1 1 1 5 5 5 1 1 1 5 5 5 1 1 1 1 1 1 1", "1 1 1 1 1 1 5 6 1 1 7 8"]


def pages(numbers: list[str]) -> tuple[Tensor, Tensor]:
    """Patches, cell by cell, and grids: equal numbers are equal cells of noise, equal in both frames."""
    own = torch.randn(30, CELL * CELL, 3, 1, SIDE * SIDE, generator=torch.Generator().manual_seed(5))
    patches = [own[[int(cell) for cell in page.split()]].expand(-1, -1, -1, 2, -1).reshape(-1, 96) for page in numbers]
    return torch.cat(patches), torch.tensor(
        [[1, CELL * rows, CELL * columns] for rows, columns in SIZES[: len(numbers)]]
    )


def prompt(numbers: list[str], rows: list[list[int]] | None = None, **ends: Any) -> dict[str, Tensor]:
    """Texts with images between them; negative numbers are images, counted from -1. Rows are padded on the left."""
    patches, grids = pages(numbers)
    every = rows or [[7, 4, -1, 5, 8, 9, 4, -2, 5, 11]]
    cells = [rows * columns for rows, columns in SIZES]
    ids = [[x for own in row for x in ([IMAGE] * cells[-own - 1] if own < 0 else [own])] for row in every]
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    return {
        "input_ids": padded,
        "attention_mask": (padded != 0).long(),
        "mm_token_type_ids": (padded == IMAGE).long(),
        "pixel_values": patches,
        "image_grid_thw": grids,
        **ends,
    }


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def tower(visual: Any, patches: Tensor, rows: int, columns: int, kept: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Features (cells that stay, D) of one image, and those for further layers, in plain lines."""
    grid = torch.arange(rows * columns).view(rows // CELL, CELL, columns // CELL, CELL)
    raster = grid.transpose(1, 2).reshape(-1, CELL * CELL)[kept].flatten()  # places in the image, in the order of cells
    stay = torch.tensor([CELL * CELL * cell + part for cell in kept for part in range(CELL * CELL)])
    row, column = raster // columns, raster % columns
    x = visual.patch_embed(patches)[stay]
    if hasattr(visual, "pos_embed"):
        table = visual.pos_embed.weight.view(1, visual.num_grid_per_side, -1, x.shape[-1]).permute(0, 3, 1, 2)
        whole = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)
        x = x + whole[0].flatten(1).T[raster]
    cos, sin = visual.rotary_pos_emb(x, torch.stack([row, column], dim=1))
    together = torch.ones(len(x), len(x), dtype=torch.bool)
    side = getattr(visual, "window_size", 0) // SIDE
    window = row // side * columns + column // side if side else row * 0
    further = []
    for number, block in enumerate(visual.blocks):
        whole = number in getattr(visual, "fullatt_block_indexes", range(99))
        q, k, v = block.attn.qkv(block.norm1(x)).view(len(x), 3, block.attn.num_heads, -1).permute(1, 2, 0, 3)
        weights = (turned(q, cos, sin) @ turned(k, cos, sin).mT * q.shape[-1] ** -0.5).masked_fill(
            ~(together if whole else window[:, None] == window), float("-inf")
        )
        x = x + block.attn.proj((weights.softmax(dim=-1) @ v).transpose(0, 1).flatten(1))
        x = x + block.mlp(block.norm2(x))
        if number in getattr(visual, "deepstack_visual_indexes", []):
            further.append(visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(number)](x))
    return visual.merger(x), further


@torch.no_grad()
def shortened(model: Any, given: dict[str, Tensor], kept: list[list[int]]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The library's inputs for the tokens that stay, which of the prompt these are, and what position comes next."""
    ids, mask = given["input_ids"], given["attention_mask"]
    positions, _ = model.model.get_rope_index(
        ids, image_grid_thw=given["image_grid_thw"], attention_mask=mask, mm_token_type_ids=given["mm_token_type_ids"]
    )
    images = given["pixel_values"].split(given["image_grid_thw"].prod(dim=1).tolist())
    found = [
        tower(model.model.visual, image, grid[1], grid[2], own)
        for image, grid, own in zip(images, given["image_grid_thw"].tolist(), kept, strict=True)
    ]
    output = model.model.get_image_features(given["pixel_values"], given["image_grid_thw"], return_dict=True)
    output.pooler_output = [features for features, _ in found]
    if getattr(output, "deepstack_features", None) is not None:
        layers = len(output.deepstack_features)
        output.deepstack_features = [[further[layer] for _, further in found] for layer in range(layers)]
    flags = torch.ones_like(ids, dtype=torch.bool)
    flags[ids == IMAGE] = torch.cat(
        [
            torch.isin(torch.arange(int(grid.prod()) // CELL**2), torch.tensor(own))
            for grid, own in zip(given["image_grid_thw"], kept, strict=True)
        ]
    )
    assert len(ids) == 1
    own = positions[:, :, flags[0]]
    numbers = torch.arange(own.shape[2]).view(1, 1, -1)
    inputs = {
        "input_ids": ids[:, flags[0]],
        "position_ids": torch.cat([numbers, own]),
        "mm_encoder_outputs": {"image": output},
    }
    return inputs, flags, positions.amax(dim=(0, 2)) + 1


@torch.no_grad()
def logits(model: Any, given: dict[str, Any]) -> Tensor:
    return model(**given, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_stays_is_read_at_its_place(name: str) -> None:
    """Two images of two sizes, in the tower and in the language model, also step by step."""
    model, given = ALL[name].create(), prompt(PAGES)
    hand, flags, behind = shortened(model, given, KEPT)
    expected, dense = logits(model, hand), logits(model, given)
    steps: list[int] = []
    for _ in range(3):  # the whole prompt again for every token
        longer = dict(hand)
        places = torch.cat([hand["position_ids"][:1, :, -1:] + 1, behind.view(1, 1, 1).expand(3, -1, -1)])
        more = torch.arange(len(steps)).view(1, 1, -1)
        longer["position_ids"] = torch.cat([hand["position_ids"], places + more], dim=2)
        longer["input_ids"] = torch.cat([hand["input_ids"], torch.tensor([steps], dtype=torch.long)], dim=1)
        steps.append(int(logits(model, longer)[0, -1].argmax()))
    reduction = vitrim.reduce_(model, select="pixelprune:tau=0")
    torch.testing.assert_close(logits(model, given), expected, atol=1e-5, rtol=1e-5)
    assert reduction.image_tokens == [4, 5]
    assert [image.kept.nonzero().squeeze(1).tolist() for image in reduction.image_places] == KEPT
    assert not any(image.merged.any() for image in reduction.image_places)
    new = model.generate(**given, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert new[0, given["input_ids"].shape[1] :].tolist() == steps
    assert (expected[0, -1] - dense[0, -1]).abs().max() > 1e-3  # or nothing is tested
    assert int(flags.sum()) == expected.shape[1]
    vitrim.restore_(model)
    assert torch.equal(logits(model, given), dense)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_repeats_nothing_is_answered_as_before(name: str) -> None:
    """Bit for bit, in both rows of a padded batch; with a threshold, too."""
    page = [" ".join(map(str, range(rows * columns))) for rows, columns in SIZES]
    model, given = ALL[name].create(), prompt(page, [[7, 4, -1, 5, 8], [9, 4, -2, 5, 11]])
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    dense, new = logits(model, given), model.generate(**given, **options)
    for select in ("pixelprune:tau=0", "pixelprune:tau=0.01"):
        reduction = vitrim.reduce_(model, select=select)
        assert torch.equal(logits(model, given), dense)
        assert torch.equal(model.generate(**given, **options), new)
        assert reduction.image_tokens == [30, 12]
        vitrim.restore_(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_batch_are_answered_as_alone(name: str) -> None:
    """One ends in its image, of which the first cell stays, and what follows stands as behind the whole."""
    model = ALL[name].create()
    vitrim.reduce_(model, select="pixelprune")
    alone = [[7, 4, -1, 5, 8], [9, 10, 4, -1]]
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    flat = " ".join(["1"] * 30)
    given = prompt([PAGES[0], flat], alone)
    given["image_grid_thw"] = given["image_grid_thw"][[0, 0]]
    out = model.generate(**given, **options, return_dict_in_generate=True, output_logits=True)
    new = out.sequences[:, -3:]
    for page, row, own in zip([PAGES[0], flat], alone, new, strict=True):
        assert torch.equal(model.generate(**prompt([page], [row]), **options)[0, -3:], own)
    hand, _, behind = shortened(model := ALL[name].create(), prompt([flat], alone[1:]), [[0]])
    first = logits(model, hand)[:, -1:].argmax(dim=-1)
    places = torch.cat([hand["position_ids"][:1, :, -1:] + 1, behind.view(1, 1, 1).expand(3, -1, -1)])
    longer = {**hand, "position_ids": torch.cat([hand["position_ids"], places], dim=2)}
    longer["input_ids"] = torch.cat([hand["input_ids"], first], dim=1)
    torch.testing.assert_close(out.logits[1][1], logits(model, longer)[0, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "std"), [("qwen2_vl", None), ("qwen2_5_vl", None), ("qwen3_vl", 0.5), ("qwen3_5", 0.5)]
)
def test_a_threshold_is_of_pixels_as_they_were(name: str, std: float | None) -> None:
    """By the processor of the family: cells 5 of 255 apart are alike at 0.0197, in one channel as in all."""
    own = {} if std is None else {"image_mean": [0.5] * 3, "image_std": [std] * 3}
    processor = transformers.Qwen2VLImageProcessor(
        do_resize=False, patch_size=SIDE, temporal_patch_size=2, merge_size=CELL, **own
    )
    for channel in range(3):
        image = torch.full((3, 24, 24), 100, dtype=torch.uint8)
        image[channel, :, 8:] += 5  # 3 x 3 cells, of which two columns are lighter
        given = {**VLMS["qwen2_vl"].prompt([[7, 11]]), **processor(images=[image], return_tensors="pt")}
        model = ALL[name].create()
        for tau, kept in ((0.0, [0, 1]), (0.0195, [0, 1]), (0.0197, [0])):
            reduction = vitrim.reduce_(model, select=f"pixelprune:tau={tau}")
            logits(model, given)
            assert reduction.image_places[0].kept.nonzero().squeeze(1).tolist() == kept
            vitrim.restore_(model)


def test_positions_that_are_given_are_kept() -> None:
    model, given = VLMS["qwen2_vl"].create(), prompt(PAGES)
    ids = {name: given[name] for name in ("image_grid_thw", "attention_mask", "mm_token_type_ids")}
    places, _ = model.model.get_rope_index(given["input_ids"], **ids)
    vitrim.reduce_(model, select="pixelprune")
    assert torch.equal(logits(model, {**given, "position_ids": places}), logits(model, given))


def test_labels_follow() -> None:
    model, given = VLMS["qwen3_vl"].create(), prompt(PAGES)
    hand, flags, _ = shortened(model, given, KEPT)
    labels = torch.where(given["input_ids"] == IMAGE, -100, given["input_ids"])
    with torch.no_grad():
        expected = model(**hand, labels=labels[flags][None]).loss
        vitrim.reduce_(model, select="pixelprune")
        torch.testing.assert_close(model(**given, labels=labels).loss, expected)


def test_products_of_tower_and_language_model_are_counted() -> None:
    """Random images repeat nothing, and the report says so."""
    report = vitrim.profile(VLMS["qwen2_vl"].create(), prompt=vitrim.Prompt(5, select="pixelprune"))
    dense, row = (row["prefill"] for row in report.rows)
    assert row["image_tokens"] == dense["image_tokens"]
    assert any("pixelprune" in note and "depends on the image" in note for note in report.notes)


def test_what_has_no_cells_to_leave_out_is_refused() -> None:
    for name in ("llava", "internvl", "glm4v", "gemma3", "llava_next"):
        with pytest.raises(vitrim.UnsupportedModelError, match="every patch"):
            vitrim.reduce_(ALL[name].create(), select="pixelprune")
    qwen, given = VLMS["qwen2_vl"].create(), prompt(PAGES[:1], [[7, 4, -1, 5]])
    with pytest.raises(vitrim.VitrimError, match="give no method"):
        vitrim.reduce_(qwen, "tome:r=1", select="pixelprune")
    reduction = vitrim.reduce_(qwen, select="pixelprune")
    with pytest.raises(vitrim.VitrimError, match="reduce_ again"):
        reduction.set(select="resize:tokens=4")
    reduction.set(select="pixelprune:tau=0.5")
    logits(qwen, given)
    ids = given["input_ids"].where(given["input_ids"] != IMAGE, 3)
    video = {"input_ids": ids, "mm_token_type_ids": 2 * (ids == 3).long(), "attention_mask": given["attention_mask"]}
    video |= {"pixel_values_videos": given["pixel_values"], "video_grid_thw": given["image_grid_thw"]}
    with pytest.raises(vitrim.VitrimError, match="videos"):
        logits(qwen, video)
