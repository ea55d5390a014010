"""Tables of the folder; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {"open_clip.transformer.VisionTransformer": "vit:OpenClipViT"}

LIBRARIES: dict[str, str] = {"open_clip": "library:OpenClipLibrary"}
