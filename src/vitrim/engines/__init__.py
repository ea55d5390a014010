"""Models as files that run without vitrim: ONNX, torch.export, AOTInductor, OpenVINO.

    file = vitrim.export(model, "tome:r=13", "m.onnx")
    logits = file.run(images)

An `Engine` prepares a model and gives a `Runnable`: a module, or a file that a `Format` wrote from the exported
`Program`; `check` compares the two; `bound` fixes the token counts of adaptive methods, as `vitrim.freeze` does.
"""

from vitrim.engines.exported import Exported
from vitrim.engines.formats import engines, register_format
from vitrim.engines.formats.base import Format
from vitrim.engines.parity import Parity, check
from vitrim.engines.static import bound

__all__ = [
    "Exported",
    "Format",
    "Parity",
    "bound",
    "check",
    "engines",
    "register_format",
]
