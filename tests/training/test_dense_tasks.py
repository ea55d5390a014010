"""Training for dense tasks: masks, boxes and outlines, on made images."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cli_runs import exit_code
from full_matrix import cells
from tiny_dense import NAMES, RECIPES, SIDE, STILL, data, recipe, trainer, write_masks
from vitrim.data import Boxes, SegmentationDataset
from vitrim.data.dense import IGNORED
from vitrim.data.transforms import geometry_of
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.tasks import make_task
from vitrim.training.build import make_accelerator
from vitrim.training.learner import Learner
from vitrim.training.loop import Trainer
from vitrim.training.recipe import load_recipe, recipe_text, resolve

TASKS = list(RECIPES)
TERMS = {
    "segmentation": {"total"},
    "detection": {"total", "rpn_objectness", "rpn_box", "roi_class", "roi_box"},
    "instances": {"total", "rpn_objectness", "rpn_box", "roi_class", "roi_box", "roi_mask"},
}
PATCHES = {"segmentation": 16, "detection": 64, "instances": 64}
PRUNED = "cropr:r=6,first_extra=1,num_queries={}"


def few_proposals(run: Trainer) -> Trainer:
    """The run of a detector with so few proposals that it takes seconds."""
    model: Any = run.learner.model
    if hasattr(model, "rpn"):
        for limits in (model.rpn._pre_nms_top_n, model.rpn._post_nms_top_n):
            limits.update(training=200, testing=200)
    return run


def quick(task: str, **changes: Any) -> Any:
    """The recipe of a task, with so few samples in a detector's heads that it takes seconds."""
    options = {} if task == "segmentation" else {"samples": 64, "channels": 16}
    return recipe(task, **{**changes, "model_options": {**options, **changes.get("model_options", {})}})


def weights(run: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.learner.model.state_dict().items()}


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("task", TASKS)
def test_two_updates(task: str, tmp_path: Path) -> None:
    """Every term is finite, every part of the model moves, and what is written is read again."""
    run = few_proposals(trainer(quick(task), tmp_path / "run", watched=data(task, 7, 8)))
    before = weights(run)
    result = run.run()
    rows = (tmp_path / "run" / "log.csv").read_text().splitlines()
    assert len(rows) == 3
    assert set(rows[0].split(",")) >= TERMS[task]
    assert all(math.isfinite(float(value)) for row in rows[1:] for value in row.split(","))
    moved = {name.split(".")[0] for name, value in weights(run).items() if not torch.equal(value, before[name])}
    assert moved == ({"backbone", "decoder"} if task == "segmentation" else {"backbone", "pyramid", "rpn", "roi_heads"})
    assert result["last"] == result["best"]
    assert make_task(task, 2).selects_by in result["last"]
    written = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in weights(run).items())


@pytest.mark.slow
@pytest.mark.parametrize("task", cells(TASKS, ("segmentation",)))  # detectors: `models/test_vitdet.py` has their losses
def test_a_batch_is_memorised(task: str, tmp_path: Path) -> None:
    """More than 95 % of the pixels, or AP50 and mask AP above 50, after 60 or 80 updates."""
    seeds, lr, updates = ((0, 1, 2, 3), 3e-3, 60) if task == "segmentation" else ((0, 1), 5e-3, 80)
    options = {"img_size": SIDE} if task == "segmentation" else {"samples": 32}
    changes: dict[str, Any] = {
        "epochs": updates,
        "batch_size": len(seeds),
        "dense_augment": STILL,
        "model_options": options,
    }
    changes["optimizer"] = {"lr": lr, "weight_decay": 0.0, "clip": 1.0}
    watched = data(task, *seeds)
    run = few_proposals(trainer(quick(task, **changes), tmp_path / "run", data(task, *seeds), watched))
    last = run.run()["last"]
    if task == "segmentation":
        assert last["aAcc"] > 95
        assert last["mIoU"] > 70
    else:
        assert last["box_AP50"] > 50
    assert last.get("mask_AP", 100) > 50


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("task", TASKS)
def test_the_same_image_changes_the_same_way_with_any_number_of_workers(task: str, tmp_path: Path) -> None:
    def first(workers: int) -> tuple[Tensor, Any]:
        run = trainer(recipe(task), tmp_path / "run", workers=workers)
        images, targets = next(iter(run._loader(1)))
        return images, targets

    (images, targets), (others, same) = first(0), first(2)
    assert torch.equal(images, others)
    if isinstance(targets, Boxes):
        for one, other in zip(targets, same, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in one.items())
    else:
        assert torch.equal(targets, same)


