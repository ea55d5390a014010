"""Pictures of what a language model gets of an image, by the data behind the axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor
from typer.testing import CliRunner

import vitrim
from tiny_other_vlms import OTHERS
from tiny_vlms import VLMS
from vitrim.cli import app
from vitrim.core.registry import parse_method
from vitrim.engines.prefill import Prefill
from vitrim.loading import create_model
from vitrim.plots.image_tokens import copies, image_token_rows
from vitrim.plots.patches import HATCH_GROUND, HATCH_LINE, OUTLINE_COLOUR, draw_kept

IMAGE = torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llava() -> Any:
    return VLMS["llava"].create()


def rows(model: Any, method: str, select: str | None) -> Any:
    prefill = Prefill(model, text=4, select=select)
    image = torch.rand(prefill.shape[1:], generator=torch.Generator().manual_seed(0))
    (row,) = image_token_rows(prefill, copies(prefill, [parse_method(method)]), image)
    return row, prefill, image


def test_places_are_those_that_the_selector_keeps(llava: Any) -> None:
    row, prefill, image = rows(llava, "none", "divprune:tokens=9")
    with torch.no_grad():
        features = llava.model.get_image_features(image[None], return_dict=True).pooler_output[0]
    kept = prefill.select.mask(features).numpy()
    assert row.name == "none + divprune:tokens=9"
    assert row.text == "9 of 36 image tokens"
    assert row.sources.tolist() == [place if kept[place] else -1 for place in range(36)]
    assert not row.made.any()


def test_tokens_of_a_reduced_tower_stand_for_what_they_hold(llava: Any) -> None:
    """Places by the state behind the block that the projector reads; a selector leaves whole groups out."""
    row, prefill, image = rows(llava, "tome:r=4", None)
    reduction = vitrim.reduce_(llava, "tome:r=4", compact=True, record=True)
    with torch.no_grad():
        prefill(image[None, None])
    state = reduction.states[3]
    vitrim.restore_(llava)
    anchors = (state.position[0] - 1)[state.source[0, 1:]].tolist()
    assert row.sources.tolist() == anchors
    assert len(set(anchors)) == 24
    few = rows(llava, "tome:r=4", "divprune:tokens=5")[0].sources
    left = set(few.tolist()) - {-1}
    assert len(left) == 5
    assert few.tolist() == [anchor if anchor in left else -1 for anchor in anchors]
    assert rows(llava, "tome:r=0", None)[0].sources.tolist() == list(range(36))  # the first of them, too
    pruned = rows(llava, "topk:keep_rate=0.5,blocks=[1]", None)[0].sources
    assert (pruned < 0).sum() == 18
    assert all(place == own for own, place in enumerate(pruned.tolist()) if place >= 0)


def test_merged_tokens_are_told_from_those_kept(llava: Any) -> None:
    """Of nine tokens of VisionZip one is the class token, which stands nowhere, and three are made of several."""
    row = rows(llava, "none", "visionzip:tokens=9,contextual=3")[0]
    assert row.text == "9 of 36 image tokens"
    assert (row.sources >= 0).sum() == 8
    assert row.made.sum() == 3
    assert (row.sources[row.made] >= 0).all()
    rest = rows(llava, "none", "prumerge:tokens=5")[0]
    assert (rest.sources >= 0).sum() == rest.made.sum() == 4


@pytest.mark.parametrize("name", ["llava_full", "internvl", "gemma3", "qwen2_vl"])
def test_other_families(name: str) -> None:
    """Cells count as places; a class token in the prompt goes on, and is none of the picture's."""
    row, prefill, _ = rows(VLMS[name].create(), "tome:r=1", "divprune:tokens=4")
    assert row.text == f"{4 + (name == 'llava_full')} of {prefill.places} image tokens"
    kept = set(row.sources.tolist()) - {-1}
    assert len(kept) == 4
    assert len(row.sources) == prefill.places - (name == "llava_full")
    assert all(row.sources[place] == place for place in kept)


def test_a_windowed_tower() -> None:
    row = rows(OTHERS["qwen2_5_vl"].create(), "none", "fastervlm:tokens=9")[0]
    assert row.text == "9 of 256 image tokens"
    assert (row.sources >= 0).sum() == 9


def test_what_is_made_of_several_is_outlined_and_what_is_gone_hatched() -> None:
    image = np.full((24, 24, 3), 0.5, np.float32)
    drawn = draw_kept(image, np.array([0, -1, 2, 3]), (2, 2), made=np.array([False, False, True, False]))
    greys = {tuple(np.float32(grey)) for grey in (HATCH_GROUND, HATCH_LINE)}
    assert {tuple(pixel) for pixel in drawn[:12, 12:].reshape(-1, 3)} <= greys
    border = np.zeros((12, 12), bool)
    border[[0, -1]] = border[:, [0, -1]] = True
    assert ((drawn[12:, :12] == np.float32(OUTLINE_COLOUR)).all(-1) == border).all()
    assert (drawn[:12, :12] == 0.5).all()
    assert (drawn[12:, 12:] == 0.5).all()


def test_show_draws_a_picture_for_every_method(llava: Any, tmp_path: Path) -> None:
    shown = vitrim.show(llava, ["none", "tome:r=4"], IMAGE, select="cdpruner:tokens=9", out=tmp_path)
    titles = [axis.get_title() for axis in shown.figure.axes if axis.get_title()]
    assert titles[0] == "image"
    assert [title.splitlines()[-1] for title in titles[1:]] == ["9 of 36 image tokens"] * 2
    assert shown.rows[0]["tome:r=4 + cdpruner:tokens=9"] == "9 of 36 image tokens"
    assert shown.notes == ["cdpruner:tokens=9: the text of the prompt is a made one"]
    assert [file.name for file in shown.files] == ["image_0.png"]
    assert "vitrim_reduction" not in vars(llava)
    for wrong in ({"blocks": [1]}, {"select": None}):
        with pytest.raises(vitrim.VitrimError):
            vitrim.show(llava, (), IMAGE, **{"select": "divprune", **wrong})
    with pytest.raises(vitrim.VitrimError, match="of a vision-language model"):
        vitrim.show("test_vit", "tome:r=4", torch.rand(3, 160, 160), select="divprune")


def test_the_command_reads_files_as_the_processor_says(llava: Any, tmp_path: Path) -> None:
    llava.config.save_pretrained(tmp_path)
    CLIPImageProcessor(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    Image.new("RGB", (40, 30), (255, 0, 0)).save(tmp_path / "red.png")
    given = ["show", f"hf:{tmp_path}", str(tmp_path / "red.png"), "--select", "divprune:tokens=9"]
    result = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "none + divprune:tokens=9: 9 of 36 image tokens" in result.output
    assert (tmp_path / "out" / "red.png").is_file()
    loaded = create_model(f"hf:{tmp_path}")
    figure = vitrim.show(loaded, (), tmp_path / "red.png", select="divprune:tokens=9").figure
    np.testing.assert_allclose(figure.axes[0].get_images()[0].get_array()[12, 12], [1, 0, 0], atol=1e-5)
