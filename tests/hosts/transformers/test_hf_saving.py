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
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTModel,
)

import tiny
import vitrim
from tiny_hosts.transformers_vit import GEOMETRY
from vitrim.core.registry import parse_method

METHODS = ("tome:r=4", "dynamicvit")
"""Without and with learned parameters."""


def keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def reduced(host: str, method: str) -> tuple[Any, vitrim.Reduction]:
    model = tiny.HOSTS[host]()
    return model, vitrim.reduce_(model, tiny.fits(parse_method(method), model))


@pytest.mark.sampled(3)
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
    reset = type(model).from_pretrained(tmp_path)
    vitrim.Reduction.load(reset, tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(reset.state_dict()[name], value), name


def test_a_restored_model_saves_as_before(tmp_path: Path) -> None:
    model, _ = reduced("hf_vit", "dynamicvit")
    vitrim.restore_(model)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "reduction.json").exists()


# ---- a part of the saved model is reduced ---------------------------------------------------------------------------

VISION: dict[str, Any] = {key: value for key, value in GEOMETRY.items() if key != "num_labels"}


def llava() -> Any:
    text = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    vision = CLIPVisionConfig(**VISION)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=1, pad_token_id=0)
    )


def timm_wrapper() -> Any:
    args = {"img_size": 24, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
    return TimmWrapperForImageClassification(
        TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=args, num_labels=5)
    )


def call_llava(model: Any) -> Tensor:
    ids = torch.cat([torch.full((2, 36), 1), torch.full((2, 3), 5)], dim=1)
    return model(input_ids=ids, pixel_values=tiny.images()).logits


def call(model: Any) -> Tensor:
    return model(tiny.images()).logits


HOLDERS: dict[str, tuple[Callable[[], Any], str, Callable[[Any], Tensor]]] = {
    "ViTForImageClassification": (tiny.HOSTS["hf_vit"], "vit", call),
    "LlavaForConditionalGeneration": (llava, "model.vision_tower", call_llava),
    "TimmWrapperForImageClassification": (timm_wrapper, "timm_model", call),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_model_with_a_reduced_part_is_saved_with_the_reduction(holder: str, method: str, tmp_path: Path) -> None:
    create, name, run = HOLDERS[holder]
    torch.manual_seed(0)
    model = create().eval()
    model.save_pretrained(tmp_path / "dense")
    reduction = vitrim.reduce_(model.get_submodule(name), method)
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


def test_folders_without_the_name_of_a_part_are_of_the_whole_model(tmp_path: Path) -> None:
    """As vitrim wrote them before it knew parts."""
    model, _ = reduced("hf_vit", "dynamicvit")
    model.save_pretrained(tmp_path)
    assert "module" not in json.loads((tmp_path / "reduction.json").read_text())
    loaded = vitrim.Reduction.load(twin := tiny.HOSTS["hf_vit"](), tmp_path)
    assert loaded.model is twin
    record = json.loads((tmp_path / "reduction.json").read_text())
    (tmp_path / "reduction.json").write_text(json.dumps({**record, "module": 3}))
    with pytest.raises(vitrim.VitrimError, match="names the module 3, which is no name"):
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
    model = llava()
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
