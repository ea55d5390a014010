"""Reasons why timm's other models cannot be reduced, with alternatives; see ``REFUSED`` in `__init__.py`."""

PLAIN = "use a plain ViT of its size, such as deit3_small_patch16_224 or vit_small_patch14_dinov2"

CONVOLUTIONS = f"its layers are convolutions over a map, so it has no tokens that could be fewer; {PLAIN}"

MIXING = f"its layers mix all places by fixed weights or step by step, so every place has to be there; {PLAIN}"

CHANNELS = (
    "it attends among channels, not among patches, so fewer patches save no attention, and convolutions in every block "
    f"read a patch's neighbours; {PLAIN}"
)

SHIFTED_WINDOWS = (
    "its windows shift from block to block and its map is halved between stages, so patches that are gone would be "
    "missing in other windows of the next block; for classification use a plain ViT, such as deit3_small_patch16_224, "
    "for detection and segmentation one with fixed windows, such as samvit_base_patch16_224, or a vitdet: or "
    "segmenter: model around a plain ViT"
)

STAGES = (
    "its map of patches is halved between stages by convolutions or pooling, which read every patch at its place, so "
    f"tokens could only be fewer within a stage; {PLAIN}"
)

PIT = (
    "a convolution halves its map between stages and reads every patch at its place, and its last stage has only some "
    "50 tokens left; use deit_tiny_distilled_patch16_224 or deit_small_distilled_patch16_224, which have the same heads"
)

CAIT = (
    "its attention mixes heads in front of and behind the softmax (talking heads), so there is no attention that a "
    "method could decide by or weigh merged tokens in; use a deit3 of its size and image size, such as "
    "deit3_small_patch16_384"
)

CONVIT = (
    "most of its blocks add a fixed map of positions to their attention behind the softmax, where merged tokens cannot "
    "weigh as many patches as they stand for; use deit_small_patch16_224, its plain form"
)

CROSSVIT = (
    "it has two sequences of patches of different sizes, whose class tokens change places, and a method plans for one; "
    "use a plain ViT at the same image size, such as deit3_small_patch16_224"
)

TNT = (
    "every block adds to each patch what a second transformer makes of its pixels, so a patch that is merged would "
    "still be computed twice; use deit_small_patch16_224, which is about as large"
)

HIERA = (
    "it pools queries between stages, which takes four neighbours of a fixed order for one, so patches that are gone "
    "would leave holes; use a plain ViT that was pre-trained likewise, such as vit_base_patch16_224.mae"
)

SAM2 = (
    "SAM 2's encoder pools queries between stages and attends in windows of other sizes in each, so every window must "
    "stay whole; use SAM's or SAM 3's, whose windows are fixed: samvit_base_patch16_224 here, or SamVisionModel and "
    "Sam3VisionModel of transformers"
)
