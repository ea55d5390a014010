"""Tables: the file of this folder that knows each class of models; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "torchvision.models.vision_transformer.VisionTransformer": "vit:TorchvisionViT",
}
"""The host of each class of models."""

LIBRARIES: dict[str, str] = {
    "torchvision": "library:TorchvisionLibrary",
    "torchvision.models.vision_transformer.VisionTransformer": "library:TorchvisionViTLibrary",
}
"""The adapter for all models of the library, and those for some classes."""
