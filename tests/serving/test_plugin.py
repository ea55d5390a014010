"""What the plugin makes of a server's options, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import served
from vitrim.errors import VitrimError
from vitrim.serving.vllm.setting import FAMILIES, PREFIX, ServerSetting

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")

REGISTRY = "vllm.model_executor.models.registry"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that takes videos, too."""
    found = tmp_path_factory.mktemp("qwen")
    served.folder("qwen2_vl", found)
    return found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose images are selected, but not its videos."""
    found = tmp_path_factory.mktemp("internvl")
    served.folder("internvl", found)
    return found


def configured(place: Path, select: str | None = "divprune", allowed: list[str] | None = None, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    own = {name: given for name, given in {"select": select, "allowed": allowed}.items() if given is not None}
    if own:
        options["additional_config"] = {"vitrim": own}
    return EngineArgs(model=str(place), dtype="float32", **options).create_model_config()


@pytest.mark.parametrize("none", [0, {"count": 0}, {"count": 0, "num_frames": 8}])
def test_no_videos_are_no_videos_however_that_is_said(place: Path, pictures: Path, none: Any) -> None:
    own = {"image": {"count": 2, "width": 64}}
    for found in (place, pictures):
        config = configured(found, limit_mm_per_prompt={**own, "video": none})
        assert config.multimodal_config.get_limit_per_prompt("video") == 0
    config = configured(pictures, limit_mm_per_prompt=own)
    assert config.architectures == ["VitrimInternVLForConditionalGeneration"]
    assert config.multimodal_config.get_limit_per_prompt("video") == 0
    assert config.multimodal_config.get_limit_per_prompt("image") == 2


@pytest.mark.parametrize("some", [1, {"count": 1}, {"num_frames": 8}])
def test_videos_are_refused_however_they_are_asked_for(place: Path, pictures: Path, some: Any) -> None:
    """Where they are not selected."""
    with pytest.raises(VitrimError, match=r"^videos of InternVL cannot be selected in vLLM"):
        configured(pictures, limit_mm_per_prompt={"video": some})
    assert configured(place, limit_mm_per_prompt={"video": some}).multimodal_config.get_limit_per_prompt("video")


def test_videos_are_selected_once(place: Path) -> None:
    """By us, or by vLLM's own selection."""
    with pytest.raises(VitrimError, match=r"^video_pruning_rate=0\.5 .*: leave it out, or the selector$"):
        configured(place, video_pruning_rate=0.5)
    own = configured(place, None, video_pruning_rate=0.5)
    assert own.architectures == ["Qwen2VLForConditionalGeneration"]


def test_another_implementation_is_refused_in_one_line(place: Path) -> None:
    with pytest.raises(VitrimError, match=r"^model_impl=transformers: .* leave it out, or take auto or vllm$"):
        configured(place, model_impl="transformers")
    assert configured(place, model_impl="vllm").architectures == ["VitrimQwen2VLForConditionalGeneration"]
    assert configured(place, None, model_impl="transformers").architectures == ["Qwen2VLForConditionalGeneration"]


