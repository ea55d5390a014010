"""Prefill with selected image tokens: MACs by share, rows of `bench`, and the command line's option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import vitrim
from tiny_other_vlms import OTHERS
from tiny_vlms import IMAGE, VLMS
from vitrim.cli import app
from vitrim.core.registry import selectors
from vitrim.engines.prefill import Prefill


@pytest.fixture(scope="module")
def llava() -> Any:
    return VLMS["llava"].create()


@pytest.mark.slow
def test_macs_are_those_of_the_shorter_prompt_and_of_choosing(llava: Any) -> None:
    """The language model's as on so many words; DivPrune's are one Gram matrix of 36 tokens of width 16."""
    report = vitrim.profile(llava, [], prompt=vitrim.Prompt(5, select="divprune:tokens=9"))
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
    own = vitrim.profile(VLMS["llava"].create(), prompt=vitrim.Prompt(14 - 9, select="fastervlm:tokens=9")).rows[1]
    assert own["prefill"]["gmacs"]["language model"] == few["prefill"]["gmacs"]["language model"]
    assert not (words == IMAGE).any()
    assert "vitrim_choosing" not in dict(llava.named_children())


def test_a_method_and_a_selector_go_together(llava: Any) -> None:
    report = vitrim.profile(llava, "tome:r=2", prompt=vitrim.Prompt(select="visionzip:tokens=9"))
    row = report.rows[1]
    assert row["method"] == "tome:r=2 + visionzip:tokens=9"
    assert row["tokens_per_block"] == [35, 33, 31, 29]
    assert row["prefill"]["image_tokens"] == 9


def test_bench_times_a_selection(llava: Any) -> None:
    report = vitrim.bench(
        llava,
        (),
        batch_size=2,
        images=vitrim.Prompt(select="divprune:tokens=9"),
        budget=vitrim.Budget(1, min_seconds=0),
    )
    dense, row = report.rows
    assert (dense["image_tokens"], row["image_tokens"]) == (36, 9)
    assert row["method"] == "none + divprune:tokens=9"
    assert row["select"] == "divprune:tokens=9"
    assert row["macs_speedup"] > 1


def cache_bytes(tokens: int) -> int:
    """Keys and values of two layers, two heads of width 8, float32."""
    return 2 * 2 * 2 * 8 * 4 * tokens


def test_an_answer_is_counted_and_its_cache(llava: Any) -> None:
    """Decoding by PyTorch's own counter of the whole answer, without the prefill."""
    report = vitrim.profile(llava, (), prompt=vitrim.Prompt(5, select="divprune:tokens=9", new_tokens=3))
    alone = vitrim.profile(llava, (), prompt=vitrim.Prompt(5, select="divprune:tokens=9"))
    for row, prefill, image_tokens in zip(report.rows, alone.rows, (36, 9), strict=True):
        cost = row["prefill"]
        assert cost["new_tokens"] == 3
        assert prefill["prefill"]["new_tokens"] == 0
        # the third token is made, and not read
        assert cost["kv_cache_bytes"] == cache_bytes(5 + image_tokens + 2)
        assert prefill["prefill"]["kv_cache_bytes"] == cache_bytes(5 + image_tokens)
        shares = {name: sum(parts.values()) for name, parts in cost["gmacs"].items()}
        decoding = shares.pop("decoding")
        assert shares == {name: sum(parts.values()) for name, parts in prefill["prefill"]["gmacs"].items()}
        words = torch.full((1, 5 + image_tokens), 7)
        found = 0.0
        for number in (1, 3):
            own: dict[str, Any] = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False}
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                llava.generate(input_ids=words, **own)
            found = counter.get_total_flops() / 2 - found
        assert round(1e9 * (decoding - cost["gmacs"]["decoding"]["norm"])) == found
    table = report.tables[-1].cells()
    assert table[0][-4:] == ("decoding", "total", "MACs saved %", "KV cache MiB")
    assert report.tables[-1].title.endswith("32 tokens of text and 1 image, and an answer of 3".replace("32", "5"))


def test_bench_times_the_parts_of_an_answer(llava: Any) -> None:
    report = vitrim.bench(
        llava,
        "tome:r=2",
        batch_size=(1, 2),
        images=vitrim.Prompt(select="visionzip:tokens=9", new_tokens=2),
        budget=vitrim.Budget(1, min_seconds=0),
    )
    for row, tokens in zip(report.rows, (36, 9, 36, 9), strict=True):
        assert list(row["parts_ms"]) == ["tower", "selection", "language model", "rest", "decoding"]
        assert row["kv_cache_bytes"] == cache_bytes(32 + tokens + 1)
        assert row["new_tokens"] == 2
        assert (row["parts_ms"]["selection"] > 0) == (tokens == 9)
        assert all(row["parts_ms"][part] > 0 for part in ("tower", "language model", "decoding"))
    assert [table.name for table in report.parts_tables] == ["parts_1", "parts_2"]
    assert report.parts_tables[0].columns[-2:] == ("decoding 1", "KV cache MiB")
    assert "parts of the prefill and an answer of 2 tokens, batch 2, fp32" in "\n".join(map(str, report.parts()))
    base = llava.model
    with pytest.raises(vitrim.VitrimError, match="has no head for an answer"):
        vitrim.bench(base, (), images=vitrim.Prompt(select="divprune", new_tokens=2))
    with pytest.raises(vitrim.VitrimError, match="VisionTransformer reads none"):
        vitrim.bench("test_vit", "tome:r=2", images=vitrim.Prompt(new_tokens=3))


def test_the_dense_tower_runs_once_for_all_rows(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To say how many tokens its blocks have."""
    calls = []
    own = Prefill._counted_tokens
    monkeypatch.setattr(Prefill, "_counted_tokens", lambda self: calls.append(1) or own(self))
    vitrim.profile(llava, ["tome:r=2", "none", "evit:keep_rate=0.8"], prompt=vitrim.Prompt(select="divprune:tokens=9"))
    assert len(calls) == 1


def test_a_tower_that_cannot_be_reduced_is_counted_whole() -> None:
    report = vitrim.profile(OTHERS["qwen2_5_vl"].create(), prompt=vitrim.Prompt(3, select="divprune:tokens=9"))
    assert [row["prefill"]["image_tokens"] for row in report.rows] == [256, 9]
    with pytest.raises(vitrim.VitrimError, match="not measured"):
        vitrim.profile(OTHERS["llava_next"].create(), prompt=vitrim.Prompt(select="divprune:tokens=9"))


def test_list_selectors(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    result = CliRunner().invoke(app, ["list", "selectors", "--json", str(file)])
    assert result.exit_code == 0
    assert "divprune" in result.output
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == list(selectors())
