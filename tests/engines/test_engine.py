"""What models run on: engines by name, the baseline among them, and the numbers of several at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrim
from vitrim.core.method import MethodConfig
from vitrim.core.registry import parse_method
from vitrim.engines import engine as engines
from vitrim.engines import writing
from vitrim.engines.copies import reduced_copy
from vitrim.engines.engine import Compiled, Eager, Engine, FileEngine, engines_named
from vitrim.engines.formats import PT2
from vitrim.engines.runnable import Module, Runnable, outputs
from vitrim.errors import MissingPackageError, VitrimError
from vitrim.measure import timing
from vitrim.measure.latency import Budget
from vitrim.measure.records import Row
from vitrim.measure.timing import measure

ONCE = Budget(min_rounds=1, min_seconds=0.0, warmup_rounds=0)
IMAGES = torch.zeros(2, 3, 32, 32)
METHODS = {text: parse_method(text) for text in ("tome:r=2", "topk")}


def model() -> nn.Module:
    from timm.models import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5).eval()


class Other(Eager):
    """An engine of our own, which runs some methods only."""

    def __init__(self, label: str, refuses: Sequence[str] = (), precision: str = "fp32") -> None:
        super().__init__(precision)
        self.label, self.refuses = label, refuses
        self.folders: list[Path] = []

    def obstacle(self, config: MethodConfig, batch: int) -> str | None:
        return "it is not made for it" if config.name in self.refuses else None

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Runnable:
        assert not list(folder.iterdir())
        self.folders.append(folder)
        return Module(model, self.label, self.precision)


def timed(monkeypatch: pytest.MonkeyPatch, times: Mapping[str, float]) -> None:
    """Let `measure` find these milliseconds in every round."""

    def fake(runs: Mapping[str, Callable[[], object]], device: object, budget: object) -> dict[str, Any]:
        assert list(runs) == list(times)
        return {name: np.full(3, value) for name, value in times.items()}

    monkeypatch.setattr(timing, "time_interleaved", fake)


def by_place(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    return {(row["method"], row["engine"]): row for row in rows}


def test_the_baseline_is_the_fastest_engine_and_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Other("other", ("topk",))
    times = {
        "dense (fused)": 12.0,
        "dense (unfused)": 16.0,
        "tome:r=2": 9.0,
        "topk": 6.0,
        "dense (fused) on other": 9.0,
        "dense (unfused) on other": 8.0,
        "tome:r=2 on other": 4.0,
    }
    timed(monkeypatch, times)
    rows = measure(model(), METHODS, IMAGES, engines=["eager", other])
    found = by_place(rows)
    assert list(found) == [
        ("dense", "eager"),
        ("dense", "other"),
        ("tome:r=2", "eager"),
        ("tome:r=2", "other"),
        ("topk", "eager"),
    ]
    assert {(row["dense_engine"], row["dense_kernel"]) for row in rows} == {("other", "unfused")}
    speeds = {place: (row["speedup"], row["engine_speedup"]) for place, row in found.items()}
    assert speeds == {
        ("dense", "eager"): (8 / 12, 1.0),
        ("dense", "other"): (1.0, 1.0),
        ("tome:r=2", "eager"): (8 / 9, 12 / 9),
        ("tome:r=2", "other"): (2.0, 2.0),
        ("topk", "eager"): (8 / 6, 2.0),
    }
    assert found["tome:r=2", "other"]["ratio"] == 2.0 / found["tome:r=2", "eager"]["macs_speedup"]
    assert found["dense", "eager"]["dense_p50_ms"] == {"fused": 12.0, "unfused": 16.0}
    assert found["tome:r=2", "other"]["dense_p50_ms"] == {"fused": 9.0, "unfused": 8.0}
    assert found["topk", "eager"]["peak_memory_mib"] > 0
    assert len(set(other.folders)) == 3
    assert not any(folder.exists() for folder in other.folders)


def test_every_round_takes_the_next_of_several_batches() -> None:
    """Every other one warms up; the rest is timed once while it is new, and then each equally often. All models see the
    same one, and what MACs promise is a mean over them."""
    ring = [torch.full((1, 3, 32, 32), float(number)) for number in range(5)]
    ring[2][:, :, 16:] = torch.randn(1, 3, 16, 32, generator=torch.Generator().manual_seed(0))
    seen: dict[str, list[float]] = {}

    class Seeing(Eager):
        def prepare(self, model: nn.Module, *given: Any) -> Runnable:
            own = seen.setdefault(str(len(seen)), [])
            return Module(model, call=lambda images: own.append(images[0, 0, 0, 0].item()))

    config = parse_method("atm:alpha=0.999,beta=0.0,theta_min=0.9,last_block=full")
    budget = Budget(min_rounds=4, min_seconds=0.0, max_rounds=4, warmup_rounds=0)
    rows = measure(model(), {"atm": config}, ring, engines=[Seeing()], budget=budget)
    # once to be ready, the others, new ones, again, and six rounds, before the memory is measured; two dense kernels
    others, turn = [1.0, 3.0], [0.0, 2.0, 4.0]
    assert [each[:15] for each in seen.values()] == [[0.0, *others, *turn, *turn, *turn, *turn]] * 3
    assert [row["rounds"] for row in rows] == [6, 6]
    assert rows[0]["new_speedup"] == 1.0
    assert rows[1]["new_p50_ms"] > 0.0
    single = [measure(model(), {"atm": config}, each, budget=ONCE)[1]["macs_speedup"] for each in ring[::2]]
    assert len(set(single)) > 1
    assert rows[1]["macs_speedup"] == pytest.approx(3 / sum(1 / each for each in single))


@pytest.mark.slow  # exports, twice
def test_an_adaptive_method_runs_on_an_engine_image_by_image() -> None:
    ring = list(torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0)).split(1))
    methods = {"atm": parse_method("atm:alpha=0.9,beta=0.2,theta_min=0.1")}
    rows = measure(model(), methods, ring, engines=["eager", "torch.export"], budget=ONCE)
    assert [(row["method"], row["engine"], row["rounds"]) for row in rows] == [
        (name, engine, 6) for name in ("dense", "atm") for engine in ("eager", "torch.export")
    ]


@pytest.mark.slow  # `engines/test_writing.py` runs files beside the model
def test_what_is_timed_on_an_engine_of_files_is_the_model_itself(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    reduced = reduced_copy(model(), "dynamicvit:blocks=[1],keep_rate=0.5")  # its scores are drawn anew in every copy
    (engine,), lacking = engines_named(["torch.export"])
    assert lacking == []
    runnable = engine.prepare(reduced, images, tmp_path)
    with torch.inference_mode():
        np.testing.assert_allclose(outputs(runnable, images), reduced(images).numpy(), atol=1e-5)


def test_compile_is_two_engines_and_freezing_is_told_to_both_that_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch._inductor.config as inductor

    seen: list[tuple[object, bool, bool]] = []

    def fake(candidate: nn.Module, options: object = None, dynamic: bool | None = None) -> Callable[[Tensor], object]:
        return lambda images: seen.append((options, inductor.freezing, torch.is_inference_mode_enabled()))

    monkeypatch.setattr(torch, "compile", fake)
    for engine in engines_named(["compile"])[0]:
        assert engine.compiled
        engine.prepare(model(), IMAGES, tmp_path)
    assert seen == [(None, False, True), ({"freezing": True}, True, True)]
    assert not inductor.freezing


def test_compile_takes_the_sizes_of_a_second_image_size_as_constants(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Models at other image sizes run the code of the first, and dynamic sizes would be slower than its own."""
    seen: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., object]:
        assert not any(isinstance(one, torch.SymInt) for one in given)
        seen.append(tuple(size for one in given if one.ndim == 4 for size in one.shape if isinstance(size, int)))
        return graph.forward

    class Pooled(nn.Linear):
        """A model of images of any size."""

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.mean((2, 3)))

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, options, **given: compile_(model, backend=backend, **given))
    with engines.compilation(True):
        for side in (32, 24, 16):
            Compiled().prepare(Pooled(3, 2), torch.zeros(2, 3, side, side), tmp_path)
    torch.compiler.reset()
    assert seen == [(2, 3, side, side) for side in (32, 24, 16)]


