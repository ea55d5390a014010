"""A reduced model in the browser, without a server behind it: one static page, an ONNX file, and onnxruntime-web.

    python examples/export_for_web.py                                   # a tiny random model, into the folder web
    python examples/export_for_web.py web vitrim:cifar10_vit tome:r=8   # folder, model, method
    npm install --prefix web onnxruntime-web                            # fetches the engine, once
    python -m http.server --directory web 8000                          # then http://localhost:8000

Copies `web/index.html` beside this file into the folder, and writes the model with its preprocessing in the graph. The
page asks nothing of any other host; images stay in the browser.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import timm
import torch

import vitrim
from vitrim.loading import create_model

PAGE = Path(__file__).parent / "web" / "index.html"
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def main(arguments: list[str]) -> None:
    """Write the folder: ``arguments`` are the folder, a model and a method, each optional."""
    folder, name, method = (*arguments, None, None, None)[:3]
    out, method = Path(folder or "web"), method or "tome:r=4"
    out.mkdir(parents=True, exist_ok=True)
    if name is None:
        torch.manual_seed(0)
        model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3)
    else:
        model = create_model(name)
    classes = CIFAR10 if name == "vitrim:cifar10_vit" else None
    wanted = vitrim.FileSpec(preprocess=True, classes=classes, name=name)
    file = vitrim.export(model, method, out / "model.onnx", wanted)
    shutil.copyfile(PAGE, out / "index.html")
    print(f"{method}: {file.path.stat().st_size / 1e6:.1f} MB in {file.path}; {file.metadata['parity']}")


if __name__ == "__main__":
    main(sys.argv[1:])
