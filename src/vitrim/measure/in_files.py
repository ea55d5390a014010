"""Exported files among the models to measure: the deployed file beside the model it was made from, or alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import parse_methods
from vitrim.engines.exported import Exported
from vitrim.engines.machine import select_device
from vitrim.errors import VitrimError
from vitrim.loading import Loaded, ModelSpec, PlacedModel

AnyModel: TypeAlias = nn.Module | str | ModelSpec | Exported
MethodsAndFiles: TypeAlias = MethodConfig | str | Exported | Sequence[MethodConfig | str | Exported] | None


def load(spec: ModelSpec, device: str | torch.device, methods: Sequence[MethodConfig]) -> tuple[Loaded, list[Loaded]]:
    """The model of a description, which ``methods`` reduce unless it is a file, and the same at other sizes."""
    if not isinstance(spec.model, Exported):
        return spec.load_sizes(device)
    file: Any = spec.model
    if spec.pretrained or spec.checkpoint is not None or spec.options:
        raise VitrimError("pretrained, checkpoint and model_options say how to create a model, and a file is given")
    if torch.device(device).type != "cpu":
        raise VitrimError(f"files run on the CPU, not on {device}")
    if spec.img_sizes:
        raise VitrimError(f"{file.path} is an exported file, for images of one size: leave the other sizes out")
    reducing = next((config.describe() for config in methods if config.kind != "none"), None)
    if reducing is not None:
        raise VitrimError(f"{file.path} is an exported file, and runs as it was written: leave {reducing} out")
    return Loaded(file, str(file.path), str(file.path), {}, None), []


def place_of(spec: PlacedModel) -> torch.device:
    """The device of a model: that of its description, else its own; a model by name runs on the CPU."""
    if spec.device is None and isinstance(spec.model, nn.Module):
        return next(spec.model.parameters()).device
    return select_device(str(spec.device or "cpu"))


def parted(methods: MethodsAndFiles) -> tuple[list[MethodConfig], dict[str, Exported]]:
    """Split a list, or a single entry, into methods and files by path.

    Example:
        >>> [config.describe() for config in parted("tome:r=8")[0]]
        ['tome:r=8']
    """
    given: Any = [methods] if isinstance(methods, Exported) else methods
    files = [one for one in given if isinstance(one, Exported)] if isinstance(given, list | tuple) else []
    configs = parse_methods([one for one in given if not isinstance(one, Exported)] if files else given)
    return configs, {str(file.path): file for file in files}


def size_of(file: Exported, others: Sequence[Loaded]) -> int | None:
    """The image size of a file among those of ``others``; None for the model's own."""
    found: int | None = next(
        (one.img_size for one in others if one.preprocessing.size == file.preprocessing.size), None
    )
    return found


def check_alike(loaded: Loaded, files: Sequence[Exported], others: Sequence[Loaded] = ()) -> None:
    """Refuse ``files`` of another size or normalisation than the model, which may be measured at ``others``."""
    for file in files:
        # A file at another size is compared with the model at that size.
        beside = next((one for one in others if one.img_size == size_of(file, others)), loaded)
        for name in ("size", "mean", "std"):
            own, other = getattr(file.preprocessing, name), getattr(beside.preprocessing, name)
            if other is not None and not np.allclose(other, own, atol=1e-6):
                raise VitrimError(
                    f"{file.path} takes images with {name} {tuple(own)}, and this {type(loaded.model).__name__} with "
                    f"{tuple(other)}: they cannot be compared on the same batches"
                )


def file_words(files: Sequence[Exported]) -> str:
    """A note on the origin of the files, and on the one size of batches that some take."""
    texts = [
        f"{file.path} is {known.get('method', 'none')} of {known.get('model', 'a model')} on {file.engine} in "
        f"{file.precision}"
        + ("" if file.batch is None else f", in batches of {file.batch}: others are split or padded")
        for file in files
        for known in [file.metadata]
    ]
    return "; ".join(texts)
