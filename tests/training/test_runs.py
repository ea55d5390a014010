"""A finished run's folder gives back its model, also as a reference checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitrim
from tiny_training import recipe, trainer
from vitrim.errors import VitrimError
from vitrim.loading import create_model, load_run
from vitrim.models import references as reference
from vitrim.training.recipe import load_recipe


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run under a method that learns, of a model that drops patches in training."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    options = {"img_size": 16, "patch_size": 4, "patch_drop_rate": 0.25}
    trainer(recipe(epochs=1, method="dynamicvit:keep_rate=0.5", model_options=options), images, out).run()
    return out


@pytest.mark.slow
def test_the_model_of_a_run_has_its_weights_and_drops_nothing(run: Path) -> None:
    model = load_run(run)
    weights = load_file(run / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert (model.training, model.num_classes, type(model.patch_drop)) == (False, 3, torch.nn.Identity)
    assert vitrim.Reduction.load(model, run).config.describe().startswith("dynamicvit:keep_rate=0.5")
    assert load_run(run, patch_drop_rate=0.5).patch_drop.prob == 0.5
    with torch.device("meta"):
        assert next(load_run(run).parameters()).is_meta


def test_a_run_that_is_not_finished_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(VitrimError, match=r"is not a finished run: it has no model\.safetensors"):
        load_run(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    with pytest.raises(VitrimError, match=r"is not a finished run: it has no recipe\.yaml"):
        load_run(tmp_path)
    (tmp_path / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    with pytest.raises(VitrimError, match=r"is not a finished run: it has no result\.json"):
        load_run(tmp_path)
    with pytest.raises(VitrimError, match="has shape"):
        load_run(run, patch_size=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [", "cannot read"),
        ("just words", "recipe.yaml: must be options by name"),
        ("model: test_vit\nmodel_options: {1: 2}", "model_options=1: must be a text"),
        ("model: tset_vit", "unknown model 'tset_vit'; did you mean 'test_vit'"),
    ],
)
def test_a_run_whose_recipe_is_damaged_is_refused_in_one_line(run: Path, tmp_path: Path, text: str, said: str) -> None:
    for name in ("model.safetensors", "result.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(VitrimError, match=said):
        load_run(tmp_path)


def test_of_the_recipe_of_a_run_only_the_model_is_read(run: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "result.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "recipe.yaml").write_text(
        "model: test_vit\nmodel_options: {img_size: 16, patch_size: 4}\nof_a_later_version: 1\n"
    )
    mine, whole = load_run(tmp_path).state_dict(), load_run(run).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in mine.items())


def test_a_run_becomes_a_model_by_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "FOLDER", tmp_path / "shipped")
    assert reference.references() == {}
    shutil.copytree(run, tmp_path / "shipped" / "tiny")
    assert list(reference.references()) == ["tiny"]
    assert load_recipe(reference.folder("tiny") / "recipe.yaml").recipe.epochs == 1
    model, trained = create_model("vitrim:tiny"), create_model(f"run:{run}")
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name])
    with pytest.raises(VitrimError, match="unknown reference checkpoint 'tony'; did you mean 'tiny'"):
        create_model("vitrim:tony")


def test_a_run_keeps_the_names_of_its_classes(run: Path, tmp_path: Path) -> None:
    names = ["ant", "bee", "cat"]  # of the folders that it learned from
    options = {"num_classes": 3, "img_size": 16, "patch_size": 4}
    given = [create_model("test_vit", checkpoint=path, options=options) for path in (run, run / "model.safetensors")]
    assert [model.class_names for model in (load_run(run), *given)] == [names] * 3
    (tmp_path / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    assert create_model("test_vit", checkpoint=tmp_path, options=options).class_names is None


@pytest.mark.parametrize("text", ['{"classes": 3}', pytest.param("[" * 50000, id="deep")])
def test_results_that_are_damaged_are_refused_in_one_line(run: Path, tmp_path: Path, text: str) -> None:
    for name in ("model.safetensors", "recipe.yaml"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(VitrimError, match=r"result\.json: (it is not|classes)"):
        load_run(tmp_path)
