"""The contents of the metadata of an exported file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.plan import Preprocessing
from vitrim.core.reduce import HANDLE, restore_
from vitrim.core.registry import ask
from vitrim.exporting.exported import Shape
from vitrim.measure.latency import shared_copy
from vitrim.measure.macs import count_macs
from vitrim.version import __version__

GIGA = 1e9


def describe(
    model: nn.Module,
    image: Tensor,
    told: Preprocessing,
    *,
    name: str | None,
    classes: Sequence[str] | None,
    tokens: Sequence[int] | None,
) -> dict[str, Any]:
    """The metadata of a model that is reduced, or not: everything but what depends on the file.

    Args:
        model: a copy, in eval mode.
        image: (1, C, H, W), to count multiply-accumulates on.
        told: the preprocessing of its images; what is not known is None in it.
        name: of the model; by default its library's name of the architecture.
        classes: names of the classes.
        tokens: left after each block, prefix included; None for a dense model.
    """
    reduction = getattr(model, HANDLE, None)
    dense = shared_copy(model)
    if reduction is not None:
        restore_(dense)
    macs = count_macs(dense, image).total
    return {
        "vitrim": __version__,
        "torch": str(torch.__version__),
        "model": name or ask(model).architecture(dense),
        "method": "none" if reduction is None else reduction.config.describe(),
        "preprocessing": _preprocessing(told),
        "classes": None if classes is None else list(classes),
        "tokens_per_block": None if tokens is None else list(tokens),
        "gmacs": (macs if reduction is None else count_macs(model, image).total) / GIGA,
        "dense_gmacs": macs / GIGA,
    }


def of_file(inputs: Shape, output: str, *, dtype: str, half: bool, opset: int, in_graph: bool) -> dict[str, Any]:
    """The metadata that depends on how the file is written."""
    layout = "NHWC, as read, 0 to 255" if in_graph else "NCHW, normalised"
    return {
        "input": {"name": "image", "shape": list(inputs), "dtype": dtype, "layout": layout},
        "output": {"name": output},
        "weights": "fp16" if half else "fp32",
        "opset": opset,
    }


def _preprocessing(told: Preprocessing) -> dict[str, Any]:
    """The fields of the preprocessing, without the library's own function."""
    fields = {field.name: getattr(told, field.name) for field in dataclasses.fields(told) if field.name != "transform"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
