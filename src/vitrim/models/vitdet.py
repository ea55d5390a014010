"""ViTDet: boxes and masks, from the last map of any supported model (Li et al., ECCV 2022).

The pyramid is ours; anchors, region proposals, RoI heads and mask pasting are torchvision's. A batch has one size, and
padded images come with their valid sizes: a reduction needs one grid of tokens per batch, so torchvision's
`GeneralizedRCNNTransform` is not used. Attention is global in every block unless the backbone has windows
(`vitrim.models.windowed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead

from vitrim.core.block import running
from vitrim.core.library import Size
from vitrim.errors import VitrimError
from vitrim.models.common import DenseModel
from vitrim.models.vitdet_heads import RoIs, roi_heads, wide

if TYPE_CHECKING:
    from vitrim.tasks.step import Step

SCALES = (4.0, 2.0, 1.0, 0.5)
"""Scales of the pyramid's maps relative to the patches: strides 4, 8, 16, 32 px at patches of 16 px."""
RATIOS = (0.5, 1.0, 2.0)
ANCHOR = 8
"""Side of an anchor over the stride of its level: 32 to 512 px at patches of 16 px."""
PROPOSALS = {"training": 2000, "testing": 1000}
BEFORE_NMS = {"training": 2000, "testing": 1000}

Detected = dict[str, Tensor]


