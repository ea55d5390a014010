"""Class names of a model, for people to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from vitrim.core.registry import ask
from vitrim.tasks.base import spelling

WORDNET = re.compile(r"(n\d{8})\s*(.*)")


def class_names(model: nn.Module, others: Sequence[str] | None = None) -> list[str] | None:
    """The class names of a classifier: its own, else ``others`` (such as the data's), else ImageNet's, if as many.

    Example:
        >>> from vitrim.loading import create_model
        >>> class_names(create_model("vitrim:cifar10_vit"))[:2], class_names(create_model("vit_tiny_patch16_224"))[207]
        (['airplane', 'automobile'], 'golden retriever')
        >>> class_names(create_model("test_vit", options={"num_classes": 2})) is None
        True
    """
    library = ask(model)
    count = library.num_classes(model)
    for names in (library.class_names(model), others):
        if names and len(names) == count:
            return described(names)
    if not count or (imagenet := imagenet_of(count)) is None:
        return None
    return [imagenet.index_to_description(number).partition(",")[0] for number in range(count)]


def strange(names: Sequence[str], model: nn.Module) -> list[str] | None:
    """The class names of ``model`` if it shares none with ``names``, those of the data; else None.

    Synonyms and WordNet ids count as shared. Names that are numbers, on either side, are ignored.

    Example:
        >>> from vitrim.loading import create_model
        >>> model = create_model("vit_tiny_patch16_224")
        >>> strange(["Granny_Smith", "sofa"], model), strange(["n02099601"], model), strange(["0", "1"], model)
        (None, None, None)
        >>> strange(["daisy flower", "rose"], model)[:2]
        ['tench', 'goldfish']
    """
    known = class_names(model)
    if not known or all(name.strip().isdecimal() for name in names) or all(name.isdecimal() for name in known):
        return None
    every = [*known, *(ask(model).class_names(model) or ())]
    imagenet = imagenet_of(len(known))
    if imagenet is not None:
        every += [*imagenet.label_names(), *map(imagenet.index_to_description, range(len(known)))]
    spelt = {spelling(part) for name in every for part in (name, *name.split(","))}
    found = {spelling(part) for name in (*names, *described(names)) for part in (name, *name.split(","))}
    return None if found & spelt else known


def imagenet_of(count: int) -> Any | None:
    """timm's `ImageNetInfo` of the ImageNet with ``count`` classes; None if there is none."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})  # timm itself knows no more
    return None if subset is None else ImageNetInfo(subset)


def described(names: Sequence[str]) -> list[str]:
    """Class names with WordNet ids, as in ImageNet's folders and tables, replaced by readable ones.

    Example:
        >>> described(["n02099601", "n01440764 tench, Tinca tinca", "cat"])
        ['golden retriever', 'tench', 'cat']
    """
    found = [WORDNET.fullmatch(name) for name in names]
    if not any(found):
        return list(names)
    from timm.data import ImageNetInfo

    imagenet = ImageNetInfo("imagenet-22k")  # all others are parts of it
    known = set(imagenet.label_names())
    return [
        name if one is None
        else one[2].partition(",")[0] if one[2]
        else imagenet.label_name_to_description(name, detailed=False) if name in known
        else name
        for name, one in zip(names, found, strict=True)
    ]  # fmt: skip
