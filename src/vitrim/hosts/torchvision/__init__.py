"""Which file of this folder knows which class of models; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "torchvision.models.vision_transformer.VisionTransformer": "vit:TorchvisionViT",
}
"""The host of each class of models."""

LIBRARIES: dict[str, str] = {
    "torchvision": "library:TorchvisionLibrary",
}
"""What answers for all models of the library, and for those of some classes."""
