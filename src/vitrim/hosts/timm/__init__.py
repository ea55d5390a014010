"""Tables of the folder; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "timm.models.beit.Beit": "beit:TimmBeit",
    "timm.models.deepseek_vit.DeepseekVitClassifier": "encoders:TimmDeepseek",
    "timm.models.deepseek_vit.DeepseekVitEncoder": "encoders:TimmDeepseek",
    "timm.models.eva.Eva": "eva:TimmEva",
    "timm.models.gemma4_vit.Gemma4VitClassifier": "encoders:TimmGemma4",
    "timm.models.gemma4_vit.Gemma4VitEncoder": "encoders:TimmGemma4",
    "timm.models.naflexvit.NaFlexVit": "naflexvit:TimmNaFlexViT",
    "timm.models.qwen3_vit.Qwen3VitClassifier": "encoders:TimmQwen3",
    "timm.models.qwen3_vit.Qwen3VitEncoder": "encoders:TimmQwen3",
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
    "timm.models.deepseek_vit.DeepseekVitClassifier": "library:TimmMapLibrary",
    "timm.models.deepseek_vit.DeepseekVitEncoder": "library:TimmMapLibrary",
    "timm.models.gemma4_vit.Gemma4VitClassifier": "library:TimmMapLibrary",
    "timm.models.gemma4_vit.Gemma4VitEncoder": "library:TimmMapLibrary",
    "timm.models.qwen3_vit.Qwen3VitClassifier": "library:TimmMapLibrary",
    "timm.models.qwen3_vit.Qwen3VitEncoder": "library:TimmMapLibrary",
    "timm.models.vision_transformer_sam.VisionTransformerSAM": "sam:TimmSamLibrary",
    "timm.models.volo.VOLO": "library:TimmMapLibrary",
}
