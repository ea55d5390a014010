"""Two processes that search together come to the files of one, to the byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_runs import exit_code

LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
TUNE = ["tune", "test_vit", "--model-option", "img_size=32", "--model-option", "patch_size=8"]
TUNE += ["--model-option", "num_classes=2", "--data", "images", "--target", "macs=0.8", "--evaluations", "4"]
TUNE += ["--batch-size", "3", "--limit", "24", "-m", "tome", "-m", "random", "--threads", "1"]


@pytest.mark.full  # `test_search.py` shares scores out to planted processes, `training/test_processes.py` starts two
def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 3 of 8 images: the processes have two and one of them, and of the first round one and none."""
    random = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *TUNE, "--out", "one") == 0
    # --multi_gpu is what makes it start several processes; --device cpu puts them on the CPU, with gloo
    done = subprocess.run(
        [sys.executable, *LAUNCH, "-m", "vitrim", *TUNE, "--out", "two", "--device", "cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("returned: ") == 1, "one process prints"
    for name in ("study.jsonl", "best.json"):
        assert Path("two", name).read_bytes() == Path("one", name).read_bytes()
