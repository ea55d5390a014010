"""The setting of a server and of its requests: the selector, its validity there, and the placeholders that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrim.core.registry import parse_selector
from vitrim.core.selection import ImageSelector, Selector
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.version import __version__

VARIABLES = {"select": "VITRIM_SELECT", "allowed": "VITRIM_SELECT_ALLOWED"}
"""Variables of the environment, by their names in ``--additional-config``."""
FIELD = "vitrim_select"
"""Name of the setting in a request's ``mm_processor_kwargs``."""
NONE, OFF = "none", ("none", "off")
"""The setting without a selection, and its names."""
ANY = "any"
"""In the list of allowed settings: all that a server can do."""
WHOLE = "random:keep=1"
"""A selector that keeps every token in its place."""
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
        packed: the tower reads packed patches of images of any size, cell by cell.
        cells: the tower can be told of the patches that it gets alone.
    """

    name: str
    target: str
    images_only: bool = False
    axes: bool = False
    packed: bool = False
    cells: bool = False


PACKED = partial(ServedFamily, axes=True, packed=True)
"""A family with positions of three axes whose tower reads packed patches, as most of these do."""

FAMILIES = {
    "LlavaForConditionalGeneration": ServedFamily("LLaVA-1.5", "llava:ServedLlava"),
    "LlavaNextForConditionalGeneration": ServedFamily("LLaVA-NeXT", "llava:ServedLlavaNext"),
    "LlavaOnevisionForConditionalGeneration": ServedFamily("LLaVA-OneVision", "llava:ServedLlavaOneVision"),
    "Qwen2VLForConditionalGeneration": PACKED("Qwen2-VL", "qwen:ServedQwen2VL", cells=True),
    "Qwen2_5_VLForConditionalGeneration": PACKED("Qwen2.5-VL", "qwen:ServedQwen25VL", cells=True),
    "Qwen3VLForConditionalGeneration": PACKED("Qwen3-VL", "qwen:ServedQwen3VL", cells=True),
    "Qwen3_5ForConditionalGeneration": PACKED("Qwen3.5", "qwen:ServedQwen35", images_only=True, cells=True),
    "Glm4vForConditionalGeneration": PACKED("GLM-4.1V, GLM-4.6V-Flash", "qwen:ServedGlm4v", images_only=True),
    "Glm4vMoeForConditionalGeneration": PACKED("GLM-4.5V, GLM-4.6V", "qwen:ServedGlm4vMoe", images_only=True),
    "GlmOcrForConditionalGeneration": PACKED("GLM-OCR", "qwen:ServedGlmOcr", images_only=True),
    "PaddleOCRVLForConditionalGeneration": ServedFamily("PaddleOCR-VL", "qwen:ServedPaddleOCRVL", axes=True),
    "InternVLForConditionalGeneration": ServedFamily("InternVL", "tiles:ServedInternVL", images_only=True),
    "Gemma3ForConditionalGeneration": ServedFamily("Gemma 3", "tiles:ServedGemma3"),
    "Gemma4ForConditionalGeneration": ServedFamily("Gemma 4", "llava:ServedGemma4", images_only=True),
    "MiniCPMV4_6ForConditionalGeneration": ServedFamily("MiniCPM-V 4.6", "tiles:ServedMiniCPMV", images_only=True),
    "SmolVLMForConditionalGeneration": ServedFamily("SmolVLM", "tiles:ServedSmolVLM"),
    "Idefics3ForConditionalGeneration": ServedFamily("Idefics 3", "tiles:ServedIdefics3"),
}
"""Supported models, by the architecture in their configuration."""


class ServerSetting(NamedTuple):
    """The selections of a server: its own, and those that requests may ask for.

    Attributes:
        select: the setting of requests that give none.
        allowed: what they may give instead; None: everything that a server can do. The server reserves memory for the
            largest of its images in these and its own setting.
    """

    select: str
    allowed: Sequence[str] | None = None

    @classmethod
    def of_model(cls, config: Any) -> ServerSetting:
        """The setting that a model's configuration carries from the plugin to vLLM's processes."""
        return cls(config.vitrim_select, config.vitrim_allowed)

    def asked(self, text: object) -> str:
        """The setting of a request that gives ``text``, as `canonical`; `VitrimError` if it is not allowed."""
        found = canonical(text)
        own = tuple(dict.fromkeys([self.select, *(self.allowed or ())]))
        if self.allowed is not None and found not in own and ANY not in own:
            raise VitrimError(f"{FIELD}={found} is not allowed by this server; allowed: {', '.join(own)}")
        return found

    def reserved(self) -> list[str]:
        """The settings whose images need the most memory, one of them the most."""
        own = [self.select, *(self.allowed or ())]
        everything = any(text in (NONE, ANY) or selector_of(text).is_adaptive() for text in own)
        return [NONE] if everything else list(dict.fromkeys(own))


def setting_of(additional: Mapping[str, Any] | None, environment: Mapping[str, str]) -> ServerSetting | None:
    """The setting by ``--additional-config``, or else by the environment; None if nothing is ever selected.

    Example:
        >>> setting_of({"vitrim": {"select": "divprune:keep=0.25"}}, {})
        ServerSetting(select='divprune:keep=0.25', allowed=None)
        >>> setting_of(None, {"VITRIM_SELECT_ALLOWED": "divprune:keep=0.25 pool:tokens=64"})
        ServerSetting(select='none', allowed=['divprune:keep=0.25', 'pool:tokens=64'])
    """
    given = (additional or {}).get("vitrim")
    if given is not None and (not isinstance(given, Mapping) or not given or set(given) - set(VARIABLES)):
        raise VitrimError(
            f'expected {{"vitrim": {{"select": "divprune:keep=0.25"}}}}, with "allowed": [...] beside it or alone, got '
            f'{{"vitrim": {given!r}}}'
        )
    found: dict[str, Any] = {
        name: environment[variable] for name, variable in VARIABLES.items() if environment.get(variable)
    }
    found |= given or {}
    listed = found.get("allowed")
    if isinstance(listed, str):
        listed = listed.split()
    if listed is not None and not isinstance(listed, list | tuple):
        raise VitrimError(f'expected a list of settings in "allowed", got {listed!r}')
    own = ServerSetting(
        canonical(found.get("select", NONE)),
        None if listed is None else [text if text == ANY else canonical(text) for text in listed],
    )
    return own if own.select != NONE or own.allowed else None


def canonical(text: object) -> str:
    """A setting, written in one way; `VitrimError` if a server cannot do it."""
    if text in OFF:
        return NONE
    selector = parse_selector(text)  # type: ignore[arg-type]
    if isinstance(selector, ImageSelector):  # its number is known where pixels are
        return selector.describe()
    needs = selector.needs()
    if needs.attention != "none" or needs.text:
        # neither kernels with attention, nor one choice per prompt: embeddings of an image are kept for all prompts
        why = "reads the question, but vLLM keeps the embeddings of an image for every prompt"
        if needs.attention != "none":
            why = "needs the attention of the tower, which vLLM's kernels do not give"
        raise VitrimError(f"{selector.describe()} {why}: take {FREE}")
    selector.count(1)  # raises if the number depends on the image
    return selector.describe()


def selector_of(setting: str) -> Selector:
    """The selector of a `canonical` setting.

    Example:
        >>> selector_of("divprune:keep=0.25").count(64), selector_of("none").count(64)
        (16, 64)
    """
    return parse_selector(WHOLE if setting == NONE else setting)


def family_of(architectures: Sequence[str] | None, config: Any) -> tuple[str, ServedFamily]:
    """The supported architecture of the model's configuration, and its family."""
    found = next((name for name in architectures or () if name in FAMILIES), None)
    interrupted = getattr(getattr(config, "vision_config", None), "model_type", None) == "pixtral"
    if found is None or interrupted:
        what = f"{', '.join(architectures or ['no architecture'])}{' with the tower of Pixtral' * interrupted}"
        covered = ", ".join(dict.fromkeys(family.name for family in FAMILIES.values()))
        raise UnsupportedModelError(f"image tokens of {what} cannot be selected in vLLM; covered: {covered}")
    return found, FAMILIES[found]


def check_fits(selector: Selector, family: ServedFamily) -> None:
    """Raise `VitrimError` if a selector cannot act in a family, or that cannot place its tokens."""
    changes = isinstance(selector, ImageSelector)
    drops = isinstance(selector, ImageSelector) and selector.drops_cells
    faults = {
        f"the tower of {family.name} reads every patch of an image; cells are left out in {_names('cells')}": (
            drops and not family.cells
        ),
        f"images of {family.name} keep the size that its processor gives them; they are made smaller in "
        f"{_names('packed')}": changes and not family.packed,
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


def _names(flag: str) -> str:
    return ", ".join(family.name for family in FAMILIES.values() if getattr(family, flag))


def mark(setting: str) -> str:
    """Part of a cache's key that identifies the selection."""
    return sha256(f"vitrim {__version__} {setting}".encode()).hexdigest()[:16]


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
