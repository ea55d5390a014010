"""The checkpoints that come with the package: what they are, how large, and that they do what their record says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import vitrim
from vitrim.data import batches, eval_transform, load_data, load_images
from vitrim.data.transforms import geometry_of
from vitrim.loading import create_model
from vitrim.measure.evaluation import evaluate
from vitrim.measure.records import read
from vitrim.models.references import FOLDER, references
from vitrim.tasks import make_task
from vitrim.training.recipe import load_recipe

REAL_IMAGES = Path(__file__).parents[2] / "shared" / "data"
MOST_BYTES = 12_000_000


def test_there_are_some_and_together_they_are_small() -> None:
    assert "cifar10_vit" in references()
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MOST_BYTES


@pytest.mark.parametrize("name", references())
def test_weights_are_bfloat16_and_come_with_the_recipe_and_the_log_that_made_them(name: str) -> None:
    folder = references()[name]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    with (folder / "log.csv").open(newline="") as file:
        updates = [int(row["update"]) for row in csv.DictReader(file)]
    assert updates == sorted(updates)
    assert updates[-1] + 1 == json.loads((FOLDER / name / "result.json").read_text())["updates"]
    assert load_recipe(folder / "recipe.yaml").recipe.dataset


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", references())
def test_accuracy_on_real_images_is_that_of_the_record(name: str) -> None:
    if not REAL_IMAGES.is_dir():
        pytest.skip("the real images are not here: test images of CIFAR-10 and CamVid as parquet")
    MEASURED[name](create_model(f"vitrim:{name}"), name)


def of_photographs(model: nn.Module, name: str) -> None:
    dataset = load_images(REAL_IMAGES / "cifar10-test.parquet")
    dataset.transform = eval_transform(model)
    (dense,) = evaluate(model, [], batches(dataset, 100, limit=500)).rows
    assert (
        abs(100 * dense["top1"] - json.loads((FOLDER / name / "result.json").read_text())["last"]["top1"]) < 4
    )  # 500 of 10,000 images: 1.8 % standard error


def of_streets(model: nn.Module, name: str) -> None:
    recipe = load_recipe(references()[name] / "recipe.yaml").recipe
    task = make_task("segmentation", 11)
    task.follow(recipe.protocol)
    source = REAL_IMAGES / "camvid-test.parquet"
    dataset = load_data(source, task="segmentation", **recipe.data_options)
    dataset.transform = task.eval_transform(geometry_of(model))
    (dense,) = evaluate(model, [], vitrim.ScoredData(read(dataset, 1, limit=12, collate=task.collate), task=task)).rows
    # 12 of 233 images, whose accuracies spread by 6 points
    assert abs(100 * dense["aAcc"] - json.loads((FOLDER / name / "result.json").read_text())["test"]["aAcc"]) < 6


MEASURED = {"cifar10_vit": of_photographs, "camvid_vit": of_streets}
"""How each is checked: a new reference needs a line here."""
