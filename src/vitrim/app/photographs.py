"""Example images: free photographs, and drawings for models with a few everyday classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "examples"


@dataclass(frozen=True)
class Example:
    """A shipped image, with names of correct classes, including ImageNet's; drawings, made for vitrim, have
    no credit.
    """

    name: str
    classes: frozenset[str]
    credit: str = ""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.{'jpg' if self.credit else 'png'}"


EXAMPLES = (
    Example("cat", frozenset({"cat", "tabby", "tiger cat", "Egyptian cat", "Persian cat"}), "Stéfan van der Walt, CC0"),
    Example("panda", frozenset({"giant panda", "panda"}), "Aaron Logan, CC BY 1.0"),
    Example("coffee", frozenset({"espresso", "cup", "coffee mug"}), "Rachel Michetti, CC0"),
    Example("brushes", frozenset({"paintbrush"}), "Trevor “Freespace”, CC BY 4.0"),
    Example("mountains", frozenset({"alp", "mountain"}), "Aitzol Berasategi, CC BY 4.0"),
    Example("palace", frozenset({"palace"}), "danielbuechele, CC BY 2.0"),
    Example("moose", frozenset({"deer", "moose"}), "Ryan Hagerty, public domain"),
    *(
        Example(name, frozenset({name}))
        for name in ("ship", "airplane", "automobile", "truck", "frog", "horse", "bird")
    ),
)
"""Photographs, whose sources are in `examples/README.md`, then drawings."""


def known_of(said: dict[str, str]) -> list[str]:
    """The examples that a model classifies correctly, by the classes ``said``; all photographs if there are none."""
    known = [one.name for one in EXAMPLES if said.get(one.name) in one.classes]
    return known or [one.name for one in EXAMPLES if one.credit]
