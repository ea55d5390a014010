"""The plugin: with a setting, a model's configuration names an architecture that selects image tokens."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm import ModelRegistry
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

from vitrim.errors import VitrimError
from vitrim.serving.vllm.setting import (
    ANY,
    FAMILIES,
    FIELD,
    PREFIX,
    VARIABLES,
    check_fits,
    family_of,
    selector_of,
    setting_of,
)

LIBRARY = EngineArgs.create_model_config
"""vLLM's own function."""
IMPLEMENTATIONS = ("auto", "vllm")
"""Values of ``model_impl`` for which vLLM takes its own model."""


class Pruned(MultiModalConfig):
    """Positions come with the embeddings: vLLM's own interface for pruned prompts, without its pruning of videos."""

    def is_multimodal_pruning_enabled(self) -> bool:
        return True


@dataclass(frozen=True)
class SelectingModel(_LazyRegisteredModel):
    """A family in vLLM's registry, with the traits of vLLM's own model of the architecture ``base``.

    vLLM would start a process to find them, and keep them until the family's file changes; but they come from other
    files.
    """

    base: str

    def inspect_model_cls(self) -> _ModelInfo:
        return replace(ModelRegistry.models[self.base].inspect_model_cls(), architecture=self.class_name)


def changed(given: Any, changes: dict[str, Any], config: Any) -> Any:
    """Apply the user's override function ``given`` to a model's configuration, and then the ``changes``."""
    config = given(config)
    config.update(changes)
    return config


def create_model_config(self: Any) -> Any:
    """vLLM's configuration; with a setting, that of the selecting architecture; `VitrimError` if it does not fit."""
    if FIELD in (self.mm_processor_kwargs or {}):
        raise VitrimError(f"{FIELD} in mm_processor_kwargs is for requests: set {VARIABLES['select']} for the server")
    setting = setting_of(self.additional_config, os.environ)
    plain = LIBRARY(self)
    if setting is None:
        return plain
    architecture, family = family_of(plain.architectures, plain.hf_config)
    for text in (setting.select, *(setting.allowed or ())):
        if text != ANY:
            check_fits(selector_of(text), family)
    if plain.model_impl not in IMPLEMENTATIONS:
        raise VitrimError(
            f"model_impl={plain.model_impl}: image tokens are selected in vLLM's own models: leave it out, or take "
            f"{' or '.join(IMPLEMENTATIONS)}"
        )
    if plain.multimodal_config.get_video_pruning_spec() is not None:
        raise VitrimError(
            f"video_pruning_rate={plain.multimodal_config.video_pruning_rate} selects tokens of videos, too: leave "
            "it out, or the selector"
        )
    # vLLM's own arguments stay as the user gave them.
    args = copy.copy(self)
    changes = {
        "architectures": [PREFIX + architecture],
        "vitrim_select": setting.select,
        "vitrim_allowed": setting.allowed,
    }
    given = self.hf_overrides
    args.hf_overrides = partial(changed, given, changes) if callable(given) else {**(given or {}), **changes}
    if family.images_only:
        limits = self.limit_mm_per_prompt or {}
        if "video" in limits and plain.multimodal_config.get_limit_per_prompt("video"):
            raise VitrimError(f"videos of {family.name} cannot be selected in vLLM: leave their limit out")
        args.limit_mm_per_prompt = {**limits, "video": 0}
    config = LIBRARY(args)
    if family.axes:
        config.multimodal_config.__class__ = Pruned
    return config


def register() -> None:
    """Register the families, and read the setting whenever vLLM creates a configuration.

    vLLM calls it in every process, sometimes more than once.
    """
    known = ModelRegistry.get_supported_archs()
    for architecture, family in FAMILIES.items():
        if PREFIX + architecture not in known:
            module, name = family.target.split(":")
            model = SelectingModel(f"vitrim.serving.vllm.{module}", name, architecture)
            ModelRegistry.models[PREFIX + architecture] = model
        if architecture in MODELS_CONFIG_MAP:  # what vLLM changes in a server's settings for some models
            MODELS_CONFIG_MAP[PREFIX + architecture] = MODELS_CONFIG_MAP[architecture]
    EngineArgs.create_model_config = create_model_config