@pytest.mark.slow
def test_frozen_weights_give_the_same_numbers(tmp_path: Path) -> None:
    """Two models of one form: neither runs on the weights of the other."""
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    one, other = model(), model()
    with torch.no_grad():
        other.head.weight.mul_(2.0)
    with engines.compilation(True):
        runs: list[Runnable] = [Compiled(freezing=True).prepare(each, images, tmp_path) for each in (one, other)]
        with torch.inference_mode():
            for each, run in zip((one, other), runs, strict=True):
                torch.testing.assert_close(run.run(images), each(images), atol=1e-5, rtol=0)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no engine is given; valid: aoti"),
        (["eager", "eager"], "engine eager is given twice"),
        (["compile", Compiled()], "engine compile is given twice"),
    ],
)
def test_wrong_engines(names: list[str | Engine], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        measure(model(), METHODS, IMAGES, engines=names)


def test_what_an_engine_cannot_run_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "dense_copies", lambda model: pytest.fail("made"))
    with pytest.raises(VitrimError, match=r"atm runs on none of these engines: .*; give eager too"):
        measure(model(), {"atm": parse_method("atm")}, torch.zeros(2, 3, 32, 32), engines=["torch.export"])
    with pytest.raises(VitrimError, match=r"torch.export runs fp32 here: torch.export cannot run in bf16"):
        measure(model().bfloat16(), METHODS, IMAGES, engines=["torch.export"])
    with pytest.raises(VitrimError, match=r"torch.export is timed on the CPU, and the model is on meta: leave it out"):
        measure(model(), METHODS, IMAGES.to("meta"), engines=["torch.export"])
    monkeypatch.setattr(engines, "compiler_lack", lambda: "g++")
    with pytest.raises(MissingPackageError, match=r"engine compile needs a C\+\+ compiler"):
        measure(model(), METHODS, IMAGES, engines=["eager", "compile"])


