"""The benchmarks run: loops are the methods they stand for, rows are kept, tiny settings of each command pass."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitrim.core import registry
from vitrim.core.registry import parse_method, selectors
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.measure.copies import dense_copies, reduced_copy
from vitrim.measure.macs import count_macs
from vitrim.tasks.detection import DetectionScores
from vitrim.tuning.cost import MacsCost
from vitrim.tuning.space import Space, quiet

FOLDER = str(Path(__file__).parents[1] / "benchmarks")
sys.path.append(FOLDER)  # where its scripts find each other
try:
    import baselines
    import frontier
    import fused_or_unfused
    import gpu
    import image_selectors
    import kernels
    import latency_model
    import plain_loops
    import resolution
    import scale
    import second_check
    import study
    import upstream
    from lines import Lines
    from script import from_shell
finally:
    sys.path.remove(FOLDER)

SMALL = ["--model", "test_vit", "--size", "64", "--batch-size", "1", "--threads", "1", "--rounds", "1"]
LOOPED = ("tome:r=2", "topk", "evit", "dynamicvit", "cropr:r=2", "sit")
LOOPED += ("atc", "ppt:r=3,threshold=0.0004", "saint:threshold=0.3,neighbours=2", "vid_tldr", "cubist_merge")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return create_model("test_vit", options={"img_size": 64}).eval()


SCRIPTS = {path.stem for path in Path(FOLDER).glob("*.py")} - {"upstream_families"}
"""All but the one that is imported beside the tests of transformers."""


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_what_a_script_imports_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))  # one registers a method of its own
    monkeypatch.setattr(registry, "_REDUCERS", dict(registry._REDUCERS))
    importlib.import_module(name)


def test_bad_input_from_the_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        from_shell(lambda: baselines.main([*SMALL, "-m", "nope"]))
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("error: unknown method 'nope'; ")
    assert told.count("\n") == 1
    with pytest.raises(ZeroDivisionError):  # a defect, whose traceback is wanted
        from_shell(lambda: 1 // 0)


@pytest.mark.slow  # a script of `benchmarks/`, which no user runs
def test_loops_give_the_logits_of_vitrim(model: nn.Module) -> None:
    configs = [parse_method(method) for method in LOOPED]
    assert {config.name for config in configs} == set(plain_loops.LOOPS)
    assert max(baselines.check_loops(model, configs, torch.randn(2, 3, 64, 64)).values()) < 1e-12


def test_a_wrong_loop_is_noticed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plain_loops.LOOPS, "evit", plain_loops.topk)
    with pytest.raises(VitrimError, match="the loop is not the method"):
        baselines.check_loops(model, [parse_method("evit")], torch.randn(1, 3, 64, 64))


@pytest.mark.slow  # a script of `benchmarks/`, which no user runs
def test_each_model_runs_on_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def kernel(*args: Any, **given: Any) -> torch.Tensor:
        taken.append(True)
        return own(*args, **given)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", kernel)
    model, images = create_model("test_vit", options={"img_size": 64}).eval(), torch.randn(1, 3, 64, 64)
    for name, calls in (("fused", 12), ("unfused", 0)):  # two models of six blocks
        taken.clear()
        for each in (dense_copies(model)[name], reduced_copy(dense_copies(model)[name], "topk")):
            fused_or_unfused.on(name, each, images)
        assert len(taken) == calls
    small = ["--model", "test_vit", "--size", "64", "--batch-size", "1", "--threads", "1", "--rounds", "1"]
    rows = fused_or_unfused.main([*small, "-m", "topk"])
    assert [row["method"] for row in rows] == ["dense", "topk"]
    assert all(row["ratio"] == pytest.approx(row["unfused_ms"] / row["fused_ms"]) for row in rows)


@pytest.mark.parametrize(
    ("method", "routing"),
    [
        ("tome:r=2", 0),
        ("topk", 0),
        ("l2", 0),
        ("cropr:r=2", 64 * (16 + 13 + 11 + 9)),
        ("atm", 0),
    ],  # scores count as linear
)
def test_the_slice_computes_as_much_as_the_method(model: nn.Module, method: str, routing: int) -> None:
    images = torch.randn(1, 3, 64, 64)
    one = baselines.subject(model, parse_method(method), images)
    of_slice, of_method = count_macs(plain_loops.Plain(model, one.slice), images), count_macs(one.reduced, images)
    assert (of_slice.linear + routing, of_slice.attention) == (of_method.linear, of_method.attention)


def test_targets_follow_the_batch_size() -> None:
    over = {"median": 0.99, "q1": 0.9, "q3": 1.1}
    row = {"method": "gtp", "over_slice": over, "over_loop": None, "over_dense": over, "ratio": 0.9}
    assert baselines.verdicts(row, 1) == {"over slice >= 0.88": True, "over dense >= 0.97": True}
    assert baselines.verdicts({**row, "over_loop": over}, 8) == {"over loop >= 1.03": False, "ratio >= 0.95": False}


def test_growth_is_that_of_the_rounds() -> None:
    assert scale.growth({"1": [2.0, 4.0, 1.0], "2": [3.0, 8.0, 1.0]}) == [1.5, 2.0, 1.0]
    assert scale.spread([1.5, 2.0, 1.0]) == "1.50 (1.00-2.00)"
    assert scale.spread([15.0, 22.22, 9.0]) == "15.0 (9.0-22.2)"


def test_the_page_of_scale_has_what_was_measured() -> None:
    record = Path(FOLDER) / "scale.json"
    found = scale.section(json.loads(record.read_text()) if record.exists() else {})
    assert scale.HEAD + found + scale.NEXT in scale.PAGE.read_text()


def test_a_section_has_medians_and_extremes() -> None:
    one = {"setting": "small", "processor": "a chip", "packages": {"torch": "2"}, "load": [0.5, 1.0]}
    record = {name: {**one, "rates": {"1": [2.0, 4.0, 1.0], "2": [3.0, 8.0, 1.5]}} for name in scale.MEASURED}
    said = scale.section(record)
    assert said.startswith("**Two workers do 1.5 times the work of one.**")
    assert "| features, Ray Data | 2.00 (1.00-4.00) images/s | 3.00 (1.50-8.00) images/s | 1.50 (1.50-2.00) |" in said
    assert "small; torch 2; a chip; medians of 3 rounds" in " ".join(said.split())
    assert all(len(line) <= 100 for line in said.splitlines() if not line.startswith("|"))
    record["data"] = {**one, "rates": {"1": [2.0, 4.0, 1.0], "2": [4.0, 6.0, 2.0]}}
    assert scale.section(record).startswith("**Two workers do 1.5 to 2.0 times the work of one.**")


def test_rows_are_kept_and_a_torn_one_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = Lines(file, {"threads": 1}, ["method"])
    assert lines.once({"method": "tome"}, lambda: {"ms": 1.0}) == {"method": "tome", "ms": 1.0}
    lines.add({"method": "topk", "skipped": "too large"})
    file.write_text(file.read_text() + '{"method": "ev')
    lines = Lines(file, {"threads": 1}, ["method"])
    assert [row["method"] for row in lines.rows] == ["tome", "topk"]
    assert lines.once({"method": "tome"}, lambda: pytest.fail("measured twice"))["ms"] == 1.0
    assert lines.add({"method": "evit"}) == json.loads(file.read_text().splitlines()[-1])
    assert [row["method"] for row in Lines(file, {"threads": 1}, ["method"], again=True).rows] == ["tome", "evit"]
    with pytest.raises(VitrimError, match="name another file"):
        Lines(file, {"threads": 2}, ["method"])


@pytest.mark.slow  # a script of `benchmarks/`, which no user runs
def test_resolution_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resolution, "matched", lambda *given: parse_method("topk"))  # the next test but one searches
    file = tmp_path / "rows.jsonl"
    given = [*SMALL, "--min-seconds", "0", "--method", "topk", "--json", str(file)]
    rows = resolution.main([*given, "--plot", str(tmp_path / "rows.svg")])
    assert [row["method"] for row in rows] == ["dense", "topk"]
    assert all(0 < rows[1][share] < 1 for share in ("matching_macs", "matching_time"))
    assert "<svg" in (tmp_path / "rows.svg").read_text()
    assert resolution.main(given) == rows
    assert "| test_vit | 64 | 1 | `topk` |" in capsys.readouterr().out


def test_what_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cells.free_mib", lambda device: 0.0)
    rows = resolution.main([*SMALL, "--method", "topk"])
    assert all("0.0 GiB are free" in row["skipped"] for row in rows if row["method"] == "dense")
    assert rows[1]["skipped"] == "the dense model did not run"


@pytest.mark.slow  # a script of `benchmarks/`, which no user runs
def test_the_gpu_command_with_tiny_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device", "cpu", "--tiny", "--threads", "1", "--rounds", "1", "--method", "topk", "--batch-size", "1"]
    rows = gpu.main([*given, "--part", "bias", "determinism", "speed", "--json", str(tmp_path / "rows.jsonl")])
    found = {(row["part"], row.get("engine"), row.get("method")): row for row in rows}
    assert found["determinism", None, "topk"]["forward"]
    assert found["speed", "eager", "topk"]["speedup"] > 0
    assert found["speed", "graph", "dense"]["skipped"] == "CUDA graphs need a CUDA device"
    assert "mean nothing" in capsys.readouterr().out


@pytest.mark.slow  # a script of `benchmarks/`, which no user runs
def test_the_latency_model_is_judged_by_the_place_of_its_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = np.array([0.9, 0.5, 0.8, 0.7])
    fitted = SimpleNamespace(error=0.01, share=lambda config: config.predicted)
    four = [SimpleNamespace(predicted=share, describe=str) for share in (0.9, 0.6, 0.55, 0.7)]
    monkeypatch.setattr(latency_model, "latency_fit", lambda *args: (SimpleNamespace(worst=0.02), 0.0))
    monkeypatch.setattr(latency_model, "LatencyCost", lambda *args: fitted)
    monkeypatch.setattr(latency_model, "drawn", lambda *args: four)
    monkeypatch.setattr(latency_model, "eager", lambda *args: (shares, 100.0))
    rows = latency_model.main(["--model", "test_vit", "-m", "tome", "--draws", "1", "--threads", "1"])
    assert rows[0]["place"] == 3  # 0.8 of the dense latency, where 0.5 and 0.7 are faster
    assert rows[0]["error"] == pytest.approx((0 + 0.1 / 0.5 + 0.25 / 0.8 + 0) / 4)
    assert "| `tome` | 1.0% | 2.0% | 0 |" in capsys.readouterr().out


@pytest.mark.slow  # a script of `benchmarks/`, which no user runs
def test_settings_of_a_draw_differ_and_keep_to_the_share() -> None:
    model = create_model("test_vit", options={"img_size": 64, "depth": 4}).eval()
    space = Space.of(model, "tome")
    with quiet():
        found = latency_model.drawn(space, MacsCost(model, space), seed=1)
    shares = [count_macs(reduced_copy(model, one), torch.randn(1, 3, 64, 64)).total for one in found]
    dense = count_macs(model, torch.randn(1, 3, 64, 64)).total
    assert len({one.describe() for one in found}) == 4
    assert max(shares) <= 0.6 * dense * 1.001


def test_channels_are_proportional_attention() -> None:
    given = kernels.inputs(2, 2, 9, 16, torch.bfloat16, torch.device("cpu"))
    assert kernels.error("channels", given) < 1.5 * kernels.error("bias", given) < 0.05
    assert kernels.error("without sizes", given) > 0.1


# ---- the study -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of four images each."""
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for place in range(8):
        file = root / f"class{place % 2}" / f"{place}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(file)
    return root


