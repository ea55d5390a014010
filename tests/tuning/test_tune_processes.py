"""Two processes that search together come to the files of one, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_runs import exit_code, in_two_processes
from image_files import write_noise

TUNE = ["tune", "test_vit", "--model-option", "img_size=32", "--model-option", "patch_size=8"]
TUNE += ["--model-option", "num_classes=2", "--data", "images", "--target", "macs=0.8", "--evaluations", "4"]
TUNE += ["--batch-size", "3", "--limit", "24", "-m", "tome", "-m", "random", "--threads", "1"]


@pytest.mark.slow  # `test_proxy.py` shares scores out to planted processes, `training/test_processes.py` starts two
def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 3 of 8 images: the processes have two and one of them, and of the first round one and none."""
    write_noise(tmp_path / "images", 12)
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *TUNE, "--out", "one") == 0
    printed = in_two_processes("-m", "vitrim", *TUNE, "--out", "two", "--device", "cpu")
    assert printed.count("returned: ") == 1, "one process prints"
    for name in ("study.jsonl", "best.json"):
        assert Path("two", name).read_bytes() == Path("one", name).read_bytes()
