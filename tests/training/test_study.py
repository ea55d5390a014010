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
    [("study/coco/tome@25", "study/coco/tome is a recipe for each keep rate: study/coco/tome@50, @70 or @90")],
)
def test_a_name_without_its_rate_is_refused_with_those_it_has(name: str, said: str) -> None:
    with pytest.raises(VitrimError) as caught:
        load_recipe(name)
    assert str(caught.value) == said
