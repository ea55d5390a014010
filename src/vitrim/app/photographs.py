"""Images that the page offers: photographs that anybody may use, and drawings for models of a few everyday classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "examples"


@dataclass(frozen=True)
class Example:
    """An image that comes with vitrim.

    Attributes:
        name: for people, and of its file.
        classes: names of classes that are right for it, ImageNet's among them.
        credit: who made it, and the licence; empty for drawings made for vitrim, free of anybody's rights.
    """

    name: str
    classes: frozenset[str]
    credit: str = ""

    @property
    def path(self) -> Path:
        """The file."""
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
"""Photographs, of which `examples/README.md` says where they are from; then drawings."""


def known_of(said: dict[str, str]) -> list[str]:
    """The examples that a model knows; all photographs, if it knows none.

    Args:
        said: the best class by the names of examples.

    Example:
        >>> known_of({"cat": "tabby", "coffee": "envelope", "ship": "ship"}), known_of({"ship": "envelope"})
        (['cat', 'ship'], ['cat', 'panda', 'coffee', 'brushes', 'mountains', 'palace', 'moose'])
    """
    known = [one.name for one in EXAMPLES if said.get(one.name) in one.classes]
    return known or [one.name for one in EXAMPLES if one.credit]
