"""`vitrim.tuning.tune.tune` as it is called from Python: the same as the command line, and nothing else is changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import vitrim
from cli_runs import Run, runner, succeeded
from image_files import write_noise
from vitrim.data import load_data
from vitrim.errors import VitrimError
from vitrim.loading import Loaded, PlacedModel, create_model
from vitrim.tuning import Target
from vitrim.tuning import tune as tuning
from vitrim.tuning.tune import tune

OPTIONS = {"depth": 2, "img_size": 32, "patch_size": 8, "num_classes": 2}
SMALL = [part for key, value in OPTIONS.items() for part in ("--model-option", f"{key}={value}")]
FEW: dict[str, Any] = {"target": "macs=0.8", "evaluations": 4}


def data(source: Any = "images") -> vitrim.DataSpec:
    return vitrim.ScoredData(source, batch_size=4)


pytestmark = pytest.mark.usefixtures("macs_counted_once")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], images: Path) -> Run:
    return runner(monkeypatch, capfd)


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    write_noise(tmp_path / "images", 12)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "images"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("test_vit", options=OPTIONS)


def files(folder: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("methods", "arguments", "options"),
    [
        (["tome", "gtp"], ["-m", "tome", "-m", "gtp", "--target", "macs=0.8"], {"target": Target("macs", 0.8)}),
        ("tome", ["-m", "tome", "--front", "0.8,0.9"], {"target": ["macs=0.8", "macs=0.9"]}),
        (None, ["--grid", "tome:r=0|2,last_block=full|auto"], {"grid": "tome:r=0|2,last_block=full|auto"}),
    ],
)
def test_it_gives_what_the_command_line_gives(
    run: Run, methods: Any, arguments: list[str], options: dict[str, Any]
) -> None:
    given = ["--data", "images", "--batch-size", "4", "--evaluations", "2", "--check", "images"]
    given = given[:-2] if "--grid" in arguments else given
    out = succeeded(run, "tune", "test_vit", *SMALL, *given, *arguments, "--json", "record.json")
    before = files("tuned")
    Path("tuned").rename("first")
    model = vitrim.ModelSpec("test_vit", options=OPTIONS)
    if "--grid" in arguments:
        report = vitrim.tune_grid(model, options["grid"], data(), number=2)
    else:
        report = tune(model, methods, data(), evaluations=2, check="images", **options)
    assert report.record == json.loads(Path("record.json").read_text())
    assert files("tuned") == before
    assert str(report) == out.rstrip("\n")
    assert {file.name for file in report.files} == {*before} - {"study.jsonl"}


def test_a_model_is_tuned_and_left_as_it_was(model: nn.Module, images: Path) -> None:
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dataset = load_data("images")
    torch.manual_seed(7)
    transform, random = dataset.transform, torch.get_rng_state()
    report = tune(model, vitrim.ToMe(), data(dataset), out=None, **FEW)
    assert dataset.transform is transform
    assert model.training
    assert not hasattr(model, "vitrim_reduction")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert report.record["tuned"]["weights"] == "given"
    assert report.record["model"] == "test_vit"
    assert sorted(path.name for path in images.parent.iterdir()) == ["images"], "without a folder nothing is written"
    assert report.files == []
    assert [row["method"] for row in report.rows] == [trial.config.describe() for _, trial in report.results[0].pair]

    reduction = vitrim.reduce_(model, report.best, record=True)
    try:
        model(torch.zeros(1, 3, 32, 32))
        assert [count - 1 for count in reduction.tokens_per_block] == report.best.counts(16, 2)
    finally:
        vitrim.restore_(model)
        model.eval()


@pytest.mark.slow
def test_weights_of_a_name_follow_from_the_seed_and_those_that_are_given_are_searched(
    model: nn.Module, images: Path
) -> None:
    named = tune(vitrim.ModelSpec("test_vit", options=OPTIONS), "tome", data(), out=None, **FEW)
    given = tune(model, "tome", data(), out=None, **FEW)
    assert [trial.scores for trial in named.results[0].trials] == [trial.scores for trial in given.results[0].trials]


def test_progress_counts_settings_and_names_those_that_are_better(model: nn.Module, images: Path) -> None:
    seen: list[tuple[int, int, str]] = []

    def progress(done: int, most: int, line: str) -> None:
        seen.append((done, most, line))

    report = tune(model, "tome", data(), out=None, on_progress=progress, **FEW)
    trials = report.results[0].trials
    assert seen.pop(0) == (0, 4, "")  # while costs are measured
    assert [(done, most) for done, most, _ in seen] == [(number, 4) for number in range(1, len(trials) + 1)]
    scores = [trial.scores["feature"] for trial in trials]
    better = [number == 0 or score < min(scores[:number]) for number, score in enumerate(scores)]
    assert [bool(line) for _, _, line in seen] == better
    saved, method = f"{100 * (1 - trials[0].share):.1f} % saved", trials[0].config.describe()
    assert seen[0][2] == f"feature {scores[0]:.4g} at {saved}: {method} (constant)"


def test_points_of_other_weights_are_not_taken_over(model: nn.Module, images: Path) -> None:
    vitrim.tune_grid(model, "tome:r=0|2", data(), out="grid")
    before, again = files("grid"), vitrim.Results("grid", resume=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].mlp.fc1.weight[3, 5] += 1e-3
    with pytest.raises(VitrimError):
        vitrim.tune_grid(other, "tome:r=0|2", data(), out=again)
    assert files("grid") == before
    vitrim.tune_grid(model, "tome:r=0|2", data(), out=again)
    assert files("grid") == before


def test_several_settings_are_no_best_one(model: nn.Module, images: Path) -> None:
    report = vitrim.tune_grid(model, "tome:r=0|2", data(), out=None)
    assert [row["method"] for row in report.rows] == ["tome:r=0", "tome:r=2"]
    with pytest.raises(VitrimError, match="there is no single setting"):
        _ = report.best
    assert "2 points" in str(report)


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ("tome", {"target": "macs=0.5", "evaluations": 0}, "evaluations=0: must be at least 1"),
        ([], {"target": "macs=0.5"}, "there is nothing to tune: name at least one method"),
        ("tomee", {"target": "macs=0.5"}, "unknown method 'tomee'"),
        (["tome", "tome"], {"target": "macs=0.5"}, "method tome is given twice"),
        (["tome", "all"], {"target": "macs=0.5"}, "-m all has the other methods already"),
        ("tome", {"target": "macs=2"}, "a share is above 0 and below 1"),
        ("tome", {"target": "speedup=2", "search": vitrim.SearchSpec(engine="tensorrt")}, "unknown engine 'tensorrt'"),
        ("tome", {"target": [Target("macs", 0.5), "macs=0.5"]}, "--front macs=0.5, macs=0.5 has a target twice"),
        ("tome", {"target": 3}, "target=3: must be a Target, or a text"),
        ("tome", {"target": []}, r"cannot read the target '\[\]': write e.g. macs=0.5"),
        ("tome", {"target": ["macs=0.5", "speedup=2"]}, "a front is over targets of one kind"),
        ("tome", {"target": "macs=0.5", "model": PlacedModel("test_vit", device="gpu")}, "unknown device 'gpu'"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(
    images: Path, methods: Any, options: dict[str, Any], message: str
) -> None:
    class Never(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            raise AssertionError("the model is looked at")

    with pytest.raises(VitrimError, match=message):
        tune(**{"model": PlacedModel(Never(), device="cpu"), "methods": methods, "data": "nowhere", **options})
    assert not Path("tuned").exists()


def test_a_search_at_another_image_size(model: nn.Module, images: Path) -> None:
    """9 patches of 8 px instead of 16: the setting is one for them, and no more than they are is removed."""
    report = tune(PlacedModel(model, img_sizes=(24,)), vitrim.ToMe(), data(), out=None, **FEW)
    assert report.record["tuned"]["made_for"]["patches"] == 9
    assert report.record["tuned"]["img_size"] == 24
    with pytest.raises(VitrimError, match="a search is at one image size, got 16, 24"):
        tune(PlacedModel(model, img_sizes=(16, 24)), vitrim.ToMe(), data(), out=None, **FEW)


def test_a_recipe_at_the_points_of_a_grid_needs_a_source(images: Path) -> None:
    with pytest.raises(VitrimError, match=r"data=.*must be a text"):
        vitrim.train_grid("cifar10_vit", "epochs=1", load_data("images"))
    with pytest.raises(VitrimError, match="--device cuda:1 names one of several devices"):
        vitrim.train_grid("cifar10_vit", "epochs=1", "images", device="cuda:1")


# ---- images to check on ----------------------------------------------------------------------------------------------

Opened = list[tuple[str, str | None]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The sources and splits that are opened; a folder's own split is train."""
    found: Opened = []

    def open_task(loaded: object, data: vitrim.DataSpec, *, embeddings: bool) -> tuple[None, Any]:
        found.append((data.source, data.split))
        return None, SimpleNamespace(split=data.split or "train")

    monkeypatch.setattr(tuning, "open_task", open_task)
    return found


