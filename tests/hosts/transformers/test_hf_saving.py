"""save_pretrained and from_pretrained of reduced models, and the reduction beside them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    ViTModel,
)

import tiny
import vitrim
from tiny_containers import CONTAINERS
from tiny_vlms import VLMS
from vitrim.core.registry import parse_method

METHODS = ("tome:r=4", "dynamicvit")
"""Without and with learned parameters."""
WHOLE = ("hf_vit", "hf_dinov3", "hf_clip")


def keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def reduced(host: str, method: str) -> tuple[Any, vitrim.Reduction]:
    model = tiny.HOSTS[host]()
    return model, vitrim.reduce_(model, tiny.fits(parse_method(method), model))


def test_a_checkpoint_of_the_trainer_holds_everything(tmp_path: Path) -> None:
    """It names the state_dict, which then is saved whole: training resumes from that one file."""
    model, _ = reduced("hf_vit", "dynamicvit")
    model.save_pretrained(tmp_path, state_dict=None, is_main_process=True)
    assert len(keys(tmp_path)) == len(model.state_dict())
    learned = {key.partition(".reducer.")[2] for key in model.state_dict()} - {""}
    assert learned == {key.partition(".reducer.")[2] for key in keys(tmp_path)} - {""}
    assert learned
    reset = type(model).from_pretrained(tmp_path)
    vitrim.Reduction.load(reset, tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(reset.state_dict()[name], value), name


def test_a_restored_model_saves_as_before(tmp_path: Path) -> None:
    model, _ = reduced("hf_vit", "dynamicvit")
    vitrim.restore_(model)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "reduction.json").exists()


WRAPPERS = {name: CONTAINERS[name] for name in ("LLaVA", "TimmWrapperForImageClassification")}
HOLDERS: dict[str, tuple[Callable[[], Any], str, Callable[[Any], Tensor]]] = {
    **{host: (tiny.HOSTS[host], "", lambda model: tiny.run(model, tiny.images())[0]) for host in WHOLE},
    "a part": (tiny.HOSTS["hf_vit"], "vit", lambda model: model(tiny.images()).logits),
    **{
        name: (each.create, each.part.removeprefix("model."), each.run)
        for name in WRAPPERS
        for each in [CONTAINERS[name]]
    },
}
"""How to make a model, the part that is reduced, and the output."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_model_or_a_part_of_it_is_saved_with_the_reduction(holder: str, method: str, tmp_path: Path) -> None:
    create, name, run = HOLDERS[holder]
    torch.manual_seed(0)
    model = create().eval()
    model.save_pretrained(tmp_path / "dense")
    part = model.get_submodule(name)
    reduction = vitrim.reduce_(part, tiny.fits(parse_method(method), part))
    model.save_pretrained(tmp_path / "reduced")
    assert keys(tmp_path / "reduced") == keys(tmp_path / "dense")
    twin, report = type(model).from_pretrained(tmp_path / "reduced", output_loading_info=True)
    assert not report["unexpected_keys"]
    loaded = vitrim.Reduction.load(twin.eval(), tmp_path / "reduced")
    assert loaded.model is twin.get_submodule(name)
    assert loaded.config == reduction.config
    with torch.no_grad():
        assert torch.equal(run(twin), run(model))
        vitrim.restore_(twin.get_submodule(name))
        assert not torch.equal(run(twin), run(model))


def test_the_part_alone_takes_its_reduction_from_the_folder_of_the_whole(tmp_path: Path) -> None:
    model: Any = tiny.HOSTS["hf_vit"]()
    vitrim.reduce_(model.vit, "dynamicvit")
    model.save_pretrained(tmp_path)
    alone = ViTModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    vitrim.Reduction.load(alone, tmp_path)
    with torch.no_grad():
        assert torch.equal(tiny.run(alone, tiny.images()), tiny.run(model.vit, tiny.images()))


def test_a_model_without_the_part_is_refused(tmp_path: Path) -> None:
    model: Any = tiny.HOSTS["hf_vit"]()
    vitrim.reduce_(model.vit, "tome:r=4")
    model.save_pretrained(tmp_path)
    with pytest.raises(vitrim.VitrimError, match=r"holds the reduction of model.vit, a ViTModel, and this CLIPVision"):
        vitrim.Reduction.load(tiny.HOSTS["hf_clip"](), tmp_path)


def test_a_part_without_a_name_is_refused(tmp_path: Path) -> None:
    model, _ = reduced("hf_vit", "tome:r=4")
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "reduction.json").read_text())
    (tmp_path / "reduction.json").write_text(json.dumps({**record, "module": 3}))
    with pytest.raises(vitrim.VitrimError, match="module=3"):
        vitrim.Reduction.load(tiny.HOSTS["hf_vit"](), tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_process_alone_writes_the_reduction(method: str, tmp_path: Path) -> None:
    """As the library's own files: several processes that write one folder would be in each other's way."""
    model, reduction = reduced("hf_vit", method)
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    beside = {"reduction.json", "reducers.safetensors"}
    assert not beside & {file.name for file in (tmp_path / "second").iterdir()}
    model.save_pretrained(tmp_path / "first", is_main_process=True)
    reduction.save(tmp_path / "own")
    written = {file.name for file in (tmp_path / "own").iterdir()}
    assert written == beside & {file.name for file in (tmp_path / "first").iterdir()}


def test_of_two_reduced_parts_neither_is_saved(tmp_path: Path) -> None:
    model: Any = VLMS["llava"].create()
    vitrim.reduce_(model.model.vision_tower, "tome:r=4")
    model.other = tiny.HOSTS["hf_vit_model"]()
    vitrim.reduce_(model.other, "tome:r=4")
    with pytest.raises(vitrim.VitrimError, match=r"holds 2 reduced parts.*model.model.vision_tower, model.other$"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_dense_models_are_saved_by_the_library_alone(tmp_path: Path) -> None:
    model: Any = tiny.HOSTS["hf_vit"]()
    assert inspect.signature(model.save_pretrained) == inspect.signature(
        model.save_pretrained.vitrim_dense.__get__(model)
    )
    model.save_pretrained(tmp_path, state_dict={"classifier.bias": model.classifier.bias})
    assert keys(tmp_path) == {"classifier.bias"}
    assert not (tmp_path / "reduction.json").exists()
