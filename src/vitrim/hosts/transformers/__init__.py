"""Tables of the folder; see `vitrim.hosts`."""


def of_modules(places: dict[str, str]) -> dict[str, str]:
    """Expand a table of modules, ``"file:Name ClassName ..."``, into one of classes."""
    found: dict[str, str] = {}
    for module, text in places.items():
        place, *classes = text.split()
        found |= {f"transformers.models.{module}.modeling_{module}.{name}": place for name in classes}
    return found


HOSTS: dict[str, str] = of_modules(
    {
        "audio_spectrogram_transformer": "audio:HFAST ASTModel ASTForAudioClassification",
        "beit": "beit:HFBeit BeitModel BeitForImageClassification BeitForSemanticSegmentation BeitBackbone",
        "blip": "blip:HFBlip BlipVisionModel BlipModel",
        "blip_2": "blip:HFBlip2 Blip2VisionModel",
        "clip": "towers:HFCLIP CLIPVisionModel CLIPVisionModelWithProjection CLIPModel CLIPForImageClassification",
        "dinov2": "dino:HFDinov2 Dinov2Model Dinov2ForImageClassification Dinov2Backbone",
        "dinov2_with_registers": "dino:HFDinov2WithRegisters Dinov2WithRegistersModel "
        "Dinov2WithRegistersForImageClassification Dinov2WithRegistersBackbone",
        "dinov3_vit": "dino:HFDINOv3 DINOv3ViTModel DINOv3ViTBackbone",
        "radio": "radio:HFRadio RadioModel",
        "eomt": "eomt:HFEomt EomtForUniversalSegmentation",
        "eomt_dinov3": "eomt:HFEomtDinov3 EomtDinov3ForUniversalSegmentation",
        "vit_mae": "vit:HFViTMAE ViTMAEModel",
        "vit_msn": "vit:HFViTMSN ViTMSNModel ViTMSNForImageClassification",
        "ijepa": "vit:HFIJepa IJepaModel IJepaForImageClassification",
        "metaclip_2": "towers:HFMetaClip2 MetaClip2VisionModel MetaClip2VisionModelWithProjection MetaClip2Model "
        "MetaClip2ForImageClassification",
        "owlvit": "towers:HFOwlViT OwlViTVisionTransformer OwlViTVisionModel OwlViTModel OwlViTForObjectDetection",
        "owlv2": "towers:HFOwlv2 Owlv2VisionTransformer Owlv2VisionModel Owlv2Model Owlv2ForObjectDetection",
        "pixtral": "packed:HFPixtral PixtralVisionModel",
        "qwen2_vl": "packed:HFQwen2VL Qwen2VisionTransformerPretrainedModel",
        "qwen3_vl": "packed:HFQwen3VL Qwen3VLVisionModel",
        "sam": "sam:HFSam SamVisionEncoder SamVisionModel",
        "sam3": "sam:HFSam3 Sam3ViTModel",
        "lw_detr": "detr:HFLwDetr LwDetrViTBackbone",
        "rf_detr": "detr:HFRfDetr RfDetrDinov2Backbone",
        "vitdet": "sam:HFVitDet VitDetModel VitDetBackbone",
        "siglip": "towers:HFSiglip SiglipVisionModel SiglipModel SiglipForImageClassification",
        "siglip2": "siglip2:HFSiglip2 Siglip2VisionModel Siglip2Model Siglip2ForImageClassification",
        "altclip": "towers:HFAltCLIP AltCLIPVisionModel AltCLIPModel",
        "chinese_clip": "towers:HFChineseCLIP ChineseCLIPVisionModel ChineseCLIPModel",
        "aimv2": "towers:HFAimv2 Aimv2VisionModel Aimv2Model",
        "videomae": "video:HFVideoMAE VideoMAEModel VideoMAEForVideoClassification",
        "vjepa2": "video:HFVJEPA2 VJEPA2Model VJEPA2ForVideoClassification",
        "vit": "vit:HFViT ViTModel ViTForImageClassification",
        "deit": "vit:HFDeiT DeiTModel DeiTForImageClassification DeiTForImageClassificationWithTeacher",
        "vitpose_backbone": "vitpose:HFVitPose VitPoseBackbone",
        "vitpose": "vitpose:HFVitPose VitPoseForPoseEstimation",
        "idefics3": "vlm_towers:HFIdefics3 Idefics3VisionTransformer",
        "smolvlm": "vlm_towers:HFSmolVLM SmolVLMVisionTransformer",
        "internvl": "vlm_towers:HFInternVL InternVLVisionModel",
        "yolos": "yolos:HFYolos YolosModel YolosForObjectDetection",
    }
)

