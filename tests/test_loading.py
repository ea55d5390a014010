"""Models of other libraries on the command line: ``torchvision:NAME`` and ``hf:FOLDER``, offline."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import open_clip
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import vision_transformer
from torch import nn
from torchvision.models import VisionTransformer, ViT_B_32_Weights
from torchvision.models.vision_transformer import interpolate_embeddings
from transformers import (
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTModel,
)

from cli_runs import Run, runner, succeeded
from vitrim import loading
from vitrim.core.saving import REDUCERS_FILE
from vitrim.data import DataError, eval_transform
from vitrim.errors import MissingPackageError, VitrimError
from vitrim.loading import ModelSpec, PlacedModel, ScoredModel, create_model, load_run
from vitrim.measure.inputs import ScoredData, open_data
from vitrim.measure.task_data import open_task
from vitrim.weights import holds_encoder, load_checkpoint, load_encoder, load_host

TINY = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``vitrim`` with the given arguments: exit code, standard output, standard error."""
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face classifier of four classes with its weights and its image processor."""
    path = tmp_path_factory.mktemp("models") / "vit"
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(**TINY, num_labels=4)).save_pretrained(path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(path)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """One image in each of four classes."""
    random = np.random.default_rng(0)
    for name in ("ant", "bee", "cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        pixels = random.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name / "0.png")
    return tmp_path / "images"


def test_a_folder_with_weights_is_loaded_with_them(folder: Path) -> None:
    model = create_model(f"hf:{folder}")
    assert isinstance(model, ViTForImageClassification)
    assert not model.training
    expected = ViTForImageClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert loading.weights_of(f"hf:{folder}") == str(folder)
    assert loading.weights_of(f"hf:{folder}", pretrained=True) == "pretrained"


def test_a_folder_with_a_config_alone_gives_random_weights(tmp_path: Path) -> None:
    ViTConfig(**TINY).save_pretrained(tmp_path)
    model = create_model(f"hf:{tmp_path}", options={"num_labels": 3, "num_hidden_layers": 2})
    assert isinstance(model, ViTForImageClassification)
    assert (model.config.num_labels, len(model.vit.layers)) == (3, 2)
    assert loading.weights_of(f"hf:{tmp_path}") == "random"


def test_a_model_is_what_it_was_saved_as_if_it_takes_images_alone(tmp_path: Path) -> None:
    ViTModel(ViTConfig(**TINY)).save_pretrained(tmp_path / "bare")
    assert isinstance(create_model(f"hf:{tmp_path / 'bare'}"), ViTModel)
    text = {**{key: TINY[key] for key in list(TINY)[2:]}, "vocab_size": 8}
    CLIPModel(CLIPConfig(vision_config=TINY, text_config=text)).save_pretrained(tmp_path / "clip")
    assert type(create_model(f"hf:{tmp_path / 'clip'}")).__name__ == "CLIPVisionModelWithProjection"


def test_an_encoder_is_loaded_into_what_has_none(tmp_path: Path) -> None:
    vit = create_model("test_vit", options={"num_classes": 0})
    file = tmp_path / "pretrained.safetensors"
    save_file({f"encoder.{key}": value for key, value in vit.state_dict().items()}, file)
    model = create_model("test_vit", options={"num_classes": 3})
    assert holds_encoder(file, model)
    load_encoder(model, file)
    assert torch.equal(model.cls_token, vit.cls_token)
    other = create_model("torchvision:vit_b_16", options={"image_size": 32, "num_classes": 3}, device="meta")
    assert not holds_encoder(file, other)  # its own parameters are called so
    hf = ViTForImageClassification(ViTConfig(**TINY))
    with pytest.raises(VitrimError, match="lacks"):
        load_encoder(hf, file)
    save_file(vit.state_dict(), file)
    with pytest.raises(VitrimError, match="no weights of an encoder"):
        load_encoder(model, file)


def test_a_head_is_replaced_only_for_weights_that_fit(tmp_path: Path) -> None:
    options = {"num_classes": 3, "img_size": 16, "patch_size": 4}
    save_file(create_model("test_vit", options=options).state_dict(), tmp_path / "three.safetensors")
    model = create_model("test_vit", options={**options, "num_classes": 5, "patch_size": 8})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(VitrimError, match="has shape"):
        load_host(model, tmp_path / "three.safetensors")
    assert model.num_classes == 5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# ---- checkpoints of another image size: each library's own result, bit for bit


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """All weights drawn, so that no table is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model.eval()