@pytest.mark.parametrize("word", ["none", "off"])
def test_a_word_switches_selection_off(place: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRIM_SELECT", word)
    assert configured(place, None).architectures == ["Qwen2VLForConditionalGeneration"]
    monkeypatch.setenv("VITRIM_SELECT", "divprune")
    assert configured(place, word).architectures == ["Qwen2VLForConditionalGeneration"]
    assert configured(place, None).architectures == ["VitrimQwen2VLForConditionalGeneration"]


def test_a_server_can_select_for_requests_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRIM_SELECT_ALLOWED", "pool off")
    config = configured(place, None)
    assert config.architectures == ["VitrimQwen2VLForConditionalGeneration"]
    assert ServerSetting.of_model(config.hf_config) == ServerSetting("none", ["pool", "none"])


def test_what_is_listed_must_fit_the_model(place: Path) -> None:
    with pytest.raises(VitrimError, match=r"^divprune:positions=closed: positions of Qwen2-VL have three axes"):
        configured(place, allowed=["any", "divprune:positions=closed"])


def test_what_cannot_act_in_a_family_ends_the_start_in_one_line(pictures: Path) -> None:
    with pytest.raises(
        VitrimError, match=r"^pixelprune: the tower of InternVL reads every patch of an image; .*Qwen2-VL"
    ):
        configured(pictures, "pixelprune")
    with pytest.raises(
        VitrimError, match=r"^resize:tokens=4: images of InternVL keep the size that its processor gives"
    ):
        configured(pictures, allowed=["resize:tokens=4"])


def test_the_setting_of_a_server_is_not_an_argument_of_its_processor(place: Path) -> None:
    with pytest.raises(VitrimError, match=r"^vitrim_select in mm_processor_kwargs is for requests: set VITRIM_SELECT"):
        configured(place, None, mm_processor_kwargs={"vitrim_select": "pool"})


@pytest.mark.parametrize(
    ("select", "allowed", "largest"),
    [
        ("divprune:tokens=12", None, 12),
        ("divprune:tokens=12", [], 12),
        ("resize:tokens=16", None, 16),
        ("pixelprune", None, 64),
        ("pixelprune", [], 64),
        ("divprune:tokens=12", ["pixelprune"], 64),
        ("divprune:tokens=12", ["random:tokens=9"], 12),
        ("divprune:tokens=12", ["random:tokens=20", "random:tokens=15"], 20),
        ("divprune:tokens=12", ["random:tokens=20", "any"], 64),
        (None, ["divprune:tokens=12"], 64),
    ],
)
def test_memory_is_for_the_largest_image_of_what_is_listed(
    place: Path, select: str | None, allowed: list[str] | None, largest: int
) -> None:
    """vLLM's own number of an image's tokens, of at most 128 x 128 pixels, in cells of 16 x 16."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item

    processor = MULTIMODAL_REGISTRY.create_processor(configured(place, select, allowed))
    assert get_mm_max_toks_per_item(processor, {"image": 1}, None) == {"image": largest}


def test_pixels_of_different_form_are_never_joined(place: Path) -> None:
    """Bytes, numbers between them, and images of which cells are missing: vLLM would join them silently, or fail."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import ProcessorInputs
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.utils import group_and_batch_mm_items

    processor = MULTIMODAL_REGISTRY.create_processor(configured(place, None, ["any"]))

    def item(select: str) -> Any:
        own = processor.info.parse_mm_data({"image": [served.photograph(1)]})
        given = ProcessorInputs([served.WORDS], own, hf_processor_mm_kwargs={"vitrim_select": select})
        return processor.apply(given, TimingContext(enabled=False))["mm_kwargs"]["image"][0]

    def joined(*selects: str) -> list[int]:
        return [number for number, _ in group_and_batch_mm_items([item(select) for select in selects])]

    assert joined("none", "divprune", "pool") == [3]
    assert joined("resize", "resize:tokens=5") == joined("pixelprune", "pixelprune:tau=0.1") == [2]
    assert joined("none", "resize", "pixelprune", "none") == [1, 1, 1, 1]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_has_the_traits_of_the_model_that_it_selects_in(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM finds the traits of our class to be those of its own; none are kept in a file, where they could grow old.

    It changes a server's settings as for its own.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import _ModelInfo
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert MODELS_CONFIG_MAP.get(PREFIX + architecture) is MODELS_CONFIG_MAP.get(architecture)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    own = ModelRegistry.models[PREFIX + architecture]
    with mock.patch(f"{REGISTRY}._run_in_subprocess", lambda found: found()):
        assert own.inspect_model_cls() == _ModelInfo.from_model_cls(own.load_model_cls())
    assert [file.name.startswith("vitrim") for file in (tmp_path / "modelinfos").iterdir()] == [False]
