"""YOLOS and EoMT in the tasks detection, segmentation and instances: what they predict, and `vitrim eval` on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, EomtImageProcessor, YolosImageProcessor

import tiny
from cli_runs import exit_code
from vitrim.core.registry import ask, parse_method
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec
from vitrim.measure.inputs import task_name
from vitrim.tasks import make_task
from vitrim.tasks.classes import places_of
from vitrim.training.checks import check_model

SIDE = 24
"""Pixels of the tiny hosts' images."""
NAMES = ["ground", "red", "blue"]


def images(count: int = 2, side: int = SIDE) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


# ---- predictions, against the library's post-processing


@pytest.mark.parametrize("host", tiny.OWN_HEAD)
def test_classes_of_pixels_are_those_of_the_library(host: str) -> None:
    model = tiny.HOSTS[host]()
    size = {"shortest_edge": SIDE, "longest_edge": SIDE}
    with torch.no_grad():
        scores = ask(model).pixel_scores(model, images())
        wanted = EomtImageProcessor().post_process_semantic_segmentation(
            model(images()), [(SIDE, SIDE)] * 2, size=size, return_segmentation_scores=True
        )
    assert torch.allclose(scores, torch.stack([one.segmentation_scores for one in wanted]), atol=1e-6)


def test_instances_are_those_of_the_library() -> None:
    model = tiny.HOSTS["hf_eomt"]()
    with torch.no_grad():
        found = ask(model).detections(model, images())
        wanted = EomtImageProcessor().post_process_instance_segmentation(
            model(images()), [(SIDE, SIDE)] * 2, threshold=0.0, size={"shortest_edge": SIDE, "longest_edge": SIDE}
        )
    for one, other in zip(found, wanted, strict=True):
        assert one["labels"].tolist() == [each["label_id"] for each in other["segments_info"]]
        assert one["scores"].tolist() == pytest.approx([each["score"] for each in other["segments_info"]], abs=2e-6)
        drawn = torch.full((SIDE, SIDE), -1.0)
        for number, mask in enumerate(one["masks"]):
            drawn[mask] = number
        assert torch.equal(drawn, other["segmentation"])
        for box, mask in zip(one["boxes"].tolist(), one["masks"], strict=True):
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            edges = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
            assert box == edges


def test_nothing_is_found_in_the_padding() -> None:
    model = tiny.HOSTS["hf_eomt"]()
    with torch.no_grad():
        (found,) = ask(model).detections(model, images(1), [(8, 12)])
    assert not found["masks"][:, 8:].any()
    assert not found["masks"][:, :, 12:].any()
    assert (found["boxes"] <= torch.tensor([12.0, 8, 12, 8])).all()


# ---- classes by name


def test_classes_are_told_by_name_where_the_data_has_fewer() -> None:
    model = tiny.HOSTS["hf_yolos"]()
    model.config.id2label = dict(enumerate(["N/A", "dog", "N/A", "cat", "owl"]))
    task = make_task("detection", 5)
    task.meet(places_of(["cat", "dog"], ask(model).class_names(model), 5))
    assert task.num_classes == 2
    every = ask(model).detections(model, images())
    for own, one in zip(task.predict(model, images()), every, strict=True):
        known = [(place, {3: 0, 1: 1}[label]) for place, label in enumerate(one["labels"].tolist()) if label in (1, 3)]
        assert own["labels"].tolist() == [label for _, label in known]
        assert torch.equal(own["boxes"], one["boxes"][[place for place, _ in known]])


def test_scores_of_pixels_are_sorted_by_name() -> None:
    model = tiny.HOSTS["hf_eomt"]()
    model.config.id2label = dict(enumerate(["sky", "road", "car", "tree", "pole"]))
    task = make_task("segmentation", 5)
    task.meet(places_of(["Car", "sky"], ask(model).class_names(model), 5))
    with torch.no_grad():
        every = ask(model).pixel_scores(model, images())
        assert torch.allclose(task.predict(model, images()), every[:, [2, 0]], atol=1e-6)


def test_names_that_the_library_fills_in_are_none_and_those_of_a_run_come_first() -> None:
    model = tiny.HOSTS["hf_vit"]()
    assert ask(model).class_names(model) is None
    model.config.id2label = {label: f"kind {label}" for label in range(model.config.num_labels)}
    assert list(ask(model).class_names(model) or ())[:2] == ["kind 0", "kind 1"]
    model.class_names = ["a", "b"]
    assert ask(model).class_names(model) == ["a", "b"]


# ---- the command


