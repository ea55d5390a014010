"""Which classes of a model the data's are. The oracle is the list of ImageNet that timm ships, and names by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo

import vitrim
from vitrim.data import ImageDataset
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.tasks.classes import class_names, names_of, places_of, told_apart

INFO = ImageNetInfo("imagenet-1k")


def model_of(*names: str, count: int | None = None) -> Any:
    """A model whose library gives these names."""
    model: Any = torch.nn.Linear(1, 1)
    model.num_classes, model.pretrained_cfg = count or len(names), {}
    model.class_names = list(names) or None
    return model


@pytest.fixture(scope="module")
def imagenet() -> Any:
    return timm.create_model("test_vit", img_size=32, depth=1)


# ---- names that are ImageNet's


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (["n02099601", "n01440764"], [207, 0]),
        (["golden_retriever", "Granny Smith"], [207, 948]),
        (["Tinca tinca", "goldfish"], [0, 1]),
        (["Cardigan", "cardigan"], [264, 474]),
        (["Cardigan", "Cardigan Welsh corgi"], [474, 264]),
        (["missile", "projectile"], [657, 744]),
        (["crane", "n03126707"], [134, 517]),
        (["207_golden_retriever", "crane 517"], [207, 517]),
    ],
)
def test_names_of_imagenet_in_all_forms(imagenet: Any, names: list[str], places: list[int]) -> None:
    assert places_of(names, imagenet) == places


def test_all_of_imagenet_by_ids_and_by_words_is_found_in_any_order(imagenet: Any) -> None:
    words: list[str] = []
    for place in range(1000):
        text = INFO.index_to_description(place)
        short = text.partition(",")[0].replace(" ", "_")
        words.append(short if short not in words else f"{text.replace(' ', '_')}_{place}")
    for names in (INFO.label_names(), INFO.label_descriptions(), words):
        numbered = sorted(enumerate(names), key=lambda pair: pair[1])
        if names is not words and len(set(names)) < 1000:  # the whole texts of the two cranes are equal
            numbered = [pair for pair in numbered if pair[1] != "crane"]
        assert places_of([name for _, name in numbered], imagenet) == [place for place, _ in numbered]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["daisy", "dandelion", "rose", "sunflower", "tulip"],
            "does not have 4 of the data's 5 classes: dandelion, ros",
        ),
        (
            ["crane", "tench"],
            r"'crane' of the data may be several of the model's: crane \(n02012849\), crane \(n03126707",
        ),
        (["Cardigan", "Sweatshirt"], "'Cardigan' of the data may be several"),
        (["tench", "n01440764"], "classes 'tench' and 'n01440764' of the data are one of the model's, tench"),
        (["1_tench", "2_golden retriever"], "are none of the model's"),
    ],
)
def test_names_that_are_not_all_of_the_model_are_refused(imagenet: Any, names: list[str], words: str) -> None:
    with pytest.raises(VitrimError, match=words) as caught:
        places_of(names, imagenet)
    assert "class_names=FILE" in str(caught.value)
    assert places_of(names, imagenet, by_number=True) is None


def test_names_of_other_libraries_are_imagenets_if_they_stand_in_its_order() -> None:
    """transformers has all synonyms, torchvision a crane bird; ids are neither's."""
    from torchvision.models._meta import _IMAGENET_CATEGORIES as torchvisions

    for names in (INFO.label_descriptions(), torchvisions):
        assert places_of(["n02099601", "Tinca tinca", "Cardigan_Welsh_corgi"], model_of(*names)) == [207, 0, 264]
    assert places_of(["crane bird", "n03710721"], model_of(*torchvisions)) == [134, 639]
    other = model_of(*reversed(torchvisions))  # as many, but in another order
    assert places_of(["golden retriever"], other) == [999 - 207]
    with pytest.raises(VitrimError, match="none of the model's"):  # so ImageNet's ids say nothing of them
        places_of(["n01440764"], model_of(*(f"thing {number}" for number in range(1000))))


def test_ids_and_words_meet_in_models_of_a_few_classes() -> None:
    assert places_of(["tench", "English springer"], model_of("n02102040", "n01440764")) == [1, 0]
    assert places_of(["n01440764", "n02102040"], model_of("English_springer", "tench")) == [1, 0]


# ---- other names


