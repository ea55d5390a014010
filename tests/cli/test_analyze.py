"""``vitrim analyze`` as a user runs it: one pass on made images, and everything again from its records."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import spearmanr

from cli_runs import exit_code
from vitrim.analysis import output
from vitrim.analysis.families import FAMILIES, Family
from vitrim.analysis.families.features import procrustes
from vitrim.analysis.families.patterns import iou
from vitrim.analysis.figures import drawn
from vitrim.analysis.record import Record
from vitrim.errors import VitrimError
from vitrim.measure.decisions import read_arrays

METHODS = ("topk:keep_rate=0.5", "random:keep_rate=0.5", "tome:r=2", "kmedoids:keep_rate=0.5", "patchmerger")
MODEL = ("test_vit", "--model-option", "img_size=64", "--model-option", "num_classes=6")  # 17 tokens


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 images, two of each of six classes."""
    root = tmp_path_factory.mktemp("images")
    for label, name in enumerate(("ant", "bee", "cat", "dog", "eel", "fox")):
        (root / name).mkdir()
        for index in range(2):
            pixels = np.random.default_rng(2 * label + index).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(root / name / f"{index}.png")
    return root


def run(*arguments: object) -> int:
    """Exit code of ``vitrim analyze`` with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        return exit_code(patch, "analyze", *arguments)


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures out, which take most of the time, where a test is about something else."""
    monkeypatch.setattr("vitrim.analysis.output.drawn", lambda family, tables: [])


DRAWN = ("counts", "depth", "patterns")
"""Families whose figures are drawn here; `test_family.py` draws those of all."""


