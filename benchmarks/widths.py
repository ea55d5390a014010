"""A larger ViT that computes the same as a smaller one, to time its cost with the decisions of published weights.

    python benchmarks/widths.py vit_tiny_patch16_224 vit_small_patch16_224 --checkpoint WEIGHTS --out WIDE
    vitrim compare vit_small_patch16_224 --checkpoint WIDE --data HELD_OUT -m tome:r=13 --engine openvino \\
        --precision int8 --at 1,8

Every channel is repeated, the columns of the product that reads it are divided by the number of copies, and heads are
repeated whole. Norms, attention maps and similarities of tokens are then unchanged, so a method decides as in the
smaller model. (A method that compares distances with a constant, not with each other, would not.)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import vitrim
from script import from_shell
from vitrim.errors import VitrimError
from vitrim.files import save_file
from vitrim.measure.inputs import random_images

LARGEST = 1e-4
"""Logits that differ by more are not those of the same function in float32."""


def widen_(wide: nn.Module, narrow: nn.Module) -> float:
    """Give ``wide`` the function of ``narrow``, timm's ViT of the same depth and width per head with fewer heads.

    Returns:
        The largest difference of logits on random images.

    Raises:
        VitrimError: the models do not differ in this alone.
    """
    state, expected = {}, wide.state_dict()
    for name, old in narrow.state_dict().items():
        if name not in expected or (new := expected.pop(name)).dim() != old.dim():
            raise VitrimError(f"expected the same layers with more channels, but {name} differs")
        copies = [size // own for size, own in zip(new.shape, old.shape, strict=True)]
        parts = old.unflatten(0, (3 if ".qkv." in name else 1, -1))  # q, k and v lie one behind the other
        repeated = parts.repeat(1, *copies).flatten(0, 1)
        if repeated.shape != new.shape:
            raise VitrimError(f"{name}: {tuple(new.shape)} is no multiple of {tuple(old.shape)}")
        state[name] = repeated / copies[1] if old.dim() == 2 else repeated
    if expected:
        raise VitrimError(f"expected the same layers with more channels, but {next(iter(expected))} is one more")
    wide.load_state_dict(state)
    images = random_images(narrow, 2, 0)
    with torch.inference_mode():
        difference = (wide(images) - narrow(images)).abs().max().item()
    if not difference <= LARGEST:
        raise VitrimError(f"expected heads of the same width and more of them, but logits differ by {difference:.1e}")
    return difference


def main(given: Sequence[str] | None = None) -> None:
    """Write the weights of the larger model, and the largest difference of logits on random images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("narrow", help="timm's, such as vit_tiny_patch16_224")
    parser.add_argument("wide", help="of 2 or 4 times the width and as many heads, such as vit_small_patch16_224")
    parser.add_argument("--checkpoint", help="weights of the narrow one")
    parser.add_argument("--out", required=True, type=Path, help="file for the weights of the wide one, .safetensors")
    options = parser.parse_args(given)
    narrow = vitrim.ModelSpec(options.narrow, checkpoint=options.checkpoint).load().model.eval()
    wide = vitrim.create_model(options.wide).eval()
    difference = widen_(wide, narrow)
    save_file(wide.state_dict(), options.out)
    print(f"{options.out}: logits differ by at most {difference:.1e}")


if __name__ == "__main__":
    from_shell(main)
