"""``vitrim train`` as a user runs it, on made images."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState, GradientState

from cli_runs import exit_code
from tiny_training import TINY, write_images
from vitrim.cli.options import flat
from vitrim.cli.train import _next
from vitrim.cli.train import train as command_of_train
from vitrim.training.loop import Trainer
from vitrim.training.recipe import load_recipe, recipes
from vitrim.training.running import Running

training = import_module("vitrim.training.train")


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A recipe of the user's own."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "dataset": "folders of colours"}))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of ``vitrim train`` with these arguments."""
    return exit_code(monkeypatch, "train", *arguments)


def the_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of the error."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_run_from_start_to_result(
    images: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, record = tmp_path / "run", tmp_path / "record.json"
    common = ["--data", images, "--device", "cpu", "--threads", 1, "--out", out]
    assert run(monkeypatch, tiny, "epochs=2", "method=evit:keep_rate=0.5", *common, "--json", record) == 0
    written = json.loads(record.read_text())
    assert written["recipe"]["epochs"] == 2
    assert written["recipe"]["method"] == "evit:keep_rate=0.5"
    assert written["result"]["updates"] == 6
    assert written["processes"] == 1
    assert "evaluation of the model: epoch 2.00" in capsys.readouterr().out
    # the resolved recipe in the run's folder is a recipe
    assert load_recipe(out / "recipe.yaml").recipe.epochs == 2
    assert run(monkeypatch, tiny, "epochs=2", *common) == 2
    assert "has a run already" in the_error(capsys)


SMALL = ("--model", "test_vit", "pretrained=false", "model_options={img_size: 16, patch_size: 4}", "epochs=2")


