"""Models as files that run without vitrim: ONNX, torch.export, AOTInductor, OpenVINO.

    file = vitrim.export(model, "tome:r=13", "m.onnx")
    logits = file.run(images)

A `Program` is the exported module; a `Format` writes it and names the engine that runs it; `check` compares the two;
`freeze` and `bound` fix the token counts of adaptive methods. The folder is not called ``export``, because a package of
that name would hide the function `vitrim.export`.
"""

from vitrim.engines.exported import Exported
from vitrim.engines.formats import engines, register_format
from vitrim.engines.formats.base import Format
from vitrim.engines.program import Parity, check
from vitrim.engines.static import bound, freeze
from vitrim.engines.writing import export

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
