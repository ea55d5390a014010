"""Zero-shot classification: the oracle is transformers' own ``logits_per_image`` of both towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CLIPImageProcessor, CLIPTokenizer, SiglipImageProcessor

import vitrim
from image_files import write_noise
from vitrim.data import load_images
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.measure.evaluation import evaluate
from vitrim.tasks import make_task

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
    task.meet(tower, data.class_names)
    with torch.no_grad():
        assert torch.allclose(task.predict(tower, images), wanted, atol=1e-5)
    dense, reduced = evaluate(tower, "tome:r=2", data, task="zero_shot", batch_size=4).rows
    assert dense["top1"] == (wanted.argmax(1) == labels).double().mean().item()
    with vitrim.reduced(both.vision_model if kind == "Siglip" else both, "tome:r=2"), torch.no_grad():
        own = both(pixel_values=images, **given)
    assert reduced["top1"] == (own.logits_per_image.argmax(1) == labels).double().mean().item()
    embeds = own.image_embeds / own.image_embeds.norm(dim=1, keepdim=True)
    with torch.no_grad():
        plain = both(pixel_values=images, **given).image_embeds
    cosine = torch.cosine_similarity(embeds, plain, dim=1).mean().item()
    assert reduced["cosine"] == pytest.approx(cosine, abs=1e-5)


def test_models_and_data_without_names_are_refused(tmp_path: Path) -> None:
    write_noise(tmp_path / "images", 4)
    with pytest.raises(VitrimError, match="VisionTransformer has no text tower"):
        evaluate("test_vit", None, str(tmp_path / "images"), task="zero_shot", model_options={"num_classes": 0})
    batches = [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 1]))]
    with pytest.raises(VitrimError, match="knows no classes: give a source or a dataset that names them"):
        evaluate("test_vit", None, batches, task="zero_shot", model_options={"num_classes": 0})
    with pytest.raises(VitrimError, match="asks for the classes by their names, and the data has none"):
        make_task("zero_shot", 0).meet(torch.nn.Identity(), None)
