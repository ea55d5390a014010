"""Training in two processes is training in one; `training_worker.py` is what they do."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny_dense
import training_worker
from cli_runs import exit_code
from tiny_training import COPIES, SHARDED, recipe, trainer
from vitrim import Reduction
from vitrim.loading import load_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo"),
    pytest.mark.xdist_group("distributed"),  # the processes are started once
]


@pytest.fixture
def two(two_processes: Path) -> Path:
    """The folder with the runs of the two processes."""
    return two_processes


def losses(out: Path) -> list[float]:
    """The loss of every update."""
    with (out / "log.csv").open(newline="") as file:
        return [float(row["total"]) for row in csv.DictReader(file)]


def evaluations(out: Path) -> list[dict[str, Any]]:
    """All that was written of every evaluation."""
    return [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]


def test_two_processes_of_accelerate_are_one(uneven: Path, two: Path, tmp_path: Path) -> None:
    """The same losses over 20 updates, to 1e-4, and the same evaluations, also where they are stopped and resumed."""
    trainer(recipe(**COPIES), uneven, tmp_path, eval_batch=training_worker.EVAL_BATCH).run()
    assert json.loads((two / "copies.json").read_text())["processes"] == 2
    assert len(losses(tmp_path)) == 21
    assert losses(two / "copies") == pytest.approx(losses(tmp_path), abs=1e-4)
    assert evaluations(two / "copies") == evaluations(tmp_path) != []


def test_two_processes_evaluate_as_one(uneven: Path, two: Path, tmp_path: Path, monkeypatch) -> None:
    """The same table to the digit, and the same decisions, also where the two were stopped and resumed."""
    assert exit_code(monkeypatch, *training_worker.evaluation(uneven, tmp_path)[1:]) == 0
    one, other = (json.loads((folder / "eval.json").read_text()) for folder in (tmp_path, two))
    assert (one["environment"].pop("processes"), other["environment"].pop("processes")) == (1, 2)
    assert one == other
    assert [row["images"] for row in one["rows"]] == [11] * 4
    assert one["complete"]
    names = sorted(file.name for file in (tmp_path / "decisions").iterdir())
    assert len(names) == 3
    for name in names:
        assert (two / "decisions" / name).read_bytes() == (tmp_path / "decisions" / name).read_bytes()
    assert sorted(file.name for file in (two / "part").iterdir()) == ["part-0.safetensors", "part-1.safetensors"]


def test_two_processes_with_shards_are_one(uneven: Path, two: Path, tmp_path: Path) -> None:
    """FSDP2 as accelerate sets it up: the same losses and evaluations, weights that load, and a resume."""
    trainer(recipe(**SHARDED), uneven, tmp_path, eval_batch=training_worker.EVAL_BATCH).run()
    shards = two / "shards"
    assert len(losses(tmp_path)) == 9
    assert losses(shards) == pytest.approx(losses(tmp_path), abs=1e-4)
    assert evaluations(shards) == evaluations(tmp_path) != []
    found, expected = weights(shards), weights(tmp_path)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-3, rtol=1e-3)
    Reduction.load(load_run(shards), shards)


def test_two_processes_train_one_detector(two: Path) -> None:
    """Both end with the same weights, though one of them has an image without a box; a break changes no bit.

    What a detector draws differs between processes, so one process alone is no comparison.
    """
    found = {name: load_file(two / name / "model.safetensors") for name in ("detector", "detector-parts")}
    assert all(math.isfinite(loss) for loss in losses(two / "detector"))
    assert losses(two / "detector") == losses(two / "detector-parts")
    assert len(losses(two / "detector")) == 4
    fresh = tiny_dense.trainer(training_worker.detector(), two / "fresh", training_worker.boxes()).learner.model
    for name, trained in found.items():
        other = load_file(two / f"{name}-1.safetensors")
        assert trained.keys() == other.keys() == fresh.state_dict().keys()
        assert all(torch.equal(value, other[key]) for key, value in trained.items())
        assert all(torch.equal(value, found["detector"][key]) for key, value in trained.items())
    moved = {key.split(".")[0] for key, value in fresh.state_dict().items() if not torch.equal(value, trained[key])}
    assert moved == {"backbone", "pyramid", "rpn", "roi_heads"}


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The model's weights and what its method learned."""
    return {**load_file(out / "model.safetensors"), **load_file(out / "reducers.safetensors")}
