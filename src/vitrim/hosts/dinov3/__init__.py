"""Tables of the folder; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {"dinov3.models.vision_transformer.DinoVisionTransformer": "vit:Dinov3"}

LIBRARIES: dict[str, str] = {"dinov3.models.vision_transformer.DinoVisionTransformer": ".dinov2.library:DinoLibrary"}
