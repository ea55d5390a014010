from __future__ import annotations

import json
import sys

from cli_runs import exit_code
from vitrim.demo import run

SPEED = [
    {"model": run.SPEED_MODEL, "batch_size": 8, "dtype": "fp32", "method": "dense", "images_per_second": 10.0}
    | {"speedup": 1.0, "promised_speedup": 1.0},
    {"model": run.SPEED_MODEL, "batch_size": 8, "dtype": "fp32", "method": "tome:r=13", "images_per_second": 17.0}
    | {"speedup": 1.7, "promised_speedup": 1.74},
]


def test_demo_prints_one_table_and_writes_record_and_figures(monkeypatch, capsys, tmp_path) -> None:
    """The digits half runs for real on two methods; the timing half, which takes a minute, is given."""
    monkeypatch.setattr(run, "DIGITS_METHODS", (*run.DIGITS_METHODS[1:2], *[run.DIGITS_METHODS[-1]] * 9))
    monkeypatch.setattr(run, "measure_speed", lambda seed: SPEED)
    assert exit_code(monkeypatch, "demo", "--out", tmp_path) == 0
    record = json.loads((tmp_path / "demo.json").read_text())
    dense, random, atm = record["digits"][:3]
    assert dense["method"] == "dense"
    assert dense["top1"] > 0.99
    assert random["top1"] < 0.95 < atm["top1"]
    assert 0.45 < sum(atm["gmacs"].values()) / sum(dense["gmacs"].values()) < 0.55
    assert record["speed"] == SPEED
    for name in ("accuracy_over_macs.png", "merged_patches.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "digits ViT on 450 images it never saw" in capsys.readouterr().out


def test_settings_of_the_demo_cut_about_30_and_50_percent() -> None:
    names = [text.partition(":")[0] for text in run.DIGITS_METHODS]
    assert names == ["random", "random", "topk", "topk", "evit", "evit", "tome", "tome", "atm", "atm"]


def test_missing_package_is_one_line(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert exit_code(monkeypatch, "demo", "--out", tmp_path / "none") == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: the demo needs")
