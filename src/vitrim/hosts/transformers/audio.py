"""Hugging Face AST: a ViT on spectrograms, with a class and a distillation token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.models.audio_spectrogram_transformer import modeling_audio_spectrogram_transformer as spectrogram

from vitrim.core.plan import HostFacts
from vitrim.hosts.transformers.common import TransformersHost
from vitrim.hosts.transformers.library import TransformersLibrary
from vitrim.hosts.transformers.versions import OLDER_VIT, VIT_LAYERS, ViTForm, attention


class ReducedASTLayer(ViTForm, spectrogram.ASTLayer):
    attention_classes = (attention(spectrogram, "AST", OLDER_VIT),)


class HFAST(TransformersHost):
    """Grid rows are frequencies, columns are times; patches may overlap.

    The input is a spectrogram (B, time, frequency): `HostFacts.input_size` has one channel, time and frequency.
    """

    name = "transformers AST"
    purpose = "video and audio"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedASTLayer,)
    trunk_classes = (spectrogram.ASTModel,)
    layers_name = VIT_LAYERS
    num_prefix = 2
    size_names = ("max_length", "num_mel_bins")
    prefix_readers = (spectrogram.ASTForAudioClassification,)
    tokens_of_images = False  # of spectrograms

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        facts, trunk = super().facts(model), cls.trunk(model)
        frequencies, times = trunk.embeddings.get_shape(trunk.config)
        return replace(
            facts,
            grid_size=(frequencies, times),
            input_size=(1, *facts.input_size[1:]),
            num_classes=model.classifier.dense.out_features if hasattr(model, "classifier") else 0,
        )


class ASTLibrary(TransformersLibrary):
    """A library whose classifier has a norm in front."""

    def inputs_of(self, model: nn.Module, images: Tensor) -> dict[str, Any]:
        """Spectrograms (B, time, frequency) of images with one channel, (B, 1, time, frequency)."""
        return {"input_values": images[:, 0]}

    def classifiers(self, model: Any) -> list[nn.Module]:
        return [model.classifier.dense] if hasattr(model, "classifier") else []
