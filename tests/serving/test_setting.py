"""What a server is asked for, and how many placeholders stay: needs no vLLM."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vitrim
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.serving.vllm.setting import FAMILIES, FREE, asked, family_of, mark, stay

ROOT = Path(__file__).parents[2]
PLAIN = SimpleNamespace(vision_config=SimpleNamespace(model_type="clip_vision_model"))


def test_nothing_is_asked_for_without_a_setting() -> None:
    assert asked(None, {}) is None
    assert asked({"other": 1}, {"VITRIM_SELECT": ""}) is None


@pytest.mark.parametrize("word", ["none", "off"])
def test_a_word_switches_selection_off(word: str) -> None:
    assert asked({}, {"VITRIM_SELECT": word}) is None
    assert asked({"vitrim": {"select": word}}, {"VITRIM_SELECT": "pool"}) is None


def test_options_of_the_server_go_before_the_environment() -> None:
    given = {"vitrim": {"select": "random:tokens=9"}}
    assert asked(given, {"VITRIM_SELECT": "pool"}).describe() == "random:tokens=9"
    assert asked({}, {"VITRIM_SELECT": "pool:tokens=4"}).describe() == "pool:tokens=4"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"vitrim": "pool"}, "expected"),
        ({"vitrim": {"selct": "pool"}}, "expected"),
        ({"vitrim": {"select": 5}}, "expected a selector"),
        ({"vitrim": {"select": "divprun"}}, "divprune"),
        ({"vitrim": {"select": "divprune:keep=2"}}, "keep"),
        ({"vitrim": {"select": "fastervlm"}}, "attention"),
        ({"vitrim": {"select": "prumerge"}}, "attention"),
        ({"vitrim": {"select": "dart"}}, "reads the question"),
        ({"vitrim": {"select": "cdpruner:tokens=9"}}, "reads the question"),
        ({"vitrim": {"select": "scope"}}, "attention"),
        ({"vitrim": {"select": "resize"}}, "max_pixels"),
        ({"vitrim": {"select": "pixelprune"}}, "acts on images .*: take .*divprune"),
        ({"vitrim": {"select": "vidcom2:reconcile=false"}}, "video by video"),
    ],
)
def test_bad_settings_are_one_line(given: dict[str, object], words: str) -> None:
    with pytest.raises(VitrimError, match=words) as caught:
        asked(given, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [*FREE.replace(" or ", ", ").split(", ")])
def test_what_needs_features_alone_is_taken(text: str) -> None:
    assert asked({"vitrim": {"select": text}}, {}) == vitrim.parse_selector(text)


def test_a_model_that_is_not_covered_is_told_which_are() -> None:
    selector = vitrim.parse_selector("divprune")
    with pytest.raises(UnsupportedModelError, match="covered: LLaVA") as caught:
        family_of(["WhisperForConditionalGeneration"], PLAIN, selector)
    assert all(family.name in str(caught.value) for family in FAMILIES.values())
    pixtral = SimpleNamespace(vision_config=SimpleNamespace(model_type="pixtral"))
    with pytest.raises(UnsupportedModelError, match="Pixtral"):
        family_of(["LlavaForConditionalGeneration"], pixtral, selector)
    with pytest.raises(UnsupportedModelError, match="no architecture"):
        family_of(None, PLAIN, selector)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_positions_that_a_family_cannot_give_are_refused(architecture: str) -> None:
    other = "closed" if FAMILIES[architecture].axes else "original"
    with pytest.raises(VitrimError, match="leave positions out"):
        family_of([architecture], PLAIN, vitrim.parse_selector(f"divprune:positions={other}"))
    assert family_of([architecture], PLAIN, vitrim.parse_selector("divprune"))[0] == architecture


def test_what_makes_new_tokens_is_refused_where_tokens_keep_their_places() -> None:
    for architecture, family in FAMILIES.items():
        assert family_of([architecture], PLAIN, vitrim.parse_selector("pool"))[1] == family  # stands where it pools
        if family.axes:
            with pytest.raises(VitrimError, match="has no places"):
                family_of([architecture], PLAIN, vitrim.parse_selector("prumerge"))
        else:
            assert family_of([architecture], PLAIN, vitrim.parse_selector("prumerge"))[1] == family


def test_caches_tell_settings_apart() -> None:
    texts = ["divprune:keep=0.25", "divprune:keep=0.5", "divprune:tokens=16", "random", "random:seed=1", "pool"]
    assert len({mark(vitrim.parse_selector(text)) for text in texts}) == len(texts)
    assert mark(vitrim.parse_selector("random")) == mark(vitrim.parse_selector("random"))


def test_as_many_placeholders_stay_as_are_counted() -> None:
    text, image = [9, 9], [1] * 5
    ids = torch.tensor([*text, *image, *text, *image, *text])
    left = ids[stay(ids == 1, [5, 5], [2, 3])]
    assert left.tolist() == [9, 9, 1, 1, 9, 9, 1, 1, 1, 9, 9]
    assert ids[stay(ids == 1, [5, 5], [5, 5])].tolist() == ids.tolist()


def test_placeholders_of_another_form_are_refused() -> None:
    rows = torch.tensor([True, True, False, True, True, False])  # as Pixtral's, with a token that ends each row
    with pytest.raises(VitrimError, match="other tokens stand among"):
        stay(rows, [4], [2])
    with pytest.raises(VitrimError, match="expected 5 placeholders"):
        stay(rows, [5], [2])


def test_the_entry_point_and_the_families_are_there() -> None:
    """Names that are looked up when vLLM runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [project["entry-points"]["vllm.general_plugins"]["vitrim"]]
    names += [f"vitrim.serving.vllm.{family.target}" for family in FAMILIES.values()]
    for module, name in (text.split(":") for text in names):
        file = ROOT / "src" / (module.replace(".", "/") + ".py")
        body = ast.parse(file.read_text(encoding="utf-8")).body
        assert name in {part.name for part in body if isinstance(part, ast.FunctionDef | ast.ClassDef)}