# ---- Cropr -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("task", TASKS)
def test_cropr_teaches_its_routers_by_the_task(task: str, tmp_path: Path) -> None:
    """One query per patch with a label each for masks, one query for the classes in the crop for boxes."""
    queries = PATCHES[task] if task == "segmentation" else 1
    changes = {"method": PRUNED.format(queries), "model_options": {"depth": 3}}
    run = few_proposals(trainer(quick(task, **changes), tmp_path / "run"))
    before = weights(run)
    run.run()
    rows = (tmp_path / "run" / "log.csv").read_text().splitlines()
    assert set(rows[0].split(",")) >= TERMS[task] | {"main", "auxiliary"}
    names, first = rows[0].split(","), rows[1].split(",")
    found = {name: float(value) for name, value in zip(names, first, strict=True)}
    assert found["total"] == pytest.approx(found["main"] + found["auxiliary"], rel=1e-5)  # of one router
    assert any(not torch.equal(value, before[name]) for name, value in weights(run).items() if ".reducer." in name)


@pytest.mark.parametrize("task", TASKS)
def test_the_number_of_queries_is_checked_before_anything_is_written(task: str, tmp_path: Path) -> None:
    needed = PATCHES[task] if task == "segmentation" else 1
    with pytest.raises(VitrimError, match=rf"task {task} needs num_queries={needed}, one .*, not 9$"):
        trainer(recipe(task, method=PRUNED.format(9), model_options={"depth": 3}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- nothing to learn from -------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"masks": True}, {"masks": True, "cascade": True}], ids=str)
def test_images_without_a_box_leave_no_parameter_without_gradient(options: dict[str, bool], tmp_path: Path) -> None:
    """Distributed runs wait for the gradient of every parameter."""
    task = "instances" if options.get("masks") else "detection"
    train = data(task, 0, empty=2).part([1, 2])
    run = few_proposals(trainer(quick(task, batch_size=2, model_options=options), tmp_path / "run", train))
    losses = run.learner.backward(iter(run._loader(1)), 0)
    assert all(math.isfinite(value) for value in losses.values())
    without = [name for name, parameter in run.learner.model.named_parameters() if parameter.grad is None]
    assert not without


def test_a_batch_of_ignored_pixels_changes_nothing_but_by_decay(tmp_path: Path) -> None:
    pictures = data("segmentation")
    blank = SegmentationDataset(
        pictures.images, pictures.masks, class_names=list(NAMES), relabel={0: 255, 1: 255, 2: 255}
    )
    run = trainer(recipe("segmentation", method=PRUNED.format(16), model_options={"depth": 3}), tmp_path / "run", blank)
    assert all((batch[1] == IGNORED).all() for batch in run._loader(1))
    before = weights(run)
    assert run.run()["updates"] == 2
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())


# ---- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("segmentation", {"mix": {"mixup": 0.8}}, "task segmentation does not mix images: set mix.mixup=0 and mix.cut"),
        ("detection", {"mix": {"cutmix": 1.0}}, "task detection does not mix images: set mix.mixup=0 and mix.cutmix=0"),
        ("detection", {"protocol": {"size": 64}}, "task detection sees whole images, once: leave the protocol out"),
        ("segmentation", {"method": "patchmerger"}, "patchmerger mixes patches into tokens that belong to none"),
        ("segmentation", {"model_options": {"img_size": [32, 36]}}, "crop of 32 x 36 pixels is no multiple"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_one_line(task: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(VitrimError, match=message):
        trainer(recipe(task, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        ("segmentation", "classification", "task classification needs a classifier; this Segmenter is for segment"),
        ("instances", "detection", "vitdet:NAME without masks; this Detector is for instances$"),
        (None, "instances", "with model_options.masks=true; this VisionTransformer is for classification$"),
    ],
)
def test_a_model_for_another_task_is_refused(model: str | None, task: str, message: str) -> None:
    found = None if model is None else recipe(model).recipe
    built = (
        create_model("test_vit", options={"img_size": 32, "num_classes": 2})
        if found is None
        else create_model(found.model, options={**found.model_options, "num_classes": 2})
    )
    loss = make_task(task, 2).losses[0]
    with pytest.raises(VitrimError, match=message):
        Learner(
            resolve({"model": "given", "epochs": 1, "task": task, "loss": {"name": loss}}).recipe,
            built,
            make_task(task, 2),
            make_accelerator(recipe("detection").recipe, cpu=True),
            1,
        )


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("protocol.windows=3", "unknown option of protocol 'windows'; did you mean 'window'?"),
        ("dense_augment.range=[2,1]", "range is from low to high above 0, not 2 to 1"),
        ("schedule.milestones=[1]", "milestones go with shape steps"),
    ],
)
def test_unknown_keys_and_values(key: str, message: str) -> None:
    with pytest.raises(VitrimError) as refused:
        load_recipe("camvid_vit", [key])
    assert message in str(refused.value)


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_masks(tmp_path_factory.mktemp("masks"))


