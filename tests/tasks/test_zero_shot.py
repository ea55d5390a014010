"""Zero-shot classification: the oracle is transformers' own ``logits_per_image`` of both towers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPImageProcessor, CLIPTokenizer, SiglipImageProcessor

import vitrim
from image_files import write_noise
from vitrim.core.library import Library
from vitrim.core.registry import ask
from vitrim.data import load_images
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec, create_model
from vitrim.measure.evaluation import evaluate
from vitrim.measure.inputs import ScoredData
from vitrim.tasks import make_task

HEADLESS = ModelSpec("test_vit", options={"num_classes": 0})
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def saved(folder: Path, kind: str) -> Any:
    """A tiny model of both towers in ``folder``, with a tokenizer that spells."""
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    text = {**SIZES, "vocab_size": len(words), "max_position_embeddings": 24, "eos_token_id": len(words) - 1}
    image = {**SIZES, "image_size": 32, "patch_size": 8}
    made = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=image, projection_dim=16)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(made).eval()
    model.save_pretrained(folder)
    CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[]).save_pretrained(folder)
    if kind == "CLIP":
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    else:
        SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_the_logits_are_those_of_both_towers(kind: str, tmp_path: Path) -> None:
    both = saved(tmp_path / "model", kind)
    write_noise(tmp_path / "images", 6)
    data = load_images(str(tmp_path / "images"))
    tower = create_model(f"hf:{tmp_path / 'model'}")
    data.transform = vitrim.data.eval_transform(tower)
    images, labels = (torch.stack([torch.as_tensor(one) for one in each]) for each in zip(*data, strict=True))
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "model")
    texts = [f"a photo of a {name.replace('_', ' ')}" for name in data.class_names]
    given = tokenizer(texts, padding="max_length", max_length=24, return_tensors="pt")
    with torch.no_grad():
        wanted = both(pixel_values=images, **given).logits_per_image
    task = make_task("zero_shot", 0)
    task.read_names(tower, data.class_names)
    with torch.no_grad():
        assert torch.allclose(task.predict(tower, images), wanted, atol=1e-5)
    dense, reduced = evaluate(tower, "tome:r=2", ScoredData(data, task="zero_shot", batch_size=4)).rows
    assert dense["top1"] == (wanted.argmax(1) == labels).double().mean().item()
    with vitrim.reduced(both.vision_model if kind == "Siglip" else both, "tome:r=2"), torch.no_grad():
        own = both(pixel_values=images, **given)
    assert reduced["top1"] == (own.logits_per_image.argmax(1) == labels).double().mean().item()
    embeds = own.image_embeds / own.image_embeds.norm(dim=1, keepdim=True)
    with torch.no_grad():
        plain = both(pixel_values=images, **given).image_embeds
    cosine = torch.cosine_similarity(embeds, plain, dim=1).mean().item()
    assert reduced["cosine"] == pytest.approx(cosine, abs=1e-5)


def open_clip_model(**text: Any) -> Any:
    """A tiny CLIP of open_clip, whose text tower reads its library's own words."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, set_model_preprocess_cfg
    from open_clip.transform import PreprocessCfg

    torch.manual_seed(0)
    image = CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=8, image_size=32)
    model = CLIP(16, image, CLIPTextCfg(width=32, heads=2, layers=1, **text), init_logit_bias=-3.0).eval()
    set_model_preprocess_cfg(model, vars(PreprocessCfg(size=32)))
    return model


def test_the_logits_are_those_of_open_clip(tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    both = open_clip_model()
    data = load_images(str(write_noise(tmp_path / "images", 6)), class_names=["cat", "sea lion"])
    data.transform = open_clip.image_transform(32, is_train=False)
    images, labels = (torch.stack([torch.as_tensor(one) for one in each]) for each in zip(*data, strict=True))
    texts = open_clip.get_tokenizer("ViT-B-32")(["a photo of a cat", "a photo of a sea lion"])
    wanted = []
    for method in ("none", "tome:r=2"):
        with vitrim.reduced(both, method), torch.no_grad():
            wanted.append(both.get_logits(images, texts)[0])
    options = {"class_names": ["cat", "sea lion"]}
    spec = ScoredData(str(tmp_path / "images"), task="zero_shot", options=options, batch_size=4)
    dense, reduced = rows = evaluate(both, "tome:r=2", spec).rows
    for row, logits in zip(rows, wanted, strict=True):
        assert row["top1"] == (logits.argmax(1) == labels).double().mean().item()
    task = make_task("zero_shot", 0)
    task.read_names(both, data.class_names)
    with torch.no_grad():
        torch.testing.assert_close(task.predict(both, images), wanted[0], atol=1e-4, rtol=1e-4)
    assert (dense["tokens_per_block"], reduced["tokens_per_block"]) == ([17, 17], [15, 13])
    tower = evaluate(both.visual, "tome:r=2", ScoredData(data, task="embedding")).rows[1]
    assert reduced["cosine"] == pytest.approx(tower["cosine"], abs=1e-6)


def write_open_clip(folder: Path, tokenizer: str | None = None, **text: Any) -> Any:
    """A folder as open_clip's own `push_to_hf_hub` fills it, and what is in it."""
    model = open_clip_model(**text)
    vision = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32}
    text = {"width": 32, "heads": 2, "layers": 1, "hf_tokenizer_name": tokenizer, **text}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text, "init_logit_bias": -3.0}
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {"size": 32}}))
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return model