class SimpleFeaturePyramid(nn.Module):
    """Maps at five scales from the last map of the backbone alone (section 3).

    Scale 4: a deconvolution 2 x 2 with stride 2 to C/2, LayerNorm, GELU, another to C/4; scale 2: one to C/2; scale 1:
    the map; scale 1/2: its maximum over 2 x 2. Each then goes through a 1 x 1 and a 3 x 3 convolution with LayerNorm
    over channels and no bias. ``p6`` is every second place of ``p5``.

    Example:
        >>> maps = SimpleFeaturePyramid(16, channels=8)(torch.zeros(1, 16, 4, 4))
        >>> {name: tuple(found.shape[2:]) for name, found in maps.items()}
        {'p2': (16, 16), 'p3': (8, 8), 'p4': (4, 4), 'p5': (2, 2), 'p6': (1, 1)}
    """

    def __init__(self, dim: int, channels: int = 256) -> None:
        super().__init__()
        self.p2 = nn.Sequential(
            nn.ConvTranspose2d(dim, dim // 2, 2, stride=2),
            LayerNorm2d(dim // 2),
            nn.GELU(),
            nn.ConvTranspose2d(dim // 2, dim // 4, 2, stride=2),
            *_to_channels(dim // 4, channels),
        )
        self.p3 = nn.Sequential(nn.ConvTranspose2d(dim, dim // 2, 2, stride=2), *_to_channels(dim // 2, channels))
        self.p4 = nn.Sequential(*_to_channels(dim, channels))
        self.p5 = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), *_to_channels(dim, channels))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the maps ``p2`` to ``p6``, each (B, channels, h, w), of the patches' map ``x`` (B, C, h, w)."""
        maps = {"p2": self.p2(x), "p3": self.p3(x), "p4": self.p4(x), "p5": self.p5(x)}
        maps["p6"] = F.max_pool2d(maps["p5"], kernel_size=1, stride=2)
        return maps


def _to_channels(dim: int, channels: int) -> tuple[nn.Module, ...]:
    """Two convolutions from ``dim`` to ``channels``, the end of every level."""
    return (
        nn.Conv2d(dim, channels, 1, bias=False),
        LayerNorm2d(channels),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        LayerNorm2d(channels),
    )


class StridedAnchors(AnchorGenerator):
    """torchvision's anchors at given strides; its own come from image size over map size, which must then divide."""

    def __init__(self, strides: Sequence[float]) -> None:
        super().__init__(tuple((ANCHOR * stride,) for stride in strides), (RATIOS,) * len(strides))
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Anchors (A, 4) of every image, on all of ``feature_maps``, in at least float32."""
        # Corners in half precision would be off by pixels.
        kind = wide(feature_maps[0].new_empty(0)).dtype
        self.set_cell_anchors(kind, feature_maps[0].device)
        grids = [found.shape[-2:] for found in feature_maps]
        anchors = torch.cat(self.grid_anchors(grids, [(stride, stride) for stride in self.strides]))
        return [anchors.to(kind)] * len(image_list.image_sizes)


class WideRPNHead(RPNHead):
    """torchvision's head with scores and box changes in at least float32: bfloat16 loses a pixel."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, changes = super().forward(x)
        return [wide(one) for one in logits], [wide(one) for one in changes]


class Detector(DenseModel):
    """Boxes, and with ``masks`` outlines, of the objects in images.

    Args:
        masks: predict a mask for every box (Mask R-CNN).
        cascade: refine the boxes in three stages of heads (Cascade R-CNN).
        channels: of the pyramid.
        hidden: width of the last layer of the box head.
        rpn_layers, box_layers: convolutions of the RPN and of the box head.
        samples: proposals of an image that train the heads, up to a quarter of them on objects.
        soft_nms: in evaluation, lower the scores of boxes that overlap a better one by more than this IoU, linearly,
            instead of dropping them above 0.5.
        maskness: in evaluation, multiply scores by the mean probability of a mask where it is higher; needs ``masks``.

    Example:
        >>> import timm
        >>> backbone = timm.create_model("test_vit", num_classes=0, dynamic_img_size=True)
        >>> model = Detector(backbone, num_classes=3, channels=16, hidden=16).eval()
        >>> sorted(model(torch.zeros(1, 3, 64, 64))[0])
        ['boxes', 'labels', 'scores']
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        *,
        masks: bool = False,
        cascade: bool = False,
        channels: int = 256,
        hidden: int = 1024,
        rpn_layers: int = 2,
        box_layers: int = 4,
        samples: int = 512,
        soft_nms: float | None = None,
        maskness: float | None = None,
    ) -> None:
        if maskness is not None and not masks:
            raise VitrimError("maskness weighs scores by masks: it goes with masks=true")
        super().__init__(backbone, num_classes)
        if self.layout.patch_size[0] != self.layout.patch_size[1]:
            raise VitrimError(f"a pyramid needs square patches, not {self.layout.patch_size} px")
        self.masks = masks
        self.task = "instances" if masks else "detection"
        self.patch = self.layout.patch_size[0]
        self.settings: dict[str, Any] = {
            "masks": masks,
            "cascade": cascade,
            "channels": channels,
            "hidden": hidden,
            "box_layers": box_layers,
            "samples": samples,
            "soft_nms": soft_nms,
            "maskness": maskness,
        }
        self.pyramid = SimpleFeaturePyramid(self.layout.dim, channels)
        # Pixels per place of each map; p6 takes every second place of p5.
        strides = [self.patch / scale for scale in (*SCALES, SCALES[-1] / 2)]
        self.rpn = RegionProposalNetwork(
            StridedAnchors(strides),
            WideRPNHead(channels, len(RATIOS), conv_depth=rpn_layers),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n=dict(BEFORE_NMS),  # a copy: torchvision keeps the dict objects
            post_nms_top_n=dict(PROPOSALS),
            nms_thresh=0.7,
        )
        self.roi_heads: RoIs = self._heads()

    def _heads(self) -> RoIs:
        return roi_heads(self.num_classes, strides=[self.patch / scale for scale in SCALES], **self.settings)

    def forward(self, images: Tensor, sizes: Sequence[Size] | None = None) -> list[Detected]:
        """Detect objects, in training and evaluation mode alike.

        Args:
            sizes: height and width of each image, in the top left corner; the rest is padding.

        Returns:
            Per image ``boxes`` (n, 4), x1 y1 x2 y2 in pixels of the input; ``labels`` (n,) in 0..K-1; ``scores`` (n,),
                the highest first (before `maskness`); with masks, ``masks`` (n, H, W) bool.
        """
        sizes = [(images.shape[2], images.shape[3])] * len(images) if sizes is None else list(sizes)
        batch, maps = ImageList(images, sizes), self.front(images)
        if images.is_meta:
            # for counting: the heads run on the largest numbers of proposals and detections
            self.rpn.head(list(maps.values()))
            heads: Any = self.roi_heads
            n = heads.detections_per_img
            heads.nominal(len(images) * PROPOSALS["testing"], len(images) * n)
            empty = next(iter(maps.values())).new_empty
            return [{"boxes": empty(n, 4), "labels": empty(n, dtype=torch.long), "scores": empty(n)}] * len(images)
        with running(False, self.rpn, self.roi_heads):  # torchvision's heads return losses or detections by it
            proposals, _ = self.rpn(batch, maps)
            found, _ = self.roi_heads(maps, proposals, batch.image_sizes)
        done = []
        for one in found:  # labels from 0, and masks as large as the image
            done.append({"boxes": one["boxes"], "labels": one["labels"] - 1, "scores": one["scores"]})
            if self.masks:
                masks = paste_masks_in_image(one["masks"], one["boxes"], (images.shape[2], images.shape[3]))
                done[-1]["masks"] = masks[:, 0] >= 0.5
        return done

    def losses(self, step: Step) -> dict[str, Tensor]:
        return self.criterion(step.images, cast("Sequence[Mapping[str, Tensor]]", step.targets))

    def criterion(self, images: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Compute the losses of Faster, Mask or Cascade R-CNN, in training and evaluation mode alike.

        Targets hold per image ``boxes`` (n, 4), x1 y1 x2 y2 in pixels, ``labels`` (n,) in 0..K-1, with masks ``masks``
        (n, H, W); n may be 0. Optional: ``size`` (2,), height and width without padding; ``iscrowd`` (n,), boxes to
        ignore. Returns ``rpn_objectness``, ``rpn_box``, ``roi_class``, ``roi_box``, with masks ``roi_mask``, and their
        sum ``total``.
        """
        sizes = []
        for target in targets:
            height, width = target["size"].tolist() if "size" in target else images.shape[2:]
            sizes.append((int(height), int(width)))
        batch, maps = ImageList(images, sizes), self.front(images)
        own = [self._target(target) for target in targets]
        with running(True, self.rpn, self.roi_heads):
            proposals, first = self.rpn(batch, maps, own)
            _, second = self.roi_heads(maps, proposals, batch.image_sizes, own)
        losses = {
            "rpn_objectness": first["loss_objectness"],
            "rpn_box": first["loss_rpn_box_reg"],
            "roi_class": second["loss_classifier"],
            "roi_box": second["loss_box_reg"],
        }
        if self.masks:
            losses["roi_mask"] = second["loss_mask"]
        return {"total": torch.stack(list(losses.values())).sum(), **losses}

    front_name = "trunk + pyramid"

    def front(self, images: Tensor) -> dict[str, Tensor]:
        """Compute the pyramid's maps of ``images`` (B, 3, H, W), the input of RPN and RoI heads."""
        tokens, grid = self.tokens(images)
        return cast("dict[str, Tensor]", self.pyramid(tokens.transpose(1, 2).unflatten(2, grid)))

    def reset_classifier(self, num_classes: int) -> None:
        """Create new box and mask heads for ``num_classes``; backbone, pyramid and RPN stay."""
        place = next(self.pyramid.parameters())
        self.num_classes = num_classes
        self.roi_heads = self._heads().to(device=place.device, dtype=place.dtype)

    def _target(self, target: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a target for torchvision's heads, where label 0 is the background."""
        if self.masks and "masks" not in target:
            raise VitrimError("masks are learned from masks, and the targets have none: set masks=false")
        own = {"boxes": target["boxes"].float(), "labels": target["labels"].long() + 1}
        if self.masks:
            own["masks"] = target["masks"].to(torch.uint8)
        if "iscrowd" not in target:
            return own
        single = ~target["iscrowd"].bool()  # a crowd box does not train
        return {name: value[single] for name, value in own.items()}
