"""Tables: the file of this folder that knows each class of models; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "timm.models.beit.Beit": "beit:TimmBeit",
    "timm.models.eva.Eva": "eva:TimmEva",
    "timm.models.naflexvit.NaFlexVit": "naflexvit:TimmNaFlexViT",
    "timm.models.vision_transformer_relpos.VisionTransformerRelPos": "relpos:TimmRelPos",
    "timm.models.vision_transformer_sam.VisionTransformerSAM": "sam:TimmSam",
    "timm.models.vision_transformer.VisionTransformer": "vit:TimmViT",
}
"""The host of each class of models."""

LIBRARIES: dict[str, str] = {
    "timm": "library:TimmLibrary",
    "timm.models.vision_transformer_sam.VisionTransformerSAM": "sam:TimmSamLibrary",
}
"""The adapter for all models of the library, and those for some classes."""
