"""The text of grids, the sweeps of the papers, and tables of what was found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import vitrim
from vitrim.errors import VitrimError
from vitrim.training.recipe import load_recipe, recipe_text
from vitrim.training.running import Running
from vitrim.tuning.result import non_dominated
from vitrim.tuning.sweep import SweepResult, folder_name, paper_grids, parse_grid, train_sweep


def test_ranges_lists_and_words() -> None:
    grid = parse_grid(["tome:r=[1,2]|[3,4]|0..4/2,kept_order=raster"])
    assert grid.axes == {"r": ("[1,2]", "[3,4]", "0", "2", "4"), "kept_order": ("raster",)}
    assert parse_grid(["atm:theta_min=-0.1..0.1/0.1"]).axes["theta_min"] == ("-0.1", "0", "0.1")
    assert parse_grid(["tome:r=2..4|3"]).axes["r"] == ("2", "3", "4")
    of_recipe = parse_grid(["method=evit:keep_rate=0.5|topk:keep_rate=0.7"], recipe=True)
    assert of_recipe.axes["method"][1] == "topk:keep_rate=0.7"
    assert grid.config(parse_grid(["tome:r=[1,2]"]).points()[0]) == vitrim.ToMe(r=[1, 2])


@pytest.mark.parametrize("text", ["1..0", "0..4/0", "0..4/-1", "0..1/nan"])
def test_a_range_that_does_not_rise_is_refused(text: str) -> None:
    with pytest.raises(VitrimError, match=f"the range '{text}' does not rise: .* with a step above 0"):
        parse_grid([f"tome:r={text}"])


def test_some_points_of_a_large_grid_are_drawn_by_the_seed() -> None:
    grid = parse_grid(["atm"])
    some = grid.points(50, seed=1)
    assert some == grid.points(50, seed=1) != grid.points(50, seed=2)
    every = grid.points()
    places = [every.index(point) for point in some]
    assert places == sorted(set(places))
    huge = parse_grid(["atm:alpha=0.1..1/0.001,beta=0..1/0.01"])
    with pytest.raises(VitrimError, match="the grid has 91001 points"):
        huge.points()
    assert len(huge.points(3)) == 3


@pytest.mark.parametrize("name", paper_grids())
def test_the_sweeps_of_the_papers_are_valid(name: str) -> None:
    """Every value of every option is one that the method or the recipe takes; the sizes are those of the papers."""
    sizes = {"atm": 2880, "study": 72, "study_imagenet": 8, "cropr_r": 9, "mctf_temperatures": 1 + 3 * 5}
    recipe = paper_grids()[name].get("train")
    grid = parse_grid([name], recipe=recipe is not None)
    assert len(grid) == sizes[name]
    first = {key: values[0] for key, values in grid.axes.items()}
    for key, values in grid.axes.items():
        for value in values:
            point = {**first, key: value}
            if recipe is None:
                grid.config(point)
            else:
                resolved = load_recipe(recipe, [f"{one}={text}" for one, text in point.items()])
                vitrim.parse_method(resolved.recipe.method)


def test_a_table_has_the_best_over_the_other_options() -> None:
    grid = parse_grid(["atm:alpha=0.9|0.95|1,beta=0|0.1,theta_min=0|0.5"])
    rows = [
        {"share": 0.5 + place / 100, "top1": float(place % 5), "values": point}
        for place, point in enumerate(grid.points())
    ]
    swept = SweepResult(grid, "top1", tuple(rows))
    assert swept.heat() is not None
    numbers, down, across = swept.heat() or ([], ("", ()), ("", ()))
    assert (down, across) == (("beta", ("0", "0.1")), ("alpha", ("0.9", "0.95", "1")))
    by_hand = np.array([float(place % 5) for place in range(12)]).reshape(3, 2, 2).max(axis=2).T
    assert np.array_equal(numbers, by_hand)
    assert [row["share"] for row in swept.best()] == [0.54, 0.53, 0.52, 0.51, 0.5]
    assert SweepResult(parse_grid(["tome:r=1|2"]), "top1", ()).heat() is None


def test_no_point_of_a_front_is_dominated() -> None:
    points = [tuple(one) for one in np.random.default_rng(0).random((40, 2)).round(1).tolist()]
    kept = [one for one, keep in zip(points, non_dominated(points), strict=True) if keep]
    for one in points:
        by = [two for two in points if two != one and two[0] <= one[0] and two[1] <= one[1]]
        assert (one in kept) == (not by)


def test_folders_of_runs_differ() -> None:
    point = {"method": "cropr:r=1", "optimizer.lr": "1e-3"}
    assert folder_name(point) == "method=cropr_r=1,lr=1e-3"
    long = {f"a.{'key' * 12}{number}": "1" for number in range(6)}
    assert folder_name(long) != folder_name({**long, "a.b": "2"})
    assert len(folder_name(long)) <= 120


def finished(out: Path, recipe: str, score: float | None) -> None:
    """A run as it ends, of the recipe given as its text."""
    out.mkdir(parents=True)
    (out / "recipe.yaml").write_text(recipe)
    scores = {"top1": 50.0} if score is None else {"top1": 50.0, "other": score}
    (out / "result.json").write_text(json.dumps({"best": scores, "last": None}))


def test_finished_runs_are_taken_over_if_they_are_of_the_recipe(tmp_path: Path) -> None:
    grid = parse_grid(["epochs=1|2"], recipe=True)
    texts = [recipe_text(load_recipe("cifar10_vit", [f"epochs={epochs}"]).recipe) for epochs in (1, 2)]
    for name, text, score in zip(("epochs=1", "epochs=2"), texts, (None, 3.0), strict=True):
        finished(tmp_path / "a" / name, text, score)
    found = train_sweep("cifar10_vit", grid, "images", Running(tmp_path / "a", resume=True))
    assert [row["top1"] for row in found.rows] == [50.0, 50.0]
    found.save(tmp_path / "saved", {"none": float("nan")})
    assert (tmp_path / "saved" / "grid.csv").read_text().splitlines()[0] == "epochs,out,top1,other"
    assert json.loads((tmp_path / "saved" / "grid.json").read_text())["none"] is None
    finished(tmp_path / "b" / "epochs=1", texts[1], None)
    with pytest.raises(VitrimError, match="has a finished run of another recipe: give another --out"):
        train_sweep("cifar10_vit", grid, "images", Running(tmp_path / "b", resume=True))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"last": 1}', '{"best": [1], "last": 1}', "null", "\xff"])
def test_a_finished_run_with_damaged_results_is_one_line(tmp_path: Path, text: str) -> None:
    finished(tmp_path / "epochs=1", recipe_text(load_recipe("cifar10_vit", ["epochs=1"]).recipe), None)
    (tmp_path / "epochs=1" / "result.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(VitrimError, match=r"result\.json is damaged \(.*\): remove its folder"):
        train_sweep("cifar10_vit", parse_grid(["epochs=1|2"], recipe=True), "images", Running(tmp_path, resume=True))
