"""A model measured at other image sizes beside its own: every row is that of the resized model, measured alone."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tiny_hosts
import vitrim
from cli_runs import Run, runner
from image_files import write_noise
from vitrim.core.image_size import at_size
from vitrim.data import ImageDataset, eval_transform, load_images
from vitrim.data.dataset import calibrating
from vitrim.engines.macs import count_macs
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec, PlacedModel, ScoredModel, create_model
from vitrim.measure import timing
from vitrim.measure.latency import Budget

OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 2}
ONCE = Budget(min_rounds=1, min_seconds=0.0, warmup_rounds=0)
NAMES = ["dense", "tome:r=1", "dense at 24 px", "tome:r=1 at 24 px", "dense at 48 px", "tome:r=1 at 48 px"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_noise(tmp_path / "images", 6)
    return tmp_path / "images"


def model() -> nn.Module:
    torch.manual_seed(0)
    found: Any = create_model("test_vit", options=OPTIONS)
    nn.init.normal_(found.pos_embed)
    return found  # type: ignore[no-any-return]


def rights(host: nn.Module, method: str, source: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """By twenty plain lines: the classes of all images, by the model's own transform, and which of them are right."""
    alone = copy.deepcopy(host)
    if method != "dense":
        vitrim.reduce_(alone, method)
    data = load_images(source)
    data.transform = eval_transform(host)
    images = torch.stack([data[place][0] for place in range(len(data))])
    labels = torch.tensor([data[place][1] for place in range(len(data))])
    with torch.inference_mode():
        answer = alone(images).argmax(1)
    return answer, answer == labels


def test_scores_are_those_of_the_resized_models_alone(source: Path) -> None:
    host = model()
    rows = vitrim.evaluate(ScoredModel(host, img_sizes=[24, 48, 32, 24]), "tome:r=1", str(source)).rows
    assert [row["method"] for row in rows] == NAMES
    assert [row["img_size"] for row in rows] == [32, 32, 24, 24, 48, 48]
    dense, right = rights(host, "dense", source)
    full = sum(rows[0]["gmacs"].values())
    for row in rows:
        resized = host if row["img_size"] == 32 else at_size(host, row["img_size"])
        answer, own = rights(resized, row["method"].partition(" at ")[0], source)
        lost = right.double() - own.double()
        assert row["top1"] == pytest.approx(own.double().mean().item())
        assert row["agreement"] == pytest.approx((answer == dense).double().mean().item())
        assert row["loss"] == pytest.approx(lost.mean().item())
        assert row["loss_error"] == pytest.approx(max(lost.std(correction=0).item() / 12**0.5, 1 / 12))
        macs = count_macs(resized, torch.zeros(1, 3, *2 * [row["img_size"]])).total / 1e9
        if row["method"].startswith("dense"):
            assert sum(row["gmacs"].values()) == pytest.approx(macs)
            assert row["tokens_at_end"] == 1 + (row["img_size"] // 8) ** 2
        assert row["saved"] == pytest.approx(1 - sum(row["gmacs"].values()) / full)


def test_rows_without_other_sizes_say_none(source: Path) -> None:
    rows = vitrim.evaluate(ScoredModel(model(), img_sizes=[32]), None, str(source)).rows
    assert [row["method"] for row in rows] == ["dense"]
    assert "img_size" not in rows[0]


def test_images_of_every_size_are_in_the_dtype_of_the_model(source: Path) -> None:
    rows = vitrim.evaluate(ScoredModel(model(), dtype="bf16", img_sizes=[24]), None, str(source)).rows
    assert [row["img_size"] for row in rows] == [32, 24]


def test_a_reduced_model_is_scored_by_its_method_at_every_size(source: Path) -> None:
    host = model()
    reduction = vitrim.reduce_(host, "tome:r=1")
    rows = vitrim.evaluate(ScoredModel(host, img_sizes=[24]), None, str(source)).rows
    assert [row["method"] for row in rows] == NAMES[:4]
    assert vitrim.get_reduction(host) is reduction


def test_decisions_and_predictions_of_every_size(source: Path, tmp_path: Path) -> None:
    results = vitrim.ScoredResults(None, decisions=tmp_path / "d", predictions=tmp_path / "p.csv")
    vitrim.evaluate(ScoredModel(model(), img_sizes=[24]), "tome:r=1", str(source), out=results)
    assert sorted(file.name for file in (tmp_path / "d").iterdir()) == ["tome_r_1.npz", "tome_r_1_at_24_px.npz"]
    found = vitrim.measure.decisions.Decisions.load(tmp_path / "d" / "tome_r_1_at_24_px.npz")
    assert found.source.shape == (12, 2, 10)
    assert "tome:r=1 at 24 px probability" in (tmp_path / "p.csv").read_text().partition("\n")[0]


def test_what_was_gathered_at_other_sizes_is_not_continued(source: Path, tmp_path: Path) -> None:
    vitrim.evaluate(ScoredModel(model(), img_sizes=[24]), None, str(source), out=tmp_path / "e")
    again = vitrim.ScoredResults(tmp_path / "e", resume=True)
    with pytest.raises(VitrimError, match="holds an evaluation with methods"):
        vitrim.evaluate(ScoredModel(model(), img_sizes=[48]), None, str(source), out=again)


def test_embeddings_are_compared_across_sizes(source: Path) -> None:
    host = model()
    host.reset_classifier(0)  # type: ignore[operator]
    rows = vitrim.evaluate(ScoredModel(host, img_sizes=[48]), None, str(source)).rows
    data = load_images(source)
    vectors = []
    for one in (host, at_size(host, 48)):
        data.transform = eval_transform(one)
        with torch.no_grad():
            vectors.append(one(torch.stack([data[place][0] for place in range(len(data))])))
    assert rows[1]["cosine"] == pytest.approx(torch.cosine_similarity(*vectors).mean().item(), abs=1e-5)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, tuple[int, ...]]]:
    """The images that every timed model gets, by name, in a round that takes a millisecond per token of its images."""
    seen: list[dict[str, tuple[int, ...]]] = []

    def fake(runs: Any, device: object, budget: Budget) -> dict[str, Any]:
        found: dict[str, tuple[int, ...]] = {}
        for name, run in runs.items():
            with pytest.MonkeyPatch.context() as patch:
                real = nn.Conv2d.forward
                patch.setattr(
                    nn.Conv2d,
                    "forward",
                    lambda self, x, n=name, f=real: (found.setdefault(n, tuple(x.shape)), f(self, x))[1],
                )
                run()
        seen.append(found)
        return {name: np.array([1.0, 1.0]) * shape[-1] for name, shape in found.items()}

    monkeypatch.setattr(timing, "time_interleaved", fake)
    return seen


