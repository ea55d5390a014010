"""Settings timed on other engines: on which, against what, and how many at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

import vitrim
from searches import search, thirds
from vitrim.core.method import MethodConfig
from vitrim.engines.engine import Eager
from vitrim.engines.runnable import Module, Runnable
from vitrim.errors import VitrimError
from vitrim.tuning import cost as costs
from vitrim.tuning.cost import LatencyCost, latency_fit, timer_on
from vitrim.tuning.search import SearchSpec
from vitrim.tuning.space import Space, quiet

IMAGES = torch.zeros(1, 3, 32, 32)
EXPORTED = SearchSpec(engine="torch.export")


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5).eval()


class Graph(Eager):
    """An engine whose models take so many milliseconds for every token that leaves a block, and more when dense."""

    def __init__(self, label: str, factor: float, together: list[int]) -> None:
        super().__init__()
        self.label, self.factor, self.together = label, factor, together

    def obstacle(self, config: MethodConfig, batch: int) -> str | None:
        return "no" if config.is_adaptive() else None

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Runnable:
        assert folder.is_dir()
        reduction = getattr(model, "vitrim_reduction", None)
        unfused: Any = not model.blocks[0].attn.fused_attn  # type: ignore[index, union-attr]
        tokens = 32 if reduction is None else sum(reduction.config.counts(16, 2))
        milliseconds = float(self.factor * tokens * (1.0 + (unfused and reduction is None)))
        return Module(model, call=lambda images: milliseconds)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls that were timed in turn, each time."""
    counted: list[int] = []

    def fake(calls: Mapping[str, Callable[[], Any]], device: object) -> dict[str, Any]:
        counted.append(len(calls))
        return {name: np.full(3, call()) for name, call in calls.items()}

    monkeypatch.setattr(costs, "time_interleaved", fake)
    return counted


def test_settings_are_timed_on_the_engine_that_is_fastest_for_dense(
    model: VisionTransformer, together: list[int]
) -> None:
    timed = timer_on([Graph("slow", 3.0, together), Graph("quick", 0.5, together)])
    configs = [vitrim.ToMe(r=[r, 0]) for r in range(1, 9)]
    ratios, dense_ms = timed(model, configs, [IMAGES])
    assert dense_ms == 16.0
    assert ratios == pytest.approx([sum(config.counts(16, 2) or ()) / 32 for config in configs])
    assert together == [4, 1 + costs.TOGETHER, 1 + 8 - costs.TOGETHER]


def test_a_latency_is_that_of_the_engine(model: VisionTransformer, together: list[int]) -> None:
    """Whose time is that of the tokens that leave a block: one of the terms of the fit."""
    space = Space.of(model, "tome")
    timer = timer_on([Graph("quick", 0.5, together)])
    with quiet():
        fit, dense_ms = latency_fit(space, lambda configs: timer(model, configs, [IMAGES]), number=8)
    assert fit.worst < 1e-6
    assert dense_ms * LatencyCost(space, fit).share(vitrim.ToMe(r=4)) == pytest.approx(0.5 * (12 + 8))


def test_a_method_that_does_not_run_on_every_engine_is_refused(model: VisionTransformer, together: list[int]) -> None:
    timed = timer_on([Eager(), Graph("quick", 0.5, together)])
    with pytest.raises(VitrimError, match="runs on none of these engines: no"):
        timed(model, [vitrim.parse_method("atm")], [IMAGES])
    assert together == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": SearchSpec(engine=["onnx"])}, "unknown engine 'onnx'; did you mean 'onnxruntime'"),
        (
            {"spec": SearchSpec(engine="torch.export"), "target": "macs=0.5"},
            "an engine is for speedup targets: macs=0.5",
        ),
    ],
)
def test_wrong_engines_of_a_search(model: VisionTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        search(model, "tome", thirds(torch.zeros(24, 3, 32, 32), 4), **{"target": "speedup=1.2", **options})


def test_every_model_is_timed_in_the_precision_of_the_engine(
    model: VisionTransformer, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reduced models as dense ones: their ratio would be that of two precisions."""
    dtypes: list[tuple[bool, torch.dtype, torch.dtype]] = []

    class Half(Graph):
        def prepare(self, model: nn.Module, images: Tensor, *given: Any) -> Runnable:
            reduced = hasattr(model, "vitrim_reduction")
            made = super().prepare(model, images, *given)
            dtypes.append((reduced, next(model.parameters()).dtype, made.given(images).dtype))
            return made

    engine = Half("half", 1.0, together)
    engine.precision = "bf16"
    timer_on([engine])(model, [vitrim.ToMe(r=2), vitrim.ToMe(r=4)], [IMAGES])
    assert {reduced for reduced, *_ in dtypes} == {False, True}
    assert {tuple(each) for _, *each in dtypes} == {(torch.bfloat16, torch.bfloat16)}
    assert next(model.parameters()).dtype == torch.float32
