"""`Host`: what a family of models says so that its tokens can be reduced; `VisionLanguage`: what a whole model says.

Behind them: what a reduction puts on a model besides its blocks, and what must not be on it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.block import ReducedBlock, class_of, is_altered, reduced_in
from vitrim.core.plan import Head, HostFacts, Purpose
from vitrim.core.selection import Choosing, Selector
from vitrim.core.tokens import Trace
from vitrim.core.versions import constant
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
    dense_calls: ClassVar[tuple[str, ...]] = ()
    """Methods of a model that hand out full grids of patches after every block, and so must of a reduced one."""

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
        """Change anything that must change besides the blocks: by default the `dense_calls`."""
        for name in cls.dense_calls:
            setattr(model, name, DenseCall(model, name, trace))

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        """Undo what `install` did besides `Installed` objects on modules and attributes that blocks name in ``OWN``."""

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
    shows_attention: ClassVar[bool] = False
    """A tower as it is shows the attention that selectors need, so it need not be one that can be reduced."""

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
    def held(cls, model: nn.Module) -> list[Tensor]:
        """For every image of the last prompt of this thread (Q,) int64, on the CPU: the place whose token the language
        model got for what stood at each of the image's places in the prompt; -1: none."""
        raise NotImplementedError

    @classmethod
    def install(cls, model: nn.Module, trace: Trace, choosing: Choosing | None = None) -> None:
        """Let prompts follow the images. ``trace`` is shared by the blocks of the tower, if these are reduced."""
        raise NotImplementedError

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        """Undo `install`, if it was done."""
        raise NotImplementedError


class Installed:
    """Base class of what a reduction puts on modules besides the blocks: hooks, and calls in place of their methods.

    Objects and not functions, so that the model can still be copied and pickled, and `take_off` finds them in a copy.
    """


def take_off(module: nn.Module) -> None:
    """Take what is `Installed` off ``module``; what is on those in it stays."""
    before = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    for hooks, with_kwargs in (before, (module._forward_hooks, module._forward_hooks_with_kwargs)):
        for key in [key for key, hook in hooks.items() if isinstance(hook, Installed)]:
            del hooks[key]
            with_kwargs.pop(key, None)
    for name in [name for name, value in vars(module).items() if isinstance(value, Installed)]:
        delattr(module, name)


@dataclass(eq=False, repr=False)
class GridHook(Installed):
    """Hook that tells the blocks the grid of the patches after every call of the module that makes them.

    Only on models whose method asks for it.
    """

    host: type[Host]
    trace: Trace

    def __call__(self, maker: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.trace.call.grid = self.host.grid_of(maker, args, output)


@dataclass(eq=False, repr=False)
class ZeroHook(Installed):
    """Hook that leaves rows of zeros zeros behind a norm, which would make its bias of them: those of pruned patches.

    On the norms behind the blocks of a model. A row is told by its zeros and not by the state, since a host may norm
    the outputs of several blocks when all of them have run, or cut them first.

    Attributes:
        trace: of the blocks.
        always: pruned patches are zeros in every forward, and not on full grids alone.
    """

    trace: Trace
    always: bool

    def __call__(self, norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        latest = self.trace.call.latest
        if latest is None or not (self.always or latest[1].full_grid) or args[0].dim() != 3:
            return None
        return output.masked_fill((args[0] == 0).all(-1, keepdim=True), 0.0)


def norms_behind(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The layers with a weight and a bias per channel that stand behind ``block``, or behind a module it is in.

    Example:
        >>> model = nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> norms_behind(model, model[1][0]) == [model[2]]
        True
    """
    name = next(name for name, module in model.named_modules() if module is block)
    found: list[nn.Module] = []
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
    """A method of a reduced model whose tokens come out on the full grid of patches, un-merged after every block.

    Stored on the instance under the method's own ``name``.
    """

    model: nn.Module
    name: str
    trace: Trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.trace.handing_out(dense=True):
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class FormOfModel:
    """The blocks of a model when it was reduced, what they bypass, and its `Host.form`; called in every forward."""

    def __init__(self, host: type[Host], model: nn.Module, reduced: Sequence[type[ReducedBlock]]) -> None:
        self.host = host
        self.model = model
        self.form = host.form(model)
        bypassed = [kind.bypassed(block) for block, kind in zip(host.blocks(model), reduced, strict=True)]
        self.kinds: list[list[type[nn.Module]]] | None = [[type(part) for part in parts] for parts in bypassed]

    def __call__(self) -> None:
        """Raise `UnsupportedModelError` if any of it has changed since."""
        if (problem := self._changed_blocks()) is not None:
            raise UnsupportedModelError(problem)
        if self.host.form(self.model) != self.form:
            raise UnsupportedModelError(self._changed("the pooling or the image size"))

    # a compiler asks once, and need not follow: it may come to the block that it compiles through what wraps it
    @constant
    def _changed_blocks(self) -> str | None:
        """Say what is no longer as it was about the blocks; None where nothing is."""
        if self.kinds is None:
            return None
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
    """The refusal of a bypassed module (`ReducedBlock.bypassed`) with hooks or a forward put on the instance.

    Hooks of the host library itself, which only record what passes, do not count. None where there is nothing else.
    """
    if not is_altered(part, library=type(part).__module__.partition(".")[0]):
        return None
    return (
        f"the module {type(part).__name__} has hooks or a forward of its own, and a reduced block calls what "
        "is in it, not the module; put them on the block or its projections instead"
    )


def refuse_own_forward(block: nn.Module, depth: int, then: str) -> None:
    """Refuse a block whose forward is not that of its class: accelerate's hooks keep the one that they found.

    Raises:
        UnsupportedModelError: saying so.
    """
    if "forward" in vars(block):
        raise UnsupportedModelError(
            f"block {depth} has a forward of its own, put on the instance, which would go on calling the one that it "
            f"replaced; take it off (accelerate.hooks.remove_hook_from_module does that with accelerate's), then {then}"
        )
