"""Times of the parts of a prompt, by a clock that modules put forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tiny_vlms import VLMS
from vitrim.engines.copies import reduced_copy
from vitrim.engines.prefill import Prefill
from vitrim.hosts.transformers import vlm_prompt
from vitrim.measure import stopwatch
from vitrim.selectors.fastervlm import FasterVLM


class Ticking:
    """A clock that modules put forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Callable[..., None]:
        def tick(*args: Any) -> None:
            self.now += seconds

        return tick


@pytest.mark.parametrize("number", [0, 3])
def test_parts_are_timed_apart(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says when each module ran; attention of the tower that is looked at counts as choosing."""
    clock = Ticking()
    monkeypatch.setattr(stopwatch, "time", clock)
    prefill = Prefill(VLMS["llava"].create(), text=5, select="fastervlm:tokens=9", new_tokens=number)
    few = reduced_copy(prefill, "none")
    model: Any = few.model
    model.model.vision_tower.get_submodule("embeddings").register_forward_hook(clock.takes(1))
    model.model.multi_modal_projector.linear_2.register_forward_hook(clock.takes(10))
    model.model.language_model.layers[1].register_forward_hook(clock.takes(100))
    model.lm_head.register_forward_hook(clock.takes(1000))
    select, attended, tick = FasterVLM.select, vlm_prompt.attended, clock.takes(0.25)
    monkeypatch.setattr(FasterVLM, "select", lambda self, seen: (tick(), select(self, seen))[1])
    monkeypatch.setattr(vlm_prompt, "attended", lambda *given: (tick(), attended(*given))[1])
    image = torch.randn(1, *prefill.shape)
    with stopwatch.Stopwatch(few, lambda: few(image), "cpu") as watch, torch.inference_mode():
        watch()
        watch()
    parts = {"tower": 1e3, "selection": 500.0, "language model": 1.1e6, "rest": 1e4}
    assert watch.medians(2) == parts | ({"decoding": 2.2e6} if number else {})
    watch.rounds.clear()
    few(image)  # without hooks
    assert not watch.rounds


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_what_joins_the_patches_inside_the_tower_is_no_time_of_the_tower(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen's mergers are modules of its tower, and belong to the connector."""
    clock = Ticking()
    monkeypatch.setattr(stopwatch, "time", clock)
    prefill = Prefill(VLMS[name].create(), text=5)
    model: Any = prefill.model
    visual, language = model.model.visual, model.model.language_model
    visual.blocks[0].register_forward_hook(clock.takes(1))
    mergers = [visual.merger, *getattr(visual, "deepstack_merger_list", [])]
    for merger in mergers:
        merger.register_forward_hook(clock.takes(10))
    language.layers[1].register_forward_hook(clock.takes(100))
    image = torch.randn(1, *prefill.shape)
    with stopwatch.Stopwatch(prefill, lambda: prefill(image), "cpu") as watch, torch.inference_mode():
        watch()
    rest = 1e4 * len(mergers)
    assert watch.medians(1) == {"tower": 1e3, "selection": 0.0, "language model": 1e5, "rest": rest}
