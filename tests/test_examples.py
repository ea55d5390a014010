"""Every script in examples/ runs as it stands, offline."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SAYS = {
    "huggingface_pipeline": "tokens after every block: [57, 49, 41, 33, 25, 17]",
    "clip_zero_shot": "image tokens after every block: [57, 49, 41, 33, 25, 1]",
    "dinov2_dense_features": "every feature map: (1, 64, 8, 8)",
    "dense_heads": "UperNetForSemanticSegmentation: tokens after every block [59, 53, 47, 41]",
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main([])
    assert SAYS.get(name, "") in capsys.readouterr().out


def test_dense_features_are_close_to_those_of_the_dense_model(capsys: pytest.CaptureFixture[str]) -> None:
    load("dinov2_dense_features").main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if "mean cosine" in line]
    assert len(lines) == 3
    assert all(float(line.split()[-1]) > 0.5 for line in lines)