@pytest.mark.parametrize(
    ("names", "known", "places"),
    [
        (["cat", "eel"], ["eel", "dog", "cat"], [2, 0]),
        (["Traffic_Light", "stop-sign"], ["stop sign", "traffic light"], [1, 0]),
        (["Cat", "cat"], ["cat", "Cat"], [1, 0]),
        (["Crane", "dog", "Crane"], ["crane", "dog", "crane"], [0, 1, 2]),
        (["10", "2"], ["2", "10"], [1, 0]),
        (["caf\u00e9", "tea"], ["tea", "cafe\u0301"], [1, 0]),
        (None, ["cat"], None),
    ],
)
def test_places_of_classes_by_name(names: list[str] | None, known: list[str], places: list[int] | None) -> None:
    assert places_of(names, model_of(*known)) == places


@pytest.mark.parametrize(
    ("names", "known", "words"),
    [
        (
            ["ant", "yak"],
            ["ant", "bee", "cow"],
            "the model does not have 1 of the data's 2 classes: yak; found .*: ant. ",
        ),
        (["Cat", "cat"], ["cat", "dog"], "classes 'Cat' and 'cat' of the data are one of the model's, cat"),
        (["-5"], ["5", "10"], r"the data's classes \(-5\) are none"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: list[str], known: list[str], words: str) -> None:
    with pytest.raises(VitrimError, match=words):
        places_of(names, model_of(*known))


def test_a_published_list_may_be_spelt_in_another_way_if_the_order_is_the_same() -> None:
    names = ["sky", "ashcan", "road"]
    assert places_of(names, model_of("sky", "trash can", "road"), numbered=True) is None
    # a synonym of one class may be the name of another
    screens = ["screen, monitor", "road", "telly"]
    assert places_of(screens, model_of("crt screen", "road", "monitor"), numbered=True) is None
    for known in (["road", "trash can", "sky"], ["sky", "trash can", "road", "car"]):
        with pytest.raises(VitrimError, match="does not have 1 of the data's 3 classes: ashcan"):
            places_of(names, model_of(*known), numbered=True)
    with pytest.raises(VitrimError, match="are none of the model's"):
        places_of(["Himmel", "Eimer", "Weg"], model_of("sky", "trash can", "road"), numbered=True)


# ---- numbers, and models without names


def test_placeholders_of_transformers_are_numbers() -> None:
    names = sorted(f"LABEL_{number}" for number in range(12))
    assert places_of(names, model_of(count=12)) == [int(name.removeprefix("LABEL_")) for name in names]
    assert places_of(["LABEL_3"], model_of(count=12)) == [3]


def test_a_model_without_names_has_the_order_of_as_many_classes_and_of_no_part() -> None:
    model = model_of(count=3)
    assert places_of(["ant", "bee", "cat"], model) is None
    with pytest.raises(VitrimError, match=r"the data has 2 classes \(ant, cat\), and the model does not name its 3"):
        places_of(["ant", "cat"], model)


@pytest.mark.parametrize(
    ("names", "count", "fits"),
    [
        ([str(number) for number in range(10)], 10, True),
        ([f"{number:03}" for number in range(1000)], 1000, True),
        (sorted(str(number) for number in range(12)), 12, False),
        (["3", "5"], 10, False),
        ([f"{number:04}" for number in range(1, 1001)], 1000, False),
    ],
)
def test_numbers_as_names_are_asked_about(names: list[str], count: int, fits: bool) -> None:
    model = model_of(count=count)
    if fits:
        assert places_of(names, model) is None
        return
    with pytest.raises(VitrimError, match=r"named by numbers .*by_number=names.*by_number=true.*class_names=FILE"):
        places_of(names, model)
    assert places_of(names, model, by_number=True) is None
    if "1000" not in names:
        assert places_of(names, model, by_number="names") == [int(name) for name in names]


# ---- names for people


def test_classes_have_the_names_of_the_model_then_of_the_data() -> None:
    """Those of the data count where the model has none, and neither where there are too many or too few."""
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 1, "num_classes": 3}
    model: Any = create_model("test_vit", options=options)
    others = ["a", "b", "c"]
    assert class_names(model) is None
    assert class_names(model, others) == others
    model.class_names = ["c", "b", "a"]
    assert class_names(model, others) == class_names(model) == ["c", "b", "a"]
    model.class_names = ["a", "b"]  # of another head
    assert class_names(model, others) == others
    assert class_names(model, ["a", "b"]) is None


def test_a_model_of_imagenet_keeps_its_order_whatever_the_folders_are_called(imagenet: Any) -> None:
    """A file would else name class 0 by the folder that comes first in the alphabet."""
    words = [text.partition(",")[0] for text in INFO.label_descriptions()]
    for others in (sorted(words), sorted(INFO.label_names(), reverse=True), ["goldfish"], list(map(str, range(1000)))):
        assert class_names(imagenet, others) == words
    assert class_names(imagenet, [f"thing {number}" for number in range(1000)]) is None


def test_names_with_wordnet_ids_are_what_people_call_them() -> None:
    model: Any = create_model("test_vit", options={"img_size": 32, "depth": 1, "num_classes": 2})
    assert class_names(model, ["n02099601", "cat"]) == ["golden retriever", "cat"]
    model.class_names = ["n02099601", "cat"]
    known = names_of(model)
    assert known is not None
    assert known[0].id == "n02099601"


@pytest.mark.parametrize("names", [["crane", "Crane"], ["trash_can", "trash can"], ["crane", "n02012849"]])
def test_classes_that_come_to_the_same_words_are_refused(names: list[str]) -> None:
    if names[1].startswith("n0"):  # its definition tells it apart
        assert told_apart(names)[1].startswith("crane, large long-necked wading bird")
        return
    with pytest.raises(VitrimError, match=f"classes '{names[0]}' and '{names[1]}' of the data come to the same words"):
        told_apart(names)


def test_all_classes_of_imagenet_are_told_apart() -> None:
    texts = told_apart(INFO.label_names())
    assert len(set(texts)) == 1000
    assert (texts[207], texts[639], texts[474]) == ("golden retriever", "maillot, tank suit", "cardigan")
    assert texts[517].startswith("crane, lifts and moves heavy objects")


# ---- a model that guesses


def guesser(right: int) -> dict[str, Any]:
    """The report on 40 images of two classes, of which a model that always says "ant" is right on ``right``."""
    Image.new("RGB", (32, 32)).save(file := io.BytesIO(), "png")
    labels = [0] * right + [1] * (40 - right)
    images = ImageDataset([file.getvalue()] * 40, labels, class_names=["ant", "bee"])
    model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=1, num_classes=2).eval()
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([1.0, 0.0])
    report = vitrim.evaluate(model, None, images)
    assert all(doubt in str(report) for doubt in report.facts["doubts"])
    return report.record


