"""Assembly of a run: a recipe's data and starting model, and the `Trainer` of both."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from timm.layers import build_sincos2d_pos_embed
from torch import Tensor, nn

from vitrim.core.registry import ask
from vitrim.data import ImageDataset, ImageStream, MultiLabelDataset, eval_transform, load_data, spread, stream_images
from vitrim.data.load import parted, splits_of
from vitrim.data.paths import spellings
from vitrim.data.readers import AnyDataset
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.models.references import folder
from vitrim.tasks import tasks
from vitrim.training.images import seed_all
from vitrim.training.loop import Trainer
from vitrim.training.recipe import AUTO, Recipe, Resolved
from vitrim.training.running import Running
from vitrim.weights import holds_encoder, load_backbone, load_encoder, load_host, weights_file

if TYPE_CHECKING:
    from vitrim.progress import Signs

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
"""accelerate's names of a recipe's precisions."""

SPLITS = ("train", "val", "test")
HELD_OUT = 0.1
"""Share of the training images that is held out if the data have no split for evaluations."""

QUERY_KEY = (0.7, 0.7)
VALUE_PROJECTION = (0.4, -0.4)
"""Weights of noise and identity in a mimetic initialisation, section 4 of the paper."""


def build_trainer(
    resolved: Resolved,
    data: str | Path | AnyDataset | Mapping[str, AnyDataset],
    running: Running,
    *,
    checkpoint: Path | None = None,
    cpu: bool = False,
    signs: Signs | None = None,
) -> Trainer:
    """Build a run that is ready to start: everything is checked, nothing is written.

    Args:
        data: a source for `load_data`, whose splits the recipe names; or data sets by the name of the split; or a
            single one to train on.
        checkpoint: starting weights, a safetensors file or the folder of a finished run.
    """
    accelerator = make_accelerator(resolved.recipe, cpu=cpu)
    seed_all(resolved.recipe.seed)
    recipe = chosen_splits(resolved.recipe, data)
    train_data, eval_data, test_data = open_data(recipe, data)
    model = starting_model(resolved.recipe, train_data.num_classes, checkpoint)
    for held_out in (eval_data, test_data):
        if isinstance(held_out, ImageDataset | MultiLabelDataset):  # for others, the task has a transform
            # The model's own: its published accuracy is of these crops.
            held_out.transform = eval_transform(model)
    return Trainer(
        resolved,
        model,
        train_data,
        eval_data,
        accelerator,
        running,
        signs,
        start=checkpoint,
        test_data=test_data,
        notes=_about(resolved.recipe, recipe, data, train_data, eval_data),
    )


def chosen_splits(recipe: Recipe, data: Any) -> Recipe:
    """The recipe with ``auto`` splits replaced by those of the data; `VitrimError` if none of them is for training."""
    if AUTO not in (recipe.split, recipe.eval_split):
        return recipe
    names = splits_of(data) if isinstance(data, str | Path) else list(data) if isinstance(data, Mapping) else []
    if names is None:  # all layouts of readers have these two
        names = ["train", "val"]
    found = {word: next((name for name in names if name and name.lower() in spellings(word)), None) for word in SPLITS}
    # The asked splits stay what the recipe says: the run folder records the recipe as given.
    split, watched = recipe.split, recipe.eval_split
    if split == AUTO:
        split = found["train"]
        if split is None and names:
            raise VitrimError(
                f"the data have the parts {', '.join(map(str, names))}: name the one to train on, split=NAME"
            )
    if watched == AUTO:
        watched = next((name for name in (found["val"], found["test"]) if name not in (None, split)), HELD_OUT)
    return recipe.model_copy(update={"split": split, "eval_split": watched})


def _about(asked: Recipe, recipe: Recipe, data: Any, train_data: Any, eval_data: Any) -> list[str]:
    """A note on the images that ``auto`` holds out."""
    if asked.eval_split != AUTO or not isinstance(recipe.eval_split, float):
        return []
    source = data if isinstance(data, str | Path) else "the data"
    count, held = len(train_data), len(eval_data)
    return [
        f"{source} has no part for evaluations: {held} of its {count + held} images are held out, not trained on, and "
        "watched (eval_split)"
    ]


def make_accelerator(recipe: Recipe, *, cpu: bool = False) -> Accelerator:
    many = DistributedDataParallelKwargs()
    return Accelerator(cpu=cpu, mixed_precision=PRECISIONS[recipe.precision], kwargs_handlers=[many])


def open_data(
    recipe: Recipe, data: str | Path | AnyDataset | Mapping[str, AnyDataset]
) -> tuple[AnyDataset | ImageStream, AnyDataset | None, AnyDataset | None]:
    """Open the images that a recipe trains on, evaluates, and finally tests; the last two may be None.

    Only the training split can be a stream: evaluations must read the same images. Data sets that are passed ignore
    ``data_options``.
    """
    for name in recipe.data_options:
        if name in ("source", "task", "split"):
            raise VitrimError(f"data_options has no {name}: the recipe's task and split say it")
    if isinstance(recipe.data_options.get("class_names"), str):
        raise VitrimError("data_options: class_names of a recipe is a list, which runs keep; a file may go or change")
    test_data = None if recipe.test_split is None else _images(recipe, data, recipe.test_split)
    train_data = _stream(recipe, data) if recipe.stream else _images(recipe, data, recipe.split)
    watched = recipe.eval_split
    if isinstance(watched, float) and not isinstance(train_data, ImageStream):
        return *parted(train_data, watched, "eval_split"), test_data
    eval_data = None if watched is None else _images(recipe, data, str(watched))
    return train_data, eval_data, test_data


def _images(recipe: Recipe, data: Any, split: str | None) -> AnyDataset:
    """One split of a source, or of data sets by the name of the split; at most ``limit`` images, spread evenly."""
    if isinstance(data, str | Path):
        task = tasks()[recipe.task].reads if recipe.task in tasks() else None  # unknown tasks are refused later
        images = load_data(data, task=task, split=split, **recipe.data_options)
    else:
        given: Mapping[Any, AnyDataset] = data if isinstance(data, Mapping) else {recipe.split: data}
        if split not in given:
            raise VitrimError(f"no split {split} in the data that were given; there is: {', '.join(map(str, given))}")
        # The caller's dataset keeps its own transform.
        images = copy.copy(given[split])  # its transform will be replaced
        if not hasattr(images, "num_classes"):
            kind = type(images).__name__
            raise VitrimError(f"the data are a source, data sets of vitrim.data by split, or one of them, not {kind}")
    if recipe.limit is None or recipe.limit >= len(images):
        return images
    return images.part(spread(len(images), recipe.limit).tolist())


def _stream(recipe: Recipe, data: Any) -> ImageStream:
    if not isinstance(data, str | Path):
        raise VitrimError("stream=true reads files: give their place, or set stream=false")
    return stream_images(data, split=recipe.split, **recipe.data_options)


def starting_model(recipe: Recipe, num_classes: int, checkpoint: Path | None) -> nn.Module:
    """The model of a recipe with its starting weights and, if its library supports it, a head for the data's classes.

    Of a checkpoint with other classes the model gets the head, which the task then replaces; of a label-free
    pre-training only the encoder is loaded.
    """
    # models whose head vitrim makes
    ours = ":" not in recipe.model or recipe.model.startswith(("segmenter:", "vitdet:"))
    options = {**({"num_classes": num_classes} if ours else {}), **recipe.model_options}
    model = create_model(recipe.model, pretrained=recipe.pretrained and checkpoint is None, options=options)
    if checkpoint is not None:
        file = weights_file(checkpoint)
        load = load_encoder if holds_encoder(file, model) else load_host
        load(model, file)
    elif recipe.backbone is not None:
        library, colon, name = recipe.backbone.partition(":")
        found = folder(name) if colon and library == "vitrim" else Path(recipe.backbone).expanduser()
        load_backbone(model, weights_file(found))
    elif recipe.init == "mimetic":
        mimetic_(model)
    return model


@torch.no_grad()
def mimetic_(model: nn.Module) -> None:
    """Mimetic initialisation: set attention and positions of a ``model`` in place, and leave the rest unchanged.

    Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers" (ICML 2023): attention starts with two
    patterns of pretrained Vision Transformers, a query-key product near the identity and a value-projection product
    near its negative, over sine-cosine positions. It costs nothing in training and helps most if data or time is short.
    Draws from torch's global generator. `VitrimError` for a model without a joint query, key and value projection (C, 3
    C) or without learned positions.

    Example:
        >>> import timm
        >>> mimetic_(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2))
    """
    library = ask(model)
    host, weights = library.host, library.starting(model)
    if host is None or weights is None:
        raise VitrimError(
            f"init=mimetic sets one projection to queries, keys and values per block, and learned positions: this "
            f"{type(model).__name__} does not have both"
        )
    facts = host.facts(model)
    head_dim = facts.dim // facts.num_heads

    def factors(noise: float, identity: float, rank: int) -> tuple[Tensor, Tensor]:
        """Factors A, B (dim, rank) of the best approximation A B^T to noise * Z + identity * I, with Z normal of
        variance 1 / dim."""
        # The best approximation of a rank is the cut singular value decomposition; its root goes to both factors.
        target = noise * torch.randn(facts.dim, facts.dim) / facts.dim**0.5 + identity * torch.eye(facts.dim)
        u, s, vh = torch.linalg.svd(target)
        root = s[:rank].sqrt()
        return u[:, :rank] * root, vh[:rank].T * root

    for query, key, value, output in weights.attention:
        for head in range(facts.num_heads):
            # Rows of one head in the joint projection: each head approximates the target with the rank of its width.
            place = slice(head * head_dim, (head + 1) * head_dim)
            of_query, of_key = factors(*QUERY_KEY, head_dim)
            query[place], key[place] = of_query.T, of_key.T
        of_value, of_output = factors(*VALUE_PROJECTION, facts.dim)
        value.copy_(of_value.T)
        output.copy_(of_output)
    weights.positions.copy_(build_sincos2d_pos_embed(list(facts.grid_size), dim=facts.dim))
