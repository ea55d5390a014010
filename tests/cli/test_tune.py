"""`vitrim tune` from images to a file that other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import Run, runner
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


@pytest.mark.slow
def test_settings_are_scored_on_images_that_the_search_did_not_read(run: Run, tmp_path: Path) -> None:
    write_noise(tmp_path / "others", 3)
    code, out, err = run(*TUNE, "-m", "tome", "--minutes", "60", "--check", "others")
    assert code == 0, err
    assert "in %, on 6 images of others" in out
    assert "optimistic" not in out
    found = json.loads(Path("tuned/check.json").read_text())
    best = json.loads(Path("tuned/best.json").read_text())["tuned"]
    assert found["rows"][0]["method"] == "dense"
    assert {best["constant"]["method"], best["searched"]["method"]} == {row["method"] for row in found["rows"][1:]}
    assert set(found["rows"][1]) >= {"top1", "agreement", "images"}
    code, out, err = run(*TUNE, "-m", "tome", "--evaluations", "1", "--check", "images", "--out", "again")
    assert code == 0, err
    assert "these numbers are optimistic" in out


@pytest.mark.slow
def test_methods_race_and_the_table_has_all_of_them(run: Run) -> None:
    code, out, err = run(*TUNE, "-m", "tome", "-m", "gtp", "--json", "record.json")
    assert code == 0, err
    race = json.loads(Path("record.json").read_text())["tuned"]["race"]
    assert {row["method"] for row in race} == {"tome", "gtp"}
    assert {row["state"] for row in race} <= {"searched", "dropped"}
    assert all(f" {name} " in out for name in ("tome", "gtp"))
    code, _, err = run("profile", "test_vit", *SMALL, "-m", "@tuned")
    assert code == 0, err


def test_a_front_has_a_file_for_every_target_and_pictures(run: Run) -> None:
    code, out, err = run("tune", "test_vit", *SMALL, *DATA, *FEW, "-m", "tome", "--front", "0.7,0.9")
    assert code == 0, err
    rows = json.loads(Path("tuned/front.json").read_text())["rows"]
    assert {row["target"] for row in rows} == {"macs=0.7", "macs=0.9"}
    front = sorted((row["share"], row["scores"]["feature"]) for row in rows if row["on_front"])
    assert [damage for _, damage in front] == sorted((damage for _, damage in front), reverse=True)
    for name in ("macs-0.7.json", "macs-0.9.json", "front.png", "macs-0.7.png"):
        assert Path("tuned", name).stat().st_size > 0
    assert "use them as -m @tuned/macs-0.7.json, -m @tuned/macs-0.9.json" in out


@pytest.mark.slow
def test_a_grid_is_evaluated_point_by_point_and_resumed(run: Run) -> None:
    grid = ["tune", "test_vit", *SMALL, *DATA, "--limit", "8", "--grid", "tome:r=0|1|2,last_block=full|auto"]
    code, out, err = run(*grid, "--json", "record.json")
    assert code == 0, err
    rows = json.loads(Path("record.json").read_text())["rows"]
    assert [tuple(row["values"].values()) for row in rows[:3]] == [("0", "full"), ("0", "auto"), ("1", "full")]
    assert rows[0]["share"] == 1.0 > rows[4]["share"]
    lines = Path("tuned/grid.csv").read_text().splitlines()
    assert lines[0].startswith("r,last_block,method,share,top1")
    assert len(lines) == 7
    assert Path("tuned/grid.png").stat().st_size > 0
    before = Path("tuned/study.jsonl").read_bytes()
    code, again, err = run(*grid, "--resume")
    assert (code, again) == (0, out)
    assert Path("tuned/study.jsonl").read_bytes() == before

    code, out, err = run(
        "eval", "test_vit", *SMALL, *DATA, "--limit", "8", "-m", "tome:r=2,last_block=full", "--json", "-"
    )
    assert code == 0, err
    [row] = [row for row in json.loads(out)["rows"] if row["method"] != "dense"]
    assert row["top1"] == rows[4]["top1"]
    assert row["agreement"] == rows[4]["agreement"]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "tome", "-m", "tome"], "method tome is given twice"),
        (["-m", "tome", "-m", "all"], "-m all has the other methods already"),
        (["-m", "tome", "--front", "0.5"], "give one of --target, --front and --grid"),
        ([], "-m METHOD is missing"),
        (["-m", "tome", "--target", "macs=2"], "a share is above 0 and below 1"),
        (["-m", "tome", "--proxy", "loss"], "proxy=loss: must be 'feature'"),
        (["-m", "none"], "there is nothing to tune"),
        (["-m", "@gone.json"], "no file gone.json"),
        (["-m", "tome", "--limit", "3"], "too few images: searching, selecting and checking need 2 each, and get 1"),
        (
            ["-m", "tome", "--engine", "torch.export"],
            "an engine is for speedup targets: macs=0.8",
        ),
        (["-m", "tome", "--minutes", "0"], "minutes=0.0: must be above 0"),
        (["-m", "tome", "--check", "nowhere:test"], "nowhere"),
        (["-m", "tome", "--engine", "tensorrt"], "unknown engine 'tensorrt'"),
    ],
)
def test_bad_input_is_one_line_before_any_file(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*TUNE, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("tuned").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "atmm"], "unknown grid 'atmm'; did you mean 'atm'"),
        (["--grid", "tome:r,q=1"], "cannot read 'r' of the grid"),
        (["--grid", "tome:r=1..0"], "does not rise"),
        (["--grid", "tome:r=1..a"], "cannot read the range"),
        (["--grid", "tome:r=1||2"], "a value is missing"),
        (["--grid", "tome:r=1,r=2"], "given twice in the grid"),
        (["--grid", "atm:alpha=0.1..1/0.001,beta=0..1/0.01"], "say with --evaluations how many"),
        (["--grid", "tome:q=1|2"], "unknown option of tome 'q'"),
        (["--grid", "tome:r=1", "-m", "tome"], "name the method in --grid"),
        (["--front", "0.5,0.5", "-m", "tome"], "has a target twice"),
        (
            ["--front", "0.5,speedup=2", "-m", "tome"],
            "cannot read the target 'macs=speedup=2'",
        ),
        (["--front", "", "-m", "tome"], "cannot read the target 'macs='"),
        (["--grid", "study"], "is a value of a recipe or nothing that is known: give --train RECIPE too"),
        (["--front", "agree=0.5,0.9", "-m", "tome"], "a front is over targets of one kind"),
        (["--train", "cifar10_vit", "--grid", "epochs=1"], "the recipe names the model"),
        (["--grid", "tome:r=1", "--engine", "openvino"], "--engine is for a search"),
        (["--grid", "tome:r=1", "--proxy", "kl"], "--proxy is for a search with --target or --front: leave it out"),
        (
            ["--grid", "tome:r=1", "--check", "images", "--minutes", "0"],
            "--check, --minutes are for a search with --target or --front: leave them out",
        ),
        (["--train", "cifar10_vit"], "--train RECIPE trains the points of a grid"),
    ],
)
def test_bad_grids_and_fronts_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("tune", "test_vit", *SMALL, *DATA, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert not Path("tuned").exists()


RECIPE_SAYS = "not for --train, whose recipe says how the model is made and the data are read: leave"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "8"], f"--limit is {RECIPE_SAYS} it out"),
        (["--split", "train", "--task", "segmentation"], f"--split, --task are {RECIPE_SAYS} them out"),
        (["--pretrained"], f"--pretrained is {RECIPE_SAYS} it out"),
        (["--checkpoint", "w.pth"], f"--checkpoint is {RECIPE_SAYS} it out"),
        (["--model-option", "depth=2"], f"--model-option is {RECIPE_SAYS} it out"),
        (["--image-column", "a"], f"--image-column is {RECIPE_SAYS} it out"),
        (["--label-column", "a"], f"--label-column is {RECIPE_SAYS} it out"),
        (["--data-option", "a=1"], f"--data-option is {RECIPE_SAYS} it out"),
        (["--batch-size", "8"], f"--batch-size is {RECIPE_SAYS} it out"),
        (["--proxy", "kl"], "--proxy is for a search with --target or --front: leave it out"),
        (
            ["--device", "cuda:1"],
            "--device cuda:1 names one of several devices, and with --train accelerate chooses it: write --device cuda",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_without_effect_on_a_recipe_are_refused(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("tune", "--train", "cifar10_vit", "--data", "images", "--grid", "epochs=1", *arguments)
    assert (code, out, err) == (2, "", f"error: {message}\n")
    assert not Path("tuned").exists()
