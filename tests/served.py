"""Tiny vision-language models as folders that vLLM and transformers load alike, and answers of both.

Weights are random. They are written by transformers, and are in fp32, so that both give the same numbers.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.idefics3 import Idefics3VisionConfig

import vitrim
from tiny_other_vlms import GEMMA4_VISION

WORDS = 160
NEW = 20
TEXT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that the likeliest token stands out
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}


def photograph(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """A picture of coloured noise in patches, so that patches differ."""
    random = numpy.random.default_rng(seed)
    small = random.integers(0, 256, (height // 8, width // 8, 3), dtype=numpy.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


Movie = tuple[numpy.ndarray, dict[str, Any]]


def movie(seed: int, frames: int = 4, width: int = 64, height: int = 64, fps: float = 2.0) -> Movie:
    """Frames (T, H, W, 3) as they were sampled, half of each as in the one before, and what vLLM tells beside them."""
    pictures = [numpy.array(photograph(100 * seed + number, width, height)) for number in range(frames)]
    for before, after in itertools.pairwise(pictures):
        after[: height // 2] = before[: height // 2]
    facts = {"fps": fps, "duration": frames / fps, "total_num_frames": frames, "frames_indices": [*range(frames)]}
    return numpy.stack(pictures), facts


TIMES = [*(f"<{tenths / 10:.1f}" for tenths in range(50)), "seconds>"]
"""Words that tell when a frame of a video is."""


def tokenizer(special: Sequence[str], **named: str) -> Any:
    """Words w0, w1, ..., and `TIMES`, then special tokens from `WORDS` on, some of which are ``named``."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS - 4 - len(TIMES))), *TIMES]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens(names[4:])  # some families load as a tokenizer of another kind, which keeps such words
    made.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=named or list(special),
    )


class Served(NamedTuple):
    """A family, as a test sees it.

    Attributes:
        make: its configuration, processor and tokenizer's special tokens.
        image: how a prompt writes an image.
        video: how it writes a video; None: the family takes none.
        sizes: widths and heights of images.
        rename: names of weights that vLLM reads otherwise than transformers writes them.
        options: of the server, without which vLLM does not run it.
        by_hand: the version of transformers that vLLM needs is too old to select in it.
    """

    make: Callable[[], tuple[Any, Any]]
    image: str = "<image>"
    video: str | None = None
    sizes: tuple[tuple[int, int], ...] = ((64, 64),)
    rename: tuple[tuple[str, str], ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    by_hand: bool = False


LLAMA = transformers.LlamaConfig(**TEXT)
PINPOINTS = [[64, 128], [128, 64], [128, 128]]
NORMED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def llava() -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=LLAMA,
        image_token_index=WORDS,
        image_seq_length=64,
    )
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, transformers.LlavaProcessor(images, tokenizer(["<image>"]), **how)


def llava_next() -> tuple[Any, Any]:
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=LLAMA,
        image_token_index=WORDS,
        image_grid_pinpoints=PINPOINTS,
    )
    sizes = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    images = transformers.LlavaNextImageProcessor(**sizes, image_grid_pinpoints=PINPOINTS)
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, transformers.LlavaNextProcessor(images, tokenizer(["<image>"]), **how)


def llava_onevision() -> tuple[Any, Any]:
    """Seven rows of patches: an odd number, as the published models have."""
    pinpoints = [[56, 112], [112, 56], [112, 112]]
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**{**VISION, "image_size": 56}, vision_use_head=False),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=WORDS,
        video_token_index=WORDS + 1,
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_9",
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    size = {"height": 56, "width": 56}
    images = transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints)
    videos = transformers.LlavaOnevisionVideoProcessor(size=size)
    how = {"num_image_tokens": 49, "vision_feature_select_strategy": "full"}
    words = tokenizer(["<image>", "<video>"])
    return config, transformers.LlavaOnevisionProcessor(images, words, videos, **how)


QWEN_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
QWEN_IDS = {
    "image_token_id": WORDS,
    "video_token_id": WORDS + 1,
    "vision_start_token_id": WORDS + 2,
    "vision_end_token_id": WORDS + 3,
}
QWEN_VISION = {
    "depth": 4,
    "num_heads": 2,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
}
ROPE = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10000.0}


def qwen(config: Any, kind: str, videos: str, words: Sequence[str] = QWEN_TOKENS) -> tuple[Any, Any]:
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    # vLLM normalizes videos as images
    how = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": sizes, **NORMED}
    images = transformers.Qwen2VLImageProcessor(**how)
    movies = getattr(transformers, videos)(**how)
    return config, getattr(transformers, kind)(images, tokenizer(words), movies)


