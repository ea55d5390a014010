"""A pipeline of transformers that runs an exported, reduced model: onnxruntime computes, the pipeline stays the same.

    python examples/onnx_pipeline.py                                              # a tiny random model, offline
    python examples/onnx_pipeline.py hf:google/vit-base-patch16-224 cat.jpg tome:r=8   # a model of the hub

`OnnxClassifier` is all it takes: a model of transformers whose forward is a call of the file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    pipeline,
)
from transformers.modeling_outputs import ImageClassifierOutput

import vitrim
from vitrim.loading import create_model


class OnnxClassifier(PreTrainedModel):
    """A classifier whose forward runs a file.

    Args:
        config: of the model that was exported: the pipeline reads the names of the classes from it.
        file: (batch, 3, H, W) normalised images in, logits out.
    """

    config_class = PreTrainedConfig
    main_input_name = "pixel_values"
    _supports_sdpa = True  # whatever the config asks for: attention is computed in the file

    def __init__(self, config: PreTrainedConfig, file: vitrim.Exported) -> None:
        super().__init__(config)
        self.file = file
        self.device_of_inputs = torch.nn.Parameter(torch.zeros(1), requires_grad=False)  # the pipeline asks where it is

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        """Logits of images (B, 3, H, W)."""
        logits = self.file.run(np.ascontiguousarray(pixel_values.cpu().numpy()))
        return ImageClassifierOutput(logits=torch.from_numpy(logits))


def tiny_model() -> tuple[ViTForImageClassification, ViTImageProcessor]:
    """An untrained model of 2 blocks on 64 patches, so that this runs without a download."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=5,
    )
    return ViTForImageClassification(config).eval(), ViTImageProcessor(size={"height": 64, "width": 64})


def main(arguments: list[str]) -> None:
    """Classify one image with the model, the image and the method named in ``arguments``, each optional."""
    name, path, method = (*arguments, None, None, None)[:3]
    if name is None:
        model, processor = tiny_model()
    else:
        model = create_model(name, pretrained=True)
        processor = AutoImageProcessor.from_pretrained(name.removeprefix("hf:"))
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    image = Image.fromarray(noise) if path is None else Image.open(path).convert("RGB")

    reduction = vitrim.reduce_(model, method or "tome:r=8")
    eager = pipeline("image-classification", model=model, image_processor=processor)(image, top_k=3)
    vitrim.restore_(model)
    with TemporaryDirectory() as folder:
        file = vitrim.export(model, reduction.config, Path(folder) / "model.onnx")
        classify = pipeline("image-classification", model=OnnxClassifier(model.config, file), image_processor=processor)
        exported = classify(image, top_k=3)
        print(f"{reduction.config.describe()}: tokens after every block {file.metadata['tokens_per_block']}")
    for one, other in zip(eager, exported, strict=True):
        print(f"eager {one['label']} {one['score']:.4f}, onnxruntime {other['label']} {other['score']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
