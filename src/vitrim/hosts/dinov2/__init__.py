"""Tables of the folder; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {"dinov2.models.vision_transformer.DinoVisionTransformer": "vit:Dinov2"}

LIBRARIES: dict[str, str] = {"dinov2.models.vision_transformer.DinoVisionTransformer": "library:DinoLibrary"}