def qwen2_vl() -> tuple[Any, Any]:
    vision = {**QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    text = {**TEXT, "rope_parameters": ROPE}
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config=text, **QWEN_IDS)
    return qwen(config, "Qwen2VLProcessor", "Qwen2VLVideoProcessor")


def qwen2_5_vl() -> tuple[Any, Any]:
    vision = {**QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [1, 3]}
    text = {**TEXT, "rope_parameters": ROPE}
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **QWEN_IDS)
    return qwen(config, "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")


def qwen3_vl() -> tuple[Any, Any]:
    vision = {**QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
    config = transformers.Qwen3VLConfig(vision_config=vision, text_config=text, **QWEN_IDS)
    return qwen(config, "Qwen3VLProcessor", "Qwen3VLVideoProcessor")


def qwen3_5() -> tuple[Any, Any]:
    vision = {**QWEN_VISION, "num_position_embeddings": 64}
    linear = {"layer_types": ["full_attention"] * 2}  # vLLM has the linear ones of a CPU in bfloat16 alone
    rope = {**ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    config = transformers.Qwen3_5Config(
        vision_config=vision, text_config={**TEXT, **linear, "rope_parameters": rope}, **QWEN_IDS
    )
    return qwen(config, "Qwen3VLProcessor", "Qwen3VLVideoProcessor")


def glm4v() -> tuple[Any, Any]:
    """GLM-4.6V's small model; it has the class of GLM-4.1V."""
    vision = {**QWEN_VISION, "image_size": 64}
    del vision["intermediate_size"]
    names = ["<|image|>", "<|video|>"]
    names += [f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end")]
    keys = ["image", "video", "image_start", "image_end", "video_start", "video_end"]
    ids = {f"{key}_token_id": WORDS + number for number, key in enumerate(keys)}
    text = {key: value for key, value in TEXT.items() if key not in ("head_dim", "bos_token_id", "eos_token_id")}
    rope = {**ROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
    config = transformers.Glm4vConfig(vision_config=vision, text_config={**text, "rope_parameters": rope}, **ids)
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 2 * 128 * 128}  # an image counts as two frames
    how = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": sizes}
    images, videos = transformers.Glm4vImageProcessor(**how), transformers.Glm4vVideoProcessor(**how)
    return config, transformers.Glm4vProcessor(images, tokenizer(names), videos)


def glm_ocr() -> tuple[Any, Any]:
    """vLLM's projector has the width of the language model's, as in the published model."""
    images, processor = glm4v()
    ids = {name: value for name, value in images.to_dict().items() if name.endswith("token_id")}
    text = {**images.text_config.to_dict(), "head_dim": 32, "intermediate_size": 3 * 64}
    del text["model_type"]
    return transformers.GlmOcrConfig(
        vision_config={**QWEN_VISION, "image_size": 64}, text_config=text, **ids
    ), processor


def glm4v_moe() -> tuple[Any, Any]:
    """GLM-4.6V: experts in the language model."""
    dense, processor = glm4v()
    ids = {name: value for name, value in dense.to_dict().items() if name.endswith("token_id")}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    text = {**dense.text_config.to_dict(), **experts, "head_dim": 32, "use_qk_norm": False}
    del text["model_type"]
    vision = dense.vision_config.to_dict()
    return transformers.Glm4vMoeConfig(vision_config=vision, text_config=text, **ids), processor


def paddleocr_vl() -> tuple[Any, Any]:
    vision = {**VISION, "spatial_merge_size": 2}
    config = transformers.PaddleOCRVLConfig(
        vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **QWEN_IDS
    )
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    images = transformers.PaddleOCRVLImageProcessor(patch_size=8, merge_size=2, size=sizes)
    names = ["<|IMAGE_PLACEHOLDER|>", "<|VIDEO_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"]
    return config, transformers.PaddleOCRVLProcessor(images, tokenizer(names, image_token=names[0]))


def minicpmv4_6() -> tuple[Any, Any]:
    """Images of up to four slices, and a small whole image before them."""
    linear = {"layer_types": ["full_attention"] * 2}
    rope = {**ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    config = transformers.MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", **TEXT, **linear, "rope_parameters": rope},
        vision_config={**VISION, "num_hidden_layers": 4, "image_size": 128, "insert_layer_id": 1},
        insert_layer_id=1,
        image_size=128,
        image_token_id=WORDS,
        video_token_id=WORDS + 1,
        drop_vision_last_layer=False,
    )
    how = {"max_slice_nums": 4, "scale_resolution": 64, "patch_size": 8}
    images, videos = transformers.MiniCPMV4_6ImageProcessor(**how), transformers.MiniCPMV4_6VideoProcessor(**how)
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    for part in ("image", "slice", "image_id"):
        named |= {f"{part}_start_token": f"<{part}>", f"{part}_end_token": f"</{part}>"}
    words = tokenizer([*named.values(), "\n", "0", "1", "2"], **named)
    words.backend_tokenizer.decoder = decoders.Fuse()  # vLLM numbers images in decoded text
    return config, transformers.MiniCPMV4_6Processor(images, videos, words)


def internvl() -> tuple[Any, Any]:
    vision = {**VISION, "image_size": [64, 64], "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**vision),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=WORDS,
        image_seq_length=16,
    )
    size = {"height": 64, "width": 64}
    images = transformers.GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4)
    words = tokenizer(
        ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    videos = transformers.InternVLVideoProcessor(size=size)
    return config, transformers.InternVLProcessor(images, words, videos, image_seq_length=16)


def gemma3() -> tuple[Any, Any]:
    text = transformers.Gemma3TextConfig(
        **{**TEXT, "num_key_value_heads": 1, "initializer_range": 0.05},  # embeddings are tied
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )
    ids = {"image_token_index": WORDS, "boi_token_index": WORDS + 1, "eoi_token_index": WORDS + 2}
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=text,
        mm_tokens_per_image=16,
        **ids,
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 64, "width": 64}, **NORMED)
    lines = ["\n" * number for number in range(1, 5)]
    words = tokenizer(
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>", *lines],
        image_token="<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
    )
    return config, transformers.Gemma3Processor(images, words, image_seq_length=16)


def gemma4() -> tuple[Any, Any]:
    text = transformers.Gemma4TextConfig(
        # embeddings are tied; no answer gets a placeholder of videos, which vLLM reads otherwise
        **{**TEXT, "num_key_value_heads": 1, "initializer_range": 0.035},
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        global_head_dim=32,
    )
    vision = transformers.Gemma4VisionConfig(**GEMMA4_VISION, patch_size=8, default_output_length=70)
    keys = ["image", "boi", "eoi", "audio", "boa", "eoa"]
    ids = {f"{key}_token_id": WORDS + number for number, key in enumerate(keys) if key != "eoa"}
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        eoa_token_index=WORDS + 5,
        video_token_id=WORDS + 6,
        **ids,
    )
    how = {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    named = {f"{key}_token": f"<|{key}|>" for key in keys}
    words = tokenizer([*named.values(), "<|video|>"], **named)
    images, videos = transformers.Gemma4ImageProcessor(**how), transformers.Gemma4VideoProcessor(**how)
    sounds = transformers.Gemma4AudioFeatureExtractor()
    return config, transformers.Gemma4Processor(sounds, images, words, videos, image_seq_length=70)


def shuffled(family: str) -> tuple[Any, Any]:
    """SmolVLM or Idefics 3: images are cut into tiles of 64 pixels, and a small whole image comes last."""
    visions = transformers.SmolVLMVisionConfig if family == "SmolVLM" else Idefics3VisionConfig
    config = getattr(transformers, f"{family}Config")(
        vision_config=visions(**VISION),
        text_config=LLAMA,
        image_token_id=WORDS,
        scale_factor=2,
        pad_token_id=0,
    )
    sizes = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    images = getattr(transformers, f"{family}ImageProcessor")(**sizes)
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    words = tokenizer(["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows])
    if family == "Idefics3":
        return config, transformers.Idefics3Processor(images, words, image_seq_len=16)
    videos = transformers.SmolVLMVideoProcessor(**sizes, fps=1, num_frames=2)
    return config, transformers.SmolVLMProcessor(images, words, videos, image_seq_len=16)


CLIP = (("vision_tower.", "vision_tower.vision_model."),)
WIDE = ((64, 64), (128, 64), (64, 128), (112, 96))
ODD = ((56, 56), (112, 56), (56, 112), (98, 84))
QWEN = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
GLM = {kind: f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video")}
FAMILIES = {
    "llava": Served(llava, rename=CLIP),
    "llava_next": Served(llava_next, rename=CLIP, sizes=WIDE),
    "llava_onevision": Served(llava_onevision, video="<video>", rename=CLIP, sizes=ODD),
    "qwen2_vl": Served(qwen2_vl, **QWEN, sizes=WIDE),
    "qwen2_5_vl": Served(qwen2_5_vl, **QWEN, sizes=WIDE),
    "qwen3_vl": Served(qwen3_vl, **QWEN, sizes=WIDE),
    # its prefix cache asks for a linear layer
    "qwen3_5": Served(qwen3_5, **QWEN, sizes=WIDE, options={"enable_prefix_caching": False}),
    "glm4v": Served(glm4v, **GLM, sizes=WIDE),
    "glm4v_moe": Served(glm4v_moe, **GLM, sizes=WIDE),
    "glm_ocr": Served(glm_ocr, **GLM, sizes=WIDE),
    "paddleocr_vl": Served(paddleocr_vl, "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", sizes=WIDE, by_hand=True),
    "minicpmv4_6": Served(
        minicpmv4_6, "<|image_pad|>", "<|video_pad|>", sizes=WIDE, options={"enable_prefix_caching": False}
    ),
    "internvl": Served(internvl, "<IMG_CONTEXT>", "<video>", sizes=WIDE),
    "gemma3": Served(gemma3, "<start_of_image>", rename=CLIP),
    "gemma4": Served(gemma4, "<|image|>", "<|video|>", sizes=WIDE),
    "smolvlm": Served(partial(shuffled, "SmolVLM"), sizes=WIDE),
    "idefics3": Served(partial(shuffled, "Idefics3"), sizes=WIDE),
}


def folder(name: str, place: Path) -> Any:
    """Write the tiny model of a family into a folder; it itself, in fp32."""
    served = FAMILIES[name]
    config, processor = served.make()
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    for weight in model.parameters():  # Gemma's projection starts as zeros
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.3)
    if name == "paddleocr_vl":  # as in vLLM and in transformers 5.24; version 5.19 aligns the corners
        model.model.visual.vision_model.embeddings.interpolation_align_corners = False
    model.config.architectures = [type(model).__name__]
    model.generation_config.eos_token_id = None
    model.save_pretrained(place)
    processor.save_pretrained(place)
    if served.rename:
        path = place / "model.safetensors"
        weights = {}
        for key, value in load_file(path).items():
            for old, new in served.rename:
                key = key.replace(old, new) if new not in key else key
            weights[key] = value.contiguous()
        save_file(weights, path, metadata={"format": "pt"})
    return model


Prompt = tuple[str, list[Any] | dict[str, Any]]
"""Text, and the images and movies in it, or what vLLM gets of each modality."""
Videos = tuple[list[Image.Image], list[Movie]]


def apart(items: Sequence[Any]) -> Videos:
    """The images and the movies among ``items``."""
    return [own for own in items if not isinstance(own, tuple)], [own for own in items if isinstance(own, tuple)]


def prompts(name: str) -> list[Prompt]:
    """Text alone; one, two and three images; two turns: the second holds the first."""
    served = FAMILIES[name]
    sizes = [served.sizes[number % len(served.sizes)] for number in range(8)]
    pictures = [photograph(number, *size) for number, size in enumerate(sizes)]
    image = served.image
    first = f"w5 {image} w6 w7"
    return [
        ("w1 w2 w3 w4", []),
        (first, pictures[:1]),
        (f"w8 {image} w9 {image} w10", pictures[1:3]),
        (f"{image} w11 {image} w12 w13 {image} w14", pictures[3:6]),
        (f"{first} w20 w21 w22 w23 {image} w24", [pictures[0], pictures[6]]),
    ]


Answer = tuple[list[int], list[float]]


def by_transformers(model: Any, processor: Any, asked: Sequence[Prompt], select: str | None) -> list[Answer]:
    """Greedy tokens of every prompt by itself, and their log-probabilities."""
    if select is not None:
        vitrim.reduce_(model, select=select)
    found = []
    for text, items in asked:
        images, movies = apart(items)
        more: dict[str, Any] = {"images": images or None}
        if movies:
            facts = [transformers.video_utils.VideoMetadata(**own) for _, own in movies]
            more |= {"videos": [own for own, _ in movies], "video_metadata": facts, "do_sample_frames": False}
        given = processor(text=text, **more, return_tensors="pt")
        given.pop("token_type_ids", None)  # by which Gemma's image tokens see each other, which vLLM has on GPUs alone
        with torch.no_grad():
            out = model.generate(
                **given,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        new = out.sequences[0, -NEW:].tolist()
        logs = [step[0].log_softmax(dim=-1)[token].item() for step, token in zip(out.logits, new, strict=True)]
        found.append((new, logs))
    if select is not None:
        vitrim.restore_(model)
    return found


@torch.no_grad()
def by_hand(model: Any, processor: Any, asked: Sequence[Prompt], select: str) -> list[Answer]:
    """The same of a Qwen-VL without features for further layers, from transformers' parts alone, but for the choice.

    Every token keeps its position in the whole prompt, and answers continue behind the largest of these. Transformers
    takes images that touch for a single one, so every other image is called a video of one frame.
    """
    base, selector, found = model.model, vitrim.parse_selector(select), []
    for text, images in asked:
        if not images:
            found += by_transformers(model, processor, [(text, images)], None)
            continue
        given = processor(text=text, images=images, return_tensors="pt")
        ids, tables = given["input_ids"], given["image_grid_thw"]
        grids = [(frames, rows // 2, columns // 2) for frames, rows, columns in tables.tolist()]
        features = base.get_image_features(given["pixel_values"], tables).pooler_output
        embeddings, left, types = base.get_input_embeddings()(ids), torch.ones_like(ids, dtype=torch.bool), []
        places = (ids[0] == model.config.image_token_id).nonzero().squeeze(1).split([len(own) for own in features])
        for number, (own, here, grid) in enumerate(zip(features, places, grids, strict=True)):
            embeddings[0, here], left[0, here] = own, selector.mask(own, grid)
            types.append((here, 1 + number % 2))
        kinds = torch.zeros_like(ids)
        for here, kind in types:
            kinds[0, here] = kind
        videos = tables[1::2] if len(tables) > 1 else None
        positions, _ = base.get_rope_index(ids, kinds, tables[::2], videos)
        embeddings, positions, behind = embeddings[:, left[0]], positions[:, :, left[0]], int(positions.max()) + 1
        new, logs = [], []
        for step in range(NEW):
            output = base.language_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
            log = model.lm_head(output.last_hidden_state[0, -1]).log_softmax(dim=-1)
            new.append(int(log.argmax()))
            logs.append(log.max().item())
            embeddings = torch.cat([embeddings, base.get_input_embeddings()(torch.tensor([new[-1:]]))], dim=1)
            positions = torch.cat([positions, torch.full((3, 1, 1), behind + step)], dim=2)
        found.append((new, logs))
    return found


class Steps:
    """What a scheduler of vLLM does, from now on.

    Attributes:
        cut: images of which one step takes the first tokens, and another the rest.
        cached: tokens of prompts that came from the prefix cache.
        keys: of blocks of the prefix cache, and of images in the encoder's.
    """

    def __init__(self, scheduler: Any) -> None:
        self.cut, self.cached, self.keys = 0, 0, set[Any]()
        self.scheduler, self.own = scheduler, scheduler.schedule
        scheduler.schedule = self.schedule

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step = self.own(*args, **kwargs)
        self.cached += sum(request.num_computed_tokens for request in step.scheduled_new_reqs)
        for name in step.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            self.keys |= {*request.block_hashes, *(image.identifier for image in request.mm_features)}
            places = [image.mm_position for image in request.mm_features]
            self.cut += sum(0 < request.num_computed_tokens - place.offset < place.length for place in places)
        return step


@contextmanager
def engine(
    place: Path, select: str | None, allowed: Sequence[str] | None = None, **options: Any
) -> Iterator[tuple[Any, Steps]]:
    """vLLM in this process, on the model in a folder, and what its scheduler does.

    Steps are of 24 tokens, and blocks of the prefix cache of 32: prompts are cut, and found there, within images.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    own = {name: given for name, given in {"select": select, "allowed": allowed}.items() if given is not None}
    if own:
        options["additional_config"] = {"vitrim": own}
    usual = {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
        "block_size": 32,
        "kv_cache_memory_bytes": 2**26,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 3},
    }
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    with mock.patch.dict(os.environ, environment):
        try:
            llm = LLM(model=str(place), dtype="float32", seed=0, **{**usual, **options})
            yield llm, Steps(llm.llm_engine.engine_core.engine_core.scheduler)
            del llm
        finally:
            gc.collect()
            cleanup_dist_env_and_memory()


def by_vllm(llm: Any, asked: Sequence[Prompt], select: Sequence[str | None] | None = None) -> list[Answer]:
    """The same of vLLM, all prompts in one call, each with its own setting if it has one in ``select``."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    given: list[dict[str, Any]] = []
    for (text, items), own in zip(asked, select or [None] * len(asked), strict=True):
        data = items if isinstance(items, dict) else dict(zip(("image", "video"), apart(items), strict=True))
        given.append({"prompt": text})
        if any(data.values()):
            given[-1]["multi_modal_data"] = {kind: some for kind, some in data.items() if some}
        if own is not None:
            given[-1]["mm_processor_kwargs"] = {"vitrim_select": own}
    found = []
    for request in llm.generate(given, how, use_tqdm=False):
        answer = request.outputs[0]
        new = list(answer.token_ids)
        found.append((new, [step[token].logprob for step, token in zip(answer.logprobs, new, strict=True)]))
    return found
