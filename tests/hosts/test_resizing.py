"""Images made smaller in front of the tower: what the library answers to smaller images.

What is right is the library on pixels resized here, and a prompt with as many placeholders as these have tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import vitrim
from tiny_other_vlms import OTHERS
from tiny_vlms import IMAGE, VLMS
from vitrim.hosts.transformers.vlm_smaller import packed, unpacked

ALL = {**VLMS, **OTHERS}
SIDE = {"llava": 4, "llava_full": 4, "vipllava": 4, "paligemma": 4, "internvl": 8}
"""Pixels of a token of a tower with a fixed size."""
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def smaller(images: Tensor, rows: int, columns: int) -> Tensor:
    return F.interpolate(images, size=(rows, columns), mode="bicubic", antialias=True)


def logits(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**given).logits  # type: ignore[no-any-return]


def patches(images: Tensor, side: int = 4, cell: int = 2) -> tuple[Tensor, list[int]]:
    """(n, values) of one clip of frames (2 t, 3, H, W), cell by cell, in loops; and its grid."""
    times, rows, columns = len(images) // 2, images.shape[2] // side, images.shape[3] // side
    found = [
        images[2 * t : 2 * t + 2, :, r * side : r * side + side, c * side : c * side + side].transpose(0, 1).flatten()
        for t in range(times)
        for row in range(0, rows, cell)
        for column in range(0, columns, cell)
        for r in range(row, row + cell)
        for c in range(column, column + cell)
    ]
    return torch.stack(found), [times, rows, columns]


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(4, 2, 2), (1, 1, 1), (22, 5, 4), (2000, 6, 6)])
@pytest.mark.parametrize("name", SIDE)
def test_a_fixed_tower_reads_smaller_images(name: str, tokens: int, rows: int, columns: int) -> None:
    """Positions as the library interpolates them; a class token that goes on stays; two prompts, one of them padded."""
    model, given = ALL[name].create(), ALL[name].prompt([[7, 11, 13], [17, 19]])
    whole = 24 // SIDE[name]
    rows, columns = min(rows, whole), min(columns, whole)
    dense = logits(model, given)
    front = ALL[name].tokens - whole * whole
    hand = ALL[name].prompt([[7, 11, 13], [17, 19]], [rows * columns + front] * 3)
    del hand["pixel_values"]
    pixels = smaller(given["pixel_values"], rows * SIDE[name], columns * SIDE[name])
    options = {} if name == "internvl" else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        output = model.base_model.get_image_features(pixel_values=pixels, **options, return_dict=True)
    expected = logits(model, {**hand, "mm_encoder_outputs": {"image": output}})
    reduction = vitrim.reduce_(model, select=f"resize:tokens={tokens}")
    found = logits(model, given)
    real = hand["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)
    assert reduction.image_tokens == [rows * columns + front] * 3
    (picture, *_) = reduction.image_places
    assert len(picture.kept) == whole * whole + front
    assert picture.merged.sum() == (rows * columns if rows < whole else 0)
    new = model.generate(**given, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert torch.equal(new[:, : given["input_ids"].shape[1]], given["input_ids"])
    vitrim.restore_(model)
    assert torch.equal(logits(model, given), dense)


@pytest.mark.parametrize("name", [*QWEN, "qwen3_vl_moe", "qwen3_5", "glm4v", "glm46v", "glm_ocr"])
def test_a_tower_of_any_size_reads_smaller_images(name: str) -> None:
    """Positions of the smaller images, on three axes, also for what follows: the library's own on the same prompt."""
    model = ALL[name].create()
    images = [torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(3)) for size in ((24, 40), (32, 16))]
    grids: dict[bool, Any] = {}
    for small in (False, True):
        sizes = [(16, 24), (16, 8)] if small else [(24, 40), (32, 16)]  # 2 x 3 and 2 x 1 tokens of 3 x 5 and 4 x 2
        own = [patches(smaller(image, *size).repeat(2, 1, 1, 1)) for image, size in zip(images, sizes, strict=True)]
        counts = [rows * columns // 4 for _, (_, rows, columns) in own]
        row = [7, 4, *[IMAGE] * counts[0], 5, 8, 4, *[IMAGE] * counts[1], 5, 9]
        ids = torch.tensor([row])
        grids[small] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE).long(),
            "pixel_values": torch.cat([one for one, _ in own]),
            "image_grid_thw": torch.tensor([grid for _, grid in own]),
        }
    expected = logits(model, grids[True])
    new = model.generate(**grids[True], max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, -4:]
    reduction = vitrim.reduce_(model, select="resize:keep=0.4")
    torch.testing.assert_close(logits(model, grids[False]), expected, atol=1e-5, rtol=1e-5)
    assert reduction.image_tokens == [6, 2]
    assert torch.equal(model.generate(**grids[False], max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, -4:], new)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Glm46V"])
def test_patches_are_those_of_the_processor(kind: str) -> None:
    """Two images of two sizes; for one, and its copy, the picture comes back."""
    processor = getattr(transformers, f"{kind}ImageProcessor")(
        do_resize=False, patch_size=4, temporal_patch_size=2, merge_size=2, image_mean=[0, 0, 0], image_std=[1, 1, 1]
    )
    images = [torch.randint(256, (3, *size), dtype=torch.uint8) for size in ((24, 40), (32, 16))]
    given = processor(images=images, return_tensors="pt")
    config = SimpleNamespace(patch_size=4, temporal_patch_size=2, spatial_merge_size=2)
    parts = given["pixel_values"].split(given["image_grid_thw"].prod(dim=1).tolist())
    for image, own, grid in zip(images, parts, given["image_grid_thw"].tolist(), strict=True):
        clip = unpacked(config, own, tuple(grid))
        torch.testing.assert_close(clip, image.float().div(255).expand(2, -1, -1, -1))
        assert torch.equal(packed(config, clip), own)


