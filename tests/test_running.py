"""The programs of docs/running.md, as they stand: the oracle is the model on timm's own transform."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform

import vitrim

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
PAGE = Path(__file__).parents[1] / "docs" / "running.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "height"),
    [
        ("model.onnx", 61, 47),
        ("model.xml", 40, 83),
        pytest.param("model.onnx", 40, 83, marks=pytest.mark.slow),
        pytest.param("model.xml", 61, 47, marks=pytest.mark.slow),
    ],
)
def test_a_program_of_the_page_gives_what_the_model_gives(
    name: str, width: int, height: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model: Any = vitrim.create_model(
        "test_vit", options={"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}
    )
    model.eval()
    model.pretrained_cfg.update(crop_pct=0.9, interpolation="bicubic")  # 35 pixels, and a crop that is not even
    vitrim.export(
        model, "tome:r=2", name, check=0, file=vitrim.FileSpec(preprocess=True, classes=["cat", "dog", "car"])
    )
    noise = np.random.default_rng(width).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((width, height)).save("photo.jpg")
    found: dict[str, Any] = {}
    exec(dict(zip(("model.onnx", "model.xml"), PROGRAMS, strict=True))[name], found)
    known = model.pretrained_cfg
    transform = create_transform(
        (3, 32, 32), crop_pct=0.9, interpolation="bicubic", mean=known["mean"], std=known["std"]
    )
    vitrim.reduce_(model, "tome:r=2")
    with torch.no_grad():
        expected = model(transform(Image.open("photo.jpg").convert("RGB"))[None])
    np.testing.assert_allclose(found["logits"], expected.numpy(), atol=1e-4)
    assert capsys.readouterr().out.split()[-1] == ["cat", "dog", "car"][int(expected.argmax())]
