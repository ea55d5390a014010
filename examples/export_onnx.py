"""A reduced model in onnxruntime, without torch or vitrim at the end that uses it.

    python examples/export_onnx.py                                     # a tiny random model, offline
    python examples/export_onnx.py deit_small_patch16_224 tome:r=13    # pretrained weights of timm (downloads them)

Writes the model with its preprocessing in the graph, then reads the file as any program would: a photograph is resized
and cropped as the file says, uint8 pixels go in, logits come out (docs/running.md has the same without vitrim).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import timm
import torch
from PIL import Image

import vitrim


def write(name: str | None, method: str, path: Path) -> vitrim.Exported:
    """Export a model of timm, or an untrained one of 2 blocks on 16 patches: this runs without a download."""
    if name is None:
        torch.manual_seed(0)
        model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3)
        wanted = vitrim.FileSpec(preprocess=True, classes=["cat", "dog", "car"])
        return vitrim.export(model, method, path, wanted)
    model = timm.create_model(name, pretrained=True)
    return vitrim.export(model, method, path, vitrim.FileSpec(preprocess=True, name=name))


def pixels_of(image: Image.Image, known: dict[str, Any]) -> np.ndarray[Any, Any]:
    """(H, W, 3) uint8 of a photograph, as timm resizes and crops it."""
    (height, width), (side, _) = known["size"], known["resize"]
    size = (side * image.width // min(image.size), side * image.height // min(image.size))
    image = image.convert("RGB").resize(size, Image.Resampling[known["interpolation"].upper()])
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    return np.asarray(image.crop((left, top, left + width, top + height)))


def main(arguments: list[str]) -> None:
    """Export and run: ``arguments`` are a model and a method, both optional."""
    name, method = (*arguments, None, None)[:2]
    with TemporaryDirectory() as folder:
        file = write(name, method or "tome:r=4", Path(folder) / "model.onnx")
        session = onnxruntime.InferenceSession(str(file.path))  # from here on without vitrim
        known = json.loads(session.get_modelmeta().custom_metadata_map["vitrim"])
        noise = np.random.default_rng(0).integers(0, 256, (2, 300, 451, 3), dtype=np.uint8)
        images = np.stack([pixels_of(Image.fromarray(each), known["preprocessing"]) for each in noise])
        (logits,) = session.run(["logits"], {"image": images})
        print(f"{known['method']}: tokens after every block {known['tokens_per_block']}")
        print(f"{known['gmacs'] / known['dense_gmacs']:.0%} of the MACs; {file.metadata['parity']}")
        for number in logits.argmax(axis=1):
            print("class:", known["classes"][number] if known["classes"] else number)


if __name__ == "__main__":
    main(sys.argv[1:])
