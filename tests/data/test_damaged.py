"""Damaged data of every kind is refused in one line at the command line; what only looks damaged is read right."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image, ImageDraw

from cli_runs import Run, runner
from damaged_data import HEIGHT, IDS, NAMES, PLACES, WIDTH, Case, cases
from tiny_hosts.timm_vit import vit
from vitrim import loading
from vitrim.core.registry import ask
from vitrim.data import DetectionDataset, ImageDataset, MultiLabelDataset, SegmentationDataset, load_data
from vitrim.models.segmenter import LinearDecoder, Segmenter
from vitrim.models.vitdet import Detector

CASES = cases()
REFUSED = [case for case in CASES if not case.harmless]
HARMLESS = [case for case in CASES if case.harmless]


@cache
def model_of(task: str) -> Any:
    """A tiny model of five classes, as the command line would load it."""
    classes, model = len(NAMES), vit(dynamic_img_size=True)()
    if task == "segmentation":
        model = Segmenter(ask(model).without_head(model), LinearDecoder(32, classes), classes)
    elif task in ("detection", "instances"):
        small = {"channels": 8, "hidden": 8, "rpn_layers": 1, "box_layers": 1, "samples": 16}
        model = Detector(ask(model).without_head(model), classes, masks=task == "instances", **small)
    model.vitrim_origin = loading.Origin(f"tiny_{task}", "random", {}, None, 0)
    return model.eval()


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """``vitrim eval`` of the tiny model of a task."""
    monkeypatch.setattr(loading, "create_model", lambda name, **given: model_of(name.removeprefix("tiny_")))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    return runner(monkeypatch, capsys, "eval")


@pytest.mark.timeout(60)  # what waits for a pipe would wait without end
@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_damaged_data_is_refused_in_one_line(case: Case, evaluated: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    source = case.write(tmp_path / "data")
    split = ("--split", "val") if source.startswith(("coco:", "masks:")) else ()
    code, _, err = evaluated(f"tiny_{case.task}", "--data", source, *case.options, *split)
    assert code == 2
    assert re.fullmatch(r"error: .{20,600}\n", err)
    place = case.name.removeprefix("COCO ").rpartition(": ")[0]
    if place in PLACES and "are missing, the first is" not in err:
        kind = r"(image|category|annotation) \d+ | it has (no )?(images|annotations|categories)| lists no categories"
        assert re.search(kind, err)
        assert "instances_val2017.json" in err


# ---- what looks damaged and is not -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", HARMLESS, ids=lambda case: case.name)
def test_what_is_harmless_is_read_right(case: Case, tmp_path: Path) -> None:
    source = case.write(tmp_path)
    split = "val" if source.startswith(("coco:", "masks:")) else None
    options = {"num_classes": 5} if case.task == "segmentation" else {}
    task = None if case.task in ("classification", "multilabel") else case.task
    data = load_data(source, task=task, split=split, **options)
    if isinstance(data, DetectionDataset):
        check_objects(data, case.changed)
    elif isinstance(data, MultiLabelDataset):
        assert data.targets.astype(int).tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 1, 0]]
    elif isinstance(data, SegmentationDataset):
        assert [target.unique().tolist() for _, target in (data[0], data[1])] == [[1], [1]]
    else:
        assert isinstance(data, ImageDataset)
        labels = [label for _, label in (data[row] for row in range(len(data)))]
        assert labels == list(range({"folder: one class": 1}.get(case.name, 4 if "table" in case.name else 5)))


def check_objects(data: DetectionDataset, content: dict[str, Any]) -> None:
    """Compare with the file, read by plain lines."""
    assert data.class_names == [each["name"] for each in content["categories"]]
    for row, image in enumerate(content["images"]):
        pixels, target = data[row]
        assert tuple(pixels.shape) == (3, HEIGHT, WIDTH)
        objects = [each for each in content["annotations"] if each["image_id"] == image["id"]]
        objects = [each for each in objects if each["bbox"][2] > 0 and each["bbox"][3] > 0]
        boxes = [[x, y, x + width, y + height] for x, y, width, height in (each["bbox"] for each in objects)]
        assert target["boxes"].tolist() == boxes
        assert target["labels"].tolist() == [IDS.index(each["category_id"]) for each in objects]
        assert target["iscrowd"].tolist() == [int(each["iscrowd"]) for each in objects]
        assert target["area"].tolist() == [each["area"] for each in objects]
        if data.outlines is not None:
            for mask, each in zip(target["masks"].numpy(), objects, strict=True):
                wrong = (mask != filled(each)).sum()
                assert wrong <= (80 if isinstance(each.get("segmentation"), list) else 0)  # pixels of its border


def filled(annotation: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The pixels of an outline: of the polygon of the file, or, of run lengths, three pixels of the first column."""
    outline = annotation.get("segmentation")
    if isinstance(outline, list) and outline:
        image = Image.new("L", (WIDTH, HEIGHT))
        ImageDraw.Draw(image).polygon(outline[0], fill=1)
        return np.asarray(image)
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    mask[5:8, 0] = 1
    return mask
