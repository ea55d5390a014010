"""Pascal VOC: `voc:ROOT`, with ROOT/ImageSets/Segmentation, ROOT/JPEGImages and ROOT/SegmentationClass."""

from __future__ import annotations

from vitrim.data.dense import SegmentationDataset
from vitrim.data.paths import check_files, existing, pick_split, read_text, visible
from vitrim.data.readers import register_reader

_NAMES = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person "
    "pottedplant sheep sofa train tvmonitor"
)
CLASSES = tuple(_NAMES.split())


@register_reader("voc", "segmentation")
def read_voc(path: str, *, split: str | None = None) -> SegmentationDataset:
    """Pascal VOC's segmentation: 20 classes and the background, class 0; pixel value 255 is ignored.

    ``path`` is the folder of one year, such as VOCdevkit/VOC2012. ``split`` is a list of ImageSets/Segmentation:
    `train`, `val` or `trainval`.
    """
    root, source = existing(path), f"voc:{path}"
    folder = root / "ImageSets" / "Segmentation"
    lists = [file for file in visible(folder) if file.suffix == ".txt"] if folder.is_dir() else []
    name = pick_split(split, [file.stem for file in lists], source, "lists ImageSets/Segmentation/*.txt, as a year has")
    stems = read_text(folder / f"{name}.txt", source).split()
    images = [root / "JPEGImages" / f"{stem}.jpg" for stem in stems]
    masks = [root / "SegmentationClass" / f"{stem}.png" for stem in stems]
    check_files(images, source)
    check_files(masks, source, "masks")
    return SegmentationDataset(images, masks, class_names=CLASSES, source=source, split=name)
