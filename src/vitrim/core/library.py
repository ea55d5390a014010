"""`Library`: what training and measuring need to know about any model, defined once per library of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrim.core.host import Host
from vitrim.core.plan import Layout, Part, Preprocessing, Role, Starting
from vitrim.errors import UnsupportedModelError, VitrimError

Size = tuple[int, int]
"""Height and width in pixels."""

RELATIVE = ("*relative_position_bias_table", "*rel_pos_h", "*rel_pos_w")
"""Name patterns of tables of relative positions, the same in all libraries."""

METHOD = "reducer"
"""The name in dotted parameter names under which a reduced block stores what the method learns."""


class Library:
    """Answers about every model of a library, reducible or not; `vitrim.core.registry.ask` makes one.

    Questions that a model cannot answer raise `UnsupportedModelError`, or its base class `VitrimError`. ``host`` is the
    family of the model; None if it has none.
    """

    name: ClassVar[str] = ""
    runs_on_meta: ClassVar[bool] = True
    """The forward reads no values, so it runs on the meta device."""
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {}
    """Patterns of one part of a dotted name for parameters outside the trunk, ``{"tokens": ("*_token",)}``; the first
    part that matches counts. Classifiers and the `Host.patch_maker` need no name.
    """

    learns: ClassVar[bool] = True
    """vitrim can train the models on their task."""
    takes_one_size: ClassVar[bool] = False
    """Models take only images of their own size, so larger images must be cut."""
    sees_unpadded: ClassVar[bool] = False
    """A detector that takes images of any size and shape one by one, and was trained without padding."""

    def __init__(self, host: type[Host] | None = None) -> None:
        self.host = host

    # ---- classes and heads

    def classifiers(self, model: nn.Module) -> list[nn.Module]:
        """The layers that turn the feature (B, C) into logits; empty for a bare feature extractor."""
        return []

    def readers(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose inputs are compared with the dense model's; by default the classifiers."""
        found = self.classifiers(model)
        if not found:
            raise UnsupportedModelError(f"{type(model).__name__} has no classifier")
        return found

    def class_layers(self, model: nn.Module) -> dict[str, int]:
        """The layers with one row per class, by name, and how many further rows each has (such as the background's)."""
        layers = [layer for found in self.classifiers(model) for layer in found.modules()]
        linear = {id(layer) for layer in layers if isinstance(layer, nn.Linear)}
        return {name: 0 for name, module in model.named_modules() if id(module) in linear}

    def num_classes(self, model: nn.Module) -> int | None:
        """Classes of the head, 0 without one; None if the model does not tell."""
        own: int | None = getattr(model, "num_classes", None)
        return own if own is not None or self.host is None else self.host.facts(model).num_classes

    def class_names(self, model: nn.Module) -> Sequence[str] | None:
        """The names of the classes that ``model`` predicts, in order; None if unknown."""
        return getattr(model, "class_names", None)

    def reset_head(self, model: nn.Module, num_classes: int) -> None:
        """Give ``model`` a new head for ``num_classes``, initialised as its library does."""
        raise VitrimError(
            f"{type(model).__name__} cannot be given {num_classes} classes: create it with that many (model_options), "
            "as vitrim does not know how to replace its head"
        )

    def logits(self, output: Any) -> Tensor:
        """(B, K) logits from the output of the model: the tensor itself, or its entry ``logits``."""
        if isinstance(output, Tensor):
            return output
        logits: Tensor = output["logits"] if isinstance(output, dict) else output.logits
        return logits

    # ---- embeddings

    def embedding(self, model: nn.Module, images: Tensor) -> Tensor:
        """The embedding (B, D) of ``images`` (B, C, H, W), by default the input of the classifier."""
        found: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda layer, args: found.append(args[0]))
            for layer in self.classifiers(model)
        ]
        try:
            output = model(images)
        finally:
            for hook in hooks:
                hook.remove()
        # Several classifiers (class token and distillation) read one vector each: their mean.
        vectors = self.vector(model, torch.stack(found).mean(0) if found else output)
        if vectors is None:
            raise no_embedding(model)
        return vectors

    def vector(self, model: nn.Module, output: Any) -> Tensor | None:
        """The embedding (B, D) in the output of a model without a classifier; None if it has none."""
        return output if isinstance(output, Tensor) and output.ndim == 2 else None

    def text_embeddings(self, model: nn.Module, texts: Sequence[str]) -> tuple[Tensor, float, float]:
        """(K, D) embeddings of ``texts``, and the scale and bias of their cosines with images in the logits."""
        raise VitrimError(
            f"{type(model).__name__} has no text tower: take a CLIP or SigLIP of transformers or open_clip"
        )

    def token_vectors(self, model: nn.Module, items: Sequence[Any]) -> list[Tensor]:
        """(n, D) vectors, one per token, of each of ``items``: images of pages (PIL), or queries (texts)."""
        raise VitrimError(
            f"{type(model).__name__} makes no vector of every token: take a retriever of pages, such as "
            "transformers' ColPaliForRetrieval"
        )

    def embedding_name(self, model: nn.Module) -> str:
        """The embedding in a few words, such as "class token"."""
        return "what the classifier reads" if self.classifiers(model) else "the model's output"

    # ---- tokens

    def features_and_logits(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, N, C) that the head reads, and logits (B, K), from one forward on ``images`` (B, C, H, W)."""
        raise VitrimError(
            f"this loss compares tokens, and {type(model).__name__} does not give them: it needs a forward in two "
            "halves, tokens and then the head"
        )

    def without_head(self, model: nn.Module) -> nn.Module:
        """The backbone for a dense head: ``model`` without pooling and classifiers. ``model`` itself may be changed."""
        raise no_tokens(model)

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        """Tokens (B, N, C) of ``images`` (B, C, H, W) after the last norm, prefix first, patches in raster order.

        ``model`` is as returned by `without_head`, reduced or not; ``images`` consist of whole patches.
        """
        raise no_tokens(model)

    def layout(self, model: nn.Module) -> Layout:
        """The layout of `tokens`."""
        if self.host is None:
            raise no_tokens(model)
        facts = self.host.facts(model)
        (rows, columns), (_, height, width) = facts.grid_size, facts.input_size
        # images need not be whole patches; several convolutions pad, so their strides tell nothing
        maker = self.host.patch_maker(model)
        found = [] if maker is None else [module for module in maker.modules() if isinstance(module, nn.Conv2d)]
        stride = pair(found[0].stride) if len(found) == 1 else None
        patch_size = stride or (height // rows, width // columns)
        return Layout(facts.dim, facts.num_prefix, patch_size)

    # ---- parameters

    def roles(self, model: nn.Module) -> dict[str, Role]:
        """The role of every parameter of ``model``, by name, reduced or not."""
        heads = {id(p) for module in self.classifiers(model) for p in module.parameters()}
        maker = None if self.host is None else self.host.patch_maker(model)
        stem = set() if maker is None else {id(p) for p in maker.parameters()}
        parts: dict[str, Part] = {}
        for name, parameter in model.named_parameters():
            # What the model shows (heads, patch maker) is the first guess; a name in the library's table overrules it.
            known: Part = "head" if id(parameter) in heads else "stem" if id(parameter) in stem else "trunk"
            words = name.split(".")
            for part, patterns in self.parts.items():
                # a token is one tensor; a head or a stem may be a module of many
                read = words[-1:] if part == "tokens" else words
                if any(fnmatchcase(word, pattern) for word in read for pattern in patterns):
                    known = part
                    break
            parts[name] = "method" if METHOD in words else known
        layers, undecayed = self.layers(model, parts), self.undecayed(model)
        return {
            name: Role(
                part,
                None if layers is None else layers[name],
                not any(fnmatchcase(name, pattern) for pattern in undecayed),
            )
            for name, part in parts.items()
        }

    def layers(self, model: nn.Module, parts: Mapping[str, Part]) -> Mapping[str, int] | None:
        """The layer of every parameter in ``parts``, see `Role`; None if the model does not name its layers."""
        blocks = self.trunk_layers(model)
        if not blocks:
            return None
        inside = {id(p): depth for depth, block in enumerate(blocks, 1) for p in block.parameters()}
        layers: dict[str, int] = {}
        # Parameters registered before the blocks are layer 0, and a norm behind them is in the last layer.
        passed = 0
        for name, parameter in model.named_parameters():
            depth = inside.get(id(parameter))
            if depth is None:
                depth = {"trunk": passed, "head": len(blocks) + 1}.get(parts[name], 0)
            else:
                passed = len(blocks)
            layers[name] = depth
        return layers

    def trunk_layers(self, model: nn.Module) -> list[nn.Module]:
        """The blocks, plus the layers of the same kind behind them that are never reduced."""
        return [] if self.host is None else self.host.blocks(model)

    def undecayed(self, model: nn.Module) -> Collection[str]:
        """Name patterns of parameters without weight decay, besides vectors and positions."""
        return ()

    def starting(self, model: nn.Module) -> Starting | None:
        """The attention weights and learned positions of ``model``, to be initialised; None without them."""
        return None

    def are_positions(self, name: str) -> bool:
        """True if the parameter ``name`` is a table of positions, whose size is that of the images."""
        return any(
            fnmatchcase(word, pattern)
            for word in name.split(".")
            for pattern in (*self.parts.get("positions", ()), *RELATIVE)
        )

    def resampled(self, model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """``weights`` with patch kernels and position tables resampled to the sizes of ``model``, as its library does.

        Functions of libraries raise errors of many kinds for tables that they cannot resample.
        """
        return weights

    def has_idle_parameters(self, model: nn.Module) -> bool:
        """True if classification may leave parameters without a gradient, which distributed training must know."""
        return False

    # ---- images

    def preprocessing(self, model: nn.Module) -> Preprocessing:
        """The preprocessing of the images of ``model``, by default by its ``eval_transform`` and ``image_size``."""
        own: Any = getattr(model, "eval_transform", None)
        normalises = own is not None and hasattr(own, "mean") and hasattr(own, "std")
        return Preprocessing(
            channels=input_channels(model),
            size=pair(getattr(model, "image_size", None)),
            mean=tuple(own.mean) if normalises else None,
            std=tuple(own.std) if normalises else None,
            transform=own,
        )

    def input_size(self, model: nn.Module) -> tuple[int, int, int] | None:
        """Channels, height and width of the images ``model`` was made for; None if unknown."""
        if self.host is not None and self.host.blocks(model):
            try:
                return self.host.facts(model).input_size
            except UnsupportedModelError:
                pass  # of blocks that cannot be reduced: the library knows what images the dense model takes
        how = self.preprocessing(model)
        return None if how.size is None else (how.channels, *how.size)

    def set_size(self, model: nn.Module, size: int) -> None:
        """Make ``model`` take square images of ``size`` pixels, in place; see `vitrim.core.image_size.at_size`."""
        raise UnsupportedModelError(f"{self.name or 'its library'} has no way to do so")

    def take_resampled(self, model: nn.Module, like: nn.Module | None = None) -> None:
        """Replace the tables of ``model`` by those `resampled` for the layout of ``like``, by default its own."""
        weights = model.state_dict()
        finer = {  # half precision would round twice, and is not there for all of torch's resampling
            name: value.to(torch.promote_types(value.dtype, torch.float32)) if self.are_positions(name) else value
            for name, value in weights.items()
        }
        for name, table in self.resampled(like or model, finer).items():
            old = weights[name]
            if table.shape != old.shape:
                place, _, last = name.rpartition(".")
                module = model.get_submodule(place)
                setattr(module, last, nn.Parameter(table.to(old), getattr(module, last).requires_grad))

    def inputs_of(self, model: nn.Module, images: Tensor) -> dict[str, Any] | None:
        """The inputs of ``model`` by name, for ``images`` (B, C, H, W); None if it takes images themselves."""
        return None

    def padding(self, model: nn.Module, images: Tensor) -> int:
        """The tokens of padding among those of ``images``, as `inputs_of` takes them, in all."""
        return 0

    # ---- segmentation and detection; the defaults are of a model for labels of images

    def tasks(self, model: nn.Module) -> tuple[str, ...]:
        """The tasks that ``model`` can be evaluated in, its own first; empty for image classification."""
        return ()

    def pixel_scores(self, model: nn.Module, images: Tensor) -> Tensor:
        """Class scores (B, K, H, W) of every pixel of ``images`` (B, C, H, W)."""
        return self.logits(model(images))

    def detections(
        self, model: nn.Module, images: Tensor, sizes: Sequence[Size] | None = None
    ) -> list[dict[str, Tensor]]:
        """The objects in ``images`` (B, C, H, W), per image, in the format of `vitrim.models.vitdet.Detector`.

        ``sizes`` are those of the images, which lie in the top left corner of a padded batch.
        """
        found: list[dict[str, Tensor]] = model(images) if sizes is None else model(images, sizes)
        return found

    def front(self, model: nn.Module) -> tuple[str, Callable[[Tensor], Any]] | None:
        """The name of the part before the heads, to measure it alone, and a function of images to run it."""
        return None

    # ---- switches

    def checkpoint_gradients(self, model: nn.Module, on: bool = True) -> None:
        """Turn gradient checkpointing on or off: recompute activations in the backward pass instead of storing them."""
        raise VitrimError(f"{type(model).__name__} cannot checkpoint gradients: set grad_checkpointing=false")

    def patch_dropout(self, model: nn.Module) -> Any | None:
        """The module that drops a share ``prob`` of the patches in training; None without one."""
        return None

    def set_fused(self, model: nn.Module, fused: bool) -> bool:
        """Make attention fused or written out; return False if the family has no such choice."""
        return False

    def masked_autoencoder(self, model: nn.Module) -> bool:
        """True if the library records that the weights were trained as a masked autoencoder (MAE)."""
        return False

    def architecture(self, model: nn.Module) -> str:
        """The library's name of the model, or else its class."""
        return type(model).__name__


