"""Dense heads of other libraries on a backbone whose tokens are merged: reduce the backbone inside the model.

    python examples/dense_heads.py                                   # tiny random models, offline
    python examples/dense_heads.py FOLDER tome:r=16                  # your UperNet around a ViT backbone

Runs UperNet and DPT of transformers around a DINOv2 backbone, and a DPT of segmentation_models_pytorch around a ViT of
timm if that library is installed. Prints the tokens after every block and how close the maps stay.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import (
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

import vitrim

SIZE = 64


def dinov2(reshape: bool) -> Dinov2Config:
    """An untrained backbone of 4 blocks on 64 patches that hands out the map of every block."""
    return Dinov2Config(
        image_size=SIZE,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        mlp_ratio=2,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=reshape,
    )


def models() -> Iterator[tuple[nn.Module, nn.Module, Tensor]]:
    """Every model, the backbone in it that is reduced, and images that it takes."""
    images = torch.randn(2, 3, SIZE, SIZE)
    upernet = UperNetForSemanticSegmentation(
        UperNetConfig(backbone_config=dinov2(reshape=True), hidden_size=16, num_labels=5, use_auxiliary_head=False)
    )
    yield upernet, upernet.backbone, images
    dpt = DPTForDepthEstimation(
        DPTConfig(
            backbone_config=dinov2(reshape=False),
            is_hybrid=False,
            patch_size=8,
            hidden_size=32,
            neck_hidden_sizes=[8, 8, 8, 8],
            fusion_hidden_size=8,
            reassemble_factors=[4, 2, 1, 0.5],
        )
    )
    yield dpt, dpt.backbone, images
    if importlib.util.find_spec("segmentation_models_pytorch"):
        import segmentation_models_pytorch as smp

        segmenter = smp.DPT("tu-test_vit", encoder_weights=None, classes=5)
        yield segmenter, segmenter.encoder.model, torch.randn(2, 3, 160, 160)


def map_of(model: nn.Module, images: Tensor) -> Tensor:
    """The prediction of the model for every pixel."""
    with torch.no_grad():
        output = model(images)
    if isinstance(output, Tensor):
        return output
    found: Tensor = output.logits if "logits" in output else output.predicted_depth
    return found


def compare(model: nn.Module, backbone: nn.Module, images: Tensor, method: str) -> None:
    """Print what reducing ``backbone`` does to the map that ``model`` predicts."""
    dense = map_of(model, images)
    reduction = vitrim.reduce_(backbone, method, record=True)
    reduced = map_of(model, images)
    cosine = torch.nn.functional.cosine_similarity(dense.flatten(), reduced.flatten(), dim=0).item()
    print(f"{type(model).__name__}: tokens after every block {reduction.tokens_per_block}")
    print(f"  maps {tuple(dense.shape)}, cosine to the dense ones {cosine:.4f}")


def main(arguments: list[str]) -> None:
    """Compare the maps: ``arguments`` are an UperNet and the method, both optional."""
    name, method = (*arguments, None, None)[:2]
    torch.manual_seed(0)
    if name is not None:
        model = UperNetForSemanticSegmentation.from_pretrained(name).eval()
        return compare(model, model.backbone, torch.randn(1, 3, 512, 512), method or "tome:r=16")
    for model, backbone, images in models():
        compare(model.eval(), backbone, images, method or "tome:r=6")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
