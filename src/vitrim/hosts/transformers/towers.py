"""Hugging Face models of an image and a text tower: CLIP, SigLIP, AltCLIP, Chinese-CLIP, AIMv2, MetaCLIP 2, OWL-ViT,
OWLv2.

The image tower is reduced, alone or in a model of both. Text towers, whose layers may have the same class, are left as
they are.
"""

from __future__ import annotations

from typing import ClassVar

from transformers.models.aimv2.modeling_aimv2 import Aimv2Attention, Aimv2EncoderLayer, Aimv2VisionModel
from transformers.models.altclip.modeling_altclip import (
    AltCLIPAttention,
    AltCLIPEncoderLayer,
    AltCLIPModel,
    AltCLIPVisionModel,
)
from transformers.models.chinese_clip.modeling_chinese_clip import (
    ChineseCLIPModel,
    ChineseCLIPVisionAttention,
    ChineseCLIPVisionLayer,
    ChineseCLIPVisionModel,
)
from transformers.models.clip.modeling_clip import (
    CLIPAttention,
    CLIPEncoderLayer,
    CLIPModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)
from transformers.models.metaclip_2.modeling_metaclip_2 import (
    MetaClip2Attention,
    MetaClip2EncoderLayer,
    MetaClip2Model,
    MetaClip2VisionModel,
    MetaClip2VisionModelWithProjection,
)
from transformers.models.owlv2.modeling_owlv2 import (
    Owlv2Attention,
    Owlv2EncoderLayer,
    Owlv2ForObjectDetection,
    Owlv2Model,
    Owlv2VisionTransformer,
)
from transformers.models.owlvit.modeling_owlvit import (
    OwlViTAttention,
    OwlViTEncoderLayer,
    OwlViTForObjectDetection,
    OwlViTModel,
    OwlViTVisionTransformer,
)
from transformers.models.siglip.modeling_siglip import SiglipAttention, SiglipEncoderLayer, SiglipVisionModel

from vitrim.core.plan import Head
from vitrim.hosts.transformers.common import ReducedClipLayer, ReducedLayer, TransformersHost


class ReducedCLIPEncoderLayer(ReducedClipLayer, CLIPEncoderLayer):
    """`CLIPEncoderLayer` under reduction."""

    host_class = CLIPEncoderLayer
    attention_classes = (CLIPAttention,)


class ReducedSiglipEncoderLayer(ReducedClipLayer, SiglipEncoderLayer):
    """`SiglipEncoderLayer` under reduction."""

    host_class = SiglipEncoderLayer
    attention_classes = (SiglipAttention,)


class ReducedAltCLIPEncoderLayer(ReducedClipLayer, AltCLIPEncoderLayer):
    """`AltCLIPEncoderLayer` under reduction."""

    host_class = AltCLIPEncoderLayer
    attention_classes = (AltCLIPAttention,)


class ReducedChineseCLIPVisionLayer(ReducedClipLayer, ChineseCLIPVisionLayer):
    """`ChineseCLIPVisionLayer` under reduction."""

    host_class = ChineseCLIPVisionLayer
    attention_classes = (ChineseCLIPVisionAttention,)


class ReducedAimv2EncoderLayer(ReducedLayer, Aimv2EncoderLayer):
    """`Aimv2EncoderLayer` under reduction."""

    host_class = Aimv2EncoderLayer
    attention_classes = (Aimv2Attention,)
    norm_name = "rms_norm1"
    output_names = ("out_proj",)
    update_names = ()
    mlp_names = ("rms_norm2", "ffn")
    scale_name = "scale"
    dropout_name = "dropout"


class ReducedMetaClip2EncoderLayer(ReducedClipLayer, MetaClip2EncoderLayer):
    """`MetaClip2EncoderLayer` under reduction."""

    host_class = MetaClip2EncoderLayer
    attention_classes = (MetaClip2Attention,)


class ReducedOwlViTEncoderLayer(ReducedClipLayer, OwlViTEncoderLayer):
    """`OwlViTEncoderLayer` under reduction."""

    host_class = OwlViTEncoderLayer
    attention_classes = (OwlViTAttention,)


