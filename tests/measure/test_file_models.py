"""Files as models, in memory: how their images are prepared, what they are compared with, what they report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch

from made_files import PREPARED, file
from vitrim.engines import Exported
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec
from vitrim.measure.contestants import Contestant
from vitrim.measure.in_files import check_alike
from vitrim.measure.probes import MacsProbe, Tokens
from vitrim.measure.run import Measurement
from vitrim.tasks import make_task


def told(**changed: Any) -> Exported:
    return file(lambda images: images, ("batch", 3, 16, 16), preprocessing={**PREPARED, **changed})


def model(**options: Any) -> torch.nn.Module:
    made: Any = timm.create_model("test_vit", img_size=16, patch_size=8, depth=1, num_classes=3, **options)
    made.pretrained_cfg = {**made.pretrained_cfg, "mean": tuple(PREPARED["mean"]), "std": tuple(PREPARED["std"])}
    return made.eval()


def test_a_file_of_the_same_images_is_compared() -> None:
    check_alike(ModelSpec(model()).load(), [told(), told(interpolation="bilinear")])


@pytest.mark.parametrize(
    ("what", "changed"), [("mean", {"mean": [0.5, 0.25, 0.2]}), ("std", {"std": [0.5, 0.6, 0.71]})]
)
def test_a_file_of_images_that_are_normalised_otherwise_is_refused(what: str, changed: dict[str, Any]) -> None:
    with pytest.raises(VitrimError, match=rf"m\.onnx takes images with {what} "):
        check_alike(ModelSpec(model()).load(), [told(), told(**changed)])


def test_bytes_are_those_that_were_read() -> None:
    """All 256 values, through the normalisation of torchvision and back."""
    from torchvision.transforms.v2.functional import normalize

    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16).contiguous()
    own = file(lambda images: images, ("batch", 16, 16, 3), input={"dtype": "uint8"}, preprocessing=PREPARED)
    given = own.given(normalize(pixels / 255, PREPARED["mean"], PREPARED["std"]))
    assert given.dtype == np.uint8
    assert np.array_equal(given, pixels.permute(0, 2, 3, 1).numpy())


def test_tokens_and_macs_of_a_file_are_those_of_its_metadata() -> None:
    """Per image, over a batch of three and one of two."""
    gmacs = {"linear": 0.5, "attention": 0.25, "matching": 0.125, "norm": 0.0625}
    known = {"tokens_per_block": [15, 13.5, 9], "gmacs": 9.0, "gmacs_parts": gmacs}
    own = file(lambda images: np.zeros((len(images), 3), np.float32), ("batch", 3, 16, 16), **known)
    task = make_task("classification", 3)
    contestant = Contestant(own, task)
    measurement = Measurement([contestant], [MacsProbe(), Tokens()], task)
    measurement.follow([(torch.zeros(count, 3, 16, 16), torch.zeros(count, dtype=torch.int64)) for count in (2, 4)])
    (row,) = measurement.rows()
    assert row["tokens_per_block"] == [15, 13.5, 9]
    assert row["tokens_at_end"] == 9
    assert row["gmacs"] == gmacs
