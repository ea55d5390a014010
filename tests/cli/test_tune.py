"""`vitrim tune` from images to a file that other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import Run, refused, runner, succeeded
from image_files import write_noise

RECIPE = """
model: test_vit
model_options: {img_size: 16, patch_size: 4}
epochs: 3
batch_size: 8
split: null
eval_split: 0.25
augment: {crop: padded, padding: 2}
optimizer: {lr: 1.0e-3}
"""
OPTIONS = ("depth=2", "img_size=32", "patch_size=8", "num_classes=2")
SMALL = [part for option in OPTIONS for part in ("--model-option", option)]
DATA = ["--data", "images", "--batch-size", "4"]
FEW = ["--evaluations", "4"]
TUNE = ["tune", "test_vit", *SMALL, *DATA, *FEW, "--target", "macs=0.8"]

pytestmark = pytest.mark.usefixtures("macs_counted_once")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    write_noise(tmp_path / "images", 12)
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


def test_a_front_has_a_file_for_every_target_and_pictures(run: Run) -> None:
    out = succeeded(run, "tune", "test_vit", *SMALL, *DATA, *FEW, "-m", "tome", "--front", "0.7,0.9")
    rows = json.loads(Path("tuned/front.json").read_text())["rows"]
    assert {row["target"] for row in rows} == {"macs=0.7", "macs=0.9"}
    front = sorted((row["share"], row["scores"]["feature"]) for row in rows if row["on_front"])
    assert [damage for _, damage in front] == sorted((damage for _, damage in front), reverse=True)
    for name in ("macs-0.7.json", "macs-0.9.json", "front.png", "macs-0.7.png"):
        assert Path("tuned", name).stat().st_size > 0
    assert "use them as -m @tuned/macs-0.7.json, -m @tuned/macs-0.9.json" in out


def test_a_recipe_is_trained_at_the_points_of_a_grid(run: Run) -> None:
    Path("tiny.yaml").write_text(RECIPE)
    train = ["tune", "--train", "tiny.yaml", "--data", "images", "--out", "runs", "--device", "cpu"]
    grids = ["--grid", "optimizer.lr=1e-2|1e-3", "--grid", "epochs=1"]
    code, out, err = run(*train, *grids)
    assert code == 0, err
    rows = json.loads(Path("runs/grid.json").read_text())["rows"]
    assert [row["values"]["optimizer.lr"] for row in rows] == ["1e-2", "1e-3"]
    for row in rows:
        assert row["top1"] == json.loads(Path(row["out"], "result.json").read_text())["best"]["top1"]
    code, _, err = run(*train, *grids)
    assert (code, "has a finished run" in err) == (2, True)
    code, again, err = run(*train, *grids, "--resume")
    assert (code, again) == (0, out)


GRID = TUNE[: -len(FEW) - 2]
TRAIN = ["tune", "--train", "cifar10_vit", "--data", "images", "--grid", "epochs=1"]


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (TUNE, ["-m", "tome", "-m", "all"], "-m all has the other methods already"),
        (TUNE, ["-m", "tome", "--front", "0.5"], "give one of --target, --front and --grid"),
        (TUNE, [], "-m METHOD is missing"),
        (TUNE, ["-m", "tome", "--check", "nowhere:test"], "nowhere"),
        (GRID, ["--grid", "tome:r=1..a"], "cannot read the range"),
        (GRID, ["--grid", "tome:r=1||2"], "a value is missing"),
        (GRID, ["--grid", "tome:r=1,r=2"], "given twice in the grid"),
        (GRID, ["--grid", "atm:alpha=0.1..1/0.001,beta=0..1/0.01"], "say with --evaluations how many"),
        (GRID, ["--grid", "tome:r=1", "-m", "tome"], "name the method in --grid"),
        (GRID, ["--grid", "study"], "give --train RECIPE too"),
        (GRID, ["--train", "cifar10_vit", "--grid", "epochs=1"], "the recipe names the model"),
        (GRID, ["--grid", "tome:r=1", "--engine", "openvino"], "--engine is for a search"),
        (GRID, ["--grid", "tome:r=1", "--check", "images", "--minutes", "0"], "--check, --minutes are for a search"),
        (GRID, ["--train", "cifar10_vit"], "--train RECIPE trains the points of a grid"),
        (TRAIN, ["--limit", "8"], "--limit is not for --train"),
        (TRAIN, ["--split", "train", "--task", "segmentation"], "--split, --task are not for --train"),
        (TRAIN, ["--proxy", "kl"], "--proxy is for a search"),
        (TRAIN, ["--device", "cuda:1"], "with --train accelerate chooses it"),
    ],
)
def test_bad_input_is_one_line_before_any_file(
    run: Run, command: list[str], arguments: list[str], message: str
) -> None:
    refused(run, message, *command, *arguments)
    assert not Path("tuned").exists()
