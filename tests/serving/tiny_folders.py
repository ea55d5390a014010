"""Tiny vision-language models in folders that vLLM and transformers both read, with tokenizer and processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

SPECIAL = ["<pad>", "<image>", "<s>", "<video>", "<start>", "<end>", "</s>", "<unk>", "<fake>", "<global>", "<row>"]
WORDS = [f"w{number}" for number in range(200 - len(SPECIAL))]
IMAGE, VIDEO, START, END = 1, 3, 4, 5
TEXT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}
LLAMA = transformers.LlamaConfig(**TEXT)
QWEN2 = transformers.Qwen2Config(**TEXT)
PINPOINTS = [[64, 128], [128, 64], [128, 128]]
CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}{{ '<image>' }}{% else %}{{ ' ' + c.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[1:6] + SPECIAL[8:]})
    made.chat_template = CHAT
    made.image_token, made.video_token = "<image>", "<video>"
    made.image_token_id, made.video_token_id = IMAGE, VIDEO
    return made


SIZE = {"height": 64, "width": 64}


def llava() -> tuple[nn.Module, Any]:
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION), text_config=LLAMA, image_token_id=IMAGE
        )
    )
    images = transformers.CLIPImageProcessor(size=SIZE, crop_size=SIZE)
    processor = transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )
    return model, processor


def llava_next() -> tuple[nn.Module, Any]:
    model = transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION),
            text_config=LLAMA,
            image_token_id=IMAGE,
            image_grid_pinpoints=PINPOINTS,
        )
    )
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 64}, crop_size=SIZE, image_grid_pinpoints=PINPOINTS
    )
    processor = transformers.LlavaNextProcessor(
        images,
        tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )
    return model, processor


def llava_onevision() -> tuple[nn.Module, Any]:
    model = transformers.LlavaOnevisionForConditionalGeneration(
        transformers.LlavaOnevisionConfig(
            vision_config=transformers.SiglipVisionConfig(**VISION),
            text_config=QWEN2,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            image_grid_pinpoints=PINPOINTS,
        )
    )
    images = transformers.LlavaOnevisionImageProcessor(size=SIZE, image_grid_pinpoints=PINPOINTS)
    processor = transformers.LlavaOnevisionProcessor(
        images,
        tokenizer(),
        transformers.LlavaOnevisionVideoProcessor(size=SIZE),
        num_image_tokens=64,
        vision_feature_select_strategy="full",
        chat_template=CHAT,
    )
    return model, processor


IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
QWEN: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "out_hidden_size": 64,
}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
BOUNDS = {"min_pixels": 16 * 16, "max_pixels": 128 * 128}


def qwen_processor(kind: Any) -> Any:
    images = transformers.Qwen2VLImageProcessor(
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 128 * 128},
    )
    name = "Qwen3VLVideoProcessor" if kind is transformers.Qwen3VLProcessor else "Qwen2VLVideoProcessor"
    videos = getattr(transformers, name)(patch_size=8, merge_size=2, temporal_patch_size=2)
    own = tokenizer()
    own.vision_start_token, own.vision_end_token = "<start>", "<end>"
    own.vision_start_token_id, own.vision_end_token_id = START, END
    return kind(images, own, videos, chat_template=CHAT.replace("'<image>'", "'<start><image><end>'"))


def qwen2_vl() -> tuple[nn.Module, Any]:
    vision = {**QWEN, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}
    del vision["intermediate_size"], vision["out_hidden_size"]
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **IDS)
    return transformers.Qwen2VLForConditionalGeneration(config), qwen_processor(transformers.Qwen2VLProcessor)


def qwen2_5_vl() -> tuple[nn.Module, Any]:
    vision = {**QWEN, "window_size": 32, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **IDS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), qwen_processor(transformers.Qwen2_5_VLProcessor)


def qwen3_vl() -> tuple[nn.Module, Any]:
    vision = {**QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **IDS)
    return transformers.Qwen3VLForConditionalGeneration(config), qwen_processor(transformers.Qwen3VLProcessor)


def gemma3() -> tuple[nn.Module, Any]:
    text = transformers.Gemma3TextConfig(
        **{**TEXT, "tie_word_embeddings": True}, sliding_window=512, layer_types=["sliding_attention", "full_attention"]
    )
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(**VISION),
            text_config=text,
            image_token_id=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
            mm_tokens_per_image=16,
        )
    )
    own = tokenizer()
    own.boi_token, own.eoi_token = "<start>", "<end>"
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size=SIZE, do_pan_and_scan=False),
        own,
        image_seq_length=16,
        chat_template=CHAT.replace("'<image>'", "'<start>'"),
    )
    return model, processor


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "gemma3": gemma3,
}
MARKS = {"qwen2_vl": "<start><image><end>", "qwen2_5_vl": "<start><image><end>", "qwen3_vl": "<start><image><end>"}
"""An image in the text of a prompt; "<image>" of others."""
MARKS["gemma3"] = "<start>"


def folder(family: str, where: Path) -> Path:
    """A folder with random weights of the family: large ones, so that answers differ, with shaken norms and biases."""
    torch.manual_seed(0)
    model, processor = FAMILIES[family]()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() < 2:
                value.add_(0.1 * torch.randn_like(value))
            elif "embed" not in name:
                value.normal_(std=2 * value.shape[-1] ** -0.5 if value.dim() == 2 else 0.1)
            else:
                value.normal_(std=0.5)
    model.config.torch_dtype = "float32"
    model.float().save_pretrained(where)
    processor.save_pretrained(where)
    # vLLM keeps CLIP's and SigLIP's weights one level deeper than transformers writes them
    config = json.loads((where / "config.json").read_text())
    if config["vision_config"]["model_type"] in ("clip_vision_model", "siglip_vision_model"):
        path = where / "model.safetensors"
        weights = {deeper(name): value.clone() for name, value in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
    return where


def deeper(name: str) -> str:
    """The name of a weight with the level that vLLM expects."""
    part = "vision_tower."
    if part in name and f"{part}vision_model." not in name:
        return name.replace(part, f"{part}vision_model.", 1)
    return name


def model_of(family: str, where: Path) -> Any:
    """The same weights in transformers, float32."""
    model: Any = FAMILIES[family]()[0].float().eval()
    weights = load_file(where / "model.safetensors")
    own = transformers.AutoModelForImageTextToText.from_pretrained(where, dtype=torch.float32).eval()
    assert set(own.state_dict()) == set(model.state_dict())
    del weights
    return own
