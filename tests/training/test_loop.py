"""Whole runs on a few images: they learn, are logged, saved, stopped, resumed, and fail in one line."""

from __future__ import annotations

import csv
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import timm
import torch
from accelerate.tracking import GeneralTracker
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import vitrim
from full_matrix import cells
from killed_runs import killed
from tiny_training import CLASSES, PER_CLASS, TINY, recipe, trainer
from vitrim.errors import MissingPackageError, VitrimError
from vitrim.loading import load_run
from vitrim.models import vittm_mae
from vitrim.training import checkpoint, learner, run_folder
from vitrim.training.recipe import recipe_text
from vitrim.training.running import Running

EPOCH = len(CLASSES) * PER_CLASS["train"] // TINY["batch_size"]
UPDATES = EPOCH * TINY["epochs"]

RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "method": "evit:keep_rate=0.5",
        "model_options": {**TINY["model_options"], "drop_path_rate": 0.2, "patch_drop_rate": 0.25},
        "augment": {"crop": "resized", "auto": "rand-m9-mstd0.5-inc1", "erase": 0.25, "repeats": 2},
        "mix": {"mixup": 0.8, "cutmix": 1.0},
        "micro_batch": 4,
        "loss": {"smoothing": 0.1},
        "teacher": "dense",
        "distil": {"kind": "soft"},
        "ema": {"decay": 0.9},
        "ramps": [
            {"option": "keep_rate", "start": 1.0, "stop": 0.5, "begin_epoch": 0, "end_epoch": 2},
            {"option": "patch_drop", "start": 0.25, "stop": 0.0, "begin_epoch": 0, "end_epoch": 2},
        ],
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip": 1.0, "backbone_scale": 0.1, "freeze_epochs": 1},
        "grad_checkpointing": True,
    },
    "learned": {"method": "dynamicvit:keep_rate=0.7", "teacher": "dense"},
    "momentum": {"optimizer": {"name": "sgd", "lr": 1e-2, "momentum": 0.9}},
    "an optimiser without state": {"optimizer": {"name": "momentum", "lr": 1e-2, "momentum": 0.0}},
    "parameters without gradients": {"method": "ia_red2:stage=0"},
}


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(out: Path) -> list[dict[str, str]]:
    """The log without the clock."""
    return [{name: value for name, value in row.items() if name != "images_per_second"} for row in rows(out)]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plain run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole")
    trainer(recipe(), images, out).run()
    return out