def test_all_sizes_are_timed_in_the_same_rounds(shapes: list[dict[str, tuple[int, ...]]]) -> None:
    host = model()
    report = vitrim.bench(PlacedModel(host, img_sizes=[24, 48]), "tome:r=1", batch_size=2)
    assert [row["method"] for row in report.rows] == NAMES
    assert [row["img_size"] for row in report.rows] == [32, 32, 24, 24, 48, 48]
    assert {name: shape[-1] for name, shape in shapes[0].items()} == {
        "dense (fused)": 32, "dense (unfused)": 32, "tome:r=1": 32,
        "dense at 24 px (fused)": 24, "dense at 24 px (unfused)": 24, "tome:r=1 at 24 px": 24,
        "dense at 48 px (fused)": 48, "dense at 48 px (unfused)": 48, "tome:r=1 at 48 px": 48,
    }  # fmt: skip
    assert {shape[0] for shape in shapes[0].values()} == {2}
    full = count_macs(host, torch.zeros(1, 3, 32, 32)).total
    for row in report.rows:
        assert row["speedup"] == pytest.approx(32 / row["img_size"])
        resized = host if row["img_size"] == 32 else at_size(host, row["img_size"])
        if "tome" in row["method"]:
            vitrim.reduce_(resized := copy.deepcopy(resized), "tome:r=1")
        macs = count_macs(resized, torch.zeros(1, 3, *2 * [row["img_size"]])).total
        assert row["macs_speedup"] == pytest.approx(full / macs)
        assert (row["dense_engine"], set(row["dense_p50_ms"])) == ("eager", {"fused", "unfused"})
    assert "dense at 24 px" in "".join(map(str, report.words))
    assert report.figure is not None


