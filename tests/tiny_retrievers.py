"""Tiny retrievers of document pages of Hugging Face."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    ColModernVBertConfig,
    ColModernVBertForRetrieval,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ModernBertConfig,
    ModernVBertConfig,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from tiny_hosts.common import seeded
from tiny_vlms import IMAGE, TEXT, VISION, VLM, nested, packed, paligemma, qwen2_vl

WIDTH = 8
"""Of a vector."""


def colpali() -> nn.Module:
    within: Any = paligemma()
    return ColPaliForRetrieval(ColPaliConfig(vlm_config=within.config, embedding_dim=WIDTH))


def colqwen2() -> nn.Module:
    within: Any = qwen2_vl()
    return ColQwen2ForRetrieval(ColQwen2Config(vlm_config=within.config, embedding_dim=WIDTH))


def colmodernvbert() -> nn.Module:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    text = ModernBertConfig(**{name: TEXT[name] for name in names}, pad_token_id=0, local_attention=8)
    within = ModernVBertConfig(
        text_config=text, vision_config=SiglipVisionConfig(**VISION), image_token_id=IMAGE, pixel_shuffle_factor=2
    )
    return ColModernVBertForRetrieval(ColModernVBertConfig(vlm_config=within, embedding_dim=WIDTH))


def rows_of_patches(rows: list[int]) -> dict[str, Tensor]:
    """The form of ColQwen2's processor: a row of patches for every image, padded with zeros."""
    given = packed(rows)
    own = given["pixel_values"].split(given["image_grid_thw"].prod(dim=1).tolist())
    return {**given, "pixel_values": torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True)}


RETRIEVERS: dict[str, VLM] = {
    "colpali": VLM(seeded(colpali), 36),
    "colqwen2": VLM(seeded(colqwen2), 9, images=rows_of_patches),
    "colmodernvbert": VLM(seeded(colmodernvbert), 9, images=nested),
}


WORDS = ("<pad>", "<image>", "<bos>", "<eos>", "<unk>", "Question:", "Describe", "the", "image.", "red", "blue", "page")


def processor() -> Any:
    """ColPali's processor, with few words, for `colpali`."""
    words = models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    splits = Tokenizer(words)
    splits.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=splits, **named, extra_special_tokens={"image_token": "<image>"}
    )
    images = SiglipImageProcessor(size={"height": 24, "width": 24})
    images.image_seq_length = 36
    return ColPaliProcessor(images, tokenizer)
