"""Pictures of what is left of one image, by the data behind the axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image as PillowImage
from torch import nn

import vitrim
from tiny_hosts.timm_vit import HOSTS
from vitrim.core.registry import host_of
from vitrim.data import ImageDataset, eval_transform
from vitrim.errors import VitrimError
from vitrim.plots.classifier import MethodRow, draw_show, prepared, rows_of
from vitrim.plots.images import pixels_of
from vitrim.plots.patches import draw_kept
from vitrim.plots.show import show

METHODS = ("topk:keep_rate=0.5", "random:keep_rate=0.5", "tome:r=2")
IMAGE = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))


def small(**options: Any) -> nn.Module:
    """6 blocks on a grid of 4 x 4."""
    torch.manual_seed(0)
    made: nn.Module = timm.create_model("test_vit", img_size=64, **options).eval()
    return made


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return small(num_classes=5)


@pytest.fixture(scope="module")
def rows(model: nn.Module) -> list[MethodRow]:
    return rows_of(prepared(model, METHODS), IMAGE)[0]


def test_a_row_is_what_the_model_does(model: nn.Module, rows: list[MethodRow]) -> None:
    image = IMAGE[None]
    dense = model(image).softmax(-1)
    for row in rows:
        reduction = vitrim.reduce_(model, row.name, record=True)
        torch.manual_seed(0)
        shares = model(image).softmax(-1)
        sources = [state.source[0, state.num_prefix :].tolist() for state in reduction.states[1:]]
        vitrim.restore_(model)
        assert row.prediction == f"class {shares.argmax()} ({100 * shares.max().item():.0f} %)"
        assert row.same == bool(shares.argmax() == dense.argmax())
        assert row.sources.tolist() == sources
        assert f" of {1 + row.sources.shape[1]} tokens" in row.cost


def test_scores_are_those_that_the_kept_patches_won_by(rows: list[MethodRow]) -> None:
    """None are shown of draws, which say nothing about the image, nor of merges."""
    assert [bool(row.scores) for row in rows] == [True, False, False]
    for block, scores in rows[0].scores.items():
        stays = rows[0].sources[block] >= 0
        assert np.isfinite(scores[stays]).all()
        gone = np.isfinite(scores) & ~stays
        assert scores[gone].max() <= scores[stays].min()


def test_columns_are_the_blocks_that_change_tokens(model: nn.Module, rows: list[MethodRow]) -> None:
    assert [row.changed() for row in rows] == [
        sorted(rows[0].scores),
        sorted(rows[0].scores),  # the same stages
        list(range(len(rows[2].sources))),
    ]
    grid = host_of(model).facts(model).grid_size
    pixels = pixels_of(model, IMAGE)
    figure = draw_show(pixels, rows[:1], grid, dense="cat (90 %)", title="one")
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles == ["image", *(f"after block {block}" for block in rows[0].changed())]


def test_panels_are_what_is_left(model: nn.Module, rows: list[MethodRow]) -> None:
    grid = host_of(model).facts(model).grid_size
    pixels = pixels_of(model, IMAGE)
    figure = draw_show(pixels, rows, grid, dense="cat (90 %)", blocks=[1, 2])
    drawn = [axis.images[0].get_array() for axis in figure.axes if axis.images]
    scale = -(-224 // pixels.shape[1])
    assert np.allclose(drawn[0], pixels)
    for panel, block in zip(drawn[1:3], (1, 2), strict=True):
        assert np.allclose(panel, draw_kept(pixels, rows[0].sources[: block + 1], grid, scale=scale))
    written = {text.get_text(): text.get_color() for axis in figure.axes for text in axis.texts}
    assert {"dense", "cat (90 %)", rows[0].name, rows[0].prediction, rows[0].cost, "its scores"} <= set(written)
    assert all(text.get_fontsize() >= 8 for axis in figure.axes for text in axis.texts)


def test_another_prediction_stands_out(rows: list[MethodRow]) -> None:
    def colour(same: bool) -> Any:
        row = rows[0]._replace(same=same, prediction="dog (51 %)")
        figure = draw_show(np.zeros((12, 12, 3)), [row], _square(row), dense="cat (90 %)")
        return next(t.get_color() for axis in figure.axes for t in axis.texts if t.get_text() == "dog (51 %)")

    assert colour(True) != colour(False)


def _square(row: MethodRow) -> tuple[int, int]:
    side = round(row.sources.shape[1] ** 0.5)
    return side, side


def test_pixels_are_those_before_the_normalisation(model: nn.Module) -> None:
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))  # type: ignore[index]
    assert np.allclose(pixels_of(model, (IMAGE - mean) / std), IMAGE.permute(1, 2, 0), atol=1e-6)


def test_the_model_and_the_generators_stay_as_they_were(model: nn.Module) -> None:
    before, state = list(model.state_dict()), torch.get_rng_state()
    show(model, "random:keep_rate=0.5", IMAGE)
    assert list(model.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not vitrim.core.reduce.reduced_parts(model)


def test_images_in_any_form_are_the_same_image(model: nn.Module, tmp_path: Path) -> None:
    picture = PillowImage.fromarray((IMAGE.permute(1, 2, 0).numpy() * 255).astype(np.uint8))
    picture.save(tmp_path / "one.png")
    tensor = eval_transform(model)(picture)
    found = [show(model, METHODS[0], each) for each in (picture, tensor, tensor[None], tmp_path, tmp_path / "one.png")]
    assert [one.rows[0]["image"] for one in found] == ["image 0", "image 0", "image 0", "one.png", "one.png"]
    assert len({(one.rows[0]["dense"], one.rows[0][METHODS[0]]) for one in found}) == 1
    assert len({np.asarray(one.figure.axes[1].images[0].get_array()).tobytes() for one in found}) == 1
    assert found[0].rows[0]["file"] is None
    assert found[0].record["weights"] == "given"
    assert found[0].rows[0]["dense"] in str(found[0])
    assert "<img src=" in found[0]._repr_html_()


@pytest.mark.slow
def test_a_dataset_is_left_as_it_was_and_pictures_are_written(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrim.plots.show.FEW", 2)
    files = [tmp_path / f"{name}.png" for name in range(6)]
    for file in files:
        PillowImage.new("RGB", (64, 64), (20, 90, 30)).save(file)
    dataset = ImageDataset(files, [0] * 6, class_names=list("abcde"))
    before, seen = dataset.transform, []
    shown = show(model, "topk", out=tmp_path / "out", on_progress=seen.append, images=vitrim.DataSpec(dataset, limit=3))
    assert dataset.transform is before
    assert seen == shown.rows
    assert [Path(row["file"]) for row in shown.rows] == shown.files
    assert set(shown.files) == set((tmp_path / "out").iterdir())
    assert len(shown.figures) == 2  # those of a large folder would fill the memory
    assert str(shown) == "\n".join(f"wrote {file}" for file in shown.files)
    assert shown.rows[0]["image"] == "image 0: a"
    assert shown.rows[0]["dense"][0] in "abcde"
    assert [row["image"] for row in show(model, "topk", dataset).rows] == ["image 0: a", "image 5: a"]  # FEW of them
    assert len(show(model, "topk", files[:3]).rows) == 3  # of loose images all


@pytest.mark.slow
def test_a_model_by_name_has_the_weights_of_its_seed() -> None:
    options = {"img_size": 64, "num_classes": 5}
    rows = [show(vitrim.ModelSpec("test_vit", options=options), "topk", IMAGE, seed=seed).rows for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.slow
def test_a_compiled_model_is_shown_as_the_model_in_it(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager")
    assert show(compiled, "topk", IMAGE).rows == show(model, "topk", IMAGE).rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"images": None}, "give the images to show"),
        ({"images": vitrim.DataSpec(IMAGE, split="test")}, "split says how to read a dataset"),
        ({"images": torch.rand(64, 64)}, r"a tensor \(C, H, W\) as the model takes it, .*, not one of \(64, 64\)"),
        ({"images": torch.rand(3, 20, 20)}, r"as the model takes it, \(3, 64, 64\), not one of \(3, 20, 20\)"),
        ({"images": torch.rand(2, 1, 64, 64)}, r"as the model takes it, \(3, 64, 64\), not one of \(1, 64, 64\)"),
        ({"images": 3}, "not int"),
        ({"images": [IMAGE, "x.png"]}, "do not mix"),
        ({"images": IMAGE, "seed": -1}, "seed=-1: must be at least 0"),
        ({"images": IMAGE, "blocks": 5}, "blocks=5: must be a list"),
        ({"images": IMAGE, "blocks": ["x"]}, "blocks=x: must be a whole number"),
        ({"images": IMAGE, "out": 5}, "out=5: must be a text, or a path"),
        ({"images": vitrim.DataSpec(5)}, "an image is a file, an image of Pillow or a tensor .*, not int"),
        ({"images": IMAGE, "methods": ["topk", "topk"]}, "method topk is given twice"),
    ],
)
def test_arguments_that_are_refused(given: dict[str, Any], message: str, model: nn.Module) -> None:
    with pytest.raises(VitrimError, match=message):
        show(model, **{"methods": "topk", **given})


def test_what_cannot_be_shown(model: nn.Module, rows: list[MethodRow]) -> None:
    with pytest.raises(VitrimError, match="nothing to show without a method"):
        prepared(model, [])
    with pytest.raises(VitrimError, match=r"block 9 is none of the model's, 0 to \d+"):
        draw_show(np.zeros((12, 12, 3)), rows, _square(rows[0]), dense="", blocks=[9])
    with pytest.raises(VitrimError, match="has no classes: only classifiers are shown"):
        prepared(small(num_classes=0), METHODS)


def test_columns_are_spread_over_the_blocks_that_changed_tokens() -> None:
    class Changed(MethodRow):
        def changed(self) -> list[int]:
            return list(range(12))

    sources = np.tile(np.arange(4), (12, 1))
    row = Changed("tome:r=1", "cat", "4 tokens", True, sources, {})
    figure = draw_show(np.zeros((8, 8, 3)), [row], (2, 2), dense="cat")
    titles = [axis.get_title() for axis in figure.axes if axis.get_title().startswith("after")]
    assert titles == [f"after block {block}" for block in (0, 2, 3, 5, 6, 8, 9, 11)]


def test_scores_stand_on_their_patches_beside_registers() -> None:
    model = HOSTS["registers"]()  # a class token and three registers before 36 patches
    (row,), _ = rows_of(prepared(model, ["evit:keep_rate=0.5,blocks=[1,2],fuse_token=false"]), torch.rand(3, 24, 24))
    assert {block: int(np.isfinite(scores).sum()) for block, scores in row.scores.items()} == {1: 36, 2: 18}
    left = np.isfinite(row.scores[2])
    assert row.scores[1][left].min() > row.scores[1][~left].max()  # those with the highest scores stayed


def test_another_prediction_than_the_dense_one_is_told() -> None:
    models = prepared(HOSTS["vit"](), ["topk:keep_rate=0.5"])
    image = torch.rand(3, 24, 24)
    (row,), dense = rows_of(models, image)
    assert (row.same, row.prediction.partition(" (")[0]) == (True, dense.partition(" (")[0])
    others = torch.full((5,), 100.0)
    others[int(dense.split()[1])] = 0
    models[0].model.head.register_forward_hook(lambda *given: given[-1] + others)
    (row,), changed = rows_of(models, image)
    assert (row.same, row.prediction.partition(" (")[0]) == (False, dense.partition(" (")[0])
    assert changed.partition(" (")[0] != dense.partition(" (")[0]
