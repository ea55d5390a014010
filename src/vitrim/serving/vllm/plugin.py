"""The plugin that vLLM calls in every process: it puts models that select image tokens beside vLLM's own.

A model is chosen by the name of its architecture. With a setting, that name becomes one of `families`, so whatever runs
without a setting, in the same process too, is vLLM's own. The setting itself is written into the model's configuration,
which reaches every process that builds a processor or a worker.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from vitrim.core.registry import parse_selector
from vitrim.core.selection import Selector
from vitrim.errors import UnsupportedModelError, VitrimError

VARIABLE = "VITRIM_SELECT"
PREFIX = "Vitrim"
"""In front of the architecture's name."""
ATTRIBUTE = "vitrim_select"
"""Of the model's configuration: the selector, as text."""

MODULE = "vitrim.serving.vllm.families"
ONE_AXIS = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
)
THREE_AXES = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Architectures by the axes that positions of their language models have."""


def asked_for(additional: Mapping[str, Any] | Any, environment: Mapping[str, str] = os.environ) -> Selector | None:
    """The selector of ``--additional-config``, or else of the environment; None where neither sets one.

    Raises:
        VitrimError: it cannot be read, or cannot work behind an encoder's cache.

    Example:
        >>> asked_for({"vitrim": {"select": "divprune:keep=0.25"}}).describe()
        'divprune:keep=0.25'
    """
    own = additional.get("vitrim") if isinstance(additional, Mapping) else None
    text = environment.get(VARIABLE) or None
    if own is not None:
        if not isinstance(own, Mapping) or set(own) != {"select"} or not isinstance(own["select"], str):
            raise VitrimError(f'expected --additional-config \'{{"vitrim": {{"select": "..."}}}}\', got {own!r}')
        text = own["select"]
    return None if text is None else checked(parse_selector(text))


def checked(selector: Selector) -> Selector:
    """The same selector, if features of one image are all that it needs.

    Raises:
        VitrimError: it needs more, or does not know its count before the image.
    """
    needs = selector.needs()
    if needs.attention != "none":
        raise VitrimError(
            f"{selector.name} needs the tower's attention, which vLLM's kernels do not hand out: take divprune, "
            "cdpruner:text=none, dart:text_pivots=0, evs, random or pool"
        )
    if needs.text:
        without = {"dart": "text_pivots=0", "cdpruner": "text=none"}.get(selector.name)
        raise VitrimError(
            f"{selector.describe()} reads the question, and vLLM keeps an image's tokens for every question: "
            + (f"give {without}" if without else "take divprune")
        )
    selector.count((4, 4))  # raises where counts depend on the image
    return selector


def check_family(selector: Selector, architecture: str) -> None:
    """Raise an error that says why, if vLLM's model cannot take the selector.

    Raises:
        UnsupportedModelError: the architecture is not covered.
        VitrimError: its positions are not what the selector asks for.
    """
    if architecture not in ONE_AXIS + THREE_AXES:
        raise UnsupportedModelError(
            f"{VARIABLE}={selector.describe()}: image tokens of {architecture} cannot be selected in vLLM, only those "
            f"of {', '.join(ONE_AXIS + THREE_AXES)}"
        )
    if architecture in THREE_AXES and selector.positions == "closed":
        raise VitrimError(
            f"{selector.describe()}: positions of {architecture} have three axes, so tokens keep theirs: leave "
            "positions out"
        )
    if architecture in ONE_AXIS and selector.positions == "original":
        raise VitrimError(f"{selector.describe()}: vLLM closes positions of {architecture} up: leave positions out")


def activate(config: Any) -> None:
    """Write the setting, if there is one, into vLLM's finished ``config``, and take the model that follows it.

    Raises:
        VitrimError: see `asked_for` and `check_family`; also beside options of vLLM that prune by themselves.
    """
    selector = asked_for(config.additional_config)
    if selector is None:
        return
    model = config.model_config
    check_family(selector, model.architecture)
    if model.multimodal_config.is_multimodal_pruning_enabled():
        raise VitrimError(f"{selector.describe()}: leave --video-pruning-rate out, or the selector")
    if config.compilation_config.cudagraph_mm_encoder:
        raise VitrimError(
            f"{selector.describe()}: CUDA graphs of the encoder bypass it: leave cudagraph_mm_encoder out"
        )
    name = PREFIX + model.architecture
    setattr(model.hf_config, ATTRIBUTE, selector.describe())
    model.hf_config.architectures = [name]
    model._architecture = name


def register() -> None:
    """Register the models, and read the setting whenever vLLM makes a configuration. May run any number of times."""
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    known = ModelRegistry.get_supported_archs()
    for name in ONE_AXIS + THREE_AXES:
        if PREFIX + name not in known and name in known:
            ModelRegistry.register_model(PREFIX + name, f"{MODULE}:{PREFIX}{name}")
    made = EngineArgs.create_engine_config
    if getattr(made, "reads_vitrim", False):
        return

    @functools.wraps(made)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked_for(self.additional_config)  # a setting that cannot be read ends the start before a model is looked at
        config = made(self, *args, **kwargs)
        activate(config)
        return config

    setattr(create_engine_config, "reads_vitrim", True)  # noqa: B010
    setattr(EngineArgs, "create_engine_config", create_engine_config)  # noqa: B010
