"""What a user gets wrong on the command line: one short line, exit code 2, nothing made or changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

import cli_runs
from cli_runs import Run, runner, succeeded

LONG = "x" * 400
QUICK = ["-b", "1", "--repeats", "1", "--min-seconds", "0"]
COMMANDS = {
    "profile": ["profile", "test_vit"],
    "eval": ["eval", "test_vit", "--data", "images"],
    "bench": ["bench", "test_vit", "-m", "tome:r=3", *QUICK],
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """``vitrim`` with the given arguments in a folder with the folder ``images`` of four classes, and checkpoints."""
    for name in "abcd":
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (20, 20)).save(tmp_path / "images" / name / "0.png")
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capfd)


def refused(run: Run, message: str, *arguments: object) -> None:
    """And leaves the folder as it was."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    cli_runs.refused(run, message, *arguments)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("img_size=161", "test_vit does not work with img_size=161: Input height (161) should be divisible"),
        ("patch_size=10000", "test_vit "),
        ("depth=100000", "depth=100000 must be a whole number from 0 to 1000"),
        ("drop_path_rate=NaN", "drop_path_rate=nan must be a number from 0 to 1"),
        ("checkpoint_path=weights.pth", "checkpoint_path is no option of a model here: use --checkpoint"),
        ("norm_layer=5", "cannot create test_vit: "),
    ],
    ids=lambda value: value[:24],
)
def test_model_options(run: Run, command: str, option: str, message: str) -> None:
    refused(run, message, *COMMANDS[command], "--model-option", option)


@pytest.mark.parametrize("option", ["embed_dim=262144", "mlp_ratio=1e9"])
def test_a_model_that_the_memory_cannot_hold(run: Run, option: str) -> None:
    refused(run, "GiB of memory", *COMMANDS["eval"], "--model-option", option)
    succeeded(run, *COMMANDS["profile"], "--model-option", option)  # on the meta device, which holds any


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("/proc/self/mem", "/proc/self/mem is not a safetensors file: it is empty, or no regular file"),
        (LONG, "File name too long"),
    ],
    ids=lambda value: value[:24],
)
def test_checkpoints(run: Run, command: str, checkpoint: str, message: str) -> None:
    if checkpoint.startswith("/proc") and not Path("/proc/self/mem").exists():
        pytest.skip("this system has no /proc")
    Path("empty.safetensors").touch()
    refused(run, message, *COMMANDS[command], "--checkpoint", checkpoint)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("/", "/ is the whole file system: name the folder of the images"),
        ("~no-such-user/x", "~no-such-user/x does not exist"),
        ("images/a/0.png", "neither a parquet file nor a folder"),
    ],
    ids=lambda value: value[:24],
)
def test_data(run: Run, data: str, message: str) -> None:
    refused(run, message, "eval", "test_vit", "--model-option", "num_classes=4", "--data", data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "test_vit", "--data", "images", "--workers", "100000"], "--workers"),
        (["bench", "test_vit", "-m", "tome", "--min-seconds", "1e18"], "--min-seconds"),
        (["bench", "test_vit", "-m", "tome", "--split", "test"], "--split says which images to read, and none are"),
        (["profile", "test_vit", "-m", "atm", "--images", "images", "--image-column", "a"], "without columns"),
        (["profile", "test_vit", "--limit", "4"], "limit says how many images to run, and none are"),
        (["demo", "--json", f"a/{LONG}/b"], "File name too long"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bounds_and_options_without_effect(run: Run, arguments: list[str], message: str) -> None:
    refused(run, message, *arguments)


def test_a_limit_counts_random_images_too(run: Run) -> None:
    arguments = ["--model-option", "img_size=64", "--model-option", "depth=2"]
    out = succeeded(run, "profile", "test_vit", "-m", "atm", "--limit", "2", *arguments)
    assert "means over 2 random images" in out


def test_memory_that_is_missing_in_eval_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrim.measure.run import Measurement

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory\nlong story")

    monkeypatch.setattr(Measurement, "update", full)
    small = ["--model-option", "img_size=64", "--model-option", "num_classes=4"]
    refused(run, "out of memory at batch 32, fp32; what was gathered is kept", *COMMANDS["eval"], *small)


def test_files_have_the_mode_of_the_user(run: Run) -> None:
    before = os.umask(0o027)
    try:
        code, _, err = run("list", "methods", "--json", "record.json")
    finally:
        os.umask(before)
    assert code == 0, err
    assert Path("record.json").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("optimize", "test_vit", "--data", "x"), "no option --data; did you mean --images?"),
        (("tune", "test_vit", "--images", "x"), "no option --images; did you mean --data?"),
        ((*COMMANDS["eval"], "-b", 8), "no option -b; did you mean --batch-size?"),
        ((*COMMANDS["eval"], "--pretraind"), "no option --pretraind; did you mean --pretrained?"),
        (("optimize", "--model", "x"), "no option --model: write it without, vitrim optimize MODEL"),
        (
            ("show", "test_vit", "a.png", "--img-size", 384),
            "no option --img-size; an option of the library's model is written --model-option img_size=VALUE",
        ),
    ],
)
def test_an_option_that_there_is_not_names_the_one_that_was_meant(
    run: Run, given: tuple[object, ...], message: str
) -> None:
    refused(run, message, *given)
    code, _, err = run("list", "methods", "--img-size", 384)  # which makes no model
    assert (code, err) == (2, "error: no option --img-size\n")
