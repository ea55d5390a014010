"""What the plugin makes of a server's options, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import served
from vitrim.errors import VitrimError
from vitrim.serving.vllm.setting import FAMILIES, PREFIX

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


def configured(place: Path, select: str | None = "divprune", **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    if select is not None:
        options["additional_config"] = {"vitrim": {"select": select}}
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
    with pytest.raises(VitrimError, match=r"^video_pruning_rate=0\.5 .* leave it out, or the selector"):
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


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_has_the_traits_of_the_model_that_it_selects_in(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM finds the traits of our class to be those of its own; none are kept in a file, where they could grow old."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _ModelInfo
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    own = ModelRegistry.models[PREFIX + architecture]
    with mock.patch(f"{REGISTRY}._run_in_subprocess", lambda found: found()):
        assert own.inspect_model_cls() == _ModelInfo.from_model_cls(own.load_model_cls())
    assert [file.name.startswith("vitrim") for file in (tmp_path / "modelinfos").iterdir()] == [False]
