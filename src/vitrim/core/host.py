"""`Host`: what a family of models says so that its tokens can be reduced; `VisionLanguage`: what a whole model says."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.block import ReducedBlock
from vitrim.core.modules import class_of
from vitrim.core.plan import Head, HostFacts, Purpose
from vitrim.core.selection import Selector
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError


class Host:
    """A family of models that can be reduced. Class methods only: a host has no state of its own.

    A family names its `reduced_blocks` and answers `blocks` and `facts`; `check`, `form` and `patch_maker` where it has
    something to say. What training and measuring ask of a model is answered by its library (`vitrim.core.library`).
    """

    name: ClassVar[str] = ""
    """Name of the family in `vitrim list hosts`."""
    purpose: ClassVar[Purpose] = "images"
    """The group in which `vitrim list hosts` shows the family."""
    heads: ClassVar[tuple[Head, ...]] = ("class token", "patches", "no class token")
    """The kinds of head among models of the family; a model that hands out tokens has a head that reads patches."""
    in_cells: ClassVar[bool] = False
    """Squares of patches are reduced as wholes, since what follows joins them (`HostFacts.cell`); for the list."""
    reduced_blocks: ClassVar[tuple[type[ReducedBlock], ...]] = ()
    """The reduced form of every block class the family uses."""

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise `UnsupportedModelError` if this model of the family cannot be reduced faithfully."""

    @classmethod
    def blocks(cls, model: nn.Module) -> list[nn.Module]:
        """The transformer blocks in execution order."""
        return []

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        """Geometry of ``model``."""
        raise NotImplementedError

    @classmethod
    def trunk_host(cls, model: nn.Module) -> type[Host]:
        """The host that knows the blocks of ``model``: this one, but for a model around a backbone of its own."""
        return cls

    @classmethod
    def form(cls, model: nn.Module) -> Hashable:
        """Everything the reduction rests on that later library calls may change: read in every forward, so cheap."""
        return None

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        """The module whose call, once in every forward, shows the grid of patches (`grid_of`); None if none does."""
        return None

    @classmethod
    def grid_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        """Rows and columns of the patches, read from a call of the `patch_maker`; None if it does not show them.

        By default the output is a map of patches, (B, C, rows, columns).
        """
        if not isinstance(output, Tensor) or output.dim() != 4:
            return None
        return output.shape[2], output.shape[3]

    @classmethod
    def hands_out_tokens(cls, model: nn.Module) -> bool:
        """True if ``model`` has no head, and its output are its tokens: the tower of another model, say."""
        return False

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        """Change anything that must change besides the blocks, e.g. calls that hand out dense features."""

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        """Undo `install`."""

    @classmethod
    def reduced_class(cls, block: nn.Module) -> type[ReducedBlock]:
        """The reduced form of ``block``.

        Raises:
            UnsupportedModelError: its class is not one of the family's. A subclass is refused too: its forward may
                do something that the reduced form would silently leave out.
        """
        for reduced in cls.reduced_blocks:
            if class_of(block) is reduced.host_class:
                return reduced
        known = ", ".join(reduced.host_class.__name__ for reduced in cls.reduced_blocks)
        raise UnsupportedModelError(
            f"blocks of class {type(block).__name__} are not supported in {cls.name}; supported: {known}"
        )


class VisionLanguage:
    """A family of vision-language models. Class methods only, like `vitrim.core.host.Host`."""

    name: ClassVar[str] = ""
    """Name of the family in the documentation; its docstring says what it is."""
    in_cells: ClassVar[bool] = False
    """The connector makes one token of a square of patches, so these are reduced as wholes; see `cell`."""
    refused: ClassVar[bool] = False
    """`check` refuses every model of the family."""

    @classmethod
    def tower(cls, model: nn.Module) -> nn.Module:
        """The part of ``model`` that makes tokens of images: the one that is reduced."""
        raise NotImplementedError

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise `UnsupportedModelError` if this model of the family cannot get fewer image tokens faithfully."""

    @classmethod
    def serves(cls, kind: type) -> bool:
        """True if models of a class, which no family names, are served by this one for selecting image tokens."""
        return False

    @classmethod
    def check_selector(cls, model: nn.Module, selector: Selector, facts: HostFacts | None) -> None:
        """Refuse a ``selector`` that this model of the family cannot carry.

        Args:
            model: the whole model.
            selector: of image tokens.
            facts: of its tower; None where nothing is asked of that.

        Raises:
            VitrimError: saying why.
        """

    @classmethod
    def cell(cls, model: nn.Module) -> int:
        """Patches a side of the squares that the connector makes one token of; 1 where it reads each by itself."""
        return 1

    @classmethod
    def language(cls, model: nn.Module) -> list[nn.Module]:
        """The parts of ``model`` that read a prompt: the language model, and its head if there is one."""
        raise NotImplementedError

    @classmethod
    def connector(cls, model: nn.Module) -> list[nn.Module]:
        """The parts of the connector that lie in the tower; what lies in neither is the connector's anyway."""
        return []

    @classmethod
    def usual_images(cls, model: nn.Module) -> tuple[int, ...] | None:
        """Channels, height and width of the images that are measured; None: those that the tower was made for."""
        return None

    @classmethod
    def image_tokens(cls, model: nn.Module, images: Tensor) -> int:
        """The places that each of ``images`` (B, n, C, H, W) has in a prompt of the unreduced model."""
        raise NotImplementedError

    @classmethod
    def prompts(cls, model: nn.Module, images: Tensor, text: int, places: int) -> dict[str, Any]:
        """The inputs of ``model`` for prompts of one text and some images, to be run as the first step of generation.

        Args:
            model: reduced or not.
            images: (B, n, C, H, W), n images for each of B prompts.
            text: tokens of the text, at least n: some stand before every image.
            places: those of an image, `image_tokens`.
        """
        raise NotImplementedError

    @classmethod
    def install(cls, model: nn.Module, trace: Trace, selector: Selector | None = None) -> None:
        """Let prompts follow the images. ``trace`` is shared by the blocks of the tower, if these are reduced."""
        raise NotImplementedError

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        """Undo `install`, if it was done."""
        raise NotImplementedError
