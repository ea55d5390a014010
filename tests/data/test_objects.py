"""Outlines are checked before the library decodes them, which checks next to nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as library

from vitrim.data import DataError
from vitrim.data.objects import LARGEST_IMAGE, LONGEST_BORDER, decode_outline, examine, misfit

SIZE = (3, 4)


def message(outline: Any, size: tuple[int, int] = SIZE) -> str:
    with pytest.raises(DataError) as caught:
        decode_outline(json.dumps(outline).encode(), size, "it")
    return str(caught.value).removeprefix("it ")


@given(st.lists(st.integers(0, 1), min_size=1, max_size=3000), st.integers(1, 50))
def test_compressed_run_lengths_of_the_library_are_decoded(pixels: list[int], height: int) -> None:
    filled = np.resize(np.array(pixels, dtype=np.uint8), (height, -(-len(pixels) // height)))
    text = library.encode(np.asfortranarray(filled))["counts"].decode()
    outline = {"counts": text, "size": list(filled.shape)}
    found = examine(outline)
    assert (found.problem, found.size) == ("", filled.shape)
    assert np.array_equal(decode_outline(json.dumps(outline).encode(), filled.shape, "it"), filled)
    if filled.size > 1:
        other = {"counts": text, "size": [filled.shape[0], filled.shape[1] + 1]}
        assert f"has runs of {filled.size} pixels in all" in examine(other).problem


@given(st.text(st.characters(codec="utf-8", max_codepoint=130), max_size=12))
def test_no_text_at_all_ends_the_process(text: str) -> None:
    encoding = json.dumps({"counts": text, "size": list(SIZE)}).encode()
    if examine({"counts": text, "size": list(SIZE)}).problem:
        with pytest.raises(DataError, match=r"^it has (counts|runs of|a run length)"):
            decode_outline(encoding, SIZE, "it")
    else:
        assert set(decode_outline(encoding, SIZE, "it").ravel().tolist()) <= {0, 1}


def test_numbers_that_the_library_would_cut_off() -> None:
    assert message({"counts": [1.0, 11], "size": [3, 4]}) == "has a run length that is no whole number from 0"
    assert message({"counts": [True, 11], "size": [3, 4]}) == "has a run length that is no whole number from 0"
    assert message({"counts": [-1, 13], "size": [3, 4]}) == "has a run length that is no whole number from 0"
    assert message({"counts": [], "size": [3, 4]}) == "has runs of 0 pixels in all, where its size [3, 4] has 12"
    assert message({"counts": [12], "size": [4, 3]}) == "is of an image of size [4, 3], the image's is [3, 4]"
    assert (
        message({"counts": [12], "size": [3, 4.0]}) == "is of an image of size [3, 4.0]; expected its height and width"
    )
    side = 2**16
    assert "of more than" in message({"counts": [side**2], "size": [side, side]})
    assert side**2 > LARGEST_IMAGE


@pytest.mark.parametrize(
    ("polygon", "problem"),
    [
        ([-4, -3, 8, -3, 8, 6], ""),
        ([-4.1, 0, 3, 0, 3, 2], "reaches from -4.1, 0 to 3, 2, far beyond the image of 4 x 3 pixels"),
        ([0, -3.1, 3, 0, 3, 2], "reaches from 0, -3.1 to 3, 2, far beyond the image of 4 x 3 pixels"),
        ([0, 0, 8.1, 0, 3, 2], "reaches from 0, 0 to 8.1, 2, far beyond the image of 4 x 3 pixels"),
        ([0, 0, 3, 0, 3, 6.1], "reaches from 0, 0 to 3, 6.1, far beyond the image of 4 x 3 pixels"),
        ([4, 0, 5, 0, 5, 2], "reaches from 4, 0 to 5, 2, outside of the image of 4 x 3 pixels"),
        ([0, 3, 2, 3, 2, 5], "reaches from 0, 3 to 2, 5, outside of the image of 4 x 3 pixels"),
        ([-2, 0, 0, 0, -1, 2], "reaches from -2, 0 to 0, 2, outside of the image of 4 x 3 pixels"),
        ([0, -2, 2, -2, 1, 0], "reaches from 0, -2 to 2, 0, outside of the image of 4 x 3 pixels"),
    ],
)
def test_polygons_reach_beyond_the_image_by_its_size(polygon: list[float], problem: str) -> None:
    assert misfit(examine([polygon]), SIZE) == problem
    assert misfit(examine([[0, 0, 2, 0, 2, 2], polygon]), SIZE) == (problem if "far" in problem else "")


def test_a_border_without_end() -> None:
    side = 1000
    zigzag = [0.0, 0.0, side, side] * (LONGEST_BORDER // side // 2 + 1)
    assert examine([zigzag]).problem == f"has a polygon whose border is longer than {LONGEST_BORDER} pixels"
    assert examine([zigzag[:-4]]).problem == ""
    assert examine([[1e300, 0, 1e300, 1e300, 0, 0]]).problem != ""
    assert examine([[10**400, 0, 1, 1, 0, 0]]).problem == "has a polygon with a number that is not finite"
