"""The entry point for lmms-eval: the name of the model, and its place."""

from __future__ import annotations

from lmms_eval.models.registry_v2 import ModelManifest


def manifest() -> ModelManifest:
    """The model for ``--model vitrim``."""
    return ModelManifest(model_id="vitrim", chat_class_path="vitrim.serving.lmms_eval.model.ReducedModel")
