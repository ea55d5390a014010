"""`bench` as a function: the numbers and words of the command, for a model of one's own, which stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import vitrim
from image_files import write_noise
from vitrim.cli import app
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.measure import timing
from vitrim.measure.bench import bench
from vitrim.measure.latency import Budget, MachineWatch
from vitrim.measure.speed_report import SpeedReport

OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
MODEL = ["test_vit", *(f"--model-option={key}={value}" for key, value in OPTIONS.items())]
QUICK: dict[str, Any] = {"budget": Budget(1, min_seconds=0)}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model takes as many milliseconds as its name has letters, whatever the machine does."""

    def fake(runs: Mapping[str, Callable[[], Any]], device: object, budget: object) -> dict[str, Any]:
        return {name: np.full(3, float(len(name))) for name in runs}

    monkeypatch.setattr(timing, "time_interleaved", fake)
    monkeypatch.setattr(timing.Module, "peak_mib", lambda *_: 1.0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("test_vit", options=OPTIONS)


def without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "rows": [{**row, "prepare_seconds": 0.0} for row in record["rows"]]}


@pytest.mark.usefixtures("timed")
def test_record_and_text_are_those_of_the_command(tmp_path: Path) -> None:
    import json

    methods, target = ["tome:r=2,last_block=class_token", "topk"], tmp_path / "bench.json"
    given = [*(part for method in methods for part in ("-m", method)), "-b1,2", "--precision=fp32,bf16"]
    result = CliRunner().invoke(app, ["bench", *MODEL, *given, f"--json={target}"])
    assert result.exit_code == 0, result.output
    report = bench(
        vitrim.ModelSpec("test_vit", options=OPTIONS), methods, batch_size=(1, 2), precision=["fp32", "bf16"]
    )
    assert without_seconds(json.loads(target.read_text())) == without_seconds(report.record)
    printed, said = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (result.stdout, str(report)))
    assert printed == said
    assert report.words[0][0] in report._repr_html_()


@pytest.mark.usefixtures("timed")
def test_what_else_ran_on_the_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def crowded() -> Iterator[list[MachineWatch]]:
        yield [MachineWatch(10.0, 10.0, 5.5, 2)]

    calm = bench(model(), "tome:r=2", batch_size=1, **QUICK)
    monkeypatch.setattr(timing, "watched_machine", crowded)
    report = bench(model(), "tome:r=2", batch_size=1, **QUICK)
    line = "something else ran on this machine (load 5.5 on 2 cores)"
    assert [row["disturbed"] for row in report.rows] == [line] * 2
    assert (line in str(report), "disturbed" in str(calm)) == (True, False)


@pytest.mark.usefixtures("timed")
def test_a_model_stays_as_it_is_in_every_precision() -> None:
    host = model()
    before = {name: value.clone() for name, value in host.state_dict().items()}
    generator = torch.get_rng_state()
    report = bench(host, "tome:r=2", batch_size=1, precision=("bf16", "fp32"))
    assert report.facts["weights"] == "given"
    assert [row["precision"] for row in report.rows] == ["bf16", "fp32", "bf16", "fp32"]
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_every_setting_is_handed_over_and_the_rounds_are_told() -> None:
    seen: list[tuple[int, int]] = []
    told: list[str] = []

    def on_setting(report: SpeedReport) -> None:
        seen.append((len(report.tables), len(report.rows)))

    bench(model(), "tome:r=2", batch_size=(1, 2), **QUICK, on_report=on_setting, on_progress=told.append)
    assert seen == [(0, 0), (1, 2), (2, 4)]
    assert told[:4] == [
        "1 of 2, batch 1: making dense (fused) ready, 1 of 3",
        "1 of 2, batch 1: making dense (unfused) ready, 2 of 3",
        "1 of 2, batch 1: making tome:r=2 ready, 3 of 3",
        "1 of 2, batch 1: timing, round 1, 0 %",
    ]
    assert told[-1] == "2 of 2, batch 2: timing, round 2, 100 %"


def test_half_of_a_budget_is_half() -> None:
    told: list[str] = []
    budget = timing._Watched(min_rounds=10, min_seconds=2.0, tell=told.append)
    plain = Budget(min_rounds=10, min_seconds=2.0)
    for rounds, seconds in ((0, 0.0), (5, 9.0), (40, 3.0), (40, 6.0)):
        assert budget.spent(rounds, seconds, 3) == plain.spent(rounds, seconds, 3)
    shown = ["round 1, 0 %", "round 6, 50 %", "round 41, 50 %", "round 41, 100 %"]
    assert told == [f"timing, {text}" for text in shown]
    budget.spent(0, 0.0, 3)  # the rounds begin anew, as on a machine whose timings drift
    assert told[-1] == "timing again (time 2 of at most 3), because timings drift, round 1, 0 %"


@pytest.mark.usefixtures("timed")
def test_images_of_a_dataset_are_taken_as_they_are(tmp_path: Path) -> None:
    from vitrim.data import load_images

    write_noise(tmp_path / "images", 2)
    data = load_images(tmp_path / "images")
    transform = data.transform
    report = bench(model(), "tome:r=2", batch_size=4, images=data)
    assert report.facts["images"] == str(tmp_path / "images")
    assert data.transform is transform


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": ()}, "batch_size=.*at least 1 entries"),
        (
            {"images": vitrim.DataSpec(None, split="test")},
            "split says which images of a source to read, and there is no source",
        ),
        ({"images": [1, 2]}, "expected a source of images or a dataset of vitrim.data, got list"),
    ],
)
def test_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        bench(**{"model": model(), "methods": "tome:r=2", **given})
