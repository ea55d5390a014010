"""Options of the selector. Its walk is tested in core/test_repeats.py, in towers in hosts/test_pixelpruning.py."""

from __future__ import annotations

import pytest
import torch

import vitrim


def test_what_decides_nothing_is_refused() -> None:
    for option in ("tokens=4", "keep=0.5"):
        with pytest.raises(vitrim.VitrimError, match="leave tokens and keep out"):
            vitrim.parse_selector(f"pixelprune:{option}")
    for option in ("tau=-0.1", "tau=1.5", "distance=cosine"):
        with pytest.raises(vitrim.VitrimError):
            vitrim.parse_selector(f"pixelprune:{option}")
    with pytest.raises(vitrim.VitrimError, match="image by image"):
        vitrim.parse_selector("pixelprune").count((4, 4))
    with pytest.raises(vitrim.VitrimError, match="acts on images"):
        vitrim.parse_selector("pixelprune").mask(torch.zeros(4, 2))
