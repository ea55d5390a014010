"""ADE20K as published by the scene parsing challenge: `ade20k:ROOT`, with ROOT/images and ROOT/annotations."""

from __future__ import annotations

from vitrim.data.dense import SegmentationDataset, paired
from vitrim.data.folders import files_by_stem, subfolders
from vitrim.data.paths import existing, pick_split
from vitrim.data.readers import register_reader

_NAMES = (
    "wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person, earth, "
    "door, table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, mirror, rug, "
    "field, armchair, seat, fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, box, column, "
    "signboard, chest of drawers, counter, sand, sink, skyscraper, fireplace, refrigerator, grandstand, path, "
    "stairs, runway, case, pool table, pillow, screen door, stairway, river, bridge, bookcase, blind, coffee "
    "table, toilet, flower, book, hill, bench, countertop, stove, palm, kitchen island, computer, swivel chair, "
    "boat, bar, arcade machine, hovel, bus, towel, light, truck, tower, chandelier, awning, streetlight, booth, "
    "television receiver, airplane, dirt track, apparel, pole, land, bannister, escalator, ottoman, bottle, "
    "buffet, poster, stage, van, ship, fountain, conveyer belt, canopy, washer, plaything, swimming pool, stool, "
    "barrel, basket, waterfall, tent, bag, minibike, cradle, oven, ball, food, step, tank, trade name, microwave, "
    "pot, animal, bicycle, lake, dishwasher, screen, blanket, sculpture, hood, sconce, vase, traffic light, tray, "
    "ashcan, fan, pier, crt screen, plate, monitor, bulletin board, shower, radiator, glass, clock, flag"
)
CLASSES = tuple(_NAMES.split(", "))
"""The 150 classes, in the order of their pixel values 1 to 150."""


@register_reader("ade20k", "segmentation")
def read_ade20k(path: str, *, split: str | None = None) -> SegmentationDataset:
    """ADE20K with its 150 classes; pixel value 0 is ignored, others are the class plus one.

    Expects images/{training,validation}/*.jpg and annotations/{training,validation}/*.png below ``path``. Splits are
    `training` (`train`) and `validation`.
    """
    root, source = existing(path), f"ade20k:{path}"
    asked = "training" if split is not None and split.lower() == "train" else split
    name = pick_split(asked, subfolders(root / "images"), source, f"folders in {root / 'images'}")
    images = files_by_stem(root / "images" / name, source)
    masks = files_by_stem(root / "annotations" / name, source, (".png",))
    # Value 0 means everything else.
    relabel = {value + 1: value for value in range(len(CLASSES))}
    return paired(images, masks, source, class_names=CLASSES, ignore=0, relabel=relabel, split=name)
