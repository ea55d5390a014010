"""Models as files that run without vitrim: ONNX, torch.export, AOTInductor, OpenVINO.

    file = vitrim.export(model, "tome:r=13", "m.onnx")
    logits = file.run(images)

A `Program` is what is exported; a `Format` writes it and names the engine that runs it; `check` compares; `freeze` and
`bound` give methods that adapt to the images fixed counts. This folder is not called ``export``: as a package it would
hide the function `vitrim.export`.
"""

from vitrim.exporting.exported import Exported
from vitrim.exporting.formats import engines, register_format
from vitrim.exporting.formats.base import Format
from vitrim.exporting.program import Parity, check
from vitrim.exporting.static import bound, freeze
from vitrim.exporting.writing import export

__all__ = [
    "Exported",
    "Format",
    "Parity",
    "bound",
    "check",
    "engines",
    "export",
    "freeze",
    "register_format",
]
