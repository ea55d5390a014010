"""Hugging Face's retrievers of document pages: a vision-language model whose every token becomes a vector.

With fewer image tokens, a page has fewer vectors (rows of ``embeddings``). Prompts of text alone, such as queries, are
not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from vitrim.errors import VitrimError, first_line
from vitrim.hosts.transformers.library import TransformersLibrary
from vitrim.hosts.transformers.vlm import HuggingFaceVLM
from vitrim.hosts.transformers.vlm_family import embedded
from vitrim.hosts.transformers.vlms import Idefics3, PaliGemma, Qwen2VL


class _Retriever(HuggingFaceVLM):
    """A vision-language model within a model that projects its tokens, and reads the prompt's mask, too."""

    @classmethod
    def called(cls, model: nn.Module) -> list[nn.Module]:
        return [model]  # which must see a prompt as short as the model within does

    @classmethod
    def language(cls, model: Any) -> list[nn.Module]:
        return [*super().language(model), model.embedding_proj_layer]


class ColPali(_Retriever, PaliGemma):
    """PaliGemma, of which a linear layer makes vectors."""

    name = "ColPali"


class ColQwen2(_Retriever, Qwen2VL):
    """Qwen2-VL, of which a linear layer makes vectors.

    The library numbers its tokens one by one, images too: positions have one axis.
    """

    name = "ColQwen2"
    types = None

    @classmethod
    def has_axes(cls, model: nn.Module) -> bool:
        return False

    @classmethod
    def image_inputs(cls, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        given = super().image_inputs(model, images)
        # A row of patches for every image, as the library's processor pads them.
        return {**given, "pixel_values": given["pixel_values"].unflatten(0, (len(given["image_grid_thw"]), -1))}

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        pixels, grids = given.get("pixel_values"), given.get("image_grid_thw")
        if pixels is None or grids is None or pixels.dim() != 3:
            return given
        own = zip(pixels, grids.prod(dim=1).tolist(), strict=True)
        return {**given, "pixel_values": torch.cat([patches[:number] for patches, number in own])}

    @classmethod
    def handed(cls, model: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return embedded(model, given)


class ColModernVBert(_Retriever, Idefics3):
    """ModernVBERT, of which a linear layer makes vectors. A pixel shuffle joins cells of patches."""

    name = "ColModernVBert"

    @classmethod
    def cell(cls, model: Any) -> int:
        return model.base_model.config.pixel_shuffle_factor  # type: ignore[no-any-return]

    @classmethod
    def handed(cls, model: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return embedded(model, given)


class RetrieverLibrary(TransformersLibrary):
    """Makes vectors of pages and of queries, which the processor prepares: ``model.processor``, or its folder's."""

    learns = False

    def tasks(self, model: nn.Module) -> tuple[str, ...]:
        return ("retrieval",)

    def token_vectors(self, model: Any, items: Sequence[Any]) -> list[Tensor]:
        processor = getattr(model, "processor", None) or _processor(model.config._name_or_path)
        texts = isinstance(items[0], str)
        given = processor.process_queries(text=list(items)) if texts else processor.process_images(images=list(items))
        with torch.no_grad():
            rows: Tensor = model(**given.to(model.device, model.dtype)).embeddings
        # Vectors have length 1, but those of padding, which the library multiplies by the mask, 0.
        return [row[row.any(dim=1)] for row in rows]


@cache
def _processor(source: str) -> Any:
    """The processor of a folder, or on the Hub."""
    try:
        return transformers.AutoProcessor.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise VitrimError(
            f"cannot read how pages and queries are prepared from '{source}' (processor_config.json, tokenizer): "
            f"{first_line(error)}; set model.processor"
        ) from error
