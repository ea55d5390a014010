"""Which file of this folder knows which class of models; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "open_clip.transformer.VisionTransformer": "vit:OpenClipViT",
}
"""The host of each class of models."""

LIBRARIES: dict[str, str] = {
    "open_clip": "library:OpenClipLibrary",
}
"""What answers for all models of the library, and for those of some classes."""