VISION_LANGUAGE: dict[str, str] = of_modules(
    {
        "llava": "vlms:Llava LlavaModel LlavaForConditionalGeneration",
        "vipllava": "vlms:VipLlava VipLlavaModel VipLlavaForConditionalGeneration",
        "paligemma": "vlms:PaliGemma PaliGemmaModel PaliGemmaForConditionalGeneration",
        "gemma3": "vlms:Gemma3 Gemma3Model Gemma3ForConditionalGeneration",
        "idefics3": "vlms:Idefics3 Idefics3Model Idefics3ForConditionalGeneration",
        "smolvlm": "vlms:Idefics3 SmolVLMModel SmolVLMForConditionalGeneration",
        "internvl": "vlms:InternVL InternVLModel InternVLForConditionalGeneration",
        "llava_next": "vlms:LlavaNext LlavaNextModel LlavaNextForConditionalGeneration",
        "llava_next_video": "vlms:LlavaNext LlavaNextVideoModel LlavaNextVideoForConditionalGeneration",
        "llava_onevision": "vlms:LlavaOneVision LlavaOnevisionModel LlavaOnevisionForConditionalGeneration",
        "qwen2_vl": "vlms:Qwen2VL Qwen2VLModel Qwen2VLForConditionalGeneration",
        "qwen3_vl": "vlms:Qwen3VL Qwen3VLModel Qwen3VLForConditionalGeneration",
        "qwen2_5_vl": "vlms:Qwen25VL Qwen2_5_VLModel Qwen2_5_VLForConditionalGeneration",
        "colpali": "retrievers:ColPali ColPaliForRetrieval",
        "colqwen2": "retrievers:ColQwen2 ColQwen2ForRetrieval",
        "colmodernvbert": "retrievers:ColModernVBert ColModernVBertForRetrieval",
    }
)

SELECTED: dict[str, str] = {"transformers": "vlms_selected:AnyVLM"} | of_modules(
    {
        "idefics2": "vlms_selected:Idefics2 Idefics2Model Idefics2ForConditionalGeneration",
        "cosmos3_edge": "vlms_selected:AnyVLM Cosmos3EdgeModel Cosmos3EdgeForConditionalGeneration",
        "qwen3_vl_moe": "vlms_selected:AnyQwen Qwen3VLMoeModel Qwen3VLMoeForConditionalGeneration",
        "qwen3_5": "vlms_selected:AnyQwen Qwen3_5Model Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "vlms_selected:AnyQwen Qwen3_5MoeModel Qwen3_5MoeForConditionalGeneration",
        "llama4": "vlms_selected:Llama4 Llama4ForConditionalGeneration",
        "paddleocr_vl": "vlms_selected:AnyVLM PaddleOCRVLModel PaddleOCRVLForConditionalGeneration",
        "molmo2": "vlms_selected:Molmo2 Molmo2Model Molmo2ForConditionalGeneration",
        "glm4v": "vlms_selected:Glm4V Glm4vModel Glm4vForConditionalGeneration",
        "glm4v_moe": "vlms_selected:Glm4V Glm4vMoeModel Glm4vMoeForConditionalGeneration",
        "glm46v": "vlms_selected:Glm4V Glm46VModel Glm46VForConditionalGeneration",
        "glm_ocr": "vlms_selected:Glm4V GlmOcrModel GlmOcrForConditionalGeneration",
        "blip_2": "vlms_selected:Blip2 Blip2ForConditionalGeneration",
        "instructblip": "vlms_selected:Blip2 InstructBlipForConditionalGeneration",
        "mllama": "vlms_selected:Mllama MllamaModel MllamaForConditionalGeneration",
        "florence2": "vlms_selected:Florence2 Florence2Model Florence2ForConditionalGeneration",
    }
)

_REFUSED_MODULES = {
    "refused:CONVOLUTIONS": "convnext convnextv2 dinov3_convnext focalnet regnet resnet",
    "refused:STAGES": "cvt glpn hiera levit mobilevit poolformer pvt pvt_v2 segformer swiftformer",
    "refused:SAM2": "sam2",
    "refused:SHIFTED_WINDOWS": "swin swinv2",
}
REFUSED: dict[str, str] = {
    **{
        f"transformers.models.{module}.modeling_{module}": reason
        for reason, modules in _REFUSED_MODULES.items()
        for module in modules.split()
    },
    "transformers.models.donut.modeling_donut_swin": "refused:SHIFTED_WINDOWS",
    "transformers.models.florence2.modeling_florence2.Florence2VisionBackbone": "refused:DAVIT",
    "transformers.models.sam2.modeling_sam2.Sam2HieraDetModel": "refused:SAM2",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": "vlms:WINDOWED",
}

LIBRARIES: dict[str, str] = {"transformers": "library:TransformersLibrary"} | of_modules(
    {
        "audio_spectrogram_transformer": "audio:ASTLibrary ASTModel ASTForAudioClassification",
        "eomt": "eomt:EomtLibrary EomtForUniversalSegmentation",
        "eomt_dinov3": "eomt:EomtLibrary EomtDinov3ForUniversalSegmentation",
        "qwen2_vl": "packed:QwenLibrary Qwen2VisionTransformerPretrainedModel",
        "qwen3_vl": "packed:QwenLibrary Qwen3VLVisionModel",
        "sam": "sam:HFSamLibrary SamVisionEncoder SamVisionModel",
        "siglip2": "siglip2:Siglip2Library Siglip2VisionModel Siglip2Model Siglip2ForImageClassification",
        "videomae": "video:VideoLibrary VideoMAEModel VideoMAEForVideoClassification",
        "vjepa2": "video:VideoLibrary VJEPA2Model VJEPA2ForVideoClassification",
        "yolos": "yolos:YolosLibrary YolosModel YolosForObjectDetection",
        "colpali": "retrievers:RetrieverLibrary ColPaliForRetrieval",
        "colqwen2": "retrievers:RetrieverLibrary ColQwen2ForRetrieval",
        "colmodernvbert": "retrievers:RetrieverLibrary ColModernVBertForRetrieval",
    }
)

ON_REDUCE: dict[str, str] = {"transformers.modeling_utils": "saving:support"}
