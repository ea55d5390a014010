"""The engines of exported files, as `vitrim.speed.engines` times them: one for every format."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError
from vitrim.exporting.format import Format, formats
from vitrim.exporting.timing import on_engine
from vitrim.speed.engines import Call, Engine, register_engine


class FileEngine(Engine):
    """An engine that runs a file of one format, on the CPU and in float32.

    Args:
        kind: the format.

    Example:
        >>> from vitrim.exporting.format import format_named
        >>> FileEngine(format_named(None, Path("m.onnx"))).label
        'onnxruntime'
    """

    def __init__(self, kind: type[Format]) -> None:
        self.kind = kind
        self.label = kind.engine

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        self.kind.check()
        if device.type != "cpu" or dtype != torch.float32:
            name = str(dtype).removeprefix("torch.")
            raise VitrimError(
                f"engine {self.label} is timed on the CPU in float32, and this is {name} on {device.type}: leave it out"
            )

    def obstacle(self, config: MethodConfig) -> str | None:
        return config.obstacle()

    @property
    def whole_models_only(self) -> bool:
        return True

    def prepare(self, model: nn.Module, images: Tensor, folder: Path) -> Call:
        """Export the model, as it is, and run it once: that is when the engine is opened."""
        call = on_engine(model, None, self.label, images, folder)
        call()
        return call

    def peak_mib(self, model: nn.Module, call: Call, images: Tensor) -> float | None:
        return None  # its memory is not torch's


def _engines_of(kind: type[Format]) -> list[Engine]:
    return [FileEngine(kind)]


for _kind in formats().values():
    register_engine(_kind.engine, partial(_engines_of, _kind))
