"""Zero-shot classification: the class whose sentence has the text embedding nearest to the image's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import normalize

from vitrim.core.registry import ask
from vitrim.errors import VitrimError
from vitrim.tasks.base import register_task
from vitrim.tasks.classes import told_apart
from vitrim.tasks.classification import Classification


@register_task
class ZeroShot(Classification):
    """Classification by the text tower of the image tower's model, such as CLIP or SigLIP.

    Logits (B, K) are the library's ``logits_per_image``: the scaled cosine of the image's embedding with that of each
    class's sentence. The text tower embeds the classes once, and is never reduced.

    Attributes:
        template: the sentence, with {} for the name; may be replaced before `read_names`. _ in names becomes a space.
    """

    name = "zero_shot"
    losses = ()
    learned_by = "a model of images and text"
    embeds = True

    def __init__(self, num_classes: int) -> None:
        super().__init__(max(num_classes, 2))
        self.template = "a photo of a {}"
        self.texts: tuple[Tensor, float, float] | None = None

    def read_names(self, model: nn.Module, class_names: Sequence[str] | None) -> None:
        """Embed the data's classes, whatever their numbers.

        `VitrimError` for no names (numbers are none), two classes that come to the same words, or no text tower.
        """
        if not class_names or all(name.strip().isdecimal() for name in class_names):
            found = "none" if not class_names else f"numbers: {', '.join(class_names[:3])}"
            raise VitrimError(
                f"zero-shot classification asks for the classes by their names, and the data has {found}; give them in "
                "a file, one per line in the order of the labels: --data-option class_names=FILE"
            )
        sentences = [self.template.format(name.replace("_", " ")) for name in told_apart(class_names)]
        vectors, scale, bias = ask(model).text_embeddings(model, sentences)
        # In float32: cosines of many classes lie close together.
        self.texts = normalize(vectors.float(), dim=1), scale, bias
        self.num_classes, self.places = len(class_names), list(range(len(class_names)))

    def predict(self, model: nn.Module, images: Tensor, targets: Any = None) -> Tensor:
        return self.of_embedding(ask(model).embedding(model, images))

    def of_embedding(self, vectors: Tensor) -> Tensor:
        if self.texts is None:
            raise VitrimError("zero-shot classification knows no classes: give a source or a dataset that names them")
        texts, scale, bias = self.texts
        return normalize(vectors.float(), dim=1) @ texts.to(vectors.device).T * scale + bias
