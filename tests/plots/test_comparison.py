"""A dense image under several models: what was drawn is what the models predict and what they kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

import dense_models
from dense_files import mask, photo
from vitrim.data.transforms import geometry_of
from vitrim.errors import VitrimError
from vitrim.measure.contestants import contestants
from vitrim.models.dense import detector
from vitrim.plots.dense import check_drawable, draw_comparison, draw_mask, palette, scene
from vitrim.tasks import make_task
from vitrim.tasks.options import Protocol

METHODS = ["tome:r=4", "topk:keep_rate=0.6,restore=last_block", "topk:keep_rate=0.6"]
NAMES = ["a", "b", "c", "d", "e"]


def axes_of(figure: Any) -> dict[str, Any]:
    """The pictures of a figure by the first line of their titles; those of tokens in a list."""
    found: dict[str, Any] = {"kept": []}
    for axis in (axis for axis in figure.axes if axis.images):
        title = axis.get_title()
        if "tokens kept" in title:
            found["kept"].append((title, axis.images[0].get_array()))
        else:
            found[title.partition("\n")[0]] = axis.images[0].get_array()
    return found


@pytest.fixture(scope="module")
def segmented() -> dict[str, Any]:
    """A figure of a tiny segmenter on an image of 48 x 36 pixels, evaluated at 24 x 18: 6 x 5 patches, the last cut."""
    torch.manual_seed(0)
    model = dense_models.segmenter("dynamic_img_size")
    task = make_task("segmentation", dense_models.CLASSES)
    task.follow(Protocol(size=24, side="long"))
    image, labels = photo(0, (36, 48)), mask([0, 3], size=(36, 48))
    target = tv_tensors.Mask(torch.from_numpy(np.array(labels)))
    shown = scene(image, target, task.eval_transform(geometry_of(model)))
    models = contestants(model, METHODS, task)
    figure = draw_comparison(models, task, shown, NAMES, title="one")
    return {"figure": figure, "model": model, "task": task, "shown": shown, "mask": np.array(labels)}


def test_predictions_are_those_of_the_task(segmented: dict[str, Any]) -> None:
    found = axes_of(segmented["figure"])
    assert set(found) == {"image", "truth", "dense", "kept", *METHODS}
    shown = segmented["shown"]
    with torch.no_grad():
        logits = segmented["task"].predict(segmented["model"], shown.pixels[None])
    expected = draw_mask(shown.image, logits[0].argmax(0).numpy(), palette(dense_models.CLASSES))
    assert np.array_equal(found["dense"], expected)
    assert np.array_equal(found["truth"], draw_mask(shown.image, segmented["mask"], palette(dense_models.CLASSES)))
    assert np.array_equal(found["image"], shown.image)


def test_tokens_are_counted(segmented: dict[str, Any]) -> None:
    titles = [title for title, _ in axes_of(segmented["figure"])["kept"]]
    assert titles[0].startswith("14 of 30 tokens kept")
    assert all("of 30 tokens kept, " in title and title.endswith("pruned") for title in titles[1:])
    (first, second) = ([int(word) for word in title.replace(",", "").split() if word.isdigit()] for title in titles[1:])
    assert first == second  # where they come back does not change which were pruned
    assert first[0] + first[2] == 30


def test_titles_say_what_a_reduction_costs(segmented: dict[str, Any]) -> None:
    titles = [axis.get_title() for axis in segmented["figure"].axes]
    notes = [title.partition("\n")[2] for title in titles if title.startswith(("tome", "topk"))]
    assert len(notes) == len(METHODS)
    assert all("% of the MACs, " in note and note.endswith("% as dense") for note in notes)


def test_the_legend_names_the_truth(segmented: dict[str, Any]) -> None:
    (box,) = [axis.get_legend() for axis in segmented["figure"].axes if axis.get_legend()]
    assert {"a", "d"} <= {text.get_text() for text in box.get_texts()} <= set(NAMES)


@pytest.mark.slow  # `test_dense_plots.py` draws objects
def test_objects_are_drawn_in_the_stored_image() -> None:
    import timm

    def create(pretrained: bool, options: dict[str, Any]) -> Any:
        return timm.create_model("test_vit", **{"img_size": 64, "patch_size": 16, **options})

    options = {"num_classes": 2, "channels": 16, "hidden": 16, "rpn_layers": 1, "box_layers": 1, "masks": True}
    model = detector(create, False, options).eval()
    task = make_task("instances", 2)
    target = {
        "boxes": torch.tensor([[10.0, 20, 60, 70]]),
        "labels": torch.tensor([1]),
        "iscrowd": torch.tensor([0]),
        "area": torch.tensor([2500.0]),
        "masks": tv_tensors.Mask(torch.zeros(1, 80, 100, dtype=torch.uint8)),
    }
    shown = scene(Image.new("RGB", (100, 80)), target, task.eval_transform(geometry_of(model)))
    figure = draw_comparison(contestants(model, ["tome:r=2"], task), task, shown, ["cat", "dog"])
    found = axes_of(figure)
    assert found["truth"].shape == (320, 400, 3)  # four times as large: small images are enlarged
    assert np.allclose(found["truth"][80, 40:240], palette(2)[1], atol=1 / 255)  # the upper line of the box
    assert found["kept"][0][1].shape == (320, 400, 3)
    assert any("% of the MACs" in axis.get_title() for axis in figure.axes)


def test_random_methods_draw_the_same_every_time(segmented: dict[str, Any]) -> None:
    model, task, shown = (segmented[name] for name in ("model", "task", "shown"))
    models = contestants(model, ["random:keep_rate=0.5"], task)
    before = torch.get_rng_state()
    kept = [axes_of(draw_comparison(models, task, shown, seed=seed))["kept"][0][1] for seed in (1, 1, 2)]
    assert np.array_equal(kept[0], kept[1])
    assert not np.array_equal(kept[0], kept[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_has_no_picture_is_refused() -> None:
    with pytest.raises(VitrimError, match="task classification has no map to draw; valid: segmentation, detection"):
        check_drawable(make_task("classification", 3))
    task = make_task("segmentation", 3)
    for protocol in (Protocol(mode="slide", window=8), Protocol(flip=True), Protocol(scales=(1.0, 2.0))):
        task.follow(protocol)
        with pytest.raises(VitrimError, match="whole and once"):
            check_drawable(task)
