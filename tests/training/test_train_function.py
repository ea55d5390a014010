"""`train`, the function of the command: what it takes and what it reports."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

import vitrim
from tiny_training import TINY
from vitrim.data import load_images
from vitrim.errors import VitrimError
from vitrim.loading import load_run
from vitrim.training.recipe import load_recipe
from vitrim.training.train import train


@pytest.mark.slow
def test_a_run_reports_its_evaluations_and_files(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    changes = {"epochs": 2, "method": "tome:r=1", "optimizer.lr": 5e-4}
    changes["ramps"] = [{"option": "r", "start": 0, "stop": 1, "end_epoch": 9, "whole": True}]
    report = train(TINY, images, changes=changes, out=vitrim.Running(out, log_every=1), device="cpu")
    assert [row["epoch"] for row in report.rows] == [1.0, 2.0]
    assert report.rows[-1] == report.result["last"]
    assert report.rows == [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    assert {path.name for path in report.files} == {
        "recipe.yaml", "log.csv", "evaluations.jsonl", "model.safetensors", "result.json",
    }  # fmt: skip
    assert load_recipe(out / "recipe.yaml").recipe.optimizer.lr == 5e-4
    assert list(report.record) == [
        "command", "environment", "recipe", "running", "splits", "processes", "data", "dry_run", "result",
    ]  # fmt: skip
    assert json.loads(json.dumps(report.record)) == report.record
    assert report.record["running"] == {
        "out": str(out), "resume": False, "workers": 0, "eval_batch": 64, "save_minutes": 10.0, "log_every": 1,
        "keep": 2, "tensorboard": False, "log_with": [], "max_updates": None,
    }  # fmt: skip
    lines = str(report).splitlines()
    assert "updates: 6" in lines
    assert lines[-1].startswith("note: the ramp of r ends at epoch 9")
    assert load_run(out).num_classes == 3


def test_one_data_set_and_a_share_of_it(images: Path, tmp_path: Path) -> None:
    data = load_images(images, split="train")
    changes = {"epochs": 1, "eval_split": 0.25}
    report = train(TINY, data, changes=changes, out=tmp_path, device="cpu", dry_run=True)
    assert (report.result["train_images"], report.result["eval_images"]) == (18, 6)
    assert (report.rows, report.files, list(tmp_path.iterdir())) == ([], [], [])


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {}, "no split test in the data that were given; there is: train"),
        ({"eval_split": None, "stream": True}, {}, "stream=true reads files"),
        ({"eval_split": None}, {"device": "cuda:1"}, "device=cuda:1: must be 'cpu'"),
        (5, {}, "changes=5: must be a list in brackets, or options by name"),
        ({"eval_split": None, "data_options": {"split": "x"}}, {}, "data_options has no split"),
        ({"data_options": {"class_names": "names.txt"}}, {}, "class_names of a recipe is a list"),
    ],
)
def test_what_is_refused(images: Path, tmp_path: Path, changes: dict, options: dict, said: str) -> None:
    data = {"train": load_images(images, split="train")}
    with pytest.raises(VitrimError) as refused:
        train(TINY, data, changes=changes, out=tmp_path / "out", **{"device": "cpu", **options})
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"recipe": 5}, "recipe=5: must be a text, or a path, or options by name"),
        (
            {"data": {"train": [1]}},
            "the data are a source, data sets of vitrim.data by split, or one of them, not list",
        ),
        ({"out": 5}, "out=5: must be a text, or a path, or a Running"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(images: Path, tmp_path: Path, arguments: dict, said: str) -> None:
    given = {"recipe": TINY, "data": images, "out": tmp_path / "out", "changes": {"eval_split": None}, **arguments}
    with pytest.raises(VitrimError) as refused:
        train(**given, device="cpu")
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_it_runs_in_any_thread_and_shows_its_progress(images: Path, tmp_path: Path) -> None:
    console = Console(file=(tmp_path / "said").open("w"), width=120)
    with ThreadPoolExecutor(1) as pool:  # where no signal can be handled
        run = pool.submit(
            train, TINY, images, changes=["epochs=1"], out=tmp_path / "out", device="cpu", console=console
        )
        assert run.result().result["updates"] == 3
    console.file.close()
    said = (tmp_path / "said").read_text()
    assert "evaluation of the model: epoch 1.00" in said
    assert "note: the warm-up of 1 epochs does not end" in said
    assert run.result().notes == []