@pytest.fixture(scope="module")
def finished(masks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the command line, with a protocol and options of the data."""
    out = tmp_path_factory.mktemp("finished")
    changes: dict[str, Any] = {
        "epochs": 20,
        "eval_split": "val",
        "test_split": "test",
        "data_options": {"ignore": 255, "class_names": list(NAMES)},
        "protocol": {"size": 48, "side": "long"},
        "model_options": {"depth": 4},
    }
    (out / "made.yaml").write_text(recipe_text(recipe("segmentation", **changes).recipe))
    with pytest.MonkeyPatch.context() as patch:
        arguments = ("train", out / "made.yaml", "--data", masks, "--out", out / "run", "--device", "cpu")
        assert exit_code(patch, *arguments, "--threads", "1") == 0
    return out / "run"


def compared(monkeypatch: pytest.MonkeyPatch, run: Path, masks: Path, record: Path, *more: str) -> dict[str, Any]:
    arguments = ["eval", f"run:{run}", "--data", masks, "--split", "test", "--json", record, "--device", "cpu"]
    assert exit_code(monkeypatch, *arguments, "--threads", "1", *more) == 0
    found: dict[str, Any] = json.loads(record.read_text())
    return found


@pytest.mark.slow
def test_what_was_trained_is_evaluated_as_it_was_trained(
    finished: Path, masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Protocol and options of the data are the recipe's; nothing removed is dense bit for bit."""
    methods = ["-m", "tome:r=0", "-m", "tome:r=2", "-m", "topk:keep_rate=0.5"]
    dense, still, merged, pruned = compared(monkeypatch, finished, masks, tmp_path / "a.json", *methods)["rows"]
    test = json.loads((finished / "result.json").read_text())["test"]
    assert [100 * dense[name] for name in ("mIoU", "mAcc", "aAcc")] == [test[name] for name in ("mIoU", "mAcc", "aAcc")]
    assert {key: value for key, value in still.items() if key not in ("method", "gmacs")} == {
        key: value for key, value in dense.items() if key not in ("method", "gmacs")
    }
    assert (still["agreement"], still["cosine"]) == (1, 1)
    assert merged["tokens_at_end"] < dense["tokens_at_end"]
    assert sum(pruned["gmacs"].values()) < sum(dense["gmacs"].values())
    assert "IoU" not in capsys.readouterr().out.replace("mIoU", "")  # the classes are not in the table


def test_scores_of_classes_without_objects_are_null(tmp_path: Path) -> None:
    """AP of each class in the test of a detector."""
    found = quick("detection", test_split="test")
    run = few_proposals(trainer(found, tmp_path / "run"))
    run.test_data = data("detection", 0, 1)
    only_red = run.test_data
    only_red.boxes = [boxes[:1] for boxes in only_red.boxes]
    only_red.labels = [labels[:1] for labels in only_red.labels]
    only_red.crowd, only_red.area = [one[:1] for one in only_red.crowd], [one[:1] for one in only_red.area]
    only_red.transform = run.task.eval_transform(geometry_of(run.learner.model))
    test = run.run()["test"]
    assert list(test["classes"]) == ["box_AP"]
    assert test["classes"]["box_AP"]["blue"] is None
    assert test["classes"]["box_AP"]["red"] == pytest.approx(test["box_AP"], rel=1e-9)
