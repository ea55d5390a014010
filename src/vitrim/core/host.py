"""Answers of a host about dense models: what they predict, of what classes, and how a task reads it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.block import ReducedBlock
from vitrim.core.modules import class_of, input_channels, pair, stride_of
from vitrim.core.plan import Head, HostFacts, Layout, Part, Preprocessing, Purpose, Role, Starting
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError, VitrimError

Size = tuple[int, int]
"""Height and width in pixels."""


class DenseAnswers:
    """The questions about segmentation and detection; the defaults are those of a model that is for labels of images.

    Class methods only, as `vitrim.core.host.Host`, which inherits them.
    """

    @classmethod
    def task(cls, model: nn.Module) -> str | None:
        """The task ``model`` is made for, by name; None: labels of whole images, one or several."""
        return None

    @classmethod
    def tasks(cls, model: nn.Module) -> tuple[str, ...]:
        """All tasks that ``model`` can be evaluated in, the one it is made for first; empty where `task` is None."""
        made_for = cls.task(model)
        return () if made_for is None else (made_for,)

    @classmethod
    def learns(cls, model: nn.Module) -> bool:
        """Tell whether ``model`` can be trained on its `task` here, and not only by its library."""
        return True

    @classmethod
    def class_names(cls, model: nn.Module) -> Sequence[str] | None:
        """The names of the classes that ``model`` predicts, in order; None where it does not say.

        A model of a run has them as its ``class_names``.
        """
        return getattr(model, "class_names", None)

    @classmethod
    def takes_one_size(cls, model: nn.Module) -> bool:
        """Tell whether ``model`` takes images of its own size only, which a larger image must be cut into."""
        return False

    @classmethod
    def sees_unpadded(cls, model: nn.Module) -> bool:
        """Tell whether a detector takes images of any size and shape, one by one, and was trained without padding."""
        return False

    @classmethod
    def pixel_scores(cls, model: nn.Module, images: Tensor) -> Tensor:
        """Class scores (B, K, H, W) of every pixel of ``images`` (B, C, H, W)."""
        return cls.logits(model(images))

    @classmethod
    def detections(
        cls, model: nn.Module, images: Tensor, sizes: Sequence[Size] | None = None
    ) -> list[dict[str, Tensor]]:
        """The objects in ``images`` (B, C, H, W), per image as `vitrim.models.vitdet.Detector` gives them.

        ``sizes`` are those of each image in its top left corner, where the rest is padding.
        """
        found: list[dict[str, Tensor]] = model(images) if sizes is None else model(images, sizes)
        return found

    @classmethod
    def front_name(cls, model: nn.Module) -> str | None:
        """The name of what runs in front of the heads of a dense model, `front`; None: it is measured as a whole."""
        return None

    @classmethod
    def front(cls, model: nn.Module, images: Tensor) -> Any:
        """The part of the forward on ``images`` (B, C, H, W) in front of the heads: what a reduction makes faster."""
        raise NotImplementedError

    @classmethod
    def logits(cls, output: Any) -> Tensor:
        """Logits from the output of the model."""
        raise NotImplementedError


METHOD = "reducer"
"""The part of a dotted name under which a reduced block keeps what the method learns: it is not the host's."""


