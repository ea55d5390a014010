"""What a server is asked for, and how many placeholders stay: needs no vLLM."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vitrim
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.serving.vllm.setting import (
    FAMILIES,
    FREE,
    ServedFamily,
    ServerSetting,
    canonical,
    check_fits,
    family_of,
    mark,
    selector_of,
    setting_of,
    stay,
)

ROOT = Path(__file__).parents[2]
PLAIN = SimpleNamespace(vision_config=SimpleNamespace(model_type="clip_vision_model"))


def test_nothing_is_asked_for_without_a_setting() -> None:
    assert setting_of(None, {}) is None
    assert setting_of({"other": 1}, {"VITRIM_SELECT": "", "VITRIM_SELECT_ALLOWED": ""}) is None


@pytest.mark.parametrize("word", ["none", "off"])
def test_a_word_switches_selection_off(word: str) -> None:
    assert setting_of({}, {"VITRIM_SELECT": word}) is None
    assert setting_of({"vitrim": {"select": word}}, {"VITRIM_SELECT": "pool"}) is None
    assert setting_of({"vitrim": {"select": word, "allowed": []}}, {}) is None


def test_options_of_the_server_go_before_the_environment() -> None:
    given = {"vitrim": {"select": "random:tokens=9"}}
    assert setting_of(given, {"VITRIM_SELECT": "pool"}) == ServerSetting("random:tokens=9")
    assert setting_of({}, {"VITRIM_SELECT": "pool:tokens=4"}) == ServerSetting("pool:tokens=4")
    bound = {"VITRIM_SELECT": "pool", "VITRIM_SELECT_ALLOWED": "divprune:keep=.5 off"}
    assert setting_of(given, bound) == ServerSetting("random:tokens=9", ["divprune:keep=0.5", "none"])
    assert setting_of({"vitrim": {"allowed": ["any"]}}, bound) == ServerSetting("pool", ["any"])


def test_a_server_can_select_for_requests_alone() -> None:
    assert setting_of({}, {"VITRIM_SELECT_ALLOWED": "pool"}) == ServerSetting("none", ["pool"])
    assert setting_of({}, {"VITRIM_SELECT_ALLOWED": "any"}) == ServerSetting("none", ["any"])
    assert setting_of({"vitrim": {"select": "off"}}, {"VITRIM_SELECT_ALLOWED": "any"}) == ServerSetting("none", ["any"])


def test_requests_choose_among_what_is_allowed() -> None:
    own = ServerSetting("divprune:keep=0.25", ["pool:tokens=9", "none"])
    assert [own.asked(text) for text in ("divprune:keep=.25", "pool:tokens=9", "off")] == [own.select, *own.allowed]
    with pytest.raises(VitrimError, match=r"^vitrim_select=pool:tokens=8 .*; allowed: divprune:keep=0.25, pool.*=9, n"):
        own.asked("pool:tokens=8")
    for fixed in (ServerSetting("pool", []), ServerSetting("pool", ["pool"])):
        with pytest.raises(VitrimError, match=r"allowed: pool$"):
            fixed.asked("none")
    for free in (ServerSetting("pool"), ServerSetting("none", ["pool", "any"])):
        assert [free.asked(text) for text in ("random:seed=7", "none")] == ["random:seed=7", "none"]
        with pytest.raises(VitrimError, match="attention"):
            free.asked("visionzip")


def test_memory_is_for_the_largest_of_what_is_listed() -> None:
    assert ServerSetting("pool").reserved() == ["pool"]
    assert ServerSetting("pool", ["random", "pool"]).reserved() == ["pool", "random"]
    assert ServerSetting("pool", ["random", "none"]).reserved() == ["none"]
    assert ServerSetting("resize", ["pool"]).reserved() == ["resize", "pool"]
    assert ServerSetting("pool", ["pixelprune"]).reserved() == ["none"]  # an image may keep everything
    assert ServerSetting("pool", ["any"]).reserved() == ServerSetting("none", ["pool"]).reserved() == ["none"]


def test_without_a_selection_every_token_stays_in_its_place() -> None:
    features = torch.rand(12, 3)
    assert selector_of("none").mask(features).all()
    assert selector_of("none").count((2, 2, 3)) == 12
    assert selector_of("pool") == vitrim.parse_selector("pool")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"vitrim": "pool"}, "expected"),
        ({"vitrim": {}}, "expected"),
        ({"vitrim": {"select": "pool", "allowed": 5}}, "list of settings"),
        ({"vitrim": {"select": "pool", "allowed": ["pol"]}}, "did you mean 'pool'"),
        ({"vitrim": {"allowed": ["any", "visionzip"]}}, "attention"),
        ({"vitrim": {"selct": "pool"}}, "expected"),
        ({"vitrim": {"select": 5}}, "expected a selector"),
        ({"vitrim": {"select": "divprun"}}, "divprune"),
        ({"vitrim": {"select": "divprune:keep=2"}}, "keep"),
        ({"vitrim": {"select": "fastervlm"}}, "attention"),
        ({"vitrim": {"select": "prumerge"}}, "attention"),
        ({"vitrim": {"select": "dart"}}, "reads the question"),
        ({"vitrim": {"select": "cdpruner:tokens=9"}}, "reads the question"),
        ({"vitrim": {"select": "scope"}}, "attention"),
        ({"vitrim": {"select": "resize:positions=original"}}, "those of the smaller image"),
        ({"vitrim": {"select": "pixelprune:tokens=9"}}, "leave tokens and keep out"),
        ({"vitrim": {"select": "vidcom2:reconcile=false"}}, "video by video"),
    ],
)
def test_bad_settings_are_one_line(given: dict[str, object], words: str) -> None:
    with pytest.raises(VitrimError, match=words):
        setting_of(given, {})


@pytest.mark.parametrize("text", [*FREE.replace(" or ", ", ").split(", "), "resize", "pixelprune"])
def test_what_needs_features_alone_is_taken(text: str) -> None:
    assert canonical(text) == vitrim.parse_selector(text).describe()


def test_a_model_that_is_not_covered_is_told_which_are() -> None:
    with pytest.raises(UnsupportedModelError, match="covered: LLaVA") as caught:
        family_of(["WhisperForConditionalGeneration"], PLAIN)
    assert all(family.name in str(caught.value) for family in FAMILIES.values())
    pixtral = SimpleNamespace(vision_config=SimpleNamespace(model_type="pixtral"))
    with pytest.raises(UnsupportedModelError, match="Pixtral"):
        family_of(["LlavaForConditionalGeneration"], pixtral)
    with pytest.raises(UnsupportedModelError, match="no architecture"):
        family_of(None, PLAIN)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_positions_that_a_family_cannot_give_are_refused(architecture: str) -> None:
    name, family = family_of([architecture], PLAIN)
    assert name == architecture
    other = "closed" if family.axes else "original"
    with pytest.raises(VitrimError, match="leave positions out"):
        check_fits(vitrim.parse_selector(f"divprune:positions={other}"), family)
    for text in ("divprune", "pool", "none"):  # what is pooled stands where it was
        check_fits(selector_of(text), family)


def test_what_makes_new_tokens_is_refused_where_tokens_keep_their_places() -> None:
    for family in FAMILIES.values():
        if family.axes:
            with pytest.raises(VitrimError, match="has no places"):
                check_fits(vitrim.parse_selector("prumerge"), family)
        else:
            check_fits(vitrim.parse_selector("prumerge"), family)


CELLS = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5"
SIZES = f"{CELLS}, GLM-4.1V, GLM-4.6V-Flash, GLM-4.5V, GLM-4.6V, GLM-OCR"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_images_are_changed_where_a_tower_can_be_told(family: ServedFamily) -> None:
    for text, names in {"pixelprune": CELLS, "resize:tokens=9": SIZES}.items():
        if family.name.split(", ")[0] in names.split(", "):
            check_fits(selector_of(text), family)
        else:
            with pytest.raises(VitrimError, match=rf"^{text}: .* of {re.escape(family.name)} .* in {names}"):
                check_fits(selector_of(text), family)


def test_caches_tell_settings_apart() -> None:
    texts = ["divprune:keep=0.25", "divprune:keep=0.5", "divprune:tokens=16", "random", "random:seed=1", "pool", "none"]
    assert len({mark(text) for text in texts}) == len(texts)
    assert mark("random") == mark("random")
    assert canonical("divprune:keep=.25") == canonical("divprune:keep=0.25")
    assert canonical("off") == canonical("none")


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


def test_the_page_says_what_works_in_every_family() -> None:
    expected = {}
    for family in FAMILIES.values():
        kinds = kinds_of(family)
        assert not (family.images_only and "video" in kinds)
        videos = "refused" if family.images_only else ("whole" if "video" in kinds else "")
        changed = ["yes" if able else "" for able in (family.cells, family.packed)]
        row = (videos, *changed, "yes", "kept" if family.axes else "closed up")
        expected |= dict.fromkeys(family.name.split(", "), row)
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = page.split("| family |")[1].split("\n\n")[0].splitlines()[2:]
    found = {}
    for names, _, videos, *others in ([cell.strip() for cell in row[1:-1].split("|")] for row in rows):
        found |= dict.fromkeys(re.sub(r" \(.*?\)", "", names).split(", "), (videos.split(";")[0], *others))
    assert found == expected


def kinds_of(family: ServedFamily) -> tuple[str, ...]:
    """The modalities whose tokens are selected, as the source says: its classes need vLLM."""
    module, name = family.target.split(":")
    body = ast.parse((ROOT / "src/vitrim/serving/vllm" / f"{module}.py").read_text(encoding="utf-8")).body
    classes = {part.name: part for part in body if isinstance(part, ast.ClassDef)}
    while name in classes:
        for part in classes[name].body:
            if isinstance(part, ast.Assign | ast.AnnAssign) and re.match(r"kinds\b", ast.unparse(part)):
                return ast.literal_eval(part.value)
        name = ast.unparse(classes[name].bases[0])
    return ("image",)


def test_the_entry_point_and_the_families_are_there() -> None:
    """Names that are looked up when vLLM runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [project["entry-points"]["vllm.general_plugins"]["vitrim"]]
    names += [f"vitrim.serving.vllm.{family.target}" for family in FAMILIES.values()]
    for module, name in (text.split(":") for text in names):
        file = ROOT / "src" / (module.replace(".", "/") + ".py")
        body = ast.parse(file.read_text(encoding="utf-8")).body
        assert name in {part.name for part in body if isinstance(part, ast.FunctionDef | ast.ClassDef)}
