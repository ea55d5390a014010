"""A reduced model in onnxruntime, without torch or vitrim at the end that uses it.

    python examples/export_onnx.py                                     # a tiny random model, offline
    python examples/export_onnx.py deit_small_patch16_224 tome:r=13    # pretrained weights of timm (downloads them)

Writes the model with its preprocessing in the graph, then reads the file as any program would: uint8 images in, logits
out, and what it must know about resizing and classes from the file itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import timm
import torch

import vitrim


def write(name: str | None, method: str, path: Path) -> vitrim.Exported:
    """Export a model of timm, or an untrained one of 2 blocks on 16 patches: this runs without a download."""
    if name is None:
        torch.manual_seed(0)
        model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3)
        return vitrim.export(model, method, path, preprocess=True, classes=["cat", "dog", "car"])
    return vitrim.export(timm.create_model(name, pretrained=True), method, path, preprocess=True, name=name)


def main(arguments: list[str]) -> None:
    """Export and run: ``arguments`` are a model and a method, both optional."""
    name, method = (*arguments, None, None)[:2]
    with TemporaryDirectory() as folder:
        file = write(name, method or "tome:r=4", Path(folder) / "model.onnx")
        session = onnxruntime.InferenceSession(str(file.path))  # from here on without vitrim
        known = json.loads(session.get_modelmeta().custom_metadata_map["vitrim"])
        height, width = known["preprocessing"]["size"]
        images = np.random.default_rng(0).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
        (logits,) = session.run(["logits"], {"image": images})
        print(f"{known['method']}: tokens after every block {known['tokens_per_block']}")
        print(f"{known['gmacs'] / known['dense_gmacs']:.0%} of the MACs; {file.metadata['parity']}")
        for number in logits.argmax(axis=1):
            print("class:", known["classes"][number] if known["classes"] else number)


if __name__ == "__main__":
    main(sys.argv[1:])
