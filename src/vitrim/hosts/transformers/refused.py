"""Reasons why some of the library's models cannot be reduced, with alternatives."""

CONVOLUTIONS = (
    "its layers are convolutions over a map, so it has no tokens that could be fewer; use a plain ViT, such as "
    "ViTForImageClassification or Dinov2ForImageClassification, or Dinov2Backbone in a dense model"
)

SHIFTED_WINDOWS = (
    "its windows shift from block to block and its map is halved between stages, so patches that are gone would be "
    "missing in other windows of the next block; use a plain ViT, such as Dinov2ForImageClassification, or "
    "Dinov2Backbone or VitDetBackbone in a dense model"
)

STAGES = (
    "its map of patches is halved between stages, by layers that read every patch at its place; use a plain ViT, such "
    "as Dinov2ForImageClassification, or Dinov2Backbone in a dense model"
)

SAM2 = (
    "SAM 2's encoder pools queries between stages and attends in windows of another size in each, so every window must "
    "stay whole; use SamModel or Sam3Model, whose image encoders have windows of one size"
)

DAVIT = (
    "DaViT attends among channels in every second block, in windows in the others, and halves its map between stages; "
    "keep the tower and choose among its image tokens, or use a model with a ViT, such as "
    "PaliGemmaForConditionalGeneration"
)
