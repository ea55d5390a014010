"""Prefill with selected image tokens: MACs by share, rows of `bench`, and the command line's option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import vitrim
from tiny_other_vlms import OTHERS
from tiny_vlms import IMAGE, VLMS
from vitrim.cli import app
from vitrim.core.registry import selectors


@pytest.fixture(scope="module")
def llava() -> Any:
    return VLMS["llava"].create()


def test_macs_are_those_of_the_shorter_prompt_and_of_choosing(llava: Any) -> None:
    """The language model's as on so many words; DivPrune's are one Gram matrix of 36 tokens of width 16."""
    report = vitrim.profile(llava, [], select="divprune:tokens=9", text_tokens=5)
    dense, few = report.rows
    assert [row["method"] for row in report.rows] == ["dense", "none + divprune:tokens=9"]
    assert few["select"] == "divprune:tokens=9"
    assert "select" not in dense
    assert list(few["prefill"]["gmacs"]) == ["tower", "connector", "language model", "selection"]
    assert dense["tokens_per_block"] == few["tokens_per_block"] == [37, 37, 37, 37]
    assert few["prefill"]["image_tokens"] == 9
    shares = {name: sum(parts.values()) for name, parts in few["prefill"]["gmacs"].items()}
    assert round(shares["selection"] * 1e9) == 36 * 36 * 16
    assert few["prefill"]["gmacs"]["selection"]["matching"] == shares["selection"]
    words = torch.full((1, 14), 7)
    own = vitrim.profile(VLMS["llava"].create(), text_tokens=14 - 9, select="fastervlm:tokens=9").rows[1]
    assert own["prefill"]["gmacs"]["language model"] == few["prefill"]["gmacs"]["language model"]
    assert not (words == IMAGE).any()
    assert "vitrim_choosing" not in dict(llava.named_children())


def test_a_method_and_a_selector_go_together(llava: Any) -> None:
    report = vitrim.profile(llava, "tome:r=2", select="visionzip:tokens=9")
    row = report.rows[1]
    assert row["method"] == "tome:r=2 + visionzip:tokens=9"
    assert row["tokens_per_block"] == [35, 33, 31, 29]
    assert row["prefill"]["image_tokens"] == 9


def test_bench_times_a_selection(llava: Any) -> None:
    report = vitrim.bench(llava, (), select="divprune:tokens=9", batch_size=2, repeats=1, min_seconds=0)
    dense, row = report.rows
    assert (dense["image_tokens"], row["image_tokens"]) == (36, 9)
    assert row["method"] == "none + divprune:tokens=9"
    assert row["select"] == "divprune:tokens=9"
    assert row["promised_speedup"] > 1


def test_a_tower_that_cannot_be_reduced_is_counted_whole() -> None:
    report = vitrim.profile(OTHERS["qwen2_5_vl"].create(), select="divprune:tokens=9", text_tokens=3)
    assert [row["prefill"]["image_tokens"] for row in report.rows] == [256, 9]
    with pytest.raises(vitrim.VitrimError, match="not measured"):
        vitrim.profile(OTHERS["llava_next"].create(), select="divprune:tokens=9")


def test_the_command_line(tmp_path: Path, llava: Any) -> None:
    llava.config.save_pretrained(tmp_path)
    file = tmp_path / "profile.json"
    given = ["profile", f"hf:{tmp_path}", "-m", "tome:r=2", "--select", "divprune:tokens=9", "--json", str(file)]
    assert CliRunner().invoke(app, given).exit_code == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows[1]["select"] == "divprune:tokens=9"
    for command in ("profile", "bench"):
        result = CliRunner().invoke(app, [command, "test_vit", "--select", "divprune"])
        assert result.exit_code != 0
        assert "select chooses image tokens of a vision-language model" in str(result.exception)


def test_list_selectors(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    result = CliRunner().invoke(app, ["list", "selectors", "--json", str(file)])
    assert result.exit_code == 0
    assert "divprune" in result.output
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == list(selectors())


def test_the_page_names_every_selector_and_its_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "selection.md").read_text()
    shared = vitrim.Selector.model_fields
    for name, selector in selectors().items():
        assert f"| `{name}` |" in page
        for option in selector.model_fields:
            assert f"`{option}" in page, option
        assert set(shared) <= set(selector.model_fields)
