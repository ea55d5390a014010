"""Tables of the folder; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {"torchvision.models.vision_transformer.VisionTransformer": "vit:TorchvisionViT"}

LIBRARIES: dict[str, str] = {
    "torchvision": "library:TorchvisionLibrary",
    "torchvision.models.vision_transformer.VisionTransformer": "library:TorchvisionViTLibrary",
}