@pytest.mark.parametrize(
    ("given", "split", "same"),
    [
        ("images", "train", True),
        ("./images", "train", True),
        ("ABSOLUTE/images", "train", True),
        ("link", "train", True),
        ("images:train", "train", True),
        ("images:test", "train", False),
        ("images:test", "test", True),
        ("others", "train", False),
        ("others:train", "train", False),
        ("images/below", "train", False),
    ],
)
def test_images_that_the_search_read_are_recognised(
    given: str, split: str, same: bool, images: Path, opened: Opened
) -> None:
    (images / "below").mkdir()
    Path("link").symlink_to("images")
    given = given.replace("ABSOLUTE", str(images.parent))
    loaded: Any = Loaded(nn.Identity(), "", "", {}, None)
    found = tuning._open_check(given, loaded, data(), SimpleNamespace(split=split))
    assert found.same is same
    assert found.source == given
    source, _, wanted = given.partition(":")
    assert opened == [(source, wanted or None)]


@pytest.mark.parametrize("given", ["a:b/images", "a:b\\images"])
def test_a_colon_of_a_path_is_no_split(given: str, opened: Opened) -> None:
    loaded: Any = Loaded(nn.Identity(), "", "", {}, None)
    assert tuning._open_check(given, loaded, data(given), SimpleNamespace(split="train")).same
    assert opened == [(given, None)]


def test_a_dataset_to_check_on_is_the_one_that_is_scored(model: nn.Module, images: Path) -> None:
    few = vitrim.open_data("images", limit=5)
    report = tune(model, "tome", data(), check=few, out=None, **FEW)
    assert {row["images"] for row in report.checked} == {5}
