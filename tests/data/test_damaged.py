"""Damaged data of every kind is refused in one line at the command line, without a signal and in little memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from damaged_data import HEIGHT, IDS, PLACES, WIDTH, Case, cases
from vitrim.data import DetectionDataset, ImageDataset, MultiLabelDataset, SegmentationDataset, load_data

WORKER = Path(__file__).parents[1] / "damaged_worker.py"
CASES = cases()
REFUSED = [case for case in CASES if not case.harmless]
HARMLESS = [case for case in CASES if case.harmless]
FEWEST = 300
MOST_MEGABYTES = 500

pytestmark = [
    pytest.mark.xdist_group("damaged"),  # the process is started once
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the bound on memory needs /proc"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the command line said to each case, and the memory of all."""
    folder = tmp_path_factory.mktemp("damaged")
    done = subprocess.run(
        [sys.executable, WORKER, folder],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    return lines


@pytest.mark.slow
def test_damaged_data_is_refused_in_one_line(found: list[dict[str, Any]]) -> None:
    names, said = found[:-1:2], found[1::2]
    assert [each["case"] for each in names] == [case.name for case in REFUSED]
    assert len(REFUSED) >= FEWEST
    wrong = {
        case.name: each
        for case, each in zip(REFUSED, said, strict=True)
        if each.get("code") != 2 or not re.fullmatch(r"error: .{20,600}\n", each["err"])
    }
    assert wrong == {}


@pytest.mark.slow
def test_what_is_wrong_in_a_coco_file_is_named(found: list[dict[str, Any]]) -> None:
    said = dict(zip((each["case"] for each in found[:-1:2]), (each["err"] for each in found[1::2]), strict=True))
    wrong = {}
    for name, err in said.items():
        place = name.removeprefix("COCO ").rpartition(": ")[0]
        if place in PLACES and "are missing, the first is" not in err:
            kind = (
                r"(image|category|annotation) \d+ | it has (no )?(images|annotations|categories)| lists no categories"
            )
            if not re.search(kind, err) or "instances_val2017.json" not in err:
                wrong[name] = err
    assert len(said) > len(PLACES)
    assert wrong == {}


@pytest.mark.slow
def test_damaged_data_takes_little_memory(found: list[dict[str, Any]]) -> None:
    assert found[-1]["megabytes"] < MOST_MEGABYTES


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
