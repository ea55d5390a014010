"""`vitrim compare` from the command line: its record, its table and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import Run, refused, runner, succeeded
from image_files import write_noise
from vitrim.measure import bench as timing

OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 2}
MODEL = ["test_vit", *(f"--model-option={key}={value}" for key, value in OPTIONS.items())]
DATA = ["--data", "images", "--repeats", "1", "--min-seconds", "0"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """``vitrim compare`` of a tiny model, in a folder with the folder ``images`` of two classes."""
    write_noise(tmp_path / "images", 4)
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capfd, "compare", *MODEL)


def test_record_table_and_picture(run: Run) -> None:
    given = ["-m", "tome:r=2", "-m", "none", *DATA, "--at", "1", "--at", "2,4", "--limit", "6", "--json", "r.json"]
    out = succeeded(run, *given, "--figure", "loss.png")
    record = json.loads(Path("r.json").read_text())
    assert (record["command"], record["metric"], record["at"]) == ("compare", "top1", [1, 2, 4])
    assert (record["data"]["images"], record["weights"], record["model_options"]) == (6, "random", OPTIONS)
    assert [(row["model"], row["method"]) for row in record["rows"]] == [
        ("test_vit", name) for name in ("dense", "tome:r=2", "none")
    ]
    assert all([one["batch_size"] for one in row["speeds"]] == [1, 2, 4] for row in record["rows"])
    assert "test_vit on images: 6 images" in out
    assert "note: the model has random weights" in out
    assert all(line in out for line in record["words"])
    assert len(record["words"]) == 1 + 3  # none shows what vitrim itself costs, and is not judged
    assert "figure: loss.png" in out
    assert Path("loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_before_a_failure_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = timing.measure_sizes

    def fails_at_two(sized, methods, **options):  # type: ignore[no-untyped-def]
        if len(sized[0].ring[0]) == 2:
            raise MemoryError
        return real(sized, methods, **options)

    monkeypatch.setattr(timing, "measure_sizes", fails_at_two)
    code, out, err = run("-m", "tome:r=2", *DATA, "--at", "1,2", "--json", "-")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: out of memory at batch 2; settings finished before are kept",
    )
    assert [len(row["speeds"]) for row in json.loads(out)["rows"]] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "tome", "--at", ","], "--at is empty"),
        (["-m", "tome", "--figure", "loss.pdf"], "unknown format 'pdf'"),
        (["-m", "tome", "--protocol", "mode"], "write key=value"),
        ([], "there is nothing to compare with dense: name at least one method"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    refused(run, message, *DATA, *arguments)
