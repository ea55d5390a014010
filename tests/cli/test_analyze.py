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
from vitrim import errors
from vitrim.analysis import output
from vitrim.analysis.families import DEFAULT, FAMILIES, Family
from vitrim.analysis.families.features import procrustes
from vitrim.analysis.families.patterns import iou
from vitrim.analysis.figures import drawn
from vitrim.analysis.record import Record
from vitrim.errors import VitrimError
from vitrim.measure.decisions import file_name, read_arrays
from vitrim.measure.run import Measurement

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


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_records_give_the_same_tables_again(report: Path, tmp_path: Path) -> None:
    stored = [report / f"record_{file_name(method)}.npz" for method in ("dense", *METHODS)]
    files = [part for file in stored for part in ("--from", file)]
    assert run(*files, "--out", tmp_path / "again") == 0
    for file in (report / "tables").iterdir():
        assert file.read_text() == (tmp_path / "again" / "tables" / file.name).read_text(), file.name
    assert not list((tmp_path / "again").glob("record_*"))


def test_the_report_has_its_figures(report: Path) -> None:
    figures = {file.name for file in (report / "figures").iterdir()}
    assert {"overlap.png", "clusters.png", "depth_maps.png", "tokens.png"} <= figures
    page = (report / "index.html").read_text()
    assert page.count("<img ") == len(figures)
    assert "test_vit, img_size=64, num_classes=6; weights: random" in page
    assert f"![{'Maps over the image'}" in (report / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_several_models_see_the_same_images(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "capacity"
    other = "vit_tiny_patch16_224"  # deeper: patterns could not be compared
    arguments = (*MODEL, "--model", other, "-m", "topk:keep_rate=0.5", "--only", "depth,counts")
    assert run(*arguments, "--data", images, "--limit", 6, "--out", out) == 0
    assert {file.name for file in out.glob("record_*")} == {
        f"record_{model}_{method}.npz" for model in ("test_vit", other) for method in ("dense", "topk_keep_rate_0.5")
    }
    methods = {row["method"] for row in table(out, "counts")}
    assert methods == {f"{method} on {model}" for model in ("test_vit", other) for method in ("dense", METHODS[0])}
    assert [one["model"] for one in summary(out)["models"]] == ["test_vit", other]
    kept = [Record.load(out / f"record_{model}_topk_keep_rate_0.5.npz") for model in ("test_vit", other)]
    assert np.array_equal(kept[0].arrays["ids"], kept[1].arrays["ids"])


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_one_image_is_enough(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "one"
    assert run(*MODEL, "-m", METHODS[0], "--data", images, "--limit", 1, "--only", "depth,counts", "--out", out) == 0
    assert Record.load(out / "record_dense.npz").arrays["ids"].shape == (1,)
    assert {row["images"] for row in table(out, "counts")} == {"1"}


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_finished_analyses_are_compared(report: Path, images: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    chosen = ("-m", METHODS[0], "-m", METHODS[2], "--only", "counts")
    assert run(*MODEL, *chosen, "--data", images, "--limit", 7, "--out", second) == 0
    before = sorted((file.name, file.stat().st_mtime_ns) for file in report.rglob("*"))
    out = tmp_path / "compared"
    assert run("--compare", report, second, "--only", "depth", "--out", out) == 0
    assert sorted((file.name, file.stat().st_mtime_ns) for file in report.rglob("*")) == before
    names = {row["method"] for row in table(out, "depth")}
    assert names == {
        *(f"{method} in {report}" for method in METHODS[:4]),
        *(f"{method} in {second}" for method in (METHODS[0], METHODS[2])),
    } or names == {
        *(f"{method} in {report.name}" for method in METHODS[:4]),
        *(f"{method} in {second.name}" for method in (METHODS[0], METHODS[2])),
    }
    assert summary(out)["compared"] == [str(report), str(second)]
    assert "Analyses compared" in (out / "index.html").read_text()


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


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_loss_is_of_records_and_of_the_model(report: Path, images: Path, tmp_path: Path) -> None:
    found = [row for row in table(report, "class_tokens") if "tome" in row["method"]]
    cosines = records(report)["tome:r=2"].arrays["cosine"].mean(0, dtype=np.float64)
    assert [float(row["cosine"]) for row in found] == pytest.approx(cosines.tolist())
    out = tmp_path / "out"
    assert run(*MODEL, "-m", "tome:r=2", "--data", images, "--limit", 4, "--only", "loss", "--out", out) == 0
    names = {file.stem for file in (out / "tables").iterdir()}
    assert names == {"summary", "class_tokens", "loss_alone", "loss_alone_mean", "merging_error"}


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
def test_figures_of_other_kinds(report: Path, tmp_path: Path) -> None:
    one = next(report.glob("record_topk*"))
    assert run("--from", one, "--only", "counts", "--format", "svg", "--out", tmp_path / "some") == 0
    assert {file.suffix for file in (tmp_path / "some" / "figures").iterdir()} == {".svg"}
    assert "data:image/png" in (tmp_path / "some" / "index.html").read_text()


@pytest.mark.usefixtures("without_figures")
def test_what_was_gathered_before_a_stop_is_analysed(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Measurement.update

    def stops(self: Measurement, batch: Any) -> None:
        if self.turns == 2:
            raise KeyboardInterrupt
        update(self, batch)

    monkeypatch.setattr(Measurement, "update", stops)
    out = tmp_path / "stopped"
    assert run(*MODEL, "-m", METHODS[0], "--data", images, "--batch-size", 4, "--out", out) == 130
    assert not summary(out)["complete"]
    assert len(records(out)[METHODS[0]]) == 8


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
        (["--only", "depths"], "unknown family 'depths'"),
        ([], "give a model and --data, or stored records with --from"),
        ([*MODEL], "give the images to analyse the model on with --data"),
        (["test_vit", "--from", "RECORD"], "and runs no model: leave out the model"),
        (["--from", "none.npz"], "cannot read none.npz"),
        (["--from", "RECORD", "--only", "depth,router"], "router runs the model, which stored records do not hold"),
        ([*MODEL, "--data", "none", "--only", "throughput", "--sizes", "64,x"], "whole numbers of pixels"),
        (["--from", "FULL/other.txt"], "is no record of an analysis"),
        (["--from", "RECORD", "--out", "FULL"], "is not empty and holds no analysis"),
        (["--from", "RECORD", "--from", "OTHER", "--only", "patterns"], "was made on 11 other images"),
        ([*MODEL, "-m", "tome:r=x", "--data", "none"], "r"),
        (["--from", "RECORD", "--format", "jpg"], "formats=jpg: must be 'png' or 'svg'"),
        (["--from", "RECORD", "--device", "cuda"], "and runs no model: leave out --device"),
        (["--from", "RECORD", "--dtype", "bf16"], "and runs no model: leave out --dtype"),
        (["--from", "RECORD", "--threads", "2"], "and runs no model: leave out --threads"),
        (["--from", "RECORD", "--seed", "1"], "and runs no model: leave out --seed"),
        (["--from", "RECORD", "--workers", "2"], "and runs no model: leave out --workers"),
        (["--from", "RECORD", "--batch-size", "8"], "and runs no model: leave out --batch-size"),
        (["--from", "NEWER"], "has format 2, this vitrim reads 1"),
        (["--from", "TRUNCATED"], "is no record of an analysis"),
        (["--from", "RECORD", "--from", "GRID", "--only", "patterns"], "has grid [2, 8] and that of"),
        (["--from", "RECORD", "--from", "DEEPER", "--only", "patterns"], "has num_layers 9 and that of"),
        (["--from", "DENSE", "--from", "FEW", "--only", "features"], "at least as many images as classes, got 5 for 6"),
        (["one", "two", "--data", "none"], "give one model, not one, two"),
        (["one", "--model", "one", "--data", "none"], "model one is given twice"),
        (
            ["one", "--model", "two", "--data", "none", "--checkpoint", "x"],
            "the weights of one model; 2 models are given",
        ),
        (["--compare", "REPORT"], "two finished analyses or more, got 1"),
        (["--compare", "REPORT", "FULL"], "holds no records of a finished analysis"),
        (["--compare", "REPORT", "REPORT", "--from", "RECORD"], "leave out --from"),
        (["--compare", "REPORT", "REPORT", "--only", "patterns"], "patterns needs records of the same images"),
        (["--from", "RECORD", "--model", "two"], "leave out --model"),
        (["--from", "RECORD", "--limit", "3"], "--from analyses stored records, and runs no model: leave out --limit"),
        (["--from", "RECORD", "--pretrained"], "runs no model: leave out --pretrained"),
        (["--from", "RECORD", "--model-option", "depth=2"], "runs no model: leave out --model-option"),
        (["--compare", "REPORT", "REPORT", "--split", "test"], "finished analyses, and runs no model: leave out --spl"),
        (["--from", "RECORD", "--only", ""], "unknown family ''; valid: attention"),
        (["--from", "RECORD", "--sizes", "64"], "sizes are those of the family throughput"),
    ],
)
def test_bad_input_is_one_line(
    report: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other.txt").write_text("mine")
    record = next(report.glob("record_tome*"))
    one = Record.load(next(report.glob("record_topk*")))
    cut = {name: array[1:] for name, array in one.arrays.items()}
    Record({**one.header, "feature_images": 11}, cut).save(tmp_path / "other.npz")
    known = {name: str(tmp_path / f"{name.lower()}.npz") for name in ("OTHER", "NEWER", "TRUNCATED", "GRID", "DEEPER")}
    known |= {"RECORD": str(record), "FULL": str(tmp_path / "full"), "REPORT": str(report)}
    Record({**one.header, "grid": [2, 8]}, one.arrays).save(known["GRID"])
    deeper = {name: np.tile(one.arrays[name][:, :1], 9) for name in ("num_tokens", "cosine")}
    Record({**one.header, "num_layers": 9}, {**one.arrays, **deeper}).save(known["DEEPER"])
    Path(known["TRUNCATED"]).write_bytes(record.read_bytes()[:-200])
    with np.load(record) as stored:
        newer = {**json.loads(str(stored["header"])), "format": 2}
        np.savez(known["NEWER"], header=json.dumps(newer), ids=stored["ids"])
    for name, source in (("DENSE", records(report)["dense"]), ("FEW", one)):
        known[name] = str(tmp_path / f"{name.lower()}.npz")
        few = {key: array[:5] for key, array in source.arrays.items()}
        Record({**source.header, "feature_images": 5}, few).save(known[name])
    before = {file: file.stat().st_mtime_ns for file in report.rglob("*")}
    given = [known.get(part, part.replace("FULL", known["FULL"])) for part in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "new")]
    assert run(*given, *out) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
    assert not (tmp_path / "new").exists()
    assert {file: file.stat().st_mtime_ns for file in report.rglob("*")} == before


def test_a_package_that_is_not_installed(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda package: None if package == "ot" else package)
    assert run("--from", next(report.glob("record_tome*")), "--out", tmp_path / "new") == 2
    assert "needs the package 'ot': pip install 'vitrim[analysis]'" in capsys.readouterr().err


def test_the_families_of_the_help_are_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"families with commas: {', '.join(DEFAULT)}; or those that run the model again: " in printed
    assert ", ".join(name for name in FAMILIES if name not in DEFAULT) in printed
