"""Exported files in memory, which compute what a test says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrim.engines import Exported

PREPARED = {"mean": [0.5, 0.25, 0.125], "std": [0.5, 0.6, 0.7], "interpolation": "bicubic", "crop_share": 0.9}


def file(
    run: Callable[[Any], Any], shape: tuple[int | str, ...], path: str | Path = "m.onnx", **known: Any
) -> Exported:
    """A file that computes ``run``."""
    metadata = {"weights": "fp32", "output": {"name": "logits"}, "input": {"dtype": "float32"}, **known}
    found = Exported(Path(path), "onnx", {"image": shape}, 0, 0, metadata)
    vars(found)["_run"] = run
    return found
