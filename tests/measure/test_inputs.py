"""Models and data in hand: what a function is given as an object counts as what it is given by name."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import image_files
import vitrim
from vitrim.data import load_images, spread
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec

OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_files.write_noise(tmp_path_factory.mktemp("images") / "noise", 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_file(vitrim.create_model("test_vit", options=OPTIONS).state_dict(), path)
    return path


def test_data_in_hand_is_the_source_that_it_was_opened_from(source: Path) -> None:
    data = vitrim.open_data(source, limit=4)
    whole = load_images(source)
    assert len(data) == 4
    assert data.class_names == whole.class_names
    places = spread(10, 4)
    assert [data[place][1] for place in range(4)] == [whole[int(place)][1] for place in places]
    assert all(torch.equal(data[place][0], whole[int(of)][0]) for place, of in enumerate(places))


def test_what_a_model_was_made_with_holds_until_its_weights_change(checkpoint: Path) -> None:
    model = vitrim.create_model("test_vit", checkpoint=checkpoint, options=OPTIONS)
    known = ModelSpec(model).load()
    assert (known.name, known.weights, known.options) == ("test_vit", str(checkpoint), OPTIONS)
    with torch.no_grad():
        model.norm.weight.mul_(2.0)
    assert ModelSpec(model).load().weights == "given"
    assert ModelSpec(copy.deepcopy(model)).load().weights == "given"
    made = vitrim.create_model("test_vit", options=OPTIONS)
    assert ModelSpec(made).load().weights == "given"  # random: its owner knows
    assert "vitrim_origin" not in "".join(model.state_dict())


def test_the_task_is_one_of_the_model() -> None:
    model = vitrim.create_model("segmenter:test_vit", options=OPTIONS)
    with pytest.raises(VitrimError, match="leave task segmentation out"):
        vitrim.open_data("nowhere", model=vitrim.create_model("test_vit", options=OPTIONS), task="segmentation")
    with pytest.raises(VitrimError, match=r"unknown task 'retrievel'; did you mean 'retrieval'\? valid: class"):
        vitrim.open_data("nowhere", model=vitrim.create_model("test_vit", options=OPTIONS), task="retrievel")
    with pytest.raises(VitrimError, match="unknown task"):
        vitrim.open_data("nowhere", model=model, task="detection")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": 0}, "limit=0: must be at least 1"),
        ({"options": "a"}, "options=a: must be options by name"),
        ({"split": "nowhere"}, "nowhere"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, object], message: str, source: Path) -> None:
    with pytest.raises(VitrimError, match=message):
        vitrim.open_data(source, **given)