# ---- files made for an engine ----------------------------------------------------------------------------------------


class Written:
    """An exported file that notes what its int8 is made of."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def in_precision(self, precision: str, path: Path, batches: list[Any]) -> Written:
        self.batches = batches
        return self

    def given(self, images: Tensor) -> Any:
        return images

    def run(self, images: Any) -> Any:
        return images.mean((2, 3))


@pytest.mark.parametrize(("count", "expected"), [(5, [0.0, 2.0]), (1, [50.0])])
def test_int8_ranges_are_those_of_the_calibration(
    count: int, expected: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Batches of 2 of the images for it; those that are timed stand in where there are too few for one."""
    file, wanted = Written(), []
    monkeypatch.setattr(
        engines, "write", lambda draft, path, compared, **how: wanted.extend((draft.wanted, compared)) or file
    )
    monkeypatch.setattr(writing, "_shape", lambda model, size: (3, *size))
    timed = torch.full((2, 3, 4, 6), 50.0)
    calibration = torch.arange(float(count))[:, None, None, None].expand(count, 3, 4, 6)
    made: Any = FileEngine(PT2, "int8").prepare(model(), timed, tmp_path, calibration)
    assert [(len(batch), float(batch[0].mean())) for batch in file.batches] == [(2, first) for first in expected]
    assert wanted == [vitrim.FileSpec("pt2", batch=2, size=(4, 6), name="VisionTransformer"), None]
    assert torch.equal(made.run(timed), torch.full((2, 3), 50.0))
