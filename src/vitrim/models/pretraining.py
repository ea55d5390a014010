"""ViTTM with its decoders as a model by name, so that a recipe can pre-train it; `vittm_mae` holds the model itself."""

from __future__ import annotations

from typing import Any

from timm.models import register_model

from vitrim.models.vittm import ViTTM, vittm_base_28_28
from vitrim.models.vittm_mae import MaskedViTTM


class ViTTMPretraining(MaskedViTTM):
    """A `MaskedViTTM` that says about itself what the training loop asks of every model.

    Args:
        encoder: without a classifier.
        num_classes: of the data. Nothing learns them.

    Attributes:
        pretrained_cfg: the encoder's: size, mean and standard deviation of the images.
    """

    def __init__(self, encoder: ViTTM, num_classes: int = 0) -> None:
        super().__init__(encoder)
        self.num_classes = num_classes
        self.pretrained_cfg = encoder.pretrained_cfg


@register_model
def vittm_base_28_28_mae(pretrained: bool = False, num_classes: int = 0, **kwargs: Any) -> ViTTMPretraining:
    """ViTTM-B(28,28) and a decoder per stream, to be pre-trained by `MaskedViTTM.losses`.

    Args:
        pretrained: refused by timm: there are no weights to load.
        num_classes: of the data, see `ViTTMPretraining`.
        **kwargs: of the encoder, e.g. ``img_size``.

    Example:
        >>> model = vittm_base_28_28_mae(embed_dim=48, num_heads=2, depth=1, img_size=56)
        >>> model.encoder.embed_dim, model.encoder.num_classes
        (48, 0)
    """
    return ViTTMPretraining(vittm_base_28_28(pretrained, num_classes=0, **kwargs), num_classes)
