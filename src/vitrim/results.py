"""The places and kinds of what a command writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vitrim.checked import Refined, checked
from vitrim.errors import VitrimError

PictureFormat = Literal["png", "svg"]
PictureFormats = Annotated[Sequence[PictureFormat], Field(min_length=1)]


@checked
class Results(Refined):
    """The output of a function that can go on from partial results; a folder alone suffices in most cases.

    Attributes:
        folder: for all output; None: write nothing.
        resume: continue from the partial results in the folder.

    Raises:
        VitrimError: a value of a wrong type, or ``resume`` without a folder.
    """

    folder: str | Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.resume and self.folder is None:
            raise VitrimError("resume goes on from what a folder holds, and none is given: give out (--out) too")

    @property
    def path(self) -> Path | None:
        """The folder."""
        return None if self.folder is None else Path(self.folder)


@checked
class ScoredResults(Results):
    """The output of `vitrim.evaluate`.

    Attributes:
        decisions: a folder for the decisions about every token, a file per method.
        predictions: a file, .csv or .parquet, with a row per image.
    """

    decisions: str | Path | None = None
    predictions: str | Path | None = None


@checked
class FileResults(Results):
    """The output of `vitrim.optimize`.

    Attributes:
        preprocess: the file takes pixels, (B, H, W, C) uint8.
    """

    preprocess: bool = False


@checked
class Pictures(Refined):
    """Pictures in a folder.

    Attributes:
        folder: for all of them; None: write nothing.
        formats: png, svg, or both.
    """

    folder: str | Path | None = None
    formats: PictureFormats = ("png",)
