"""vitrim's own models and users' models, assumed to follow timm's conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.library import no_tokens
from vitrim.core.plan import Layout, Part
from vitrim.hosts.timm.library import TimmLibrary
from vitrim.hosts.torch.own import OwnHost


class OwnLibrary(TimmLibrary):
    """A model of no known library: its parts are recognised by any library's names."""

    name = "vitrim"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        **TimmLibrary.parts,
        "positions": (*TimmLibrary.parts["positions"], "pos_embedding", "position_embedding", "position_embeddings"),
        "stem": (*TimmLibrary.parts["stem"], "embeddings", "conv_proj", "tokens_to_token"),
    }

    def classifiers(self, model: Any) -> list[nn.Module]:
        """The layers from ``get_classifier``, else the layer that the host names, else a linear ``head``."""
        found = super().classifiers(model)
        if found or self.host is None:
            return found
        if issubclass(self.host, OwnHost):
            classifier = self.host.classifier(model)
            return [] if classifier is None else [classifier]
        # Only direct children: a block inside may have a part called head, too.
        named = [layer for name, layer in model.named_children() if name in self.parts["head"]]
        return [layer for layer in named if isinstance(layer, nn.Linear)]

    def without_head(self, model: Any) -> nn.Module:
        """A model with its own maps, such as ViTTM, without its classifiers."""
        if self.family() is not None:
            return super().without_head(model)
        _last_map(model)
        model.reset_classifier(0)
        return model  # type: ignore[no-any-return]

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        """The last map of ``model``; of ViTTM, the channels of both streams if their grids are equal."""
        if self.family() is not None:
            return super().tokens(model, images)
        _last_map(model)
        (last,) = model.forward_intermediates(images, 1, output_fmt="NLC", intermediates_only=True)
        return last  # type: ignore[no-any-return]

    def layout(self, model: Any) -> Layout:
        if self.host is not None:
            return super().layout(model)
        last = _last_map(model)
        return Layout(last["num_chs"], 0, (last["reduction"], last["reduction"]))


def _last_map(model: Any) -> dict[str, Any]:
    """The entry of ``model.feature_info`` for its last map."""
    if not hasattr(model, "forward_intermediates") or not hasattr(model, "feature_info"):
        raise no_tokens(model)
    last: dict[str, Any] = model.feature_info[-1]
    return last
