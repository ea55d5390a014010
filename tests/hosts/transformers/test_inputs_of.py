"""Models whose inputs are no images are measured on images: what the library's own inputs for them give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

import tiny
import vitrim
from tiny_vlms import VLMS
from vitrim.core.registry import ask, taking_images
from vitrim.data import eval_transform
from vitrim.engines.macs import count_macs, profile_of
from vitrim.loading import ModelSpec, create_model

SIZE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower of SigLIP 2 and its processor."""
    path = tmp_path_factory.mktemp("siglip2")
    torch.manual_seed(0)
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**SIZE, patch_size=8, num_patches=16))
    model.eval().save_pretrained(path)
    transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images of four shapes in two classes."""
    root, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir()
        for number in range(4):
            pixels = random.integers(0, 256, (64, 24 + 24 * number, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def prepared(folder: Path, image: Image.Image) -> dict[str, Tensor]:
    """What the library's processor makes of an image."""
    return dict(transformers.AutoImageProcessor.from_pretrained(folder)(images=image, return_tensors="pt"))


def test_images_are_cut_as_the_processor_does() -> None:
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**SIZE, patch_size=8, num_patches=16))
    images = torch.randn(2, 3, 24, 40)
    found = ask(model).inputs_of(model, images)
    assert found is not None
    assert torch.equal(found["pixel_values"], torch.stack([convert_image_to_patches(image, 8) for image in images]))
    assert found["spatial_shapes"].tolist() == [[3, 5], [3, 5]]
    with pytest.raises(vitrim.VitrimError, match="takes images of 3 channels and whole patches of 8 x 8 px"):
        ask(model).inputs_of(model, torch.zeros(1, 3, 20, 40))


def test_patches_in_one_tensor_are_those_of_the_processor(folder: Path, photos: Path) -> None:
    """Values, mask and shapes, in a batch of several grids; and in bfloat16, which numbers of rows survive."""
    model = create_model(f"hf:{folder}")
    transform = eval_transform(model)
    pictures = [Image.open(photos / "a" / f"{number}.png") for number in range(4)]
    batch = torch.stack([transform(picture) for picture in pictures])
    wanted = [prepared(folder, picture) for picture in pictures]
    found = ask(model).inputs_of(model, batch)
    assert found is not None
    for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes"):
        assert torch.equal(found[name], torch.cat([one[name] for one in wanted]).to(found[name].dtype)), name
    half = ask(model).inputs_of(model, batch.bfloat16())
    assert half is not None
    assert torch.equal(half["spatial_shapes"], found["spatial_shapes"])
    assert ask(model).padding(model, batch) == sum(int((one["pixel_attention_mask"] == 0).sum()) for one in wanted) > 0
    assert eval_transform(model, in_patches=False)(pictures[0]).shape == (3, 32, 32)  # of files and pictures


def test_a_loaded_model_takes_images_and_its_own_inputs_and_the_given_one_stays(folder: Path, photos: Path) -> None:
    given: Any = create_model(f"hf:{folder}")
    loaded: Any = ModelSpec(given).load().model
    assert loaded is not given
    assert not given._forward_pre_hooks
    assert loaded.embeddings.patch_embedding.weight is given.embeddings.patch_embedding.weight
    assert taking_images(loaded) is loaded
    picture = Image.open(photos / "b" / "0.png")
    with torch.no_grad():
        own = given(**prepared(folder, picture)).pooler_output
        assert torch.equal(loaded(**prepared(folder, picture)).pooler_output, own)
        sheet = eval_transform(given)(picture)[None]
        assert torch.equal(loaded(sheet).pooler_output, own)
        assert torch.equal(ask(loaded).embedding(loaded, sheet), own)
    assert not ModelSpec(tiny.HOSTS["vit"]()).load().model._forward_pre_hooks