def test_dense_models_of_other_sizes_are_compared_with_fp32(
    source: Path, shapes: list[dict[str, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sides, real = model(), set[tuple[str, int]](), timing._agreement
    monkeypatch.setattr(
        timing,
        "_agreement",
        lambda entry, held_out, exact: (
            sides.add((entry.name, held_out[0][0].shape[-1])) or real(entry, held_out, exact)  # type: ignore[func-returns-value]
        ),
    )
    rows = vitrim.bench(
        PlacedModel(host, img_sizes=[24]), "tome:r=1", str(source), batch_size=1, precision=["fp32", "bf16"]
    ).rows
    scored = [row for row in rows if "agreement" in row]
    assert [(row["method"], row["precision"]) for row in scored] == [
        (name, precision) for name in ("dense", "dense at 24 px") for precision in ("fp32", "bf16")
    ]
    assert sides == {("dense", 32), ("dense at 24 px", 24)}
    few, _ = rights(host, "dense", source)
    small, _ = rights(at_size(host, 24), "dense", source)
    # a third calibrates: 0, 3, 6 and 8 of the twelve are left out
    kept = [place for place in range(12) if place not in calibrating(np.arange(12), 4).tolist()]
    assert scored[2]["agreement"] == pytest.approx((few == small)[kept].double().mean().item())


def test_loss_and_speed_of_every_size_in_one_table(source: Path, shapes: list[dict[str, tuple[int, ...]]]) -> None:
    host = model()
    report = vitrim.compare(PlacedModel(host, img_sizes=[24, 48]), "tome:r=1", str(source), at=2)
    assert [row["method"] for row in report.rows] == NAMES
    assert [row["img_size"] for row in report.rows] == [row["speeds"][0]["img_size"] for row in report.rows]
    assert [row["speeds"][0]["speedup"] for row in report.rows] == pytest.approx(
        [32 / row["img_size"] for row in report.rows]
    )
    assert report.rows[2]["loss"] == pytest.approx(
        (rights(host, "dense", source)[1].double() - rights(at_size(host, 24), "dense", source)[1].double())
        .mean()
        .item()
    )
    assert report.rows[2]["saved"] > 0 > report.rows[4]["saved"]
    assert len(report.words) == 5 + 1
    assert [cells[0] for cells in report.tables[0].rows] == NAMES
    (axis,) = report.figure.axes
    lines = [sorted(line.get_xdata()) for line in axis.lines if len(line.get_xdata()) == 3]
    assert [pytest.approx([12, 16, 24])] * 2 == lines  # dense and ToMe, each at three sizes, ms per image


def test_lower_precisions_are_scored_at_every_size(source: Path, shapes: list[dict[str, tuple[int, ...]]]) -> None:
    host = model()
    report = vitrim.compare(
        PlacedModel(host, img_sizes=[24]), "tome:r=1", str(source), at=1, precision=["fp32", "bf16"]
    )
    found = {(row["method"], row["precision"]): row for row in report.rows}
    assert list(found) == [(name, precision) for precision in ("fp32", "bf16") for name in NAMES[:4]]
    small = at_size(host, 24).bfloat16()
    data = load_images(source)
    data.transform = eval_transform(small)
    with torch.no_grad():
        answer = small(torch.stack([data[place][0] for place in range(12)]).bfloat16()).argmax(1)
    labels = torch.tensor([data[place][1] for place in range(12)])
    assert found["dense at 24 px", "bf16"]["top1"] == pytest.approx((answer == labels).double().mean().item())


def test_counts_are_those_of_the_resized_model() -> None:
    report = vitrim.profile(ModelSpec("test_vit", options=OPTIONS, img_sizes=[24, 48]), "tome:r=1")
    assert [row["method"] for row in report.rows] == NAMES
    for row in report.rows:
        alone = vitrim.profile(at_size(model(), row["img_size"]), "tome:r=1").rows["tome" in row["method"]]
        assert {key: row[key] for key in ("gmacs", "tokens_per_block", "params")} == {
            key: alone[key] for key in ("gmacs", "tokens_per_block", "params")
        }
        assert row["img_size"] in (32, 24, 48)


def test_a_model_that_cannot_is_left_out_beside_others_and_refused_alone() -> None:
    volo = tiny_hosts.families(True)["timm_volo"]["volo"]()
    report = vitrim.profile(ModelSpec([model(), volo], img_sizes=[24]))
    assert [row["method"] for row in report.rows] == ["dense", "dense at 24 px", "dense"]
    said = "VOLO is counted at its own size only: VOLO cannot be given images of 24 px: it has no set_input_size"
    assert said in report.notes
    with pytest.raises(VitrimError, match="VOLO cannot be given images of 24 px"):
        vitrim.profile(ModelSpec(volo, img_sizes=[24]))


def test_adaptive_methods_read_images_at_every_size(source: Path) -> None:
    report = vitrim.profile(ModelSpec(model(), img_sizes=[48]), "atm", images=str(source))
    alone = vitrim.profile(at_size(model(), 48), "atm", images=str(source))
    assert report.rows[3]["tokens_per_block"] == alone.rows[1]["tokens_per_block"]
    assert report.rows[3]["method"] == f"{alone.rows[1]['method']} at 48 px"


@pytest.mark.slow
def test_a_file_of_another_size_is_scored_on_its_images(source: Path, tmp_path: Path) -> None:
    host = model()
    file = vitrim.export(at_size(host, 24), None, tmp_path / "small.pt2", check=0)
    rows = vitrim.evaluate(ScoredModel(host, img_sizes=[24]), [file], str(source)).rows
    assert [(row["method"], row["img_size"]) for row in rows] == [
        ("dense", 32), ("dense at 24 px", 24), (str(file.path), 24)
    ]  # fmt: skip
    assert {key: rows[2][key] for key in ("top1", "agreement")} == {key: rows[1][key] for key in ("top1", "agreement")}
    with pytest.raises(VitrimError, match="takes images with size"):
        vitrim.evaluate(host, [file], str(source))
    with pytest.raises(VitrimError, match="exported file, for images of one size"):
        vitrim.evaluate(ScoredModel(file, img_sizes=[32]), None, str(source))
    timed = vitrim.bench(PlacedModel(host, img_sizes=[24]), [file], batch_size=1, budget=ONCE).rows
    assert [row["method"] for row in timed] == ["dense", "dense at 24 px", str(file.path)]


def png() -> bytes:
    Image.new("RGB", (40, 30)).save(file := io.BytesIO(), "png")
    return file.getvalue()


def test_images_prepared_for_one_size_are_refused() -> None:
    host, data = model(), ImageDataset([png()] * 2, [0, 1])
    data.transform = eval_transform(host)
    spec = ScoredModel(host, img_sizes=[24])
    with pytest.raises(VitrimError, match="has a transform of its own, for one image size"):
        vitrim.evaluate(spec, None, data)
    with pytest.raises(VitrimError, match="batches are images of one size"):
        vitrim.evaluate(spec, None, [(torch.zeros(2, 3, 32, 32), torch.tensor([0, 1]))])
    with pytest.raises(VitrimError, match="has a transform of its own"):
        vitrim.bench(PlacedModel(host, img_sizes=[24]), "tome:r=1", data)
    with pytest.raises(VitrimError, match="has a transform of its own"):
        vitrim.compare(PlacedModel(host, img_sizes=[24]), "tome:r=1", data)
    with pytest.raises(VitrimError, match="has a transform of its own"):
        vitrim.profile(ModelSpec(host, img_sizes=[24]), "atm", images=data)


def test_the_size_of_a_dense_task_is_that_of_its_protocol() -> None:
    with pytest.raises(VitrimError, match="the protocol sets that of segmentation"):
        vitrim.evaluate(
            ScoredModel("segmenter:test_vit", options={"img_size": 32, "num_classes": 2}, img_sizes=[64]),
            None,
            vitrim.data.SegmentationDataset([png()], [png()], class_names=["a", "b"]),
        )


def test_a_function_of_one_size_refuses_others(tmp_path: Path) -> None:
    spec = PlacedModel(model(), img_sizes=[24])
    with pytest.raises(VitrimError, match="img_sizes are for bench, evaluate, compare, profile, optimize and tune"):
        vitrim.export(ModelSpec(model(), img_sizes=[24]), "tome:r=1", tmp_path / "m.pt2")
    with pytest.raises(VitrimError, match="img_sizes are for"):
        spec.load()
    for wrong in ([0], [True], ["24"], [2**20], 24):
        with pytest.raises(VitrimError, match="img_sizes"):
            PlacedModel(model(), img_sizes=wrong)  # type: ignore[arg-type]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    write_noise(tmp_path / "images", 3)
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capfd)


@pytest.mark.parametrize("command", ["bench", "eval", "compare", "profile"])
def test_on_the_command_line(run: Run, command: str) -> None:
    given = [f"--model-option={key}={value}" for key, value in OPTIONS.items()]
    given += [] if command in ("bench", "profile") else ["--data", "images"]
    given += ["--repeats=1", "--min-seconds=0"] if command in ("bench", "compare") else []
    given += {"bench": ["-b", "1"], "compare": ["--at", "1"]}.get(command, [])
    code, out, err = run(command, "test_vit", "-m", "tome:r=1", *given, "--img-size", "24,48", "--json", "r.json")
    assert code == 0, err
    assert [row["method"] for row in json.loads(Path("r.json").read_text())["rows"]] == NAMES
    assert all(name in out for name in NAMES)
    for text, said in (
        ("20", "take 16 or 24"),
        ("24;48", "--img-size takes whole numbers with commas"),
        ("0", "takes"),
    ):
        code, _, err = run(command, "test_vit", "-m", "tome:r=1", *given, "--img-size", text)
        assert (code, said in err) == (2, True), err
