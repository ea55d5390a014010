"""Video classification with VideoMAE, dense and with merged tokens of space and time.

    python examples/video.py                                                       # a tiny random model, offline
    python examples/video.py MCG-NJU/videomae-base-finetuned-kinetics FOLDER       # a folder with the clip's 16 frames

Prints the most probable classes before and after, and the tokens that are left after every block.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import VideoMAEConfig, VideoMAEForVideoClassification, VideoMAEImageProcessor

import vitrim


def tiny_model() -> tuple[VideoMAEForVideoClassification, torch.Tensor]:
    """An untrained model of 6 blocks on 4 frames of 32 pixels, and such a clip: this runs without a download."""
    config = VideoMAEConfig(
        image_size=32,
        patch_size=8,
        num_frames=4,
        tubelet_size=2,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=5,
    )
    torch.manual_seed(0)
    return VideoMAEForVideoClassification(config).eval(), torch.randn(1, 4, 3, 32, 32)


def clip_of(folder: str, name: str) -> torch.Tensor:
    """The frames (1, T, 3, height, width) of a folder, in the order of their names."""
    frames = [Image.open(path).convert("RGB") for path in sorted(Path(folder).iterdir())]
    processor = VideoMAEImageProcessor.from_pretrained(name)
    return processor(frames, return_tensors="pt")["pixel_values"]  # type: ignore[no-any-return]


def main(arguments: list[str]) -> None:
    """Classify one clip: ``arguments`` are the model and the folder of frames, both or none."""
    if arguments:
        name, folder = arguments
        model, clip = VideoMAEForVideoClassification.from_pretrained(name).eval(), clip_of(folder, name)
    else:
        model, clip = tiny_model()

    with torch.no_grad():
        dense = model(clip).logits
        # of the published model's 1,568 tokens, r=65 takes a half by the end
        reduction = vitrim.reduce_(model, "tome:r=65" if arguments else "tome:r=3", record=True)
        reduced = model(clip).logits
    for title, logits in (("dense", dense), (reduction.config.describe(), reduced)):
        best = logits.softmax(dim=-1)[0].topk(3)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        print(f"{title}: " + ", ".join(f"{model.config.id2label[index]} {p:.3f}" for index, p in pairs))
    print("tokens after every block:", reduction.tokens_per_block)


if __name__ == "__main__":
    main(sys.argv[1:])
