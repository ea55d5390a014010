"""Choose the image tokens that a language model gets: LLaVA, Qwen, and a server that counts before it sees a pixel.

    python examples/select_image_tokens.py                                        # tiny random models, offline
    python examples/select_image_tokens.py Qwen/Qwen2.5-VL-3B-Instruct cat.jpg "What is this?"

The server is two processes: one encodes images and sends the features that a selector keeps; the other, which holds the
language model and never sees an image, has made its prompt meanwhile, with as many places as will come.
"""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

import vitrim

SELECT = "divprune:tokens=16"
IMAGE = 1
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
WORDS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def llava() -> tuple[Any, dict[str, torch.Tensor]]:
    """An untrained LLaVA on 64 patches, and a prompt with two images."""
    tower = CLIPVisionConfig(**TEXT, image_size=64, patch_size=8)
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=tower, text_config=LlamaConfig(**TEXT, **WORDS), image_token_id=IMAGE)
    ids = torch.tensor([[7, 8, *[IMAGE] * 64, 9, *[IMAGE] * 64, 10, 11]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 64, 64)}
    return LlavaForConditionalGeneration(config).eval(), inputs


def qwen() -> tuple[Any, dict[str, torch.Tensor]]:
    """An untrained Qwen2.5-VL, and a prompt with an image of 16 x 16 patches, 8 x 8 tokens."""
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
    }
    vision |= {"out_hidden_size": 64, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    text = {**TEXT, **WORDS, "num_key_value_heads": 4, "rope_parameters": rope}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=4)
    ids = torch.tensor([[7, 8, *[IMAGE] * 64, 9]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(256, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 16, 16]]),
    }
    return Qwen2_5_VLForConditionalGeneration(config).eval(), inputs


def answer(name: str, model: Any, inputs: dict[str, torch.Tensor], decode: Any) -> None:
    """Generate with all image tokens, and with those that are selected."""
    places = int((inputs["input_ids"] == model.config.image_token_id).sum())
    for select in (None, SELECT):
        if select is not None:
            vitrim.reduce_(model, select=select)  # the prompt is prepared as before, and follows by itself
        out = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        tokens = [places] if select is None else vitrim.get_reduction(model).image_tokens
        print(f"{name}, {select or 'all'}: image tokens {sum(tokens)}")
        print("  says:", decode(out[0, inputs["input_ids"].shape[1] :]))
    vitrim.restore_(model)


def encode(channel: Connection) -> None:
    """Encode images in a process of their own: what a selector keeps of their features is all that is sent."""
    model, inputs = llava()
    selector = vitrim.parse_selector(SELECT)
    with torch.no_grad():
        images = model.model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output
    for features in images:
        mask = selector.mask(features, (8, 8))
        channel.send((features[mask].numpy(), mask.numpy()))
    channel.close()


def serve() -> None:
    """Answer a prompt of two images that another process encodes."""
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    encoder = context.Process(target=encode, args=(there,))
    encoder.start()
    there.close()
    model, _ = llava()
    count = vitrim.parse_selector(SELECT).count((8, 8))  # known before any pixel: memory for the cache can be set aside
    ids = torch.tensor([[7, 8, *[IMAGE] * count, 9, *[IMAGE] * count, 10, 11]])
    embeddings = model.get_input_embeddings()(ids).detach()
    received = [here.recv() for _ in range(2)]
    encoder.join()
    features = torch.cat([torch.from_numpy(image) for image, _ in received])
    embeddings[ids == IMAGE] = features
    out = model.generate(inputs_embeds=embeddings, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert all(mask.sum() == count for _, mask in received)
    print(f"server, {SELECT}: counted {count} tokens per image before any pixel, received {len(features)}")
    print("  says:", out[0].tolist())


def main(arguments: list[str]) -> None:
    """Answer one prompt: ``arguments`` are the model, the image and the question, all of them or none."""
    if not arguments:
        for name, (model, inputs) in (("llava", llava()), ("qwen2.5-vl", qwen())):
            answer(name, model, inputs, torch.Tensor.tolist)
        serve()
        return
    name, path, question = arguments
    model = AutoModelForImageTextToText.from_pretrained(name).eval()
    processor = AutoProcessor.from_pretrained(name)
    content = [{"type": "image", "image": Image.open(path).convert("RGB")}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer(name, model, dict(inputs), processor.decode)


if __name__ == "__main__":
    main(sys.argv[1:])
