"""The grid of the comparative study: its table, the names of its rows, and what is said of each."""

from __future__ import annotations

import csv

import pytest

from vitrim.errors import VitrimError
from vitrim.training import study
from vitrim.training.recipe import load_recipe

SECTIONS = ("optimizer.lr", "optimizer.lr_batch", "optimizer.backbone_scale", "optimizer.freeze_epochs",
            "schedule.warmup_epochs")  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with study.TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_row_has_a_name_of_its_own(rows: list[dict[str, str]]) -> None:
    assert len(set(study.names())) == len(rows)
    assert all(None not in row and None not in row.values() for row in rows)  # as many cells as columns


@pytest.mark.parametrize(
    ("name", "paper", "notes"),
    [
        (
            "study/imagenet/l1@25",
            "Which Tokens to Use? Table 3, the fixed pattern L1 on ImageNet, r = 0.25",
            "See study/imagenet.",
        ),
        (
            "study/coco/dynamicvit@50",
            "Which Tokens to Use? Table 5, DynamicViT on COCO, r = 0.5 (I: ImageNet's settings)",
            "The teacher is DeiT-S trained with study/coco: teacher_checkpoint=PATH. See there for the rest.",
        ),
        (
            "study/coco/sit@25",  # the fifth mark of its row
            "Which Tokens to Use? Table 5, SiT on COCO, r = 0.25 (I: ImageNet's settings)",
            "See study/coco.",
        ),
        (
            "study/nuswide/topk@90",
            "Which Tokens to Use? Table 5, Top-K on NUS-WIDE, r = 0.9 (D: the dataset's baseline, extended from a "
            "row that is cut short)",
            'Table 5 marks I or D for every rate; in the text at hand its row ends after "D" (rates 25, 50, 70, 90 of '
            "NABirds, then COCO, then NUS-WIDE), and the last mark is taken for the rest. See study/nuswide for all "
            "else.",
        ),
    ],
)
def test_what_is_said_of_a_row(name: str, paper: str, notes: str) -> None:
    found = load_recipe(name).recipe
    assert (found.paper, found.notes) == (paper, notes)


def test_a_row_gives_its_own_values_and_nothing_else() -> None:
    assert set(study.study("study/coco/topk@25")) == {"base", "paper", "notes", "method"}
    given = study.study("study/imagenet/ats@25")
    assert given["method"] == "ats:keep_rate=0.25,blocks=[3,6,9],rule=floor_initial_power,variant=study"
    assert given["optimizer"] == {"backbone_scale": 1.0, "freeze_epochs": 0}
    assert given["schedule"] == {"warmup_epochs": 5}
    assert study.study("study/coco/dynamicvit@25")["objective"]["token_loss"] == "mse"


def test_imagenets_settings_are_those_of_imagenet(rows: list[dict[str, str]]) -> None:
    """Where Table 5 marks I; where it marks D a row leaves all to the baseline."""
    cells = {(row["dataset"], row["method"], row["rate"]): [row[column] for column in SECTIONS] for row in rows}
    seen = set()
    for row in rows:
        mark = study.study(f"study/{row['dataset']}/{row['method']}@{row['rate']}")["paper"].partition("(")[2][:1]
        seen.add(mark)
        own = cells[row["dataset"], row["method"], row["rate"]]
        if mark == "D":
            assert own == [""] * 5
        elif mark == "I":
            assert own[:2] == ["1.0e-3", "1024"]
            assert own[2:] == cells["imagenet", row["method"], row["rate"]][2:]
    assert seen == {"", "I", "D"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("study/coco/topk", "study/coco/topk is a recipe for each keep rate: study/coco/topk@25, @50, @70 or @90"),
        ("study/coco/tome@25", "study/coco/tome is a recipe for each keep rate: study/coco/tome@50, @70 or @90"),
    ],
)
def test_a_name_without_its_rate_is_refused_with_those_it_has(name: str, said: str) -> None:
    with pytest.raises(VitrimError) as caught:
        load_recipe(name)
    assert str(caught.value) == said


def test_a_slip_of_the_hand_is_told_the_nearest() -> None:
    with pytest.raises(VitrimError, match="did you mean 'study/imagenet/topk@25'"):
        load_recipe("study/imagnet/topk@25")