@pytest.fixture(scope="module")
def report(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "report"
    chosen = [part for method in METHODS for part in ("-m", method)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "drawn", lambda family, tables: drawn(family, tables) if family in DRAWN else [])
        assert run(*MODEL, *chosen, "--data", images, "--batch-size", 5, "--out", out) == 0
    return out


def table(report: Path, name: str) -> list[dict[str, str]]:
    with (report / "tables" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def summary(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((report / "analysis.json").read_text())
    return found


def records(report: Path) -> dict[str, Record]:
    return {record.method: record for record in map(Record.load, sorted(report.glob("record_*.npz")))}


def test_every_family_has_its_tables(report: Path) -> None:
    names = {file.stem for file in (report / "tables").iterdir()}
    assert names == {
        *("overlap", "clusters", "depth", "depth_maps", "depth_pairs", "counts"),
        *("summary", "features", "proxy", "proxy_anchors", "class_tokens"),
    }
    found = summary(report)
    assert found["complete"]
    assert set(found["tables"]) == names - {"depth_maps"}
    assert any("estimated from 12 images" in note for note in found["notes"])
    assert any("CCA and PWCCA need 128 images" in note for note in found["notes"])
    assert len(records(report)) == 1 + len(METHODS)
    header = records(report)["tome:r=2"].header
    assert {header[key] for key in ("model", "weights")} == {"test_vit", "random"}
    assert header["environment"]["device"] == "cpu"


def test_the_numbers_are_those_of_the_metrics(report: Path) -> None:
    found = records(report)
    topk, random = found[METHODS[0]], found[METHODS[1]]
    rows = [row for row in table(report, "overlap") if {row["method_a"], row["method_b"]} == {topk.name, random.name}]
    assert [int(row["block"]) for row in rows] == topk.blocks == random.blocks
    for stage, row in enumerate(rows):
        values = iou(topk.kept()[:, stage], random.kept()[:, stage])
        assert float(row["iou"]) == pytest.approx(values.mean())
        assert float(row["iou_std"]) == pytest.approx(values.std())
        assert float(row["iou_low"]) <= values.mean() <= float(row["iou_high"])
        assert float(row["iou_least"]) <= float(row["iou_chance"])
        assert (values >= float(row["iou_least"])).all()
    merging = [row for row in table(report, "overlap") if "tome" in row["method_a"] + row["method_b"]]
    assert merging
    assert all(row["iou_least"] == "" for row in merging)
    pairs = {frozenset((row["method_a"], row["method_b"])) for row in table(report, "clusters")}
    assert len(pairs) == 3  # of the three that merge
    one = table(report, "features")[0]
    a, b = (next(r for r in found.values() if r.name == one[side]) for side in ("method_a", "method_b"))
    assert float(one["procrustes"]) == pytest.approx(
        procrustes(a.feature(int(one["block"])), b.feature(int(one["block"])))
    )
    difference = abs(a.correct().mean() - b.correct().mean())
    assert float(one["difference"]) == pytest.approx(difference)
    for row in table(report, "proxy"):
        distances = [
            (float(pair[row["measure"]]), float(pair["difference"]))
            for pair in table(report, "features")
            if pair["block"] == row["block"]
        ]
        assert float(row["spearman"]) == pytest.approx(spearmanr(*zip(*distances, strict=True)).statistic)
        assert float(row["spearman_low"]) <= float(row["spearman"]) <= float(row["spearman_high"])
    counts = [row for row in table(report, "counts") if "tome" in row["method"]]
    assert [float(row["tokens"]) for row in counts] == [15, 13, 11, 9, 7, 5]
    assert float(counts[0]["removed"]) == 2
    places = table(report, "depth_maps")
    assert len(places) == 16 * 4  # soft tokens stand on no patch


def test_the_report_has_its_figures(report: Path) -> None:
    figures = {file.name for file in (report / "figures").iterdir()}
    assert {"overlap.png", "clusters.png", "depth_maps.png", "tokens.png"} <= figures
    page = (report / "index.html").read_text()
    assert page.count("<img ") == len(figures)
    assert "test_vit, img_size=64, num_classes=6; weights: random" in page
    assert f"![{'Maps over the image'}" in (report / "report.md").read_text()


@pytest.mark.usefixtures("without_figures")
def test_experiments_alone_need_no_pass(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    methods = ("-m", "topk:keep_rate=0.5", "-m", "mctf:r=2")
    assert run(*MODEL, *methods, "--data", images, "--only", "router,attention", "--out", out) == 0
    assert not list(out.glob("record_*"))
    assert {file.stem for file in (out / "tables").iterdir()} == {"router", "attention"}
    header, arrays = read_arrays(out / "arrays" / "router.npz", "arrays", 1)
    assert header["family"] == "router"
    assert arrays["topk:keep_rate=0.5/scores"].shape == (8, 3, 16)
    notes = summary(out)["notes"]
    assert "router: estimated from 12 images, fewer than 30" in notes
    assert "mctf:r=2 is left out of router: it does not rank patches" in notes


@pytest.mark.usefixtures("without_figures")
def test_only_some_families(report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = next(report.glob("record_topk*"))
    assert run("--from", one, "--only", "depth,counts", "--out", tmp_path / "some", "--json", "-") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["table"] for row in printed["rows"]} == {"depth", "counts"}
    assert {file.stem for file in (tmp_path / "some" / "tables").iterdir()} == {
        "summary",
        "depth",
        "depth_maps",
        "counts",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_a_family_that_cannot_be_had_does_not_cost_the_records(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> None:
        raise VitrimError("these records are too few")

    monkeypatch.setitem(FAMILIES, "counts", Family("Counts", fails))
    out = tmp_path / "out"
    assert run(*MODEL, "-m", "tome:r=2", "--data", images, "--only", "counts", "--out", out) == 2
    assert "these records are too few" in capsys.readouterr().err
    assert sorted(file.name for file in out.iterdir()) == ["record_dense.npz", "record_tome_r_2.npz"]
    monkeypatch.undo()
    stored = [part for name in ("dense", "tome_r_2") for part in ("--from", out / f"record_{name}.npz")]
    assert run(*stored, "--only", "counts", "--out", tmp_path / "again") == 0
    assert len(table(tmp_path / "again", "counts")) == 12  # 6 blocks of 2 models


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a model and --data, or stored records with --from"),
        ([*MODEL], "give the images to analyse the model on with --data"),
        (["test_vit", "--from", "RECORD"], "and runs no model: leave out the model"),
        (["--from", "RECORD", "--only", "depth,router"], "router runs the model, which stored records do not hold"),
        ([*MODEL, "--data", "none", "--only", "throughput", "--sizes", "64,x"], "whole numbers of pixels"),
        (["--from", "RECORD", "--out", "FULL"], "is not empty and holds no analysis"),
        (["--from", "RECORD", "--workers", "2"], "and runs no model: leave out --workers"),
        (["one", "two", "--data", "none"], "give one model, not one, two"),
        (
            ["one", "--model", "two", "--data", "none", "--checkpoint", "x"],
            "the weights of one model; 2 models are given",
        ),
        (["--compare", "REPORT"], "two finished analyses or more, got 1"),
        (["--compare", "REPORT", "REPORT", "--from", "RECORD"], "leave out --from"),
        (["--from", "RECORD", "--model", "two"], "leave out --model"),
        (["--from", "RECORD", "--limit", "3"], "--from analyses stored records, and runs no model: leave out --limit"),
        (["--compare", "REPORT", "REPORT", "--split", "test"], "finished analyses, and runs no model: leave out --spl"),
        (["--from", "RECORD", "--sizes", "64"], "sizes are those of the family throughput"),
    ],
)
def test_bad_input_is_one_line(
    report: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other.txt").write_text("mine")
    known = {"RECORD": str(next(report.glob("record_tome*"))), "FULL": str(tmp_path / "full"), "REPORT": str(report)}
    before = {file: file.stat().st_mtime_ns for file in report.rglob("*")}
    given = [known.get(part, part.replace("FULL", known["FULL"])) for part in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "new")]
    assert run(*given, *out) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
    assert not (tmp_path / "new").exists()
    assert {file: file.stat().st_mtime_ns for file in report.rglob("*")} == before
