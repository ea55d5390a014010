"""Hugging Face AST: a ViT on spectrograms, with a class and a distillation token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer import (
    ASTAttention,
    ASTLayer,
    ASTModel,
)

from vitrim.core.host import no_tokens
from vitrim.core.plan import HostFacts
from vitrim.core.registry import register_host
from vitrim.hosts.transformers.common import ReducedPlainLayer, TransformersHost


class ReducedASTLayer(ReducedPlainLayer, ASTLayer):
    """`ASTLayer` under reduction."""

    host_class = ASTLayer
    attention_class = ASTAttention


@register_host(
    "transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer.ASTModel",
    "transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer.ASTForAudioClassification",
)
class HFAST(TransformersHost):
    """Hugging Face AST. Rows of the grid are frequencies, columns are times; patches may overlap.

    Its input is a spectrogram (B, time, frequency): `HostFacts.input_size` has one channel, time and frequency.
    """

    name = "transformers AST"
    purpose = "video and audio"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedASTLayer,)
    trunk_classes = (ASTModel,)
    layers_name = "layers"
    num_prefix = 2

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return 2 if cls.find_classifiers(model) else None

    @classmethod
    def image_size(cls, config: Any) -> tuple[int, int]:
        return config.max_length, config.num_mel_bins

    @classmethod
    def find_classifiers(cls, model: Any) -> list[nn.Module]:
        return [model.classifier.dense] if hasattr(model, "classifier") else []

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        trunk = cls.trunk(model)
        length, bins = cls.image_size(trunk.config)
        frequencies, times = trunk.embeddings.get_shape(trunk.config)
        return replace(super().facts(model), grid_size=(frequencies, times), input_size=(1, length, bins))

    @classmethod
    def without_head(cls, model: nn.Module) -> nn.Module:
        raise no_tokens(model)  # it takes spectrograms, not images

    @classmethod
    def tokens(cls, model: nn.Module, images: Tensor) -> Tensor:
        raise no_tokens(model)
