"""Tiny vision-language models as folders that vLLM and transformers load alike, and answers of both.

Weights are random. They are written by transformers, and are in fp32, so that both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import vitrim

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


def tokenizer(special: Sequence[str]) -> Any:
    """Words w0, w1, ..., then special tokens from `WORDS` on; all a single token."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS - 4))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    found.add_special_tokens({"additional_special_tokens": list(special)})
    return found


class Served(NamedTuple):
    """A family, as a test sees it.

    Attributes:
        make: its configuration, processor and tokenizer's special tokens.
        image: how a prompt writes an image.
        sizes: widths and heights of images.
        rename: names of weights that vLLM reads otherwise than transformers writes them.
    """

    make: Callable[[], tuple[Any, Any]]
    image: str = "<image>"
    sizes: tuple[tuple[int, int], ...] = ((64, 64),)
    rename: tuple[tuple[str, str], ...] = ()


def llava() -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=WORDS,
        image_seq_length=64,
    )
    size = {"shortest_edge": 64}
    images = transformers.CLIPImageProcessor(size=size, crop_size={"height": 64, "width": 64})
    processor = transformers.LlavaProcessor(
        images,
        tokenizer(["<image>"]),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


CLIP = (("vision_tower.", "vision_tower.vision_model."),)
FAMILIES = {"llava": Served(llava, rename=CLIP)}


def folder(name: str, place: Path) -> Any:
    """Write the tiny model of a family into a folder; it itself, in fp32."""
    served = FAMILIES[name]
    config, processor = served.make()
    torch.manual_seed(0)
    kind = (
        getattr(transformers, config.architectures[0])
        if config.architectures
        else transformers.AutoModelForImageTextToText
    )
    model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    model = model.float().eval()
    model.config.architectures = [type(model).__name__]
    model.generation_config.eos_token_id = None
    model.save_pretrained(place)
    processor.save_pretrained(place)
    if served.rename:
        path = place / "model.safetensors"
        from safetensors.torch import load_file

        weights = {}
        for key, value in load_file(path).items():
            for old, new in served.rename:
                key = key.replace(old, new) if new not in key else key
            weights[key] = value.contiguous()
        save_file(weights, path, metadata={"format": "pt"})
    return model


Prompt = tuple[str, list[Image.Image]]


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
    for text, images in asked:
        given = processor(text=text, images=images or None, return_tensors="pt")
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


def by_vllm(llm: Any, asked: Sequence[Prompt]) -> list[Answer]:
    """The same of vLLM, all prompts in one call."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=NEW, min_tokens=NEW, ignore_eos=True, logprobs=0)
    given = [{"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})} for text, images in asked]
    found = []
    for request in llm.generate(given, how, use_tqdm=False):
        answer = request.outputs[0]
        new = list(answer.token_ids)
        found.append((new, [step[token].logprob for step, token in zip(answer.logprobs, new, strict=True)]))
    return found
