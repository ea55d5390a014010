"""Tables: the file of this folder that knows each class of models; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "dinov3.models.vision_transformer.DinoVisionTransformer": "vit:Dinov3",
}
"""The host of each class of models."""

LIBRARIES: dict[str, str] = {
    "dinov3.models.vision_transformer.DinoVisionTransformer": ".dinov2.library:DinoLibrary",
}
"""The adapter for all models of the library, and those for some classes."""
