"""Models whose image tokens are selected, inside vLLM: answers are those of transformers with the same selection.

`make test-vllm` runs these in an environment of its own; elsewhere they are skipped.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import served
from vitrim.errors import VitrimError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test-vllm` makes an environment that has it", allow_module_level=True)

TOLERANCE = 1e-4
CASES = [
    *((family, "divprune:keep=0.25") for family in served.FAMILIES),
    ("llava", "pool:tokens=20"),
    ("llava", "random:tokens=5,seed=3"),
    ("llava", "cdpruner:text=none,keep=0.5"),
    ("llava", "dart:text_pivots=0"),
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A folder and the model of every family, when it is first asked for."""

    class Made(dict[str, tuple[Path, Any]]):
        def __missing__(self, name: str) -> tuple[Path, Any]:
            place = tmp_path_factory.mktemp(name)
            self[name] = place, served.folder(name, place)
            return self[name]

    return Made()


@contextmanager
def engine(place: Path, select: str | None, **options: Any) -> Iterator[Any]:
    """vLLM in this process, on the model in a folder."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if select is not None:
        options["additional_config"] = {"vitrim": {"select": select}}
    usual = {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 3},
    }
    try:
        llm = LLM(model=str(place), dtype="float32", seed=0, **{**usual, **options})
        yield llm
        del llm
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def same(got: list[served.Answer], expected: list[served.Answer]) -> None:
    for (tokens, logs), (own, own_logs) in zip(got, expected, strict=True):
        assert tokens == own
        assert logs == pytest.approx(own_logs, abs=TOLERANCE)


def answers(name: str, place: Path, model: Any, select: str | None) -> list[served.Answer]:
    from transformers import AutoProcessor

    return served.by_transformers(model, AutoProcessor.from_pretrained(place), served.prompts(name), select)


@pytest.mark.parametrize(("name", "select"), CASES)
def test_answers_are_those_of_transformers(name: str, select: str, folders: dict[str, tuple[Path, Any]]) -> None:
    """Text alone, one to three images, and two turns, in one batch and again from the caches."""
    place, model = folders[name]
    expected = answers(name, place, model, select)
    dense = answers(name, place, model, None)
    assert [tokens for tokens, _ in expected[1:]] != [tokens for tokens, _ in dense[1:]]  # a selection matters
    with engine(place, select) as llm:
        for _ in range(2):
            same(served.by_vllm(llm, served.prompts(name)), expected)


def test_nothing_changes_without_a_setting(folders: dict[str, tuple[Path, Any]]) -> None:
    place, model = folders["llava"]
    with engine(place, None) as llm:
        config = llm.llm_engine.vllm_config.model_config
        assert config.architecture == "LlavaForConditionalGeneration"
        assert not hasattr(config.hf_config, "vitrim_select")
        same(served.by_vllm(llm, served.prompts("llava")), answers("llava", place, model, None))


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("divprun", "divprune"),
        ("fastervlm", "attention"),
        ("dart", "question"),
        ("random:positions=original", "positions"),
    ],
)
def test_bad_settings_end_the_start_in_one_line(select: str, words: str, folders: dict[str, tuple[Path, Any]]) -> None:
    with pytest.raises(VitrimError, match=words), engine(folders["llava"][0], select):
        pass
