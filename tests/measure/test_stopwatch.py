"""Times of the parts of a prompt, by a clock that modules put forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_selected_prefill import Ticking

from tiny_vlms import VLMS
from vitrim.engines.prefill import Prefill
from vitrim.measure import stopwatch


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
