"""Tables: the file of this folder that knows each class of models; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "dinov2.models.vision_transformer.DinoVisionTransformer": "vit:Dinov2",
}
"""The host of each class of models."""

LIBRARIES: dict[str, str] = {
    "dinov2.models.vision_transformer.DinoVisionTransformer": "library:DinoLibrary",
}
"""The adapter for all models of the library, and those for some classes."""
