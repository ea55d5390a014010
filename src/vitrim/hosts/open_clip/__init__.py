"""Tables: the file of this folder that knows each class of models; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "open_clip.transformer.VisionTransformer": "vit:OpenClipViT",
}
"""The host of each class of models."""

LIBRARIES: dict[str, str] = {
    "open_clip": "library:OpenClipLibrary",
}
"""The adapter for all models of the library, and those for some classes."""
