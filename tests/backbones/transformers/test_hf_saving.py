"""save_pretrained and from_pretrained of reduced models, and the reduction beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import tiny
import vitrim
from vitrim.registry import parse_method

METHODS = ("tome:r=4", "dynamicvit")
"""Without and with learned parameters."""


def keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def reduced(host: str, method: str) -> tuple[Any, vitrim.Reduction]:
    model = tiny.HOSTS[host]()
    return model, vitrim.reduce_(model, tiny.fits(parse_method(method), model))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("host", ["hf_vit", "hf_dinov3", "hf_clip"])
def test_the_round_trip_is_clean(host: str, method: str, tmp_path: Path) -> None:
    tiny.HOSTS[host]().save_pretrained(tmp_path / "dense")
    model, reduction = reduced(host, method)
    model.save_pretrained(tmp_path / "reduced")
    reduction.save(tmp_path / "reduced")
    assert keys(tmp_path / "reduced") == keys(tmp_path / "dense")
    twin, report = type(model).from_pretrained(tmp_path / "reduced", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    loaded = vitrim.Reduction.load(twin.eval(), tmp_path / "reduced")
    assert loaded.config == reduction.config
    with torch.no_grad():
        assert torch.equal(tiny.run(twin, tiny.images())[0], tiny.run(model, tiny.images())[0])


def test_learned_parameters_are_never_left_behind(tmp_path: Path) -> None:
    """Not even by who forgets ``reduction.save``."""
    model, _ = reduced("hf_vit", "dynamicvit")
    model.save_pretrained(tmp_path)
    twin = type(model).from_pretrained(tmp_path)
    vitrim.Reduction.load(twin, tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name


def test_a_checkpoint_of_the_trainer_holds_everything(tmp_path: Path) -> None:
    """It names the state_dict, which then is saved whole: training resumes from that one file."""
    model, _ = reduced("hf_vit", "dynamicvit")
    model.save_pretrained(tmp_path, state_dict=None, is_main_process=True)
    assert len(keys(tmp_path)) == len(model.state_dict())
    learned = {key.partition(".reducer.")[2] for key in model.state_dict()} - {""}
    assert learned == {key.partition(".reducer.")[2] for key in keys(tmp_path)} - {""}
    assert learned


def test_a_restored_model_saves_as_before(tmp_path: Path) -> None:
    model, _ = reduced("hf_vit", "dynamicvit")
    vitrim.restore_(model)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "reduction.json").exists()
    assert "save_pretrained" not in vars(model)
