"""Names of classes: the model's own, then those of the data, then ImageNet's."""

from __future__ import annotations

from typing import Any

from vitrim.hosts.shared.classes import class_names
from vitrim.loading import create_model


def test_classes_have_the_names_of_the_model_then_of_the_data() -> None:
    """Those of the data count where the model has none, and neither where there are too many or too few."""
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 1, "num_classes": 3}
    model: Any = create_model("test_vit", options=options)
    others = ["a", "b", "c"]
    assert class_names(model) is None
    assert class_names(model, others) == others
    model.class_names = ["c", "b", "a"]
    assert class_names(model, others) == class_names(model) == ["c", "b", "a"]
    model.class_names = ["a", "b"]  # of another head
    assert class_names(model, others) == others
    assert class_names(model, ["a", "b"]) is None


def test_names_with_wordnet_ids_are_what_people_call_them() -> None:
    model: Any = create_model("test_vit", options={"img_size": 32, "depth": 1, "num_classes": 2})
    assert class_names(model, ["n02099601", "cat"]) == ["golden retriever", "cat"]
