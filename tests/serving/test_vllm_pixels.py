"""Images changed before the tower, inside vLLM: answers are those of transformers with the same selection.

`make test-vllm` runs these in an environment of its own; elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy
import pytest
from PIL import Image

import served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test-vllm` makes an environment that has it", allow_module_level=True)

SIDE = 16
"""Pixels of a cell, in rows and columns."""
EDGES = ("1 1 1 1 1 1", "1 1 1 1 1 1", "1 1 5 5 5 1", "1 1 5 5 5 1", "1 1 1 1 1 1")
"""The worked example of the spec: of these cells, 4 stay."""
CORNER = ("1 2 3 4", "1 1 1 1", "1 1 1 6", "1 1 7 8")
FLAT = ("1 1 1", "1 1 1")
FULL = ("1 2", "3 4", "5 6")
LEFT = {EDGES: 4, CORNER: 9, FLAT: 1, FULL: 6}
CASES = {
    "qwen2_vl": ["pixelprune", "resize:tokens=6", "none", "random:keep=0.5"],
    "qwen2_5_vl": ["pixelprune", "resize:tokens=6", "none", "random:keep=0.5"],
    "qwen3_vl": ["pixelprune", "resize:tokens=6", "none", "random:keep=0.5"],
    "qwen3_5": ["pixelprune", "resize:tokens=6", "none"],
    "glm4v": ["resize:tokens=6", "none"],
    "glm4v_moe": ["resize:tokens=6", "none"],
    "glm_ocr": ["resize:tokens=6", "none"],
}
"""What requests ask for, first the server's own. Equal cells are ties for selectors that compare features."""


def page(rows: tuple[str, ...]) -> Image.Image:
    """A picture: equal numbers are equal cells of noise."""
    noise = numpy.random.default_rng(7).integers(0, 256, (10, SIDE, SIDE, 3), dtype=numpy.uint8)
    return Image.fromarray(numpy.vstack([numpy.hstack([noise[int(cell)] for cell in row.split()]) for row in rows]))


def prompts(name: str) -> list[served.Prompt]:
    """One to three pages, at the end too; a page beside a photograph; no page."""
    image, (one, two, flat, full) = served.FAMILIES[name].image, map(page, LEFT)
    return [
        (f"w5 {image} w6 w7", [one]),
        (f"w8 {image} w9 {image} w10", [two, flat]),
        (f"{image} w11 {image} w12 w13 {image} w14", [full, one, two]),
        (f"w5 w6 {image}", [two]),
        (f"w20 {image} w21", [flat]),
        ("w1 w2 w3 w4", []),
    ]


def same(got: list[served.Answer], expected: list[served.Answer]) -> None:
    for (tokens, logs), (own, own_logs) in zip(got, expected, strict=True):
        assert tokens == own
        assert logs == pytest.approx(own_logs, abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """By the server's own setting and by those of requests, in one batch that is cut into steps; and from caches."""
    from transformers import AutoProcessor

    model, asked, settings = served.folder(name, tmp_path), prompts(name), CASES[name]
    processor, options = AutoProcessor.from_pretrained(tmp_path), dict(served.FAMILIES[name].options)
    expected = {
        text: served.by_transformers(model, processor, asked, None if text == "none" else text) for text in settings
    }
    pairs = [(text, number) for number in range(len(asked)) for text in settings]
    with served.engine(tmp_path, settings[0], ["any"], **options) as (llm, steps):
        for _ in range(2):
            got = served.by_vllm(llm, [asked[number] for _, number in pairs], [text for text, _ in pairs])
            same(got, [expected[text][number] for text, number in pairs])
        assert steps.cut
        assert steps.cached or not options.get("enable_prefix_caching", True)
        same(served.by_vllm(llm, asked), expected[settings[0]])
