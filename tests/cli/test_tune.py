"""`vitrim tune` from images to a file that other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_runs import Run, runner

SMALL = ["--model-option", "img_size=32", "--model-option", "patch_size=8", "--model-option", "num_classes=2"]
TUNE = [
    "tune",
    "test_vit",
    *SMALL,
    "--data",
    "images",
    "--target",
    "macs=0.8",
    "--evaluations",
    "4",
    "--batch-size",
    "4",
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    random = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capfd)


def test_a_result_is_read_by_other_commands_and_a_study_is_resumed(run: Run) -> None:
    code, out, err = run(*TUNE, "-m", "tome", "--json", "record.json")
    assert code == 0, err
    assert "returned: constant" in out or "returned: searched" in out
    best, study = Path("tuned/best.json").read_text(), Path("tuned/study.jsonl").read_bytes()
    record = json.loads(Path("record.json").read_text())
    assert record["tuned"] == json.loads(best)["tuned"]
    assert record["tuned"]["images"] == {"search": 8, "selection": 8, "check": 8}

    code, out, err = run("profile", "test_vit", *SMALL, "-m", "@tuned/best.json", "--json", "-")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    shares = [sum(row["gmacs"].values()) for row in rows]
    assert shares[1] / shares[0] == pytest.approx(record["tuned"]["reached"])

    code, _, err = run(*TUNE, "-m", "tome")
    assert code == 2
    assert "is there already" in err
    code, _, err = run(*TUNE, "-m", "tome", "--resume")
    assert code == 0, err
    assert (Path("tuned/best.json").read_text(), Path("tuned/study.jsonl").read_bytes()) == (best, study)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "tome", "-m", "atm"], "one method is tuned at a time, got 2"),
        (["-m", "tome", "--target", "macs=2"], "a share is above 0 and below 1"),
        (["-m", "tome", "--proxy", "loss"], "unknown proxy 'loss'"),
        (["-m", "none"], "there is nothing to tune"),
        (["-m", "@gone.json"], "no file gone.json"),
        (["-m", "tome", "--limit", "3"], "3 images are too few"),
    ],
)
def test_bad_input_is_one_line_before_any_file(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*TUNE, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("tuned").exists()
