"""Names of a model's classes, where something that is installed knows them."""

from __future__ import annotations

from torch import nn

from vitrim.core.registry import ask

__all__ = ["class_names"]


def class_names(model: nn.Module, count: int) -> list[str]:
    """The names of the classes of a model: its own, ImageNet's as timm has them, or numbers.

    Args:
        model: of any library.
        count: of its classes.

    Example:
        >>> from vitrim.loading import create_model
        >>> class_names(create_model("vitrim:cifar10_vit"), 10)[:2]
        ['airplane', 'automobile']
        >>> class_names(create_model("test_vit", options={"num_classes": 2}), 2)
        ['class 0', 'class 1']
    """
    own = ask(model).class_names(model)
    if own is not None and len(own) == count:
        return list(own)
    from timm.data import ImageNetInfo

    imagenet = ImageNetInfo()
    if count == imagenet.num_classes():
        return [imagenet.index_to_description(number) for number in range(count)]
    return [f"class {number}" for number in range(count)]
