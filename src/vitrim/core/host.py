"""`Host` and `VisionLanguage`: what a family of models declares so that its tokens can be reduced."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.block import Installed, ReducedBlock, class_of, is_altered, reduced_in, replaced
from vitrim.core.method import Needs
from vitrim.core.plan import Head, HostFacts, Purpose
from vitrim.core.selection import Choosing, Selector
from vitrim.core.tokens import Asked, PatchPixels, Trace
from vitrim.core.versions import constant
from vitrim.errors import UnsupportedModelError


class Host:
    """A family of models that can be reduced. Class methods only: a host has no state.

    A family names its `reduced_blocks` and defines `blocks` and `facts`; if needed `check`, `form`, `patch_maker`.
    """

    name: ClassVar[str] = ""
    """Name of the family in `vitrim list hosts`."""
    purpose: ClassVar[Purpose] = "images"
    """The family's group in `vitrim list hosts`."""
    heads: ClassVar[tuple[Head, ...]] = ("class token", "patches", "no class token")
    """The kinds of head of the family's models; one that returns its tokens counts as reading patches."""
    in_cells: ClassVar[bool] = False
    """Squares of patches are reduced as wholes (`HostFacts.cell`); shown in the list."""
    reduced_blocks: ClassVar[tuple[type[ReducedBlock], ...]] = ()
    """The reduced form of every block class of the family."""
    dense_calls: ClassVar[tuple[str, ...]] = ()
    """Methods of the model that return full grids of patches after every block; a reduced model's must, too."""

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise `UnsupportedModelError` if ``model`` cannot be reduced faithfully."""

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
        """The host of the blocks of ``model``: this one, except for a dense model around another host's backbone."""
        return cls

    @classmethod
    def form(cls, model: nn.Module) -> Hashable:
        """A value that changes when the model no longer fits its reduction. Every forward reads it: keep it cheap."""
        return None

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        """The module, called once per forward, whose call shows the grid of patches (`grid_of`); None if none does."""
        return None

    @classmethod
    def grid_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        """Rows and columns of patches from a call of the `patch_maker`, by default a map (B, C, rows, columns)."""
        if not isinstance(output, Tensor) or output.dim() != 4:
            return None
        return output.shape[2], output.shape[3]

    @classmethod
    def patches_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> int | None:
        """Patches of an image, or at least as many, from a call of the `patch_maker`; None if it does not show them."""
        grid = cls.grid_of(maker, args, output)
        return None if grid is None else grid[0] * grid[1]

    @classmethod
    def hands_out_tokens(cls, model: nn.Module) -> bool:
        """True if ``model`` has no head and returns its tokens, such as the tower of another model."""
        return False

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        """Change what must change besides the blocks; by default the `dense_calls`."""
        for name in cls.dense_calls:
            setattr(model, name, DenseCall(model, name, trace))

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        """Undo `install`, except for `Installed` objects and the attributes in ``OWN``, which `restore_` removes."""

    @classmethod
    def reduced_class(cls, block: nn.Module) -> type[ReducedBlock]:
        """The reduced form of ``block``; subclasses are refused: their forward may do more, which would be left out."""
        for reduced in cls.reduced_blocks:
            if class_of(block) is reduced.host_class:
                return reduced
        known = ", ".join(reduced.host_class.__name__ for reduced in cls.reduced_blocks)
        raise UnsupportedModelError(
            f"blocks of class {type(block).__name__} are not supported in {cls.name}; supported: {known}"
        )


