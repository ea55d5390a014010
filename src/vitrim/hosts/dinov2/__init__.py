"""Which file of this folder knows which class of models; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "dinov2.models.vision_transformer.DinoVisionTransformer": "vit:Dinov2",
}
"""The host of each class of models."""

LIBRARIES: dict[str, str] = {
    "dinov2.models.vision_transformer.DinoVisionTransformer": "library:DinoLibrary",
}
"""What answers for all models of the library, and for those of some classes."""
