"""LLaVA and others: all tokens of an image form one pool, with those of its tiles and the ends of rows."""

from __future__ import annotations

from vllm.model_executor.models import gemma4_mm, llava, llava_next, llava_onevision

from vitrim.serving.vllm.selecting import Selecting, selecting


@selecting
class ServedLlava(Selecting, llava.LlavaForConditionalGeneration):
    """LLaVA-1.5."""


@selecting
class ServedLlavaNext(Selecting, llava_next.LlavaNextForConditionalGeneration):
    """LLaVA-NeXT."""


@selecting
class ServedLlavaOneVision(Selecting, llava_onevision.LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision."""


@selecting
class ServedGemma4(Selecting, gemma4_mm.Gemma4ForConditionalGeneration):
    """Gemma 4."""