class VisionLanguage:
    """A family of vision-language models. Class methods only, like `Host`."""

    name: ClassVar[str] = ""
    """Name of the family in the documentation, which also shows its docstring."""
    in_cells: ClassVar[bool] = False
    """The connector joins squares of patches into one token, so these are reduced as wholes; see `cell`."""
    refused: ClassVar[bool] = False
    """`check` refuses every model of the family."""
    shows_attention: ClassVar[bool] = False
    """Even a tower that cannot be reduced shows the attention that selectors need."""

    @classmethod
    def tower(cls, model: nn.Module) -> nn.Module:
        """The part of ``model`` that turns images into tokens, which is reduced."""
        raise NotImplementedError

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise `UnsupportedModelError` if ``model`` cannot get fewer image tokens faithfully."""

    @classmethod
    def serves(cls, kind: type) -> bool:
        """True if this family can select image tokens for models of class ``kind``, which no family names."""
        return False

    @classmethod
    def check_selector(cls, model: nn.Module, selector: Selector, facts: HostFacts | None) -> None:
        """Raise `VitrimError` if ``model`` cannot carry this ``selector``; ``facts`` of the tower, where needed."""

    @classmethod
    def cell(cls, model: nn.Module) -> int:
        """The side in patches of the squares that the connector joins into one token; 1 if it reads each by itself."""
        return 1

    @classmethod
    def language(cls, model: nn.Module) -> list[nn.Module]:
        """The parts of ``model`` that read a prompt: the language model, and its head if it has one."""
        raise NotImplementedError

    @classmethod
    def connector(cls, model: nn.Module) -> list[nn.Module]:
        """The parts of the connector that lie inside the tower."""
        return []

    @classmethod
    def usual_images(cls, model: nn.Module) -> tuple[int, ...] | None:
        """Channels, height and width of images to measure with; None for the tower's own size."""
        return None

    @classmethod
    def image_tokens(cls, model: nn.Module, images: Tensor) -> int:
        """The places of each of ``images`` (B, n, C, H, W) in a prompt of the unreduced model."""
        raise NotImplementedError

    @classmethod
    def prompts(cls, model: nn.Module, images: Tensor, text: int, places: int) -> dict[str, Any]:
        """The inputs of ``model`` for prompts of one text and some images, for the first step of generation.

        Args:
            images: (B, n, C, H, W), n images for each of B prompts.
            text: text tokens, at least n: some precede every image.
            places: of an image, see `image_tokens`.
        """
        raise NotImplementedError

    @classmethod
    def held(cls, model: nn.Module) -> list[Tensor]:
        """The places whose tokens the language model got, for every image of this thread's last prompt.

        (Q,) int64 on the CPU per image: for each of its Q places in the prompt, the place whose token it has, or -1.
        """
        raise NotImplementedError

    @classmethod
    def install(cls, model: nn.Module, trace: Trace, choosing: Choosing | None = None) -> None:
        """Make prompts follow the images. ``trace`` is that of the tower's blocks, if these are reduced."""
        raise NotImplementedError

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        """Undo `install`, if it was called."""
        raise NotImplementedError


def take_off(module: nn.Module) -> None:
    """Remove `Installed` objects from ``module``, but not from its children."""
    before = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    for hooks, with_kwargs in (before, (module._forward_hooks, module._forward_hooks_with_kwargs)):
        for key in [key for key, hook in hooks.items() if isinstance(hook, Installed)]:
            del hooks[key]
            with_kwargs.pop(key, None)
    for name in [name for name, value in vars(module).items() if isinstance(value, Installed)]:
        delattr(module, name)


