"""Names of a model's classes, where something that is installed knows them."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["class_names"]

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def class_names(name: str, model: nn.Module, count: int) -> list[str]:
    """The names of the classes of a model: its own, CIFAR-10's, ImageNet's as timm has them, or numbers.

    Args:
        name: of the model, as `vitrim.loading.create_model` takes it.
        model: may have a ``config.id2label``, as those of Hugging Face do.
        count: of its classes.

    Example:
        >>> class_names("vitrim:cifar10_vit", nn.Identity(), 10)[:2], class_names("test_vit", nn.Identity(), 2)
        (['airplane', 'automobile'], ['class 0', 'class 1'])
    """
    own: Any = getattr(getattr(model, "config", None), "id2label", None)
    if isinstance(own, dict) and len(own) == count and set(own) == set(range(count)):
        return [str(own[number]) for number in range(count)]
    if "cifar10_" in name and count == len(CIFAR10):
        return list(CIFAR10)
    from timm.data import ImageNetInfo

    imagenet = ImageNetInfo()
    if count == imagenet.num_classes():
        return [imagenet.index_to_description(number) for number in range(count)]
    return [f"class {number}" for number in range(count)]