@pytest.mark.parametrize(("right", "doubted"), [(26, True), (27, False)])
def test_a_dense_model_at_chance_is_doubted_in_the_record(right: int, doubted: bool) -> None:
    """Half of 40 images, and two standard errors of 0.079 more, are 26.3 images."""
    doubts = guesser(right)["doubts"]
    assert len(doubts) == doubted
    assert not doubted or doubts[0].startswith(
        f"the dense model is right on {100 * right / 40:.1f} % of 40 images, as if"
    )


# ---- in commands


def test_numbers_of_folders_are_the_models_classes_where_that_is_said(tmp_path: Path) -> None:
    """Folders 0, 1, 10 and 2 are labels 0 to 3 in text order; the model says class 10 of 12 to everything."""
    model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=1, num_classes=12).eval()
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.eye(12)[10]
    for name in ("0", "1", "10", "2"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / name / "0.png")
    for by_number, top1 in (("names", 0.25), (True, 0.0)):
        data = vitrim.DataSpec(str(tmp_path), options={"by_number": by_number})
        with pytest.warns(UserWarning, match="numbered in the order of text"):
            assert vitrim.evaluate(model, None, data).rows[0]["top1"] == top1
    for wrong in ("label", 1):
        with pytest.raises(VitrimError, match=f"by_number={wrong!r} must be true, false or names"):
            vitrim.evaluate(model, None, vitrim.DataSpec(str(tmp_path), options={"by_number": wrong}))


@pytest.mark.parametrize("count", [2, 1000])
def test_a_file_has_the_classes_of_its_model_not_of_its_images(tmp_path: Path, count: int) -> None:
    """Images of as many classes name those of a model without names, and no others."""
    for name in ("toilet tissue", "goldfish"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "images" / name / "0.png")
    options = {"img_size": 16, "patch_size": 8, "depth": 1, "num_heads": 1, "embed_dim": 8, "num_classes": count}
    file = vitrim.export(timm.create_model("test_vit", **options).eval(), None, tmp_path / "m.pt2",
                         images=str(tmp_path / "images"), check=0)  # fmt: skip
    wanted = ["goldfish", "toilet tissue"] if count == 2 else [INFO.index_to_description(k) for k in (0, 1)]
    assert [name.partition(",")[0] for name in wanted] == file.metadata["classes"][:2]
    assert len(file.metadata["classes"]) == count