@dataclass(eq=False, repr=False)
class GridHook(Installed):
    """Passes the number of patches, and the grid and pixels that a method ``needs``, to block 0 after every call of the
    patch maker.

    ``patch`` is the height and width of a patch in pixels; ``std``: see `PatchPixels`.
    """

    host: type[Host]
    trace: Trace
    needs: Needs
    patch: tuple[int, int] = (0, 0)
    std: tuple[float, ...] | None = None

    def __call__(self, maker: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self.trace.call
        call.patches = self.host.patches_of(maker, args, output)
        if self.needs.grid:
            call.grid = self.host.grid_of(maker, args, output)
        if self.needs.pixels:
            values = pixels_of(args, call.grid, self.patch)
            call.pixels = None if values is None else PatchPixels(values, self.std)


def pixels_of(args: tuple[Any, ...], grid: tuple[int, int] | None, patch: tuple[int, int]) -> Tensor | None:
    """(B, rows, columns, C, h, w) pixels of patches, a view of the images (B, C, H, W) that a patch maker got first.

    None if it got none, or if they are no whole ``grid`` of a ``patch``: what pads or crops shows other pixels.
    """
    if grid is None or not args or not isinstance(args[0], Tensor) or args[0].dim() != 4:
        return None
    if any(side != number * pixels for side, number, pixels in zip(args[0].shape[2:], grid, patch, strict=True)):
        return None
    cut: Tensor = args[0].unflatten(3, (-1, patch[1])).unflatten(2, (-1, patch[0]))  # (B, C, rows, h, columns, w)
    return cut.permute(0, 2, 4, 1, 3, 5)


@dataclass(eq=False, repr=False)
class ZeroHook(Installed):
    """Keeps the zero rows of pruned patches zero behind a norm, which would turn them into its bias.

    ``always``: in every forward, not only on full grids.
    """

    trace: Trace
    always: bool

    def __call__(self, norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # A row is recognised by its zeros, not by the state: a host may norm the outputs of several blocks after all of
        # them have run, or slice them first.
        latest = self.trace.call.latest
        if latest is None or not (self.always or latest[1].asked.full_grids) or args[0].dim() != 3:
            return None
        return output.masked_fill((args[0] == 0).all(-1, keepdim=True), 0.0)


def norms_behind(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The layers with a weight and a bias per channel behind ``block``, or behind a module around it.

    Example:
        >>> model = nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> norms_behind(model, model[1][0]) == [model[2]]
        True
    """
    name = next(name for name, module in model.named_modules() if module is block)
    found: list[nn.Module] = []
    # Along the path from the model to the block: at every level, what stands after the module on the path runs later.
    holder = model
    for part in name.split("."):
        children = list(holder._modules)
        for child in children[children.index(part) + 1 :]:
            layer = holder._modules[child]
            affine = [getattr(layer, vector, None) for vector in ("weight", "bias")]
            per_channel = all(isinstance(vector, Tensor) and vector.dim() == 1 for vector in affine)
            if layer is not None and not layer._modules and per_channel:
                found.append(layer)
        holder = holder.get_submodule(part)
    return found


@dataclass(eq=False, repr=False)
class DenseCall(Installed):
    """A method of a reduced model that returns tokens on the full grid of patches; put on the instance."""

    model: nn.Module
    name: str
    trace: Trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.trace.asking(Asked(full_grids=True)):
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class FormOfModel:
    """The form of a model when it was reduced: blocks, bypassed modules, `Host.form`. Called in every forward."""

    def __init__(self, host: type[Host], model: nn.Module, reduced: Sequence[type[ReducedBlock]]) -> None:
        self.host = host
        self.model = model
        self.form = host.form(model)
        bypassed = [kind.bypassed(block) for block, kind in zip(host.blocks(model), reduced, strict=True)]
        self.kinds: list[list[type[nn.Module]]] | None = [[type(part) for part in parts] for parts in bypassed]
        skipped = {kind.host_class for kind in reduced}.union(*(map(class_of, parts) for parts in bypassed))
        self.skipped = tuple(skipped)

    def __call__(self, more: int = 0) -> None:
        """Raise `UnsupportedModelError` if any of it has changed, or ``more`` tokens than patches entered block 0."""
        if more > 0:
            raise UnsupportedModelError(
                f"{more} tokens of this {type(self.model).__name__} are neither patches nor known to stand in front of "
                "them (prompts, perhaps), so they would be reduced like patches: before vitrim.reduce_ raise the "
                "number in front, model.num_prefix_tokens or model.config.num_register_tokens, by as many, where the "
                "model has it and they stand there; otherwise run it unreduced, after vitrim.restore_(model)"
            )
        if (problem := self._changed_blocks()) is not None:
            raise UnsupportedModelError(problem)
        if self.host.form(self.model) != self.form:
            raise UnsupportedModelError(self._changed("the pooling or the image size"))

    # evaluated once by a compiler, not traced: the blocks may be wrapped by what is being compiled
    @constant
    def _changed_blocks(self) -> str | None:
        """The message about changed blocks; None if nothing changed."""
        if self.kinds is None:
            return None
        for kind in self.skipped:
            if (problem := class_alteration(kind)) is not None:
                return problem
        blocks = self.host.blocks(self.model)
        if len(blocks) != len(self.kinds):
            return self._changed("the number of blocks")
        for depth, (found, kinds) in enumerate(zip(blocks, self.kinds, strict=True)):
            block = reduced_in(found)
            if block is None or block.depth != depth or block.trace.form is not self:
                return self._changed(f"block {depth}")
            for part, kind in zip(block.bypassed(block), kinds, strict=True):
                if type(part) is not kind:
                    return self._changed(f"the {kind.__name__} in block {depth}")
                if (problem := alteration(part)) is not None:
                    return f"block {depth} of this {type(self.model).__name__}: {problem}"
        return None

    def _changed(self, what: str) -> str:
        return (
            f"{what} of this {type(self.model).__name__} was changed after it was reduced: call "
            "vitrim.restore_(model), then vitrim.reduce_ again"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FormOfModel:
        twin = copy.copy(self)
        if id(self.model) in memo:
            twin.model = memo[id(self.model)]
        else:  # a block copied alone still belongs to its model, but is not one of its blocks
            twin.kinds = None
        return twin


def alteration(part: nn.Module) -> str | None:
    """The refusal of a bypassed module (`ReducedBlock.bypassed`) with hooks or a forward on the instance, else None."""
    if not is_altered(part, by_others=True):
        return None
    return (
        f"the module {type(part).__name__} has hooks or a forward of its own, and a reduced block calls what "
        "is in it, not the module; put them on the block or its projections instead"
    )


FORWARDS: dict[type[nn.Module], Any] = {}
"""The forward of each class that was last seen to be its own: every forward asks, and `replaced` takes long."""


def class_alteration(kind: type[nn.Module]) -> str | None:
    """The refusal of a class of blocks, or of what they bypass, whose forward someone replaced; else None."""
    if FORWARDS.get(kind) is kind.forward:
        return None
    if (name := replaced(kind)) is None:
        FORWARDS[kind] = kind.forward
        return None
    return (
        f"the forward of the class {kind.__name__} was replaced by {name}, and a reduced block calls what is in it "
        f"instead: put that of {kind.__module__} back, or the change into a module that the block calls"
    )


def refuse_own_forward(block: nn.Module, depth: int, then: str) -> None:
    """Refuse a block with a forward on the instance, as accelerate's hooks put there: it would call the dense one."""
    if "forward" in vars(block):
        raise UnsupportedModelError(
            f"block {depth} has a forward of its own, put on the instance, which would go on calling the one that it "
            f"replaced; take it off (accelerate.hooks.remove_hook_from_module does that with accelerate's), then {then}"
        )
