"""Hugging Face models of an image and a text tower: CLIP, SigLIP, AltCLIP, Chinese-CLIP, AIMv2, MetaCLIP 2, OWL-ViT.

Text towers are not reduced, even if their layers have the same class.
"""

from __future__ import annotations

from transformers.models.aimv2 import modeling_aimv2 as aimv2
from transformers.models.altclip import modeling_altclip as altclip
from transformers.models.chinese_clip import modeling_chinese_clip as chinese_clip
from transformers.models.clip import modeling_clip as clip
from transformers.models.metaclip_2 import modeling_metaclip_2 as metaclip_2
from transformers.models.owlv2 import modeling_owlv2 as owlv2
from transformers.models.owlvit import modeling_owlvit as owlvit
from transformers.models.siglip import modeling_siglip as siglip

from vitrim.hosts.transformers.common import ClassTokenTower, PatchTower, ReducedClipLayer, ReducedLayer
from vitrim.hosts.transformers.versions import tower


class ReducedCLIPEncoderLayer(ReducedClipLayer, clip.CLIPEncoderLayer):
    attention_classes = (clip.CLIPAttention,)


class ReducedSiglipEncoderLayer(ReducedClipLayer, siglip.SiglipEncoderLayer):
    attention_classes = (siglip.SiglipAttention,)


class ReducedAltCLIPEncoderLayer(ReducedClipLayer, altclip.AltCLIPEncoderLayer):
    attention_classes = (altclip.AltCLIPAttention,)


class ReducedChineseCLIPVisionLayer(ReducedClipLayer, chinese_clip.ChineseCLIPVisionLayer):
    attention_classes = (chinese_clip.ChineseCLIPVisionAttention,)


class ReducedAimv2EncoderLayer(ReducedLayer, aimv2.Aimv2EncoderLayer):
    attention_classes = (aimv2.Aimv2Attention,)
    norm_name = "rms_norm1"
    output_names = ("out_proj",)
    update_names = ()
    mlp_names = ("rms_norm2", "ffn")
    scale_name = "scale"
    dropout_name = "dropout"


class ReducedMetaClip2EncoderLayer(ReducedClipLayer, metaclip_2.MetaClip2EncoderLayer):
    attention_classes = (metaclip_2.MetaClip2Attention,)


class ReducedOwlViTEncoderLayer(ReducedClipLayer, owlvit.OwlViTEncoderLayer):
    attention_classes = (owlvit.OwlViTAttention,)


class ReducedOwlv2EncoderLayer(ReducedClipLayer, owlv2.Owlv2EncoderLayer):
    attention_classes = (owlv2.Owlv2Attention,)


class HFCLIP(ClassTokenTower):
    """Image embeddings read the class token, the classifier averages the patches, the bare tower returns its tokens.
    The text tower is not reduced, though its layers have the same class."""

    name = "transformers CLIP"
    reduced_blocks = (ReducedCLIPEncoderLayer,)
    trunk_classes = (tower(clip, "CLIP"),)
    prefix_readers = (clip.CLIPModel, clip.CLIPVisionModelWithProjection)


class HFAltCLIP(ClassTokenTower):
    """The image tower, alone or beside the text tower."""

    name = "transformers AltCLIP"
    reduced_blocks = (ReducedAltCLIPEncoderLayer,)
    trunk_classes = (tower(altclip, "AltCLIP"),)
    prefix_readers = (altclip.AltCLIPModel,)


class HFChineseCLIP(ClassTokenTower):
    """The image tower, alone or beside the text tower."""

    name = "transformers Chinese-CLIP"
    reduced_blocks = (ReducedChineseCLIPVisionLayer,)
    trunk_classes = (tower(chinese_clip, "ChineseCLIP"),)
    prefix_readers = (chinese_clip.ChineseCLIPModel,)


class HFMetaClip2(ClassTokenTower):
    """Like CLIP."""

    name = "transformers MetaCLIP 2"
    reduced_blocks = (ReducedMetaClip2EncoderLayer,)
    trunk_classes = (tower(metaclip_2, "MetaClip2"),)
    prefix_readers = (metaclip_2.MetaClip2Model, metaclip_2.MetaClip2VisionModelWithProjection)


class HFSiglip(PatchTower):
    """No class token; the head attends to the patches with a probe, or averages them. The text tower is not reduced."""

    name = "transformers SigLIP"
    reduced_blocks = (ReducedSiglipEncoderLayer,)
    trunk_classes = (tower(siglip, "Siglip"),)


class HFAimv2(PatchTower):
    """No class token; the head, if any, attends to the patches with a probe."""

    name = "transformers AIMv2"
    reduced_blocks = (ReducedAimv2EncoderLayer,)
    trunk_classes = (aimv2.Aimv2VisionModel,)
    maker_name = "embeddings.patch_embed"


class HFOwlViT(ClassTokenTower):
    """The detector predicts a box and a class for every patch, so pruned ones come back."""

    name = "transformers OWL-ViT"
    heads = ("class token", "patches", "grid")
    reduced_blocks = (ReducedOwlViTEncoderLayer,)
    trunk_classes = (owlvit.OwlViTVisionTransformer,)
    prefix_readers = (owlvit.OwlViTModel,)
    grid_readers = (owlvit.OwlViTForObjectDetection,)


class HFOwlv2(ClassTokenTower):
    """Like OWL-ViT."""

    name = "transformers OWLv2"
    heads = ("class token", "patches", "grid")
    reduced_blocks = (ReducedOwlv2EncoderLayer,)
    trunk_classes = (owlv2.Owlv2VisionTransformer,)
    prefix_readers = (owlv2.Owlv2Model,)
    grid_readers = (owlv2.Owlv2ForObjectDetection,)