def test_evaluate_counts_every_image_as_it_runs(folder: Path, photos: Path) -> None:
    """Tokens without padding; MACs of the reduced model as of each image alone, of the dense one with its padding."""
    model: Any = create_model(f"hf:{folder}")
    data = vitrim.ScoredData(photos, task="embedding", batch_size=3)
    report = vitrim.evaluate(f"hf:{folder}", ["tome:r=1"], data)
    dense, reduced = report.rows
    pictures = [Image.open(photos / name / f"{number}.png") for name in "ab" for number in range(4)]
    grids = [prepared(folder, picture)["spatial_shapes"][0].tolist() for picture in pictures]
    patches = [rows * columns for rows, columns in grids]
    assert len(set(patches)) > 1
    assert dense["tokens_at_end"] == sum(patches) / 8
    assert reduced["tokens_at_end"] == sum(patches) / 8 - 3
    takes = taking_images(model)
    alone = [profile_of(takes, "tome:r=1", torch.zeros(1, 3, 8 * rows, 8 * columns)).macs for rows, columns in grids]
    assert sum(reduced["gmacs"].values()) == pytest.approx(sum(one.total for one in alone) / 8 / 1e9, rel=0.02)
    whole = count_macs(takes, torch.zeros(1, 3, 32, 32)).total
    assert sum(dense["gmacs"].values()) == pytest.approx(whole / 1e9, rel=0.02)


def test_profile_and_bench_of_siglip_2(folder: Path) -> None:
    """On images of the position table's size; the dense count is that of the processor's patches of one."""
    report = vitrim.profile(f"hf:{folder}", ["tome:r=1"])
    assert [row["tokens_per_block"] for row in report.rows] == [[16, 16, 16], [15, 14, 13]]
    budget = vitrim.Budget(min_rounds=1, min_seconds=0)
    timed = vitrim.bench(f"hf:{folder}", ["tome:r=1"], batch_size=1, budget=budget)
    assert {row["method"] for row in timed.rows} >= {"tome:r=1"}


@pytest.mark.parametrize("method", ["none", "tome:r=1", "cubist_merge"])
def test_a_program_of_siglip_2_takes_images(folder: Path, method: str) -> None:
    """What any file is made of, for every batch; a method that reads rows and columns, too."""
    from vitrim.engines.program import Program, trace

    model = ModelSpec(f"hf:{folder}").load().model
    vitrim.reduce_(model, method)
    module = Program(model).eval()
    program = trace(module, torch.randn(2, 3, 32, 32), dynamic=True)
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images), module(images), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["onnx", "pt2", "xml"])
def test_files_of_siglip_2(folder: Path, photos: Path, suffix: str, tmp_path: Path) -> None:
    """Checked on images of the data, of the one size that a file has."""
    made = vitrim.export(f"hf:{folder}", "tome:r=1", tmp_path / f"m.{suffix}", images=photos, check=8)
    assert made.metadata["input"]["shape"] == ["batch", 3, 32, 32]


def clip(model: Any, images: Tensor) -> dict[str, Any]:
    """The library's own inputs for ``images``, by hand."""
    name = type(model).__name__
    if name.startswith("AST"):
        return {"input_values": images[:, 0]}
    if name.startswith("VideoMAE"):
        return {"pixel_values": torch.stack([images] * model.config.num_frames, dim=1)}
    return {"pixel_values_videos": torch.stack([images] * model.config.frames_per_clip, dim=1)}


@pytest.mark.parametrize("host", ["hf_ast", "hf_ast_model", "hf_videomae", "hf_videomae_model", "hf_vjepa2"])
def test_spectrograms_and_clips_of_images(host: str) -> None:
    model: nn.Module = {**tiny.HOSTS, **tiny.FURTHER}[host]()
    _, height, width = ask(model).input_size(model) or (0, 0, 0)
    images = torch.randn(2, 1 if "ast" in host else 3, height, width)
    with torch.no_grad():
        assert torch.equal(taking_images(model)(images)[0], model(**clip(model, images))[0])
    dense, reduced = vitrim.profile(model, ["tome:r=1,proportional=false"]).rows
    assert sum(reduced["gmacs"].values()) < sum(dense["gmacs"].values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "idefics3", "smolvlm"])
def test_towers_alone_are_profiled(name: str) -> None:
    """Their inputs are patches, or their class has the library's default name of its inputs, that of a text."""
    model: Any = VLMS[name].create()
    tower = next(getattr(model.base_model, one) for one in ("visual", "vision_model") if hasattr(model.base_model, one))
    dense, reduced = vitrim.profile(tower, ["tome:r=1"]).rows
    assert reduced["tokens_per_block"][-1] < dense["tokens_per_block"][-1]


def test_a_model_of_two_towers_names_the_one_to_give() -> None:
    text = {**SIZE, "vocab_size": 20, "max_position_embeddings": 8}
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config={**SIZE, "image_size": 16, "patch_size": 4})
    )
    with pytest.raises(vitrim.VitrimError, match=r"reads text beside the images: give its tower of images, model\.vis"):
        vitrim.profile(model, ["tome:r=1"])
