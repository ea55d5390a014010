"""The setting of a server: the selector, its validity there, and the placeholders that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrim.core.registry import parse_selector
from vitrim.core.selection import ImageSelector, Selector
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.version import __version__

VARIABLE = "VITRIM_SELECT"
OFF = ("none", "off")
"""Settings that switch selection off, also if the environment has another one."""
FREE = (
    "random, pool, divprune, otprune, vidcom2, vcast, evs, scope:saliency=none, dart:text_pivots=0 or "
    "cdpruner:text=none"
)
"""Selectors that need neither attention nor text."""
PREFIX = "Vitrim"
"""Prefix of the names of architectures with selection."""


class ServedFamily(NamedTuple):
    """Models of one architecture of vLLM.

    Attributes:
        target: module and class in this folder.
        images_only: the model accepts videos; they are not selected, so they are refused.
        axes: positions have three axes, and tokens keep theirs.
    """

    name: str
    target: str
    images_only: bool = False
    axes: bool = False


FAMILIES = {
    "LlavaForConditionalGeneration": ServedFamily("LLaVA-1.5", "llava:ServedLlava"),
    "LlavaNextForConditionalGeneration": ServedFamily("LLaVA-NeXT", "llava:ServedLlavaNext"),
    "LlavaOnevisionForConditionalGeneration": ServedFamily("LLaVA-OneVision", "llava:ServedLlavaOneVision"),
    "Qwen2VLForConditionalGeneration": ServedFamily("Qwen2-VL", "qwen:ServedQwen2VL", axes=True),
    "Qwen2_5_VLForConditionalGeneration": ServedFamily("Qwen2.5-VL", "qwen:ServedQwen25VL", axes=True),
    "Qwen3VLForConditionalGeneration": ServedFamily("Qwen3-VL", "qwen:ServedQwen3VL", axes=True),
    "InternVLForConditionalGeneration": ServedFamily("InternVL", "tiles:ServedInternVL", images_only=True),
    "Gemma3ForConditionalGeneration": ServedFamily("Gemma 3", "tiles:ServedGemma3"),
    "SmolVLMForConditionalGeneration": ServedFamily("SmolVLM", "tiles:ServedSmolVLM"),
    "Idefics3ForConditionalGeneration": ServedFamily("Idefics 3", "tiles:ServedIdefics3"),
}
"""Supported models, by the architecture in their configuration."""


def asked(additional: Mapping[str, Any] | None, environment: Mapping[str, str]) -> Selector | None:
    """The selector of ``--additional-config``, or else of the environment, valid in a server; None without a setting.

    "none" and "off" are no setting.

    Example:
        >>> asked({"vitrim": {"select": "divprune:keep=0.25"}}, {}).count(64)
        16
    """
    given = (additional or {}).get("vitrim")
    if given is None:
        text = environment.get(VARIABLE) or None
    else:
        if not isinstance(given, Mapping) or set(given) != {"select"}:
            raise VitrimError(f'expected {{"vitrim": {{"select": "divprune:keep=0.25"}}}}, got {{"vitrim": {given!r}}}')
        text = given["select"]
    if text is None or text in OFF:
        return None
    selector = parse_selector(text)
    if isinstance(selector, ImageSelector):
        smaller = 'set their size there, for Qwen with mm_processor_kwargs={"max_pixels": ...}'
        raise VitrimError(
            f"{selector.describe()} acts on images before vLLM's processor has counted their tokens: "
            f"{f'take {FREE}' if selector.drops_cells else smaller}"
        )
    needs = selector.needs()
    if needs.attention != "none" or needs.text:
        # neither kernels with attention, nor one choice per prompt: embeddings of an image are kept for all prompts
        why = "reads the question, but vLLM keeps the embeddings of an image for every prompt"
        if needs.attention != "none":
            why = "needs the attention of the tower, which vLLM's kernels do not give"
        raise VitrimError(f"{selector.describe()} {why}: take {FREE}")
    selector.count(1)  # raises if the number depends on the image
    return selector


def family_of(architectures: Sequence[str] | None, config: Any, selector: Selector) -> tuple[str, ServedFamily]:
    """The supported architecture of the model's configuration, and its family; `VitrimError` for a selector that does
    not fit.
    """
    found = next((name for name in architectures or () if name in FAMILIES), None)
    interrupted = getattr(getattr(config, "vision_config", None), "model_type", None) == "pixtral"
    if found is None or interrupted:
        what = f"{', '.join(architectures or ['no architecture'])}{' with the tower of Pixtral' * interrupted}"
        covered = ", ".join(dict.fromkeys(family.name for family in FAMILIES.values()))
        raise UnsupportedModelError(f"image tokens of {what} cannot be selected in vLLM; covered: {covered}")
    family = FAMILIES[found]
    faults = {
        f"positions of {family.name} have three axes, so tokens keep theirs: leave positions out": (
            family.axes and selector.positions == "closed"
        ),
        f"what goes on has no places, and {family.name} is to keep those": family.axes and not selector.keeps_places(),
        f"vLLM counts the positions of {family.name}, so they close up: leave positions out": (
            not family.axes and selector.positions == "original"
        ),
    }
    fault = next((text for text, is_there in faults.items() if is_there), None)
    if fault is not None:
        raise VitrimError(f"{selector.describe()}: {fault}")
    return found, family


def mark(selector: Selector) -> str:
    """Part of a cache's key that identifies the selection."""
    return sha256(f"vitrim {__version__} {selector.describe()}".encode()).hexdigest()[:16]


def stay(embed: Tensor, sizes: Sequence[int], counts: Sequence[int]) -> Tensor:
    """(Q,) bool: the kept tokens of an item's placeholder: text, and as many for features as are kept of these.

    ``embed`` (Q,) is True for features; ``sizes`` are of the separately selected units, such as tiles, ``counts`` kept
    of each. `VitrimError` if the features of a unit are not contiguous.

    Example:
        >>> stay(torch.tensor([False, True, True, True, False, True, True, True]), [3, 3], [1, 2]).int()
        tensor([1, 1, 0, 0, 1, 1, 1, 0], dtype=torch.int32)
    """
    places = embed.nonzero().squeeze(1)
    if sum(sizes) != len(places):
        raise VitrimError(f"expected {sum(sizes)} placeholders for features of an image, got {len(places)}")
    left = torch.ones_like(embed)
    for own, count in zip(places.split(list(sizes)), counts, strict=True):
        if len(own) and own[-1] - own[0] != len(own) - 1:
            raise VitrimError("other tokens stand among the features of an image, so a selection has no places")
        left[own[count:]] = False
    return left