def test_ones_own_folder_of_classes_is_fine_tuned(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = images / "train"  # 24 images of three classes, without splits
    common = ("--data", own, "--device", "cpu", "--threads", 1, "batch_size=8")
    assert run(monkeypatch, "finetune", *SMALL, "-m", "tome:r=1", *common, "--limit", 20, "--json", "run.json") == 0
    shown = capsys.readouterr().out
    assert "2 of its 20 images are held out, not trained on, and watched" in " ".join(shown.split())
    assert "wrote runs/train/model.safetensors" in shown
    recipe = json.loads(Path("run.json").read_text())["recipe"]
    assert (recipe["method"], recipe["limit"], recipe["split"], recipe["eval_split"]) == (
        "tome:r=1",
        20,
        "auto",
        "auto",
    )
    command = next(line for line in shown.splitlines() if line.startswith("next: vitrim "))
    assert exit_code(monkeypatch, *shlex.split(command.removeprefix("next: vitrim "))) == 0  # the next command is one
    assert "24 images" in capsys.readouterr().out
    assert "most of these images were trained on" in shown


def test_the_next_command_scores_the_share_that_was_held_out(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, own = tmp_path / "run", images / "train"
    common = ("--data", own, "--device", "cpu", "--threads", 1, "--out", out, "--json", tmp_path / "x", "batch_size=8")
    assert run(monkeypatch, "finetune", *SMALL, *common, "eval_split=0.25") == 0
    shown = capsys.readouterr().out
    assert "were trained on" not in shown
    watched = json.loads((tmp_path / "x").read_text())["result"]["last"]
    command = next(line for line in shown.splitlines() if line.startswith("next: vitrim "))
    words = [*shlex.split(command.removeprefix("next: vitrim ")), "--json", tmp_path / "eval"]
    assert exit_code(monkeypatch, *words) == 0
    record = json.loads((tmp_path / "eval").read_text())
    assert (record["data"]["split"], record["data"]["images"]) == ("0.25", 6)
    assert 100 * record["rows"][0]["top1"] == pytest.approx(watched["top1"])  # as the run's own last evaluation


def test_a_run_trains_one_method(
    images: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tiny, "-m", "tome:r=1", "-m", "topk", "--data", images, "--out", images / "run") == 2
    assert capsys.readouterr().err == "error: a run trains one method, got 2: tome:r=1, topk\n"
    assert not (images / "run").exists()


def test_a_dry_run_says_what_it_would_cost(
    images: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(monkeypatch, tiny, "--data", images, "--device", "cpu", "--dry-run", "--out", out) == 0
    said = capsys.readouterr().out
    for name in ("trained_parameters", "train_images: 24", "eval_images: 12", "updates: 9", "minutes), without"):
        assert name in said
    assert not out.exists()


def test_list_and_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "list.json"
    assert run(monkeypatch, "--list", "--json", record) == 0
    assert {row["name"] for row in json.loads(record.read_text())["rows"]} == set(recipes())
    shown = tmp_path / "show.json"
    assert run(monkeypatch, "cifar10_vit", "optimizer.lr=1e-4", "--show", "--json", shown) == 0
    values = {row["key"]: (row["value"], row["from"]) for row in json.loads(shown.read_text())["values"]}
    assert values["optimizer.lr"] == (1e-4, "command line")
    assert values["model_options.patch_size"][1] == "cifar10_vit"
    assert values["grad_checkpointing"] == (False, "default")
    capsys.readouterr()


def test_the_command_has_the_names_and_the_defaults_of_its_function() -> None:
    function, command = (dict(inspect.signature(each).parameters) for each in (training.train, flat(command_of_train)))
    running = {field.name: field for field in dataclasses.fields(Running)}
    del running["keep"]  # how many checkpoints are kept
    function |= {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        for name, field in running.items()
        if name != "out"
    }
    del command["threads"]  # torch's
    of_the_command = {"list_recipes", "show", "json", "model", "method", "limit"}  # the last three are changes
    assert set(function) - {"console"} == set(command) - of_the_command
    for name in set(function) - {"recipe", "data", "console"}:  # which the command asks for itself
        assert (function[name].default or None) in (command[name].default or None, str(command[name].default)), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a recipe"),
        (["cifar10_vit", "--list"], "--list takes no recipe"),
        (["cifar10_vit"], "--data is missing: cifar10_vit wants CIFAR-10"),
        (["cifar10_vit", "epoch=3"], "unknown option of cifar10_vit 'epoch'; did you mean 'epochs'?"),
        (
            ["cifar10_vit", "--data", ".", "--log-with", "tensorbord"],
            "unknown tracker 'tensorbord'; did you mean 'tens",
        ),
        (["cifar10_vit", "--data", ".", "--workers", "100000"], "256"),
        (["cifar10_vit", "--data", "images", "--out", "images"], "out is the folder of the data, images"),
        (["cifar10_vit", "optimizer.name=adamv", "--show"], "unknown optimizer 'adamv'; did you mean"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert message in the_error(capsys)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_a_later_one_ends_at_once(
    number: signal.Signals, code: int, images: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--data", images, "--device", "cpu", "--threads", 1]
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    step = Trainer._step
    asked: list[int] = []

    def interrupted(self: Trainer, batches: Any, update: int) -> dict[str, float]:
        for _ in range(2 if number == signal.SIGINT else 1):  # from the terminal, and once more from a launcher
            signal.raise_signal(number)
        asked.append(update)
        return step(self, batches, update)

    monkeypatch.setattr(Trainer, "_step", interrupted)
    assert run(monkeypatch, tiny, *common, "--out", tmp_path / "saved") == code
    assert asked == [0]
    assert [path.name for path in (tmp_path / "saved/checkpoints").iterdir()] == ["update-00000001"]

    monkeypatch.setattr(training, "PATIENCE", -1.0)
    assert run(monkeypatch, tiny, *common, "--out", tmp_path / "ended") == code
    assert not (tmp_path / "ended/checkpoints").exists()
    assert not (tmp_path / "ended/.lock").exists()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_part_that_was_trained_on_is_not_called_held_out(tmp_path: Path) -> None:
    splits = {"train": "train", "eval": "train", "test": None}
    facts = {"recipe": {"method": "none", "limit": None}, "splits": splits}
    lines = _next(SimpleNamespace(files=[Path("model.safetensors")], facts=facts), "photos", tmp_path)  # type: ignore[arg-type]
    assert "--split train" in lines[1]
    assert "most of these images were trained on" in lines[-1]