@pytest.mark.parametrize("name", QWEN)
def test_frames_of_a_video_get_smaller_together(name: str) -> None:
    """2 x 3 tokens of 3 x 5 in each of two pairs of frames; Qwen3-VL has a timestamp before every pair."""
    model: Any = ALL[name].create()
    video = torch.randn(4, 3, 24, 40, generator=torch.Generator().manual_seed(3))
    inputs = []
    for size, count in (((24, 40), 15), ((16, 24), 6)):
        pixels, grid = patches(smaller(video, *size))
        frames = [[20, *[3] * count], [21, *[3] * count]] if name == "qwen3_vl" else [[3] * (2 * count)]
        ids = torch.tensor([[7, 4, *[token for frame in frames for token in frame], 5, 9]])
        inputs.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": 2 * (ids == 3).long(),
                "pixel_values_videos": pixels,
                "video_grid_thw": torch.tensor([grid]),
            }
        )
    expected = logits(model, inputs[1])
    reduction = vitrim.reduce_(model, select="resize:tokens=12")
    torch.testing.assert_close(logits(model, inputs[0]), expected, atol=1e-5, rtol=1e-5)
    assert reduction.image_tokens == [12]


def test_labels_and_what_is_counted_follow_the_smaller_image() -> None:
    model, given = VLMS["llava"].create(), VLMS["llava"].prompt([[7, 11]])
    given["labels"] = torch.where(given["input_ids"] == IMAGE, -100, given["input_ids"])
    short = VLMS["llava"].prompt([[7, 11]], [4])
    labels = torch.where(short["input_ids"] == IMAGE, -100, short["input_ids"])
    with torch.no_grad():
        pixels = smaller(given["pixel_values"], 8, 8)
        output = model.model.get_image_features(pixel_values=pixels, interpolate_pos_encoding=True, return_dict=True)
        hand = {"input_ids": short["input_ids"], "labels": labels, "mm_encoder_outputs": {"image": output}}
        expected = model(**hand).loss
        vitrim.reduce_(model, select="resize:tokens=4")
        torch.testing.assert_close(model(**given).loss, expected)


def test_products_of_the_tower_fall_too() -> None:
    """5 tokens, not 37, as class token and patches; pool leaves the tower as it is."""
    model = VLMS["llava"].create()
    found: dict[str, dict[str, float]] = {}
    for select in ("pool:tokens=4", "resize:tokens=4"):
        report = vitrim.profile(model, prompt=vitrim.Prompt(5, select=select))
        for name, row in zip(("dense", select), report.rows, strict=True):
            found[name] = {part: sum(own.values()) for part, own in row["prefill"]["gmacs"].items()}
        assert report.rows[1]["prefill"]["image_tokens"] == 4
        assert report.rows[1]["tokens_per_block"] == ([] if select.startswith("resize") else [37] * 4)
    dense, pool, resize = found.values()
    assert pool["tower"] == dense["tower"]
    assert resize["language model"] == pool["language model"]
    assert dense["tower"] * (5 / 37) ** 2 < resize["tower"] < dense["tower"] * 5 / 37


def test_what_cannot_be_resized_is_refused() -> None:
    for name in ("pixtral", "gemma3", "idefics3", "llava_next"):
        with pytest.raises(vitrim.UnsupportedModelError, match="processor"):
            vitrim.reduce_(ALL[name].create(), select="resize:tokens=4")
    llava = VLMS["llava"].create()
    with pytest.raises(vitrim.VitrimError, match="give no method"):
        vitrim.reduce_(llava, "tome:r=1", select="resize:tokens=4")
    with pytest.raises(vitrim.VitrimError, match="positions"):
        vitrim.parse_selector("resize:positions=original")
    with pytest.raises(vitrim.VitrimError, match="acts on images"):
        vitrim.parse_selector("resize").mask(torch.zeros(4, 2))
    internvl, given = VLMS["internvl"].create(), VLMS["internvl"].prompt([[7, 11]])
    vitrim.reduce_(internvl, select="resize:tokens=7")
    with pytest.raises(vitrim.VitrimError, match="square"):
        logits(internvl, given)
    qwen = VLMS["qwen2_vl"].create()
    vitrim.reduce_(qwen, select="resize:tokens=4")
    given = VLMS["qwen2_vl"].prompt([[7, 11]])
    with pytest.raises(vitrim.VitrimError, match="position_ids"):
        logits(qwen, {**given, "position_ids": torch.zeros(3, *given["input_ids"].shape, dtype=torch.long)})


@pytest.mark.parametrize(
    ("grid", "tokens", "few"), [((24, 24), 64, 64), ((4, 6, 6), 36, 36), ((4, 6, 6), 2, 4), (576, 63, 56)]
)
def test_the_number_is_known_before(grid: Any, tokens: int, few: int) -> None:
    assert vitrim.parse_selector(f"resize:tokens={tokens}").count(grid) == few