BLOCKS = {"depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 3}


@pytest.mark.parametrize(
    ("name", "key", "options"),
    [
        ("vit_tiny_patch16_224", "pos_embed", BLOCKS),
        ("vit_medium_patch16_reg4_gap_256", "pos_embed", {**BLOCKS, "class_token": False}),  # positions of patches only
        ("deit_tiny_distilled_patch16_224", "pos_embed", BLOCKS),
        ("eva02_tiny_patch14_224", "pos_embed", {**BLOCKS, "patch_size": 16}),
        ("beit_base_patch16_224", "blocks.0.attn.relative_position_bias_table", BLOCKS),
    ],
)
def test_positions_of_another_image_size_are_resampled_as_timm_does(
    name: str, key: str, options: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file(shaken(timm.create_model(name, img_size=64, **options)).state_dict(), file)
    theirs = timm.create_model(name, img_size=96, **options).eval()
    convert = sys.modules[type(theirs).__module__].checkpoint_filter_fn
    theirs.load_state_dict(convert(load_file(file), theirs))
    with pytest.warns(UserWarning, match=f"is of another image size: {key} .* is resampled .* 96 x 96 px$") as said:
        ours = create_model(name, checkpoint=file, options={"img_size": 96, **options})
    assert "\n" not in str(said[0].message)
    assert load_file(file)[key].shape != theirs.state_dict()[key].shape
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_positions_of_another_image_size_are_resampled_as_torchvision_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(name: str = "", *, image_size: int, weights: None = None, **options: Any) -> VisionTransformer:
        size = {"patch_size": 32, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
        return VisionTransformer(image_size, **size)

    source = shaken(small(image_size=64))
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    theirs = small(image_size=96)
    theirs.load_state_dict(interpolate_embeddings(96, 32, OrderedDict(source.state_dict())))
    monkeypatch.setattr(torchvision.models, "get_model", small)
    monkeypatch.setattr(ViT_B_32_Weights, "get_state_dict", lambda self, **options: source.state_dict())
    found = []
    for how in ({"checkpoint": tmp_path / "model.safetensors"}, {"pretrained": True}):
        said = r"encoder.pos_embedding of shape \(1, 5, 16\) is resampled to \(1, 10, 16\), as torchvision does"
        with pytest.warns(UserWarning, match=said):
            found.append(create_model("torchvision:vit_b_32", options={"image_size": 96}, **how))
    for ours in found:
        assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(
    "kind",
    [
        *("ViTForImageClassification", "DeiTForImageClassification", "Dinov2ForImageClassification"),
        *("CLIPVisionModel", "SiglipVisionModel", "BlipVisionModel", "IJepaModel"),
    ],
)
@pytest.mark.parametrize("how", ["checkpoint", "folder"])
def test_positions_of_another_image_size_are_resampled_as_transformers_does(
    kind: str, how: str, tmp_path: Path
) -> None:
    """What the library computes of a larger image with the saved model, interpolating in its forward."""
    model = getattr(transformers, kind)
    whole = model.config_class(**TINY, num_labels=4)
    theirs = shaken(model(whole))
    theirs.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    image = torch.randn(1, 3, 24, 24)
    with torch.no_grad():
        expected = theirs(image, interpolate_pos_encoding=True)[0]
    options, name = {"image_size": 24}, f"hf:{tmp_path}"
    if how == "checkpoint":
        save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
        bare = tmp_path / "bare"
        theirs.config.save_pretrained(bare)
        options, name = {"image_size": 24}, f"hf:{bare}"
    file = tmp_path / "weights.safetensors" if how == "checkpoint" else None
    with pytest.warns(UserWarning, match=r"is of another image size: .*position.* as transformers does, .* 24 x 24 px"):
        ours = create_model(name, checkpoint=file, options=options)
    with torch.no_grad():
        assert torch.equal(ours(image)[0], expected)
    assert not ours.training
    if how == "folder":
        assert eval_transform(ours)(Image.new("RGB", (40, 30))).shape == (3, 24, 24)


def test_positions_of_another_image_size_are_resampled_as_open_clip_does(tmp_path: Path) -> None:
    def made(side: int) -> nn.Module:
        vision = {"image_size": side, "layers": 2, "width": 64, "patch_size": 8}
        text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
        return open_clip.CLIP(embed_dim=8, vision_cfg=vision, text_cfg=text)

    source, theirs, ours = shaken(made(32)), made(48), made(48)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    open_clip.model.resize_pos_embed(state, theirs)
    theirs.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"visual.positional_embedding of shape \(17, 64\) is resampled to \(37, 64\)"):
        load_checkpoint(ours, tmp_path / "model.safetensors")
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("vit_tiny_patch16_224", {"patch_size": 8}),  # the kernel differs, too: it is another model
        ("vit_tiny_patch16_224", {"embed_dim": 32}),
        ("vit_tiny_patch16_224", {"num_classes": 5}),
        (
            "vit_tiny_patch16_224",
            {"no_embed_class": True},
        ),  # the class token has a position in the file
        ("samvit_base_patch16", {"img_size": 96}),  # timm has no way
    ],
)
def test_weights_that_differ_in_more_than_the_image_size_are_refused(
    name: str, other: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    size = {"img_size": 64, **BLOCKS}
    if name.startswith("sam"):
        size |= {"global_attn_indexes": (1,), "window_size": 2}
    save_file(timm.create_model(name, **size).state_dict(), tmp_path / "model.safetensors")
    options = {**size, "img_size": 64 if other.keys() & {"patch_size", "no_embed_class"} else 96, **other}
    with pytest.raises(VitrimError, match=r"has shape .*, this model needs \([0-9, ]+\)$"):
        create_model(name, checkpoint=tmp_path / "model.safetensors", options=options)
    assert not [one for one in recwarn.list if "another image size" in str(one.message)]


def test_positions_that_the_library_cannot_resample_are_refused(tmp_path: Path) -> None:
    """Six are no square of patches; the model stays as it was."""
    model = VisionTransformer(32, 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({**before, "encoder.pos_embedding": torch.zeros(1, 7, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(VitrimError, match=r"needs \(1, 17, 16\), and torchvision cannot resample it: seq_"):
        load_checkpoint(model, tmp_path / "model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_run_goes_on_at_another_image_size(tmp_path: Path) -> None:
    """Of the model that a recipe names; the head of other classes is replaced, too."""
    weights = shaken(timm.create_model("test_vit", img_size=32, num_classes=3)).state_dict()
    save_file(weights, tmp_path / "model.safetensors")
    model = timm.create_model("test_vit", img_size=48, num_classes=5).eval()
    with pytest.warns(UserWarning, match="is of another image size"):
        load_host(model, tmp_path / "model.safetensors")
    assert model.num_classes == 3
    theirs = timm.create_model("test_vit", img_size=48, num_classes=3).eval()
    theirs.load_state_dict(vision_transformer.checkpoint_filter_fn(weights, theirs))
    image = torch.randn(1, 3, 48, 48)
    assert torch.equal(model(image), theirs(image))


def test_bench(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    succeeded(
        run, "bench", f"hf:{folder}", "-m", "tome:r=3", "-b", 1, "--repeats", 1, "--min-seconds", 0, "--json", out
    )
    assert json.loads(out.read_text())["weights"] == str(folder)


def test_eval_prepares_images_as_the_saved_processor_does(run: Run, folder: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    succeeded(run, "eval", f"hf:{folder}", "-m", "tome:r=3", "--data", images, "--json", out)
    assert json.loads(out.read_text())["weights"] == str(folder)
    image = Image.open(images / "ant" / "0.png")
    expected = ViTImageProcessor.from_pretrained(folder)(images=image, return_tensors="pt")["pixel_values"][0]
    found = eval_transform(create_model(f"hf:{folder}"))(image)
    assert found.shape == (3, 16, 16)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.0)  # two implementations of resizing


def test_eval_without_a_saved_processor_says_what_is_missing(tmp_path: Path) -> None:
    ViTConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"cannot read how images are prepared from .*preprocessor_config.json"):
        eval_transform(create_model(f"hf:{tmp_path}"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:vit_b_16", "unknown library 'hub'; valid: hf, open_clip, run, segmenter, torchvision, vitdet, vitrim"),
        ("torchvision:", "'torchvision:' names no model"),
        ("torchvision:vit_b_61", "unknown model of torchvision 'vit_b_61'; did you mean 'vit_b_16'?"),
        ("hf:./no-such-folder", "no folder ./no-such-folder; write hf: and a folder with config.json"),
        ("hf:.", "no config.json in .: it is not the folder of a Hugging Face model"),
    ],
)
def test_errors_are_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("profile", name)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(("name", "pretrained"), [("hf:some/vit", False), ("hf:some/vit", True), ("test_vit", True)])
def test_the_hub_is_asked_once(name: str, pretrained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(url: str) -> None:
        asked.append(url)
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    with pytest.raises(VitrimError, match=r"is not in the cache of the Hugging Face Hub, .* reached: no network$"):
        create_model(name, pretrained=pretrained)
    assert len(asked) == 1


def test_the_hub_is_not_asked_for_what_is_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "file")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", None)
    loading.check_hub("some/vit", ["config.json"])


def test_an_option_that_the_config_does_not_have(folder: Path) -> None:
    with pytest.raises(VitrimError, match="unknown option of vit 'image_sise'; did you mean 'image_size'"):
        create_model(f"hf:{folder}", options={"image_sise": 32})


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"a model of transformers needs .*: pip install '.\[hf\]'"):
        loading.hf_model("some/name", False, {})


BEYOND = "has weights of .* GiB; there are .* GiB of memory"
SIZES: list[tuple[str, dict[str, Any], str]] = [
    ("test_vit", {"img_size": 10**6}, "must be a whole number from 1 to 16384"),
    ("test_vit", {"img_size": True}, "must be a whole number"),
    ("test_vit", {"patch_size": 0}, "must be a whole number from 1"),
    ("test_vit", {"depth": 100_000}, "must be a whole number from 0 to 1000"),
    ("test_vit", {"embed_dim": 2**18, "num_heads": 1}, BEYOND),
    ("test_vit", {"num_classes": -1}, "must be a whole number from 0"),
    ("hf", {"image_size": 32, "patch_size": 64}, "does not work with|cannot create|memory"),
    ("hf", {"num_hidden_layers": 100_000}, "must be a whole number from 0 to 1000"),
    ("hf", {"hidden_size": 2**30}, "must be a whole number from 1 to"),
    ("hf", {"hidden_size": 2**18, "num_attention_heads": 1, "intermediate_size": 2**18}, BEYOND),
    ("hf", {"num_labels": -1}, "must be a whole number from 0"),
    ("torchvision:vit_b_16", {"image_size": 10**6}, "must be a whole number from 1 to 16384"),
]


@pytest.mark.parametrize(("name", "options", "message"), SIZES, ids=str)
def test_sizes_are_refused_before_anything_is_made(
    folder: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(VitrimError, match=message):
        create_model(f"hf:{folder}" if name == "hf" else name, options=options)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "hf"])
def test_the_trial_draws_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    ViTConfig(**TINY, num_labels=4).save_pretrained(tmp_path)
    options = {"num_labels": 5} if name == "hf" else {"num_classes": 5, "depth": 1}
    torch.manual_seed(3)
    found = create_model(f"hf:{tmp_path}" if name == "hf" else name, options=options)
    after = torch.rand(1)
    torch.manual_seed(3)
    if name == "hf":
        expected = ViTForImageClassification(ViTConfig(**TINY, num_labels=5))
    else:
        expected = timm.create_model(name, **options)
    assert torch.equal(after, torch.rand(1))
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value)


@pytest.mark.parametrize(("key", "option"), [("pretrained", "--pretrained"), ("checkpoint_path", "--checkpoint")])
def test_weights_are_no_option_of_a_model(key: str, option: str) -> None:
    with pytest.raises(VitrimError, match=f"{key} is no option of a model here: use {option}"):
        create_model("test_vit", options={key: "x"})


@pytest.mark.parametrize("key", ["trust_remote_code", "code_revision"])
def test_code_of_a_repository_is_refused(key: str) -> None:
    for name in ("hf:some/model", "test_vit"):
        with pytest.raises(
            VitrimError, match=f"{key} is no option of a model here: the code of a model's repository is"
        ):
            create_model(name, options={key: True})


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    """A folder may hold a module that its config names; whoever loads it by name would import it."""
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(VitrimError):
        create_model(f"hf:{tmp_path}")
    assert not (tmp_path / "ran").exists()


def test_a_run_has_its_own_weights(tmp_path: Path) -> None:
    with pytest.raises(VitrimError, match="has the weights of its run: leave out --pretrained"):
        create_model(f"run:{tmp_path}", pretrained=True)
    with pytest.raises(VitrimError, match="has the weights of its run: leave out --pretrained"):
        create_model(f"segmenter:run:{tmp_path}", pretrained=True)
    assert loading.weights_of("run:runs/a", pretrained=True) == "runs/a"
    assert loading.weights_of("vitrim:cifar10_vit", pretrained=True) == "reference"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("name", ["/proc/self/mem", "/proc/self/environ"])
def test_what_is_no_regular_file_is_no_checkpoint(name: str) -> None:
    with pytest.raises(VitrimError, match="is not a safetensors file: it is empty, or no regular file"):
        create_model("test_vit", checkpoint=Path(name))


@pytest.mark.parametrize(("name", "options"), [(None, None), (3, None), ("test_vit", 3), ("test_vit", ["a"])])
def test_what_is_no_name_is_one_line(name: str, options: dict[str, int]) -> None:
    with pytest.raises(VitrimError, match="a model is a name"):
        create_model(name, options=options)


# ---- what a run says of its model


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training leaves of a tiny model: weights, a result, and a recipe with options of all kinds."""
    run = tmp_path_factory.mktemp("runs") / "a"
    run.mkdir()
    options = {"img_size": 16, "patch_size": 4, "depth": 2, "num_classes": 4}
    save_file(create_model("test_vit", options=options).state_dict(), run / "model.safetensors")
    recipe = {
        "model": "test_vit",
        "model_options": {**options, "drop_path_rate": 0.5, "dynamic_img_size": False},
        "data_options": {"class_names": ["a", "b", "c", "d"]},
        "protocol": {"size": 48, "flip": True},
    }
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    (run / "result.json").write_text("{}")
    return run


def test_options_that_are_given_beat_those_of_a_recipe(finished: Path, images: Path) -> None:
    """Of the protocol, of the data, and of the model; what is not given stays the recipe's."""
    name, given = f"run:{finished}", {"class_names": ["w", "x", "y", "z"]}
    protocol, options = loading.as_trained(name, {"flip": False, "side": "long"})
    assert (protocol.size, protocol.flip, protocol.side) == (48, False, "long")
    assert options == {"class_names": ["a", "b", "c", "d"]}
    loaded = ModelSpec(name).load()
    for more, wanted in ((None, ["a", "b", "c", "d"]), (given, ["w", "x", "y", "z"])):
        assert open_data(images, options=more, model=name).class_names == wanted
        assert (
            open_task(loaded, ScoredData(images, options=more, protocol={"flip": False, "size": None}))[1].class_names
            == wanted
        )
    assert not load_run(finished).dynamic_img_size
    assert load_run(finished, dynamic_img_size=True).dynamic_img_size


def test_a_model_of_a_run_drops_nothing_unless_it_is_asked_to(finished: Path) -> None:
    assert isinstance(load_run(finished).blocks[1].drop_path1, torch.nn.Identity)
    assert load_run(finished, drop_path_rate=0.25).blocks[1].drop_path1.drop_prob == 0.25


def test_learned_parameters_are_those_of_the_weights(tmp_path: Path) -> None:
    """Of the checkpoint, if there is one, and otherwise of the run of the model."""
    for name in ("learned", "other", "dense"):
        (tmp_path / name).mkdir()
    for name in ("learned", "other"):
        (tmp_path / name / REDUCERS_FILE).touch()
    learned, other, dense = (tmp_path / name for name in ("learned", "other", "dense"))
    assert loading.learned_reduction(f"run:{learned}", None) == learned
    assert loading.learned_reduction(f"run:{dense}", None) is None
    assert loading.learned_reduction("test_vit", None) is None
    for model in ("test_vit", f"run:{learned}"):
        assert loading.learned_reduction(model, other) == other
        assert loading.learned_reduction(model, dense) is None


# ---- descriptions of models


def test_a_seed_says_what_random_weights_are_and_leaves_the_user_s_generator_alone() -> None:
    spec = ModelSpec("test_vit", options={"img_size": 16, "depth": 1})
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(found))
        expected = torch.Generator().manual_seed(len(found))
        found.append(dataclasses.replace(spec, seed=seed).load().model.state_dict()["pos_embed"])
        assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    torch.manual_seed(0)  # without a seed it is the user's
    assert torch.equal(spec.load().model.state_dict()["pos_embed"], found[0])


def test_the_device_that_is_asked_for_comes_before_that_of_the_description() -> None:
    spec = PlacedModel("test_vit", options={"img_size": 16, "depth": 1}, device="meta")
    assert next(spec.load().model.parameters()).is_meta
    model = spec.load("cpu").model
    assert not next(model.parameters()).is_meta
    assert not model.training


def test_options_of_a_list_are_those_of_its_names() -> None:
    """A module in it is there already: only device and precision are for it, too."""
    module = torch.nn.Linear(2, 2)
    own = ModelSpec("other", pretrained=True)
    spec = ScoredModel(
        ["test_vit", module, own], options={"depth": 1}, seed=3, device="meta", dtype="bf16", pretrained=True
    )
    named, given, described = ScoredModel.each(spec)
    assert named == dataclasses.replace(spec, model="test_vit")
    assert given == ScoredModel(module, device="meta", dtype="bf16")
    assert described == ScoredModel.of(own)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pth", ".json"])
def test_a_folder_of_open_clip_has_weights_in_any_of_its_forms(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "open_clip_config.json").touch()
    assert not loading.has_weights(tmp_path)
    (tmp_path / f"open_clip_model{suffix}").touch()
    assert loading.has_weights(tmp_path) == (suffix != ".json")
    assert loading.weights_of(f"open_clip:{tmp_path}") == (str(tmp_path) if suffix != ".json" else "random")


@pytest.mark.parametrize("name", ["drop_rate", "attention_dropout", "hidden_dropout_prob"])
@pytest.mark.parametrize("value", [-0.1, 1.5, True])
def test_rates_are_shares(name: str, value: float) -> None:
    with pytest.raises(VitrimError, match=rf"{name}={value} must be a number from 0 to 1$"):
        create_model("test_vit", options={name: value})


def test_torchvision_crops_the_same_share_at_the_size_of_the_model() -> None:
    """Its own transform makes 256 pixels of the short side, and crops 224 of them."""
    for options, crop, resize in (({}, 224, 256), ({"image_size": 112}, 112, 128), ({"image_size": 448}, 448, 512)):
        with torch.device("meta"):
            model: Any = loading.torchvision_model("vit_b_16", False, options)
        assert (model.eval_transform.crop_size, model.eval_transform.resize_size) == ([crop], [resize])


def test_a_checkpoint_may_be_text(tmp_path: Path) -> None:
    options = {"img_size": 32, "depth": 1}
    weights = create_model("test_vit", options=options).state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    found = create_model("test_vit", options=options, checkpoint=str(tmp_path / "weights.safetensors"))
    assert torch.equal(found.state_dict()["cls_token"], weights["cls_token"])


def test_a_model_of_torchvision_without_an_image_size_is_prepared_as_its_weights_say() -> None:
    from torchvision.models import SqueezeNet1_1_Weights

    model = create_model("torchvision:squeezenet1_1")
    image = Image.effect_noise((300, 260), 90).convert("RGB")
    torch.testing.assert_close(eval_transform(model)(image), SqueezeNet1_1_Weights.DEFAULT.transforms()(image))