def saved(folder: Path, host: str, processor: Any) -> Path:
    """A tiny model for classes `NAMES` and its image processor, as the library saves them."""
    model: Any = tiny.HOSTS[host]()
    model.config.num_labels = len(NAMES)
    model = type(model)(model.config)
    if hasattr(model, "attn_mask_probs"):
        model.attn_mask_probs.zero_()
    model.config.id2label = dict(enumerate(NAMES))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    assert AutoImageProcessor.from_pretrained(folder).image_mean
    return folder


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of two shapes with one object each but for the last, as COCO."""
    root = tmp_path_factory.mktemp("coco")
    (root / "val2017").mkdir()
    (root / "annotations").mkdir()
    annotations, listed = [], []
    for number in range(4):
        height, width = (36, 48) if number % 2 else (48, 36)
        listed.append({"id": number, "file_name": f"{number}.png", "height": height, "width": width})
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "val2017" / f"{number}.png")
        outline = [4, 4, 24, 4, 24, 20, 4, 20]
        annotation = {"id": number + 1, "image_id": number, "category_id": 5, "bbox": [4, 4, 20, 16], "area": 320}
        annotations += [annotation | {"iscrowd": 0, "segmentation": [outline]}][: number < 3]
    found = {
        "images": listed,
        "categories": [{"id": 5, "name": "blue"}, {"id": 9, "name": "red"}],
        "annotations": annotations,
    }
    (root / "annotations" / "instances_val2017.json").write_text(json.dumps(found))
    return root


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of another shape than the model's, with masks of three classes."""
    root = tmp_path_factory.mktemp("pairs")
    for kind in ("images", "masks"):
        (root / kind / "val").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        Image.fromarray(generator.integers(0, 256, (30, 50, 3), dtype=np.uint8)).save(root / f"images/val/{name}.png")
        Image.fromarray(generator.integers(0, 3, (30, 50), dtype=np.uint8)).save(root / f"masks/val/{name}.png")
    return root


def evaluated(monkeypatch: pytest.MonkeyPatch, record: Path, *arguments: object) -> dict[str, Any]:
    methods = ("-m", "tome:r=0", "-m", "tome:r=4", "-m", "cropr:r=4,fusion=last_layer")
    settings = ("--json", record, "--device", "cpu", "--threads", "1")
    assert exit_code(monkeypatch, "eval", *arguments, *methods, *settings) == 0
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def check_rows(rows: list[dict[str, Any]], score: str) -> None:
    """Removing nothing changes nothing; removing patches saves work."""
    dense, still, merged, pruned = rows
    for name in (score, "agreement", "cosine", "tokens_at_end"):
        assert still[name] == pytest.approx(dense[name], abs=1e-5)
    assert dense[score] >= 0
    for row in (merged, pruned):
        assert sum(row["gmacs"].values()) < sum(dense["gmacs"].values())
        assert row["tokens_per_block"][1] < dense["tokens_per_block"][1]


@pytest.mark.slow
def test_yolos_on_coco(coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images go through the model one by one, unpadded, upright ones too; classes are told by their names."""
    folder = saved(tmp_path / "yolos", "hf_yolos", YolosImageProcessor())
    seen = []
    forward = tiny.HOSTS["hf_yolos"]().__class__.forward

    def watched(self: nn.Module, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(pixel_values.shape))
        return forward(self, pixel_values, *args, **kwargs)

    monkeypatch.setattr(tiny.HOSTS["hf_yolos"]().__class__, "forward", watched)
    found = evaluated(monkeypatch, tmp_path / "r.json", f"hf:{folder}", "--data", f"coco:{coco}")
    assert set(seen) == {(1, 3, 18, 24), (1, 3, 24, 18)}
    assert (found["task"], found["data"]["batch_size"]) == ("detection", 1)
    check_rows(found["rows"], "box_AP")
    assert set(found["rows"][0]["classes"]["box_AP"]) == {"blue", "red"}


@pytest.mark.slow
def test_eomt_on_masks(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By windows of the size that the model takes, as its library cuts images."""
    folder = saved(tmp_path / "eomt", "hf_eomt", EomtImageProcessor(size={"shortest_edge": SIDE, "longest_edge": None}))
    options = ("--data-option", "num_classes=3")
    found = evaluated(monkeypatch, tmp_path / "r.json", f"hf:{folder}", "--data", f"masks:{pairs}", *options)
    assert found["task"] == "segmentation"
    check_rows(found["rows"], "mIoU")


def test_eomt_on_coco(coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "eomt", "hf_eomt", EomtImageProcessor(size={"shortest_edge": SIDE, "longest_edge": SIDE}))
    arguments = (f"hf:{folder}", "--data", f"coco:{coco}", "--task", "instances")
    found = evaluated(monkeypatch, tmp_path / "r.json", *arguments)
    assert found["task"] == "instances"
    check_rows(found["rows"], "mask_AP")


# ---- refused


@pytest.mark.parametrize(
    ("host", "wanted", "message"),
    [
        ("hf_yolos", "segmentation", "unknown task of YolosForObjectDetection 'segmentation'.* valid: detection"),
        ("hf_vit", "detection", "this ViTForImageClassification predicts labels of whole images: leave task detection"),
        ("hf_eomt", "instance", "unknown task of EomtForUniversalSegmentation 'instance'; did you mean 'instances'"),
    ],
)
def test_a_task_that_the_model_is_not_for(host: str, wanted: str, message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        task_name(ModelSpec(tiny.HOSTS[host]()).load(), wanted)


@pytest.mark.parametrize(("host", "task"), [("hf_yolos", "detection"), ("hf_eomt", "segmentation")])
def test_training_is_the_library_s(host: str, task: str) -> None:
    with pytest.raises(VitrimError, match="is trained by its own library"):
        check_model(make_task(task, 5), tiny.HOSTS[host](), parse_method("none"))
