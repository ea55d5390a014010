"""The whole loop on a classifier of every family of hosts: trained reduced, stopped, resumed, evaluated, loaded."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import tiny
import vitrim
from full_matrix import cells
from tiny_training import recipe
from vitrim.core.registry import ask
from vitrim.data import load_images
from vitrim.training.loop import Trainer
from vitrim.training.running import Running
from vitrim.weights import load_checkpoint

CLASSES = tiny.GEOMETRY["num_classes"]


def to_pixels(image: Image.Image) -> Tensor:
    """A test image as a model of 24 x 24 pixels takes it."""
    pixels = np.asarray(image.convert("RGB").resize((24, 24)), dtype=np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def grey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of as many classes as the tiny hosts have, of another brightness each."""
    root = tmp_path_factory.mktemp("grey")
    for split, count in {"train": 4, "test": 2}.items():
        for label in range(CLASSES):
            folder = root / split / f"grey{label}"
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (24, 24), (50 * label + index,) * 3).save(folder / f"{index}.png")
    return root


# one update of what learns is made on every variant in `test_learner.py`
@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("host", cells(tiny.PLAIN, (*tiny.LIBRARIES, "naflex", "hf_clip", "hf_beit")))
def test_a_classifier_of_every_family_is_trained(host: str, grey: Path, tmp_path: Path) -> None:
    if not tiny.is_classifier(host):
        pytest.skip("this one gives features")
    resolved = recipe(method="tome:r=4", epochs=2, batch_size=10, ema={"decay": 0.5})
    train_data, eval_data = (load_images(grey, split=split) for split in ("train", "test"))
    eval_data.transform = to_pixels
    model = tiny.HOSTS[host]()
    if ask(model).preprocessing(model).size == (224, 224):  # those that take images of any size are given this one
        model.pretrained_cfg = {"input_size": (3, 24, 24)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parts = copy.deepcopy(model)
    stopped = Running(tmp_path / "parts", max_updates=2)
    Trainer(resolved, copy.deepcopy(model), train_data, eval_data, Accelerator(cpu=True), stopped).run()
    Trainer(resolved, parts, train_data, eval_data, Accelerator(cpu=True), Running(stopped.out, resume=True)).run()
    run = Trainer(resolved, model, train_data, eval_data, Accelerator(cpu=True), Running(tmp_path, log_every=1))
    result = run.run()
    assert (result["updates"], result["last"]["update"]) == (4, 4)
    assert math.isfinite(result["last"]["top1"])

    resumed, whole = (load_file(folder / "model.safetensors") for folder in (stopped.out, tmp_path))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    twin = tiny.HOSTS[host]()
    load_checkpoint(twin, tmp_path / "model.safetensors")
    assert any(not torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert vitrim.Reduction.load(twin, tmp_path).config == vitrim.ToMe(r=4)
    averaged = run.learner.ema.module.eval()
    with torch.no_grad():
        assert torch.equal(tiny.run(twin, tiny.images()), tiny.run(averaged, tiny.images()))