class ImageHook:
    """Runs before a model's forward, and makes its own inputs of the images that it is given alone."""

    def __init__(self, library: Library, model: nn.Module) -> None:
        self.library = library
        self.positional = tuple(inspect.signature(type(model).forward).parameters)[1:]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self.positional, args)), **kwargs}  # noqa: B905 - a model may have optional inputs
        images = given.get(self.positional[0])
        # A caller that names several inputs, or text, has made them himself.
        if len(given) != 1 or not isinstance(images, Tensor) or images.ndim != 4:
            return None
        inputs = self.library.inputs_of(model, images)
        return None if inputs is None else ((), inputs)


def no_tokens(model: nn.Module) -> UnsupportedModelError:
    """The error for a backbone whose tokens are unknown."""
    return UnsupportedModelError(
        f"{type(model).__name__} hands out no tokens that a dense head could read: take a supported host "
        "(`vitrim list hosts` prints them)"
    )


def no_embedding(model: nn.Module) -> UnsupportedModelError:
    """The error for a model without one vector per image."""
    return UnsupportedModelError(
        f"{type(model).__name__} gives no embedding, one vector per image: take a tower that pools its tokens"
    )


def input_channels(model: nn.Module) -> int:
    """Channels of the images that ``model`` takes, from its first convolution; 3 if unknown.

    Example:
        >>> input_channels(nn.Sequential(nn.Conv2d(1, 8, 4))), input_channels(nn.Linear(3, 2))
        (1, 3)
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels


def pair(size: Any) -> tuple[int, int] | None:
    """Height and width from one number for both, or from two; None stays None."""
    if size is None or isinstance(size, int):
        return None if size is None else (size, size)
    return int(size[0]), int(size[1])