class ReducedOwlv2EncoderLayer(ReducedClipLayer, Owlv2EncoderLayer):
    """`Owlv2EncoderLayer` under reduction."""

    host_class = Owlv2EncoderLayer
    attention_classes = (Owlv2Attention,)


class ClassTokenTower(TransformersHost):
    """A tower with a class token, which the image embeddings read; the bare tower hands out its tokens."""

    purpose = "images and text"
    heads: ClassVar[tuple[Head, ...]] = ("class token", "patches")
    layers_name = "encoder.layers"


class PatchTower(TransformersHost):
    """A tower without a class token."""

    purpose = "images and text"
    heads: ClassVar[tuple[Head, ...]] = ("no class token",)
    num_prefix = 0
    has_class_token = False
    layers_name = "encoder.layers"


class HFCLIP(ClassTokenTower):
    """Hugging Face CLIP. The text tower, whose layers have the same class, is left as it is.

    Image embeddings read the class token. The classifier averages the patches, and the bare tower hands out its tokens.
    """

    name = "transformers CLIP"
    reduced_blocks = (ReducedCLIPEncoderLayer,)
    trunk_classes = (CLIPVisionModel,)
    prefix_readers = (CLIPModel, CLIPVisionModelWithProjection)


class HFAltCLIP(ClassTokenTower):
    """Hugging Face AltCLIP: the image tower, alone or next to the text tower."""

    name = "transformers AltCLIP"
    reduced_blocks = (ReducedAltCLIPEncoderLayer,)
    trunk_classes = (AltCLIPVisionModel,)
    prefix_readers = (AltCLIPModel,)


class HFChineseCLIP(ClassTokenTower):
    """Hugging Face Chinese-CLIP: the image tower, alone or next to the text tower."""

    name = "transformers Chinese-CLIP"
    reduced_blocks = (ReducedChineseCLIPVisionLayer,)
    trunk_classes = (ChineseCLIPVisionModel,)
    prefix_readers = (ChineseCLIPModel,)


class HFMetaClip2(ClassTokenTower):
    """Hugging Face MetaCLIP 2: as CLIP."""

    name = "transformers MetaCLIP 2"
    reduced_blocks = (ReducedMetaClip2EncoderLayer,)
    trunk_classes = (MetaClip2VisionModel,)
    prefix_readers = (MetaClip2Model, MetaClip2VisionModelWithProjection)


class HFSiglip(PatchTower):
    """Hugging Face SigLIP: no class token; its heads attend to the patches with a probe, or average them.

    The text tower, whose layers have the same class, is left as it is.
    """

    name = "transformers SigLIP"
    reduced_blocks = (ReducedSiglipEncoderLayer,)
    trunk_classes = (SiglipVisionModel,)


class HFAimv2(PatchTower):
    """Hugging Face AIMv2: no class token; its head, if it has one, attends to the patches with a probe."""

    name = "transformers AIMv2"
    reduced_blocks = (ReducedAimv2EncoderLayer,)
    trunk_classes = (Aimv2VisionModel,)
    maker_name = "embeddings.patch_embed"


class HFOwlViT(ClassTokenTower):
    """Hugging Face OWL-ViT: the detector has a box and a class for every patch, so pruned ones come back."""

    name = "transformers OWL-ViT"
    heads = ("class token", "patches", "grid")
    reduced_blocks = (ReducedOwlViTEncoderLayer,)
    trunk_classes = (OwlViTVisionTransformer,)
    prefix_readers = (OwlViTModel,)
    grid_readers = (OwlViTForObjectDetection,)


class HFOwlv2(ClassTokenTower):
    """Hugging Face OWLv2: as OWL-ViT."""

    name = "transformers OWLv2"
    heads = ("class token", "patches", "grid")
    reduced_blocks = (ReducedOwlv2EncoderLayer,)
    trunk_classes = (Owlv2VisionTransformer,)
    prefix_readers = (Owlv2Model,)
    grid_readers = (Owlv2ForObjectDetection,)