def test_a_folder_of_open_clip_reads_by_its_own_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("open_clip")
    words = {word: index for index, word in enumerate([*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<end>"])}
    model = write_open_clip(tmp_path / "clip", "its own", vocab_size=len(words), context_length=24)
    tokenizer = CLIPTokenizer(
        vocab=words, merges=[], bos_token="<end>", eos_token="<end>", unk_token="<end>", pad_token="<end>"
    )
    tokenizer.save_pretrained(tmp_path / "clip")
    ids = tokenizer(["a cat"], padding="max_length", max_length=24, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = model.encode_text(ids)
    loaded = create_model(f"open_clip:{tmp_path / 'clip'}")
    torch.testing.assert_close(ask(loaded).text_embeddings(loaded, ["a cat"])[0], wanted)


def test_a_name_of_open_clip_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own default is to fetch the weights of text towers that are transformers'."""
    open_clip, given = pytest.importorskip("open_clip"), dict[str, Any]()
    monkeypatch.setattr(open_clip, "create_model", lambda _, **options: given.update(options) or torch.nn.Identity())
    create_model("open_clip:ViT-B-32")
    assert (given["load_weights"], given["pretrained_text"]) == (False, False)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ViT-B-23", {}, "unknown model of open_clip 'ViT-B-23'; did you mean 'ViT-B-32'"),
        ("mt5-base-ViT-B-32", {"pretrained": True}, "no weights of mt5-base-ViT-B-32 on the Hub: give them with"),
        ("org/repository", {}, "org/repository is no folder; with --pretrained it is a repository on the Hub"),
        ("ViT-B-32", {"options": {"no_such": 1}}, "cannot create open_clip:ViT-B-32: "),
    ],
)
def test_what_names_no_model_of_open_clip(
    name: str, options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("open_clip")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VitrimError, match=re.escape(message)):
        create_model(f"open_clip:{name}", device="meta", **options)


@pytest.mark.parametrize(
    ("mode", "crop"), [("shortest", (1.0, "center")), ("squash", (1.0, "squash")), ("longest", (None, "center"))]
)
def test_images_are_prepared_as_open_clip_does(mode: str, crop: tuple[float | None, str]) -> None:
    open_clip = pytest.importorskip("open_clip")
    model = open_clip_model()
    model.visual.preprocess_cfg["resize_mode"] = mode
    told = ask(model).preprocessing(model)
    assert (told.crop_share, told.crop_mode, told.size) == (*crop, (32, 32))
    image = Image.effect_noise((50, 40), 90).convert("RGB")
    wanted = open_clip.image_transform(32, is_train=False, resize_mode=mode)(image)
    assert torch.equal(vitrim.data.eval_transform(model)(image), wanted)


def test_the_whole_of_open_clip_is_needed_and_a_tokenizer_for_its_words() -> None:
    pytest.importorskip("open_clip")
    task = make_task("zero_shot", 0)
    with pytest.raises(VitrimError, match="VisionTransformer is the image tower alone: give the whole model"):
        task.read_names(open_clip_model().visual, ["cat", "dog"])
    other = open_clip_model(vocab_size=100, context_length=8)
    with pytest.raises(VitrimError, match=r"by 100 words, and not open_clip's own 49408: set model.tokenizer = "):
        task.read_names(other, ["cat", "dog"])
    other.tokenizer = lambda texts: torch.arange(8).expand(len(texts), 8)
    task.read_names(other, ["cat", "dog"])
    assert task.texts is not None
    torch.testing.assert_close(task.texts[0][0], task.texts[0][1])  # of one row of words


def test_names_are_put_into_sentences_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of a folder has _ where a sentence has spaces."""
    asked: list[str] = []

    def told(self: object, model: object, texts: list[str]) -> tuple[torch.Tensor, float, float]:
        asked[:] = texts
        return torch.eye(len(texts), 64), 1.0, 0.0

    monkeypatch.setattr(Library, "text_embeddings", told)
    task = make_task("zero_shot", 0)
    task.read_names(torch.nn.Identity(), ["golden_retriever", "black_and_gold_garden_spider", "sea lion"])
    names = ["golden retriever", "black and gold garden spider", "sea lion"]
    assert asked == [f"a photo of a {name}" for name in names]


def test_models_and_data_without_names_are_refused(tmp_path: Path) -> None:
    write_noise(tmp_path / "images", 4)
    with pytest.raises(VitrimError, match="VisionTransformer has no text tower"):
        evaluate(HEADLESS, None, ScoredData(tmp_path / "images", task="zero_shot"))
    batches = [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 1]))]
    with pytest.raises(VitrimError, match="knows no classes: give a source or a dataset that names them"):
        evaluate(HEADLESS, None, ScoredData(batches, task="zero_shot"))
    with pytest.raises(VitrimError, match="asks for the classes by their names, and the data has none"):
        make_task("zero_shot", 0).read_names(torch.nn.Identity(), None)


def test_two_classes_of_the_same_words_are_refused_before_they_are_embedded() -> None:
    task = make_task("zero_shot", 0)
    with pytest.raises(VitrimError, match="classes 'crane' and 'Crane' of the data come to the same words, 'crane'"):
        task.read_names(torch.nn.Identity(), ["crane", "cat", "Crane"])


def test_sentences_of_wordnet_ids_tell_two_cranes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def embedded(self: Library, model: object, texts: list[str]) -> tuple[torch.Tensor, float, float]:
        said.extend(texts)
        return torch.eye(len(texts)), 1.0, 0.0

    monkeypatch.setattr(Library, "text_embeddings", embedded)
    make_task("zero_shot", 0).read_names(torch.nn.Identity(), ["n02012849", "n03126707", "traffic_light"])
    assert said[0].startswith("a photo of a crane, large long-necked wading bird")
    assert said[1].startswith("a photo of a crane, lifts and moves heavy objects")
    assert said[2] == "a photo of a traffic light"