class Host(DenseAnswers):
    """A host family. Class methods only: a host has no state of its own.

    `vitrim.core.registry.ask(model)` is the family of any model: also of one that cannot be reduced, where it answers
    what can be known of models of its library.
    """

    name: ClassVar[str] = ""
    """Name of the family in `vitrim list hosts`."""
    in_cells: ClassVar[bool] = False
    """Squares of patches are reduced as wholes, since what follows joins them; see `HostFacts.cell`."""
    purpose: ClassVar[Purpose] = "images"
    """The group in which `vitrim list hosts` shows the family."""
    heads: ClassVar[tuple[Head, ...]] = ("class token", "patches", "no class token")
    """The kinds of head among models of the family; a model that hands out tokens has a head that reads patches."""
    reduced_blocks: ClassVar[tuple[type[ReducedBlock], ...]] = ()
    """The reduced form of every block class the family uses."""
    runs_on_meta: ClassVar[bool] = True
    """The forward follows from shapes: it reads no value, so that it runs on the meta device."""
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {}
    """The family's names for what is not trunk: patterns of one part of a dotted name, ``{"tokens": ("*_token",)}``.
    Where several match, the part that is listed first counts. Classifiers and the `patch_maker` need no name."""

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise `UnsupportedModelError` if this model of the family cannot be reduced faithfully."""

    @classmethod
    def blocks(cls, model: nn.Module) -> list[nn.Module]:
        """The transformer blocks in execution order; none of a model that can only be asked about, as by default."""
        return []

    @classmethod
    def trunk_layers(cls, model: nn.Module) -> list[nn.Module]:
        """`blocks`, and the layers of their kind behind them that are never reduced."""
        return cls.blocks(model)

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
    def find_classifiers(cls, model: nn.Module) -> list[nn.Module]:
        """The layers that turn the feature (B, C) into logits; none in a bare feature extractor."""
        return []

    @classmethod
    def classifiers(cls, model: nn.Module) -> list[nn.Module]:
        """`find_classifiers`; the feature is the mean of their inputs.

        Raises:
            UnsupportedModelError: a model without a classifier, such as a bare feature extractor.
        """
        found = cls.find_classifiers(model)
        if not found:
            raise UnsupportedModelError(f"{type(model).__name__} has no classifier")
        return found

    @classmethod
    def compared(cls, model: nn.Module) -> list[nn.Module]:
        """The modules whose inputs are compared with the dense model's: by default the classifiers."""
        return cls.classifiers(model)

    @classmethod
    def classifier_names(cls, model: nn.Module) -> tuple[str, ...]:
        """Names, as in ``named_modules``, of the linear layers of ``model`` that have one row per class."""
        layers = [layer for found in cls.find_classifiers(model) for layer in found.modules()]
        linear = {id(layer) for layer in layers if isinstance(layer, nn.Linear)}
        return tuple(name for name, module in model.named_modules() if id(module) in linear)

    @classmethod
    def classes_in(cls, model: nn.Module, weights: Mapping[str, Tensor]) -> int | None:
        """Classes that ``weights`` of such a model, by name, were made for; None where they do not say."""
        keys = (f"{name}.weight" for name in cls.classifier_names(model))
        return next((len(weights[key]) for key in keys if key in weights), None)

    @classmethod
    def num_classes(cls, model: nn.Module) -> int | None:
        """Classes of the head; None where the model does not say."""
        return cls.facts(model).num_classes

    @classmethod
    def resampled(cls, model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """``weights`` of such a model with patch kernels and position tables of the sizes that ``model`` has."""
        return weights

    @classmethod
    def reset_head(cls, model: nn.Module, num_classes: int) -> None:
        """Give ``model`` a new head for ``num_classes``, with fresh weights as its library makes them.

        Raises:
            VitrimError: the head of such a model cannot be replaced.
        """
        raise VitrimError(
            f"{type(model).__name__} cannot be given {num_classes} classes: create it with that many (model_options), "
            "as vitrim does not know how to replace its head"
        )

    @classmethod
    def logits(cls, output: Any) -> Tensor:
        """(B, K) logits from the output of the model: the tensor itself, or its entry ``logits``."""
        if isinstance(output, Tensor):
            return output
        logits: Tensor = output["logits"] if isinstance(output, dict) else output.logits
        return logits

    @classmethod
    def features_and_logits(cls, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, N, C) that the head reads, and logits (B, K), of one forward on ``images`` (B, C, H, W).

        Raises:
            VitrimError: the model does not come apart into its two halves.
        """
        raise VitrimError(
            f"this loss compares tokens, and {type(model).__name__} does not give them: it needs a forward in two "
            "halves, tokens and then the head"
        )

    @classmethod
    def without_head(cls, model: nn.Module) -> nn.Module:
        """The model without pooling and classifiers, or the part of it that makes tokens: the backbone of a dense head.

        ``model`` itself may be changed.

        Raises:
            UnsupportedModelError: nothing is known about its tokens.
        """
        raise no_tokens(model)

    @classmethod
    def hands_out_tokens(cls, model: nn.Module) -> bool:
        """Tell whether ``model`` has no head, and its output are its tokens: the tower of another model, say."""
        return False

    @classmethod
    def tokens(cls, model: nn.Module, images: Tensor) -> Tensor:
        """Tokens (B, N, C) of ``images`` (B, C, H, W) after the last norm, prefix in front, patches in raster order.

        Args:
            model: as `without_head` leaves it, reduced or not.
            images: of whole patches.

        Raises:
            VitrimError: the model hands out no tokens, or takes images of another size only.
        """
        raise no_tokens(model)

    @classmethod
    def layout(cls, model: nn.Module) -> Layout:
        """The layout of `tokens`.

        Raises:
            UnsupportedModelError: as `without_head`.
        """
        if cls.facts.__func__ is Host.facts.__func__:  # type: ignore[attr-defined]
            raise no_tokens(model)
        facts = cls.facts(model)
        (rows, columns), (_, height, width) = facts.grid_size, facts.input_size
        # images need not be whole patches; where several convolutions make the patches, they pad
        patch_size = stride_of(cls.patch_maker(model)) or (height // rows, width // columns)
        return Layout(facts.dim, facts.num_prefix, patch_size)

    @classmethod
    def roles(cls, model: nn.Module) -> dict[str, Role]:
        """The role of every parameter of ``model``, by name, reduced or not.

        By default told from the blocks, the classifiers, the `patch_maker` and the names in `parts`.
        """
        heads = {id(p) for module in cls.find_classifiers(model) for p in module.parameters()}
        maker = cls.patch_maker(model)
        stem = set() if maker is None else {id(p) for p in maker.parameters()}
        parts: dict[str, Part] = {}
        for name, parameter in model.named_parameters():
            known: Part = "head" if id(parameter) in heads else "stem" if id(parameter) in stem else "trunk"
            parts[name] = "method" if METHOD in name.split(".") else cls.named_part(name) or known
        layers, undecayed = cls.layers(model, parts), cls.undecayed(model)
        return {
            name: Role(
                part,
                None if layers is None else layers[name],
                not any(fnmatchcase(name, pattern) for pattern in undecayed),
            )
            for name, part in parts.items()
        }

    @classmethod
    def named_part(cls, name: str) -> Part | None:
        """The part a parameter belongs to judging by its name alone, as `parts` says."""
        words = name.split(".")
        for part, patterns in cls.parts.items():
            # a token is one tensor; a head or a stem may be a module of many
            if any(
                fnmatchcase(word, pattern) for word in words[-1 if part == "tokens" else 0 :] for pattern in patterns
            ):
                return part
        return None

    @classmethod
    def layers(cls, model: nn.Module, parts: Mapping[str, Part]) -> Mapping[str, int] | None:
        """The layer of every parameter in ``parts``, see `Role`; None if the model does not name its layers.

        By default what a model registers in front of its blocks is layer 0, and a norm behind them is of the last one.
        """
        blocks = cls.trunk_layers(model)
        if not blocks:
            return None
        inside = {id(p): depth for depth, block in enumerate(blocks, 1) for p in block.parameters()}
        layers: dict[str, int] = {}
        passed = 0
        for name, parameter in model.named_parameters():
            depth = inside.get(id(parameter))
            if depth is None:
                depth = {"trunk": passed, "head": len(blocks) + 1}.get(parts[name], 0)
            else:
                passed = len(blocks)
            layers[name] = depth
        return layers

    @classmethod
    def undecayed(cls, model: nn.Module) -> Collection[str]:
        """Name patterns of parameters that weight decay leaves alone, besides vectors and positions."""
        return ()

    @classmethod
    def starting(cls, model: nn.Module) -> Starting | None:
        """The weights of attention and the learned positions of ``model``, to be initialised; None without them."""
        return None

    @classmethod
    def preprocessing(cls, model: nn.Module) -> Preprocessing:
        """The preprocessing of the images of ``model``.

        By default a model may have an ``eval_transform``, from a PIL image in RGB to (C, H, W), with its ``mean`` and
        ``std``, and an ``image_size``, one number or height and width.

        Raises:
            VitrimError: what the model says cannot be read, or is no preprocessing.
        """
        own: Any = getattr(model, "eval_transform", None)
        told = own is not None and hasattr(own, "mean") and hasattr(own, "std")
        return Preprocessing(
            channels=input_channels(model),
            size=pair(getattr(model, "image_size", None)),
            mean=tuple(own.mean) if told else None,
            std=tuple(own.std) if told else None,
            transform=own,
        )

    @classmethod
    def input_size(cls, model: nn.Module) -> tuple[int, int, int] | None:
        """Channels, height and width of the images ``model`` was made for; None where it does not say."""
        return cls.facts(model).input_size if cls.blocks(model) else None

    @classmethod
    def resized(cls, model: nn.Module, size: int) -> nn.Module | None:
        """A copy of ``model`` for square images of ``size`` pixels a side; None where its library cannot make one."""
        return None

    @classmethod
    def checkpoint_gradients(cls, model: nn.Module, on: bool = True) -> None:
        """Recompute activations in the backward pass instead of keeping them, or stop doing so.

        Raises:
            VitrimError: the model has no such switch.
        """
        raise VitrimError(f"{type(model).__name__} cannot checkpoint gradients: set grad_checkpointing=false")

    @classmethod
    def has_idle_parameters(cls, model: nn.Module) -> bool:
        """Return whether classification may leave parameters without a gradient: distributed runs must know."""
        return False

    @classmethod
    def patch_dropout(cls, model: nn.Module) -> Any | None:
        """The module that drops patches in training, a share of ``prob``; None if the model has none."""
        return None

    @classmethod
    def architecture(cls, model: nn.Module) -> str:
        """The library's name of the model, else its class."""
        return type(model).__name__

    @classmethod
    def set_fused(cls, model: nn.Module, fused: bool) -> bool:
        """Let attention run fused or written out; return whether the family has that choice."""
        return False

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


def no_tokens(model: nn.Module) -> UnsupportedModelError:
    """The refusal of a backbone about whose tokens nothing is known."""
    return UnsupportedModelError(
        f"{type(model).__name__} hands out no tokens that a dense head could read: take a supported host "
        "(`vitrim list hosts` prints them)"
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
    def install(cls, model: nn.Module, trace: Trace) -> None:
        """Let prompts follow the images. ``trace`` is shared by the blocks of the tower."""
        raise NotImplementedError

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        """Undo `install`, if it was done."""
        raise NotImplementedError