@pytest.fixture(scope="module")
def two_updates(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plain run with the checkpoints of its first two updates; tests take copies."""
    out = tmp_path_factory.mktemp("two")
    trainer(recipe(), images, out, max_updates=2, save_minutes=0).run()
    return out


def test_a_run_learns_and_leaves_what_is_needed_to_use_it(images: Path, tmp_path: Path) -> None:
    resolved = recipe(epochs=12, method="tome:r=2")
    result = trainer(resolved, images, tmp_path).run()
    assert result["updates"] == 12 * EPOCH == len(rows(tmp_path))
    assert result["last"]["top1"] == 100.0  # the classes are colours
    losses = [float(row["total"]) for row in rows(tmp_path)]
    assert losses[-1] < losses[0] / 2

    model = timm.create_model("test_vit", num_classes=3, **TINY["model_options"])
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert vitrim.Reduction.load(model, tmp_path).config == vitrim.ToMe(r=2)
    assert json.loads((tmp_path / "result.json").read_text())["last"] == result["last"]
    evaluations = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [row["update"] for row in evaluations] == [EPOCH * epoch for epoch in range(1, 13)]


# the run with everything has what the others have; a killed process resumes a plain one
@pytest.mark.slow
@pytest.mark.parametrize("name", cells(RECIPES, {"everything"}))
def test_a_stopped_run_resumes_to_the_same_bits(name: str, images: Path, tmp_path: Path) -> None:
    resolved = recipe(**RECIPES[name], epochs=2)
    trainer(resolved, images, tmp_path / "whole").run()
    for stop in (4, 5, None):  # in the middle of an epoch
        trainer(resolved, images, tmp_path / "parts", resume=stop != 4, max_updates=stop).run()
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert len(rows(tmp_path / "whole")) == 2 * EPOCH
    whole, parts = (checkpoint.load(checkpoint.latest(tmp_path / side / "checkpoints")) for side in ("whole", "parts"))
    assert all(same(whole.tensors[part], parts.tensors[part]) for part in whole.tensors)
    assert same(*(load_file(tmp_path / side / "model.safetensors") for side in ("whole", "parts")))
    assert (tmp_path / "parts/evaluations.jsonl").read_text() == (tmp_path / "whole/evaluations.jsonl").read_text()


def test_a_killed_process_resumes_to_the_same_bits(images: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL at whatever update it is when the second checkpoint appears."""
    resolved = recipe()
    text = tmp_path / "tiny.yaml"
    text.write_text(recipe_text(resolved.recipe))
    out = tmp_path / "killed"
    killed(text, images, out)
    trainer(resolved, images, out, resume=True).run()
    assert numbers(out) == numbers(whole)
    assert same(*(load_file(side / "model.safetensors") for side in (out, whole)))


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(images: Path, tmp_path: Path) -> None:
    resolved = recipe()
    run = trainer(resolved, images, tmp_path, save_minutes=0)
    step = run._step

    def poisoned(batches: Any, update: int) -> dict[str, float]:
        if update == 4:
            with torch.no_grad():
                next(run.learner.model.parameters()).fill_(float("nan"))
        return step(batches, update)

    run._step = poisoned
    with pytest.raises(VitrimError, match=r"not finite at update 4 .*last good checkpoint is .*update-00000004"):
        run.run()
    weights = checkpoint.load(checkpoint.latest(tmp_path / "checkpoints")).tensors["model"]
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    trainer(resolved, images, tmp_path, resume=True).run()


def test_a_full_disk_while_saving_leaves_the_last_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(recipe(), images, tmp_path, max_updates=3).run()
    run = trainer(recipe(), images, tmp_path, resume=True, max_updates=5)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(VitrimError, match=r"No space left on device; the last good checkpoint is .*update-00000003"):
        run.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000003"]


@pytest.mark.slow  # a full disk while saving is below
def test_a_full_disk_at_the_very_end_loses_nothing(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    run = trainer(recipe(epochs=1), images, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "save_file", full)
        with pytest.raises(VitrimError, match=r"No space left .*; they are in .*update-00000003: make room and resume"):
            run.run()
    trainer(recipe(epochs=1), images, tmp_path, resume=True).run()
    assert load_run(tmp_path)(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


def test_a_checkpoint_that_is_there_is_never_taken_away(images: Path, tmp_path: Path) -> None:
    """Stopped just after it was saved, a run saves the same update once more."""
    trainer(recipe(), images, tmp_path, max_updates=2).run()
    saved = checkpoint.latest(tmp_path / "checkpoints")
    before = {path.name: path.stat().st_ino for path in saved.iterdir()}
    trainer(recipe(), images, tmp_path, max_updates=2, resume=True).run()
    assert {path.name: path.stat().st_ino for path in saved.iterdir()} == before


def test_processes_share_the_running_statistics_that_are_written(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[Tensor] = []
    monkeypatch.setattr(learner, "broadcast", lambda buffer, from_process: shared.append(buffer))
    run = trainer(recipe(), images, tmp_path)
    norm = torch.nn.BatchNorm2d(3)
    run.learner.learned = norm
    run.learner.evaluated(0)
    assert not shared  # one process has nobody to share with
    run.learner.accelerator = SimpleNamespace(num_processes=2)
    assert run.learner.evaluated(0) is norm
    assert [buffer.data_ptr() for buffer in shared] == [norm.running_mean.data_ptr(), norm.running_var.data_ptr()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ramps": [{"option": "patch_drop", "start": 0.5, "stop": 0, "end_epoch": 1}]}, "patch_drop_rate"),
        ({"trainable": ["head.*", "neck.*"]}, r"no parameter matches 'neck\.\*'"),
        ({"epochs": 0.1}, "less than one update: an epoch has 3"),
        (
            {"method": "evo_vit", "switches": [{"option": "blocks", "value": [2, 40], "epoch": 1}]},
            r"blocks \[40\] do not exist: the model has blocks 0 to 5",
        ),
        (
            {
                "model_options": {**TINY["model_options"], "patch_drop_rate": 0.5},
                "ramps": [{"option": "patch_drop", "start": 0.5, "stop": 1, "end_epoch": 1}],
            },
            "a ramp of patch_drop goes to 1; shares",
        ),
        (
            {
                "method": "tome:r=1,strict=true",
                "ramps": [{"option": "r", "start": 1, "stop": 9, "end_epoch": 1, "whole": True}],
            },
            "asks for more than 16 patch tokens allow.*strict=true",
        ),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer adamw does not take these options: Invalid beta"),
        ({"method": "cropr:r=1", "objective": {"tau": 2}}, "the loss of cropr has no option 'tau'"),
        ({"switches": [{"option": "blocks", "value": [1], "epoch": 1}]}, "none cannot change 'blocks' at run time"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, images: Path, tmp_path: Path
) -> None:
    with pytest.raises(VitrimError, match=message):
        trainer(recipe(**changes), images, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_does_not_overwrite_another_nor_resume_one_of_another_recipe(
    images: Path, two_updates: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_updates, tmp_path, dirs_exist_ok=True)
    with pytest.raises(VitrimError, match="has a run already"):
        trainer(recipe(), images, tmp_path)
    with pytest.raises(VitrimError, match="differs in seed"):
        trainer(recipe(seed=1), images, tmp_path, resume=True)
    with pytest.raises(VitrimError, match="nothing to resume"):
        trainer(recipe(), images, tmp_path / "other", resume=True)
    with pytest.raises(VitrimError, match="differs in micro_batch"):
        trainer(recipe(micro_batch=4), images, tmp_path, resume=True)
    assert trainer(recipe(eval_every=None, notes="new"), images, tmp_path, resume=True).update == 2


def test_a_finished_run_is_not_overwritten_without_its_checkpoints(images: Path, tmp_path: Path) -> None:
    trainer(recipe(epochs=1), images, tmp_path).run()
    shutil.rmtree(tmp_path / "checkpoints")
    before = (tmp_path / "result.json").read_text()
    with pytest.raises(VitrimError, match="has a finished run: name another folder"):
        trainer(recipe(epochs=1, method="tome:r=2"), images, tmp_path)
    assert (tmp_path / "result.json").read_text() == before


@pytest.mark.slow  # `test_a_stopped_run_resumes_to_the_same_bits` sees what a resumed run forgets
def test_a_run_goes_on_from_the_start_it_had(images: Path, tmp_path: Path) -> None:
    """A teacher is a copy of the starting model, which no checkpoint holds."""
    for name in ("a", "b"):
        trainer(recipe(epochs=1), images, tmp_path / name).run()
    out = tmp_path / "out"
    trainer(recipe(), images, out, start=tmp_path / "a", max_updates=2).run()
    with pytest.raises(VitrimError, match=f"began from the weights of {tmp_path / 'a'}, not from the recipe's own"):
        trainer(recipe(), images, out, resume=True)
    with pytest.raises(VitrimError, match=f"began from the weights of {tmp_path / 'a'}, not from .*b$"):
        trainer(recipe(), images, out, start=tmp_path / "b", resume=True)
    assert trainer(recipe(), images, out, start=tmp_path / "a", resume=True).update == 2


def test_a_run_is_not_resumed_on_other_data(images: Path, two_updates: Path, tmp_path: Path) -> None:
    shutil.copytree(two_updates, tmp_path / "out")
    other = tmp_path / "images"
    shutil.copytree(images, other)
    (other / "train/ant/0.png").unlink()
    with pytest.raises(VitrimError, match="other data: 24 images of 3 classes, and this has 23 images of 3 classes"):
        trainer(recipe(), other, tmp_path / "out", resume=True)


@pytest.mark.parametrize("edit", ['{"sizes": {}, "update": "six"}', '{"sizes": {}, "update": -7}'])
def test_a_checkpoint_whose_state_was_edited_is_passed_over(
    edit: str, images: Path, two_updates: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_updates, tmp_path, dirs_exist_ok=True)
    (checkpoint.latest(tmp_path / "checkpoints") / "state.json").write_text(edit)
    assert trainer(recipe(), images, tmp_path, resume=True).update == 1


def test_a_folder_that_cannot_be_one_is_refused_first(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(VitrimError, match=f"cannot write to {out}: .*file is a file"):
            trainer(recipe(), images, out)
    with pytest.raises(VitrimError, match="is the current one or empty: name another"):
        trainer(recipe(), images, Path(""))


def test_a_dry_run_writes_nothing(images: Path, tmp_path: Path) -> None:
    found = trainer(recipe(method="evit:keep_rate=0.5"), images, tmp_path / "out").dry_run()
    assert (found["classes"], found["updates_per_epoch"], found["updates"]) == (3, EPOCH, UPDATES)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # `test_runs.py` makes a model of a run
def test_a_run_starts_from_a_finished_one_with_what_its_reducers_learned(images: Path, tmp_path: Path) -> None:
    """As IA-RED2's six runs do; the classes may be others."""
    resolved = recipe(method="dynamicvit:keep_rate=0.7", epochs=1)
    trainer(resolved, images, tmp_path / "first").run()
    second = trainer(resolved, images, tmp_path / "second", start=tmp_path / "first")
    second.learner.reduction.save(tmp_path / "copy")
    assert same(*(load_file(tmp_path / side / "reducers.safetensors") for side in ("first", "copy")))
    assert same(
        {name: value for name, value in second.learner.model.state_dict().items() if ".reducer." not in name},
        load_file(tmp_path / "first/model.safetensors"),
    )
    with pytest.raises(VitrimError, match="holds parameters of dynamicvit, this model is under cropr"):
        trainer(recipe(method="cropr:r=1"), images, tmp_path / "third", start=tmp_path / "first")


@pytest.mark.slow
def test_a_pretrained_encoder_is_fine_tuned(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From masked autoencoding to a classifier, as ViTTM is trained; the decoders are small ones."""
    decoders = {"decoder_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
    monkeypatch.setattr(vittm_mae, "MaskedViTTM", partial(vittm_mae.MaskedViTTM, **decoders))
    options = {"embed_dim": 32, "num_heads": 2, "depth": 1, "img_size": 56}
    pretraining = recipe(model="vittm_base_28_28_mae", model_options=options, epochs=1, eval_split=None)
    trainer(pretraining, images, tmp_path / "mae").run()
    tuning = recipe(model="vittm_base_28_28", model_options=options, epochs=1)
    run = trainer(tuning, images, tmp_path / "tuned", start=tmp_path / "mae")
    left = load_file(tmp_path / "mae" / "model.safetensors")
    for name, value in run.learner.model.state_dict().items():
        if "head" not in name:
            assert torch.equal(value, left[f"encoder.{name}"])
    assert run.run()["last"]["update"] == EPOCH
    wider = recipe(model="vittm_base_28_28", model_options={**options, "embed_dim": 64})
    with pytest.raises(VitrimError, match="this model needs"):
        trainer(wider, images, tmp_path / "other", start=tmp_path / "mae")


def test_a_teacher_has_weights_of_its_own(images: Path, tmp_path: Path) -> None:
    trainer(recipe(epochs=1), images, tmp_path / "first").run()
    weights = tmp_path / "first/model.safetensors"
    changes = {"method": "dynamicvit:keep_rate=0.7", "teacher": "dense", "teacher_checkpoint": str(weights.parent)}
    run = trainer(recipe(**changes, seed=1), images, tmp_path / "second")
    assert same(run.learner.objective.teacher.state_dict(), load_file(weights))
    assert not any(parameter.requires_grad for parameter in run.learner.objective.teacher.parameters())
    assert not any(name.startswith("teacher") for name in run.learner.objective.state_dict())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resumed", [False, True])
def test_what_is_saved_has_the_last_amounts(resumed: bool, images: Path, tmp_path: Path) -> None:
    """Also where nothing is evaluated at the end, or where a run is resumed when nothing is left to do."""
    ramp = {"option": "keep_rate", "start": 1.0, "stop": 0.5, "begin_epoch": 0, "end_epoch": 2}
    resolved = recipe(method="evit:keep_rate=0.9", epochs=2, ramps=[ramp], eval_split=None if not resumed else "test")
    trainer(resolved, images, tmp_path).run()
    if resumed:
        trainer(resolved, images, tmp_path, resume=True).run()
    assert json.loads((tmp_path / "reduction.json").read_text())["options"]["keep_rate"] == 0.5


@pytest.mark.slow
def test_an_option_switches_at_its_epoch(images: Path, tmp_path: Path) -> None:
    changes = {
        "method": "evo_vit:keep_rate=0.5,class_head=true,blocks=[2,3,4]",
        "model_options": {**TINY["model_options"], "global_pool": "avg"},
        "switches": [{"option": "blocks", "value": [2, 4], "epoch": 2}],
    }
    run = trainer(recipe(**changes), images, tmp_path, max_updates=2 * EPOCH - 1)
    run.run()
    assert run.learner.reduction.config.blocks == (2, 3, 4)
    run = trainer(recipe(**changes), images, tmp_path, resume=True, max_updates=2 * EPOCH + 1)
    run.run()
    assert tuple(run.learner.reduction.config.blocks) == (2, 4)


# ---- other kinds of run ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_half_precision_keeps_its_weights_in_full(images: Path, tmp_path: Path) -> None:
    run = trainer(recipe(precision="bf16", method="tome:r=2"), images, tmp_path)
    result = run.run()
    assert all(weight.dtype == torch.float32 for weight in load_file(tmp_path / "model.safetensors").values())
    assert result["last"]["top1"] >= 100 / 3


class Notes(GeneralTracker):
    """A tracker of a user's own."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ends = 0

    @property
    def tracker(self) -> list[tuple[int, dict[str, float]]]:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.values = values

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ends += 1


def test_trackers_get_what_the_log_gets_and_the_recipe(images: Path, tmp_path: Path) -> None:
    notes = Notes()
    trainer(recipe(), images, tmp_path, log_with=(notes, notes), max_updates=4).run()
    losses = [(step, values["train/total"]) for step, values in notes.logged if "train/total" in values]
    assert losses == [(int(row["update"]), float(row["total"])) for row in rows(tmp_path)]
    top1 = [(step, values["evaluation/top1"]) for step, values in notes.logged if "evaluation/top1" in values]
    evaluations = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert top1 == [(row["update"], row["top1"]) for row in evaluations]
    assert {key: notes.values[key] for key in ("optimizer.lr", "ema", "trainable", "stream")} == {
        "optimizer.lr": 1e-3, "ema": "null", "trainable": '["*"]', "stream": False,
    }  # fmt: skip
    assert notes.ends == 1


def test_a_tracker_that_is_not_there_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VitrimError, match=r"^unknown tracker 'tensorbord'; did you mean 'tensorboard'\? valid: aim, "):
        Running(Path("out"), log_with=("tensorbord",))
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    with pytest.raises(MissingPackageError, match=r"^logging needs the package 'wandb': pip install wandb$"):
        Running(Path("out"), log_with=("wandb",))
    with pytest.raises(MissingPackageError, match=r"^logging needs the package 'tensorboard': .*\.\[train\]"):
        Running(Path("out"), tensorboard=True)


def test_progress_names_the_epoch_and_the_loss_after_every_update(images: Path, tmp_path: Path) -> None:
    run = trainer(recipe(), images, tmp_path / "run", max_updates=EPOCH + 1)
    shown: list[str] = []
    run.signs = SimpleNamespace(  # type: ignore[assignment]
        say=lambda text: None,
        tell=shown.append,
        move=lambda done, total, more: shown.append(f"{done} of {total}{more.rpartition(' ')[0]}"),
    )
    run.run()
    assert shown[0] == f"update 1 of {UPDATES}, reading its images"
    epochs = TINY["epochs"]
    updates = [text for text in shown if ", loss" in text]
    assert updates[0] == f"1 of {UPDATES}, epoch 1/{epochs}, loss"
    assert updates[EPOCH - 1 :] == [
        f"{EPOCH} of {UPDATES}, epoch 1/{epochs}, loss",
        f"{EPOCH + 1} of {UPDATES}, epoch 2/{epochs}, loss",
    ]
