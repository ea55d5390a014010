"""Tables of the folder; see `vitrim.hosts`."""

_ENCODERS = {
    "deepseek_vit.DeepseekVit": "encoders:TimmDeepseek",
    "gemma4_vit.Gemma4Vit": "encoders:TimmGemma4",
    "qwen3_vit.Qwen3Vit": "encoders:TimmQwen3",
}
"""Beginnings of the names of two classes, the encoder and the classifier around it."""

HOSTS: dict[str, str] = {
    **{f"timm.models.{name}{end}": place for name, place in _ENCODERS.items() for end in ("Classifier", "Encoder")},
    "timm.models.beit.Beit": "beit:TimmBeit",
    "timm.models.eva.Eva": "eva:TimmEva",
    "timm.models.naflexvit.NaFlexVit": "naflexvit:TimmNaFlexViT",
    "timm.models.vision_transformer_relpos.VisionTransformerRelPos": "relpos:TimmRelPos",
    "timm.models.vision_transformer_sam.VisionTransformerSAM": "sam:TimmSam",
    "timm.models.vision_transformer.VisionTransformer": "vit:TimmViT",
    "timm.models.volo.VOLO": "volo:TimmVolo",
}

_REFUSED_MODULES = {
    "CONVOLUTIONS": "byobnet convmixer convnext cspnet cspnext densenet dla dpn efficientnet fasternet focalnet "
    "ghostnet hardcorenas hgnet hrnet inception_next inception_resnet_v2 inception_v3 inception_v4 lcnetv2 mambaout "
    "mobilenetv3 nasnet nfnet pnasnet rdnet regnet repghost repvit res2net resnest resnet resnetv2 rexnet "
    "selecsls senet sknet starnet tresnet vgg vovnet xception xception_aligned",
    "STAGES": "byoanet coat cpubone csatv2 davit edgenext efficientformer efficientformer_v2 efficientvim "
    "efficientvit_mit efficientvit_msra fastvit gcvit iformer levit lowformer maxxvit metaformer mobilenetv5 "
    "mobilevit mvitv2 nest nextvit pvt_v2 shvit swiftformer tiny_vit twins visformer",
    "MIXING": "mlp_mixer sequencer",
    "SHIFTED_WINDOWS": "swin_transformer swin_transformer_v2 swin_transformer_v2_cr",
    "CAIT": "cait",
    "CONVIT": "convit",
    "CROSSVIT": "crossvit",
    "HIERA": "hiera",
    "SAM2": "hieradet_sam2",
    "PIT": "pit",
    "TNT": "tnt",
    "CHANNELS": "xcit",
}
REFUSED: dict[str, str] = {
    f"timm.models.{module}": f"refused:{reason}"
    for reason, modules in _REFUSED_MODULES.items()
    for module in modules.split()
}

LIBRARIES: dict[str, str] = {
    "timm": "library:TimmLibrary",
    **{name: "library:TimmMapLibrary" for name, place in HOSTS.items() if place.startswith("encoders:")},
    "timm.models.vision_transformer_sam.VisionTransformerSAM": "sam:TimmSamLibrary",
    "timm.models.volo.VOLO": "library:TimmMapLibrary",
}