@pytest.mark.slow  # a script of `benchmarks/`, which no user runs
def test_a_part_of_the_study_goes_on_where_it_stopped(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--method", "topk", "--method", "l2", "--rate", "0.5", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(study, "write_reports", lambda *given: None)  # of vitrim analyze, which has its own tests
    study.main(["methods", "--data", str(photos), *common, "--rate", "0.9", "--method", "tome"])
    records = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "records").glob("*.npz")}
    assert len(records) == 1 + 3 * 2
    (tmp_path / "records" / "record_l2_0.9.npz").unlink()
    study.main(["methods", "--data", str(photos), *common, "--rate", "0.9", "--method", "tome"])
    again = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "records").glob("*.npz")}
    assert {name for name, time in again.items() if records[name] != time} == {"record_l2_0.9.npz"}
    accuracy = (tmp_path / "tables" / "accuracy.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in accuracy[1:3]] == [["dense", ""], ["l2", "0.5"]]
    assert (tmp_path / "figures" / "accuracy.png").is_file()
    with pytest.raises(VitrimError, match="holds records of"):
        study.main(["methods", "--data", str(photos), *common, "--limit", "4"])
    with pytest.raises(VitrimError, match="batch_size"):
        study.main(["methods", "--data", str(photos), *common, "--batch-size", "3"])


@pytest.mark.slow
def test_data_sets_are_compared_by_their_maps(photos: Path, tmp_path: Path) -> None:
    data = ["--data", f"one={photos}", "--data", f"other={photos}", "--method", "topk", "--method", "l2"]
    study.main(["data", *data, "--rate", "0.5", "--threads", "1", "--out", str(tmp_path)])
    rows = [row.split(",") for row in (tmp_path / "tables" / "maps.csv").read_text().splitlines()]
    same = [dict(zip(rows[0], row, strict=True)) for row in rows[1:] if row[0] == "data sets"]
    assert [(row["method_a"], row["data_a"], row["data_b"]) for row in same] == [("topk", "one", "other")]
    assert float(same[0]["pcc"]) == pytest.approx(1)
    assert float(same[0]["emd_patches"]) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_data_without_a_name_is_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(VitrimError, match="has a name, as in photos=PATH"):
        study.main(["data", "--data", str(photos), "--out", str(tmp_path)])
    with pytest.raises(VitrimError, match="'cropr' does not follow the study's schedule"):
        study.main(["methods", "--data", str(photos), "--method", "cropr", "--out", str(tmp_path)])


# ---- the libraries' own tests ----------------------------------------------------------------------------------------


def test_a_failure_of_reduced_models_alone_needs_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = dict.fromkeys(("same", "traced", "wrong", "gone"), ("passed", "")) | {"broken": ("failed", "own fault")}
    reduced = own | {"traced": ("failed", "Foo: torch.fx cannot trace it"), "wrong": ("failed", "1 != 2")}
    del reduced["gone"]
    runs = {"": {"outcomes": own}, "tome:r=0": {"outcomes": reduced, "reduced": 4, "refused": {"Swin: no host": 2}}}
    monkeypatch.setattr(upstream, "outcomes", lambda sources, file, method, choice: runs[method])
    assert upstream.compare(Path(), Path("test_models.py"), "tome:r=0", []) == 2
    row, *notes = capsys.readouterr().out.splitlines()
    assert row == "| test_models.py | 5 | 4 | 1 | 3 | 2 |"
    assert "NO REASON: wrong: 1 != 2" in notes[1]
    assert "NO REASON: gone: did not run" in notes[2]


@pytest.mark.full  # starts pytest twice; the command fails by itself where no test ran
def test_models_of_other_peoples_tests_are_reduced(tmp_path: Path) -> None:
    file = tmp_path / "test_models.py"
    file.write_text(
        "import timm, torch, vitrim\n"
        "def make():\n"
        "    return timm.create_model('test_vit', img_size=32, patch_size=8).eval()\n"
        "def test_logits():\n"
        "    assert make()(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)\n"
        "def test_it_is_dense():\n"
        "    assert type(make().blocks[0]).__name__ == 'Block', 'reduced'\n"
    )
    own, found = (upstream.outcomes(tmp_path, file, method, []) for method in ("", "tome:r=0"))
    ends = [{name.partition("::")[2]: end[0] for name, end in run["outcomes"].items()} for run in (own, found)]
    assert ends[0] == {"test_logits": "passed", "test_it_is_dense": "passed"}
    assert ends[1] == {"test_logits": "passed", "test_it_is_dense": "failed"}
    assert (own["reduced"], found["reduced"]) == (0, 2)


def test_sources_without_tests_of_models_run_the_shared_ones(tmp_path: Path) -> None:
    assert upstream.files_of(None, tmp_path, [], "save") == [(tmp_path, upstream.FAMILIES, ["-k", "save"])]
    models = tmp_path / "tests" / "models"
    models.mkdir(parents=True)
    files = upstream.files_of(None, tmp_path, ["vit"], None)
    assert files == [(tmp_path, models / "vit" / "test_modeling_vit.py", [])]
    assert len(upstream.files_of(None, tmp_path, [], None)) > 20


@pytest.mark.full  # makes all tiny models, twice
def test_shared_tests_run_on_the_tiny_models_of_every_family(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_modeling_common.py").write_text(
        "import torch\n"
        "from tests.exporters.test_export import ExportTesterMixin\n"
        "class ModelTesterMixin(ExportTesterMixin):\n"
        "    def test_forward(self):\n"
        "        for kind in self.all_model_classes:\n"
        "            config, given = self.model_tester.prepare_config_and_inputs_for_common()\n"
        "            assert kind(config).eval()(**given) is not None\n"
    )
    own, found = (upstream.outcomes(tmp_path, upstream.FAMILIES, method, []) for method in ("", "tome:r=0"))
    assert {end for end, _ in own["outcomes"].values()} == {end for end, _ in found["outcomes"].values()} == {"passed"}
    assert own["reduced"] == 0
    assert found["reduced"] >= len(own["outcomes"]) > 50
    names = {upstream._row_of(upstream.FAMILIES, test) for test in own["outcomes"]}
    assert {"ViTModel", "LlavaForConditionalGeneration", "VJEPA2Model"} <= names


def test_the_second_check_of_ap_agrees_with_coco() -> None:
    """On noisy copies of random boxes."""
    torch.manual_seed(0)
    found, truth, scores = [], [], DetectionScores()
    for count in (3, 0, 12, 7):
        corner, size = torch.rand(count, 2) * 80, 5 + torch.rand(count, 2) * 40
        boxes, labels = torch.cat([corner, corner + size], 1), torch.randint(3, (count,))
        seen = (boxes + 3 * torch.randn(count, 4)).repeat(2, 1)[: 2 * count - 2 if count else 0]
        kinds, sure = labels.repeat(2)[: len(seen)], torch.rand(len(seen))
        scores.update([{"boxes": seen, "scores": sure, "labels": kinds}], [{"boxes": boxes, "labels": labels}])
        found.append((seen.double().numpy(), sure.double().numpy(), kinds.numpy()))
        truth.append((boxes.double().numpy(), labels.numpy()))
    own = second_check.average_precision(found, truth)(np.arange(4))
    assert 0.1 < own < 0.9
    assert own == pytest.approx(scores.compute()["box_AP"].item(), abs=1e-6)


@pytest.mark.slow  # a script of `benchmarks/`, which no user runs
def test_every_selector_is_timed_on_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module("vlm_prefill")
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    monkeypatch.setitem(script.SIZES, "llava", {"vision": {**size, "image_size": 32, "patch_size": 4}, "text": size})
    dense, *rows, videos = script.choose(1, 9)
    assert dense.startswith("dense: ")
    assert len(rows) == len(set(selectors()) - {"evs"})
    assert all(row.split(" | ")[1] == "9" for row in rows)
    assert videos.startswith("evs:keep=0.25 on 8 frames")


@pytest.mark.slow
def test_what_reads_selected_tokens_is_the_end_of_the_model(model: nn.Module) -> None:
    """With all patches and the image's own class token it is the model, wherever that is cut."""
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for readers in (1, 3):
            tower = image_selectors.Tower(model, readers)
            _, x = tower.tokens(images)
            torch.testing.assert_close(tower.read(x[:, 1:], x[:, 0]), model(images))
            assert torch.equal(tower.seen(images).features, x[:, 1:])
            labels = torch.tensor([0, 1])
            right = image_selectors.answers(tower, [(images, labels)], torch.zeros(x.shape[2]), [0.25, 1.0])
            kept = {key: own for key, own in right.same.items() if key[1] == 1.0}
            assert all((own == 1).all() for own in kept.values())
            assert right.counts["divprune", 0.25] == round(0.25 * x[:, 1:].shape[1])
            assert {name for name, _ in kept} == set(selectors()) - {"evs"}


def test_paired_differences_are_those_of_scipy() -> None:
    from scipy.stats import ttest_rel

    own, other = torch.rand(40).round(), torch.rand(40).round()
    mean, error = image_selectors.paired(own, other)
    assert mean / error == pytest.approx(ttest_rel(own.numpy(), other.numpy()).statistic, abs=1e-5)


def test_losses_at_a_speed_are_on_the_line_between_timed_settings() -> None:
    """By numpy's interpolation; the mildest setting has the smallest loss, whatever the order of the rows."""
    losses, errors, speeds = [-0.004, 0.01, 0.06], [0.002, 0.006, 0.01], [1.2, 1.4, 1.9]
    rows = [
        {"loss": losses[row], "loss_error": errors[row], "batch 8": {"speedup": [0.0, speeds[row], 9.0]}}
        for row in (2, 0, 1)
    ]
    for speed in (1.25, 1.4, 1.5):
        wanted = (np.interp(speed, speeds, losses), np.interp(speed, speeds, errors), False)
        assert frontier._loss_at(rows, "batch 8", speed) == pytest.approx(wanted)
    assert frontier._loss_at(rows, "batch 8", 1.1) == (-0.004, 0.002, True)
    assert frontier._loss_at(rows, "batch 8", 2.0) is None
    assert [frontier._cell(found) for found in ((-0.004, 0.002, True), (0.0, 0.0, False), None)] == [
        *("+0.4 ± 0.2 *", "+0.0 ± 0.0", "-"),
    ]
