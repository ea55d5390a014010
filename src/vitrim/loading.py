"""Models by name; libraries are imported when a model of theirs is created."""

from __future__ import annotations

import copy
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

from pydantic import Field

from vitrim.checked import Refined, Seed, Stored, checked, one_line_of
from vitrim.errors import VitrimError, check_installed, check_known, first_line, unknown
from vitrim.yaml_files import read_yaml

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitrim.core.library import Library
    from vitrim.core.plan import Preprocessing
    from vitrim.tasks.options import Protocol

ModelOptions = dict[str, Any]
Creator = Callable[[str, bool, ModelOptions], "nn.Module"]

PIXELS, WIDTH = 2**14, 2**18
SIZES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("img_size", "image_size", "patch_size"), (1, PIXELS)),
    **dict.fromkeys(("in_chans", "num_channels"), (1, 2**16)),
    **dict.fromkeys(("depth", "num_layers", "num_hidden_layers"), (0, 1000)),
    **dict.fromkeys(("embed_dim", "hidden_dim", "mlp_dim", "hidden_size", "intermediate_size"), (1, WIDTH)),
    **dict.fromkeys(("num_heads", "num_attention_heads"), (1, 2**12)),
    "num_classes": (0, 2**24),
    "num_labels": (0, 2**17),  # transformers creates a name for each
    **dict.fromkeys(("reg_tokens", "num_register_tokens"), (0, 2**16)),
}
"""Size options of libraries, with their smallest and largest values: far above real models, for typing errors."""
RATES = ("_rate", "dropout", "dropout_prob")
"""Endings of the names of options in [0, 1]."""
INSTEAD = {
    "pretrained": "use --pretrained",
    "checkpoint_path": "use --checkpoint",
    **dict.fromkeys(("trust_remote_code", "code_revision"), "the code of a model's repository is never run"),
}
"""Options that load unchecked weights (timm) or run a repository's code (transformers), and what is done instead."""

OPEN_CLIP_CONFIG = "open_clip_config.json"
HF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def create_model(
    name: str,
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    options: ModelOptions | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Create the model ``name`` in eval mode, with random, pretrained or local weights.

    Args:
        name: of timm, or ``torchvision:NAME``, ``hf:FOLDER_OR_NAME``, ``open_clip:NAME_OR_FOLDER``, ``vitrim:NAME`` (a
            reference checkpoint), ``run:FOLDER`` (a finished run of ``vitrim train``), or a backbone of these after
            ``segmenter:`` or ``vitdet:``.
        pretrained: load the library's weights.
        checkpoint: load this file of weights instead, or the file in this folder of a run. Weights of another image
            size get the positions that the library resamples for ``options``, and a warning says so.
        options: keyword arguments of the library's model.

    Raises:
        VitrimError: an unknown name (the message suggests one), invalid options, or weights that do not fit.
        MissingPackageError: the library is not installed.

    Example:
        >>> create_model("deit_tiny_patch16_224", options={"num_classes": 3}, device="meta").num_classes
        3
    """
    import torch

    if not isinstance(name, str) or not isinstance(options, dict | None):
        raise VitrimError("a model is a name, e.g. deit_small_patch16_224, and its options a dict of keyword arguments")
    create, own_name = creator(name)
    options = {} if options is None else options
    if pretrained and name.removeprefix("segmenter:").removeprefix("vitdet:").startswith("run:"):
        raise VitrimError(f"{name} has the weights of its run: leave out --pretrained")
    if pretrained and checkpoint is not None:
        raise VitrimError("give either pretrained weights or a checkpoint, not both")
    for key, value in options.items():
        _check_option(name, key, value)
    # sizes need no check without options; references and runs call this function again with their model
    # The trial is made before the model: a typing error in a size must not fill the memory.
    if create is hf_model or (options and create in (timm_model, torchvision_model)):
        _check_fit(name, options, torch.device(device))
    model: Any = _created(name, create, own_name, pretrained, options, device)
    place = None if checkpoint is None else Path(checkpoint)
    if place is not None:
        from vitrim.models.references import class_names
        from vitrim.weights import load_checkpoint, weights_file

        load_checkpoint(model, weights_file(place))
        model.class_names = class_names(place)
    # Reports name the weights, since random ones make accuracies meaningless.
    weights = weights_of(name, pretrained=pretrained, checkpoint=place)
    # After the weights: a later change of them is seen by the number of edits.
    model.vitrim_origin = Origin(name, weights, options, learned_reduction(name, place), _edits(model))
    return model.eval()  # type: ignore[no-any-return]


class Origin(NamedTuple):
    """The origin of a model from `create_model`, stored on it as ``vitrim_origin``; fields as of `Loaded`.

    Another number of ``edits`` later means that its weights have changed.
    """

    name: str
    weights: str
    options: ModelOptions
    learned: Path | None
    edits: int


def _edits(model: nn.Module) -> int:
    """The number of in-place changes of the parameters."""
    # parameters created in inference mode have no counter
    return sum(parameter._version for parameter in model.parameters() if not parameter.is_inference())


def _created(
    name: str, create: Creator, own_name: str, pretrained: bool, options: ModelOptions, device: str | torch.device
) -> nn.Module:
    """Create the library's model, and turn its errors into one line."""
    import torch

    # a trial on the meta device must not advance the random generator
    with torch.random.fork_rng(devices=[], enabled=str(device) == "meta"), torch.device(device):
        try:
            return create(own_name, pretrained, options)
        except VitrimError:
            raise
        except _errors_of_libraries() as error:
            raise VitrimError(f"cannot create {name}: {_said(error)}") from error


def _errors_of_libraries() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    general = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError)
    return (*general, RuntimeError, TypeError, ValueError, SafetensorError)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return first_line(error)


def _check_option(name: str, key: str, value: Any) -> None:
    """Refuse sizes and rates that no model has."""
    from torch.utils._pytree import tree_leaves

    if key in INSTEAD:
        raise VitrimError(f"{key} is no option of a model here: {INSTEAD[key]}")
    if value is None:  # the library's default
        return
    if key in SIZES:
        least, most = SIZES[key]
        for number in tree_leaves(value):  # CrossViT has lists of lists
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
                raise VitrimError(f"{name}: {key}={value} must be a whole number from {least} to {most}")
    elif key.endswith(RATES) and isinstance(value, int | float) and (isinstance(value, bool) or not 0 <= value <= 1):
        raise VitrimError(f"{name}: {key}={value} must be a number from 0 to 1")


def _check_fit(name: str, options: ModelOptions, device: torch.device) -> None:
    """Refuse a model that exceeds the memory or fails on its images, tested on the meta device."""
    import torch

    from vitrim.core.registry import ask

    # Shapes without memory: the trial costs milliseconds where the model may need gigabytes.
    trial = _created(name, *creator(name), False, options, "meta")
    need = sum(weight.numel() * weight.element_size() for weight in chain(trial.parameters(), trial.buffers()))
    have = memory(device)
    if need > have:
        raise VitrimError(f"{name} has weights of {need / 2**30:.0f} GiB; there are {have / 2**30:.0f} GiB of memory")
    library = ask(trial)
    host = library.host
    # Models that read text, too, cannot be tried on images alone.
    images_alone = getattr(trial, "main_input_name", "pixel_values") == "pixel_values"
    if not options or host is None or not host.blocks(trial) or not images_alone or not library.runs_on_meta:
        return
    try:
        with torch.no_grad(), torch.device("meta"):
            trial.eval()(torch.empty(1, *host.facts(trial).input_size))
    except _errors_of_libraries() as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise VitrimError(f"{name} does not work with {given}: {first_line(error)}") from error


def memory(device: torch.device) -> float:
    """Total memory in bytes of this machine or of an accelerator; infinity if unknown."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu" or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return math.inf
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def check_name(name: str) -> None:
    """Refuse an unknown library, or an unknown model of timm, without creating a model."""
    create, own_name = creator(name)
    if create is timm_model:
        _check_timm_name(own_name)


def creator(name: str) -> tuple[Creator, str]:
    """The function that creates models of a library, and the name within it, from ``LIBRARY:NAME``; timm's without."""
    library, colon, rest = name.partition(":")
    if not colon:
        return timm_model, name
    check_known("library", library, LIBRARIES)
    if not rest:
        raise VitrimError(
            f"'{name}' names no model: write torchvision:vit_b_16, hf: or open_clip: and a folder or name, vitrim: "
            "and a reference checkpoint, run: and the folder of a finished run, or segmenter: or vitdet: and a backbone"
        )
    return LIBRARIES[library], rest


def timm_model(name: str, pretrained: bool, options: ModelOptions) -> nn.Module:
    import timm

    _check_timm_name(name)
    # Ask the Hub once before timm does, which would retry for half a minute.
    known = timm.get_pretrained_cfg(name) if pretrained else None
    if known is not None and known.hf_hub_id and not (known.file or known.state_dict):
        names = (known.hf_hub_filename,) if known.hf_hub_filename else ("model.safetensors", "pytorch_model.bin")
        check_hub(known.hf_hub_id, names)
    return timm.create_model(name, pretrained=pretrained, **options)


def _check_timm_name(name: str) -> None:
    import timm

    import vitrim.models  # noqa: F401 -- registers them with timm

    if not timm.is_model(name.split(".")[0]):
        hint = str(unknown("model", name, supported_models())).split(" valid:")[0]
        raise VitrimError(f"{hint} valid: the names that `vitrim list models` prints")


def supported_models() -> dict[str, str]:
    """Names and modules of timm's and vitrim's models of a supported class; builds no model."""
    import timm

    found = dict[str, str]()
    for place, families in model_modules().items():
        if families:
            short = place.rpartition(".")[2]
            found |= dict.fromkeys(timm.list_models(module=short), short)
    return found


def model_modules() -> dict[str, tuple[str, ...]]:
    """The modules of timm's and vitrim's models, and the names of the host families in each.

    Example:
        >>> model_modules()["timm.models.deit"], model_modules()["timm.models.resnet"]
        (('timm VisionTransformer',), ())
    """
    import importlib.util

    import timm

    import vitrim.models  # noqa: F401 -- registers them with timm
    from vitrim.core import registry

    hosts, found = registry.hosts(), dict[str, tuple[str, ...]]()
    for short in timm.list_modules():
        places = (f"{package}.{short}" for package in ("timm.models", "vitrim.models"))
        place = next((place for place in places if importlib.util.find_spec(place) is not None), None)
        if place is None:  # registered by another package
            continue
        classes = [value for value in vars(importlib.import_module(place)).values() if isinstance(value, type)]
        # A family may name a base class: its subclasses in the module are supported, too.
        names = {f"{base.__module__}.{base.__qualname__}" for one in classes for base in one.__mro__}
        found[place] = tuple(sorted({hosts[name].name for name in names if name in hosts}))
    return found


def torchvision_model(name: str, pretrained: bool, options: ModelOptions) -> nn.Module:
    """A model of torchvision, with the transform of its default weights as `eval_transform`."""
    models = _import("torchvision.models")
    if name not in models.list_models():
        raise unknown("model of torchvision", name, models.list_models(include="vit*"))
    weights = models.get_model_weights(name).DEFAULT
    resampled = pretrained and options.get("image_size") not in (None, *weights.meta.get("min_size", ()))
    if resampled:  # the library refuses another image size, and has a function for it
        from vitrim.weights import load_weights

        model: Any = models.get_model(name, **options)
        load_weights(model, weights.get_state_dict(check_hash=True), Path(str(weights)))
    else:
        model = models.get_model(name, weights=weights if pretrained else None, **options)
    transform = weights.transforms()
    # The image size may be another than that of the weights: the crop follows it.
    side = getattr(model, "image_size", None)
    if side is not None and transform.crop_size != [side]:
        from vitrim.hosts.torchvision.library import transform_at

        transform = transform_at(transform, side)
    model.eval_transform = transform
    model.class_names = weights.meta.get("categories") if pretrained else None
    return model  # type: ignore[no-any-return]


def hf_model(name: str, pretrained: bool, options: ModelOptions) -> nn.Module:
    """A Hugging Face model: from the folder ``name``, with its weights if it has any, or by its name on the Hub."""
    import torch

    transformers = _import("transformers")
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(("./", "../", "~"))):
        raise VitrimError(f"no folder {name}; write hf: and a folder with config.json, or a name on the Hub")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise VitrimError(f"no config.json in {name}: it is not the folder of a Hugging Face model")
    source = str(folder) if folder.is_dir() else name
    if not folder.is_dir():
        check_hub(name, HF_WEIGHTS if pretrained else ("config.json",))
    trust = {"trust_remote_code": False}  # otherwise the library may prompt at the terminal
    config, unused = transformers.AutoConfig.from_pretrained(source, return_unused_kwargs=True, **trust, **options)
    if unused:
        raise unknown(f"option of {config.model_type}", next(iter(unused)), config.to_dict())
    from vitrim.hosts.transformers.library import class_for, config_for

    kind = class_for(config)
    config = config_for(kind, config)
    transformers.utils.logging.disable_progress_bar()

    def made() -> nn.Module:
        return kind.from_config(config, **trust) if kind.__name__.startswith("AutoModel") else kind(config)  # type: ignore[no-any-return]

    if torch.get_default_device().type == "meta" or not (pretrained or has_weights(folder)):
        return made()
    # Weights of another image size: load them at their own, then resample the positions.
    others = {key: value for key, value in options.items() if key != "image_size"}
    own = config_for(kind, transformers.AutoConfig.from_pretrained(source, **trust, **others))
    if getattr(own, "image_size", None) == getattr(config, "image_size", None):
        return kind.from_pretrained(source, config=config, **trust)  # type: ignore[no-any-return]
    from vitrim.weights import load_weights

    model = made()
    load_weights(model, kind.from_pretrained(source, config=own, **trust).state_dict(), folder)
    return model


def open_clip_model(name: str, pretrained: bool, options: ModelOptions) -> nn.Module:
    """A model of open_clip with both towers: by name, from a folder with ``open_clip_config.json``, or from the Hub.

    Its ``tokenizer_name`` is the argument for `open_clip.get_tokenizer`.
    """
    import torch

    open_clip = _import("open_clip")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / OPEN_CLIP_CONFIG).is_file():
            raise VitrimError(f"no {OPEN_CLIP_CONFIG} in {name}: it is not the folder of a model of open_clip")
        source, weights = f"local-dir:{folder}", has_weights(folder)
    elif "/" in name:
        if not pretrained:
            raise VitrimError(f"{name} is no folder; with --pretrained it is a repository on the Hub")
        check_hub(name, (OPEN_CLIP_CONFIG,))
        source, weights = f"hf-hub:{name}", True
    else:
        if name not in open_clip.list_models():
            raise unknown("model of open_clip", name, open_clip.list_models())
        if pretrained:
            tags = open_clip.list_pretrained_tags_by_model(name)
            places = [open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "").rstrip("/") for tag in tags]
            known = ", ".join(f"open_clip:{place}" for place in places if place)
            if not known:
                raise VitrimError(f"open_clip has no weights of {name} on the Hub: give them with --checkpoint")
            raise VitrimError(f"{name} has several sets of weights; name the repository of one: {known}")
        source, weights = name, False
    place = torch.get_default_device()  # `create_model` has set it
    model: Any = open_clip.create_model(source, load_weights=weights, pretrained_text=False, device=place, **options)
    model.tokenizer_name = source
    return model  # type: ignore[no-any-return]


def check_hub(name: str, files: Sequence[str]) -> None:
    """Refuse a model with none of ``files`` in the cache if the Hub is unreachable; libraries would retry long."""
    import huggingface_hub as hub

    try:
        if not any(isinstance(hub.try_to_load_from_cache(name, file), str) for file in files):
            hub.get_hf_file_metadata(hub.hf_hub_url(name, files[0]))  # tries once
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError):
        return  # the Hub answers, or the name is invalid: the library has a better message
    except Exception as error:  # versions of its client raise different errors for a failed connection
        raise VitrimError(
            f"{name} is not in the cache of the Hugging Face Hub, which cannot be reached: {first_line(error)}"
        ) from error


def dense_model(kind: str, name: str, pretrained: bool, options: ModelOptions) -> nn.Module:
    """A dense head, ``segmenter`` or ``vitdet``, on the model ``name`` of any library."""
    from vitrim.models.dense import KINDS

    create, own_name = creator(name)
    return KINDS[kind](partial(create, own_name), pretrained, options)


def reference_model(name: str, pretrained: bool, options: ModelOptions) -> nn.Module:
    from vitrim.models.references import folder

    return load_run(folder(name), **options)


def load_run(folder: str | Path, **options: Any) -> nn.Module:
    """The model of a finished run of ``vitrim train`` with its weights, float32, in eval mode and not reduced.

    ``options`` override the recipe's and must not change the shapes of its weights, other than for another image size
    (see `create_model`). ``vitrim.Reduction.load(model, folder)`` adds the trained method.
    """
    import torch

    from vitrim.models.references import class_names
    from vitrim.weights import RECIPE, RESULT, WEIGHTS_FILE, load_checkpoint, load_host

    folder = Path(folder)
    for name in (WEIGHTS_FILE, RECIPE, RESULT):
        if not (folder / name).is_file():
            raise VitrimError(f"{folder} is not a finished run: it has no {name}")
    recipe = _RunRecipe.of(read_yaml(folder / RECIPE), folder / RECIPE)
    # Drop rates are for training.
    given = {key: value for key, value in (recipe.model_options or {}).items() if not key.endswith("_rate")}
    model: Any = create_model(recipe.model, options={**given, **options}, device=torch.get_default_device())
    load = load_checkpoint if "num_classes" in options else load_host  # an explicit number must fit
    load(model, folder / WEIGHTS_FILE)
    del model.vitrim_origin  # that of the model without its run
    model.class_names = class_names(folder)
    return model  # type: ignore[no-any-return]


class _RunRecipe(Stored):
    """The entries of a run's recipe by which its model is made and scored."""

    model: str
    model_options: ModelOptions | None = None
    data_options: ModelOptions | None = None
    protocol: ModelOptions | None = None


def as_trained(model: str, changes: Mapping[str, Any] | None = None) -> tuple[Protocol, ModelOptions]:
    """The evaluation protocol, with ``changes``, and the data options of a model's recipe; defaults if it has none.

    Example:
        >>> protocol, options = as_trained("vitrim:camvid_vit", {"flip": True})
        >>> protocol.size, protocol.flip, options["ignore"]
        (320, True, 11)
    """
    from vitrim.models.references import folder
    from vitrim.tasks.options import Protocol
    from vitrim.weights import RECIPE

    library, _, name = model.partition(":")
    if library not in ("run", "vitrim"):
        recipe, file = _RunRecipe(model=name), Path()
    else:
        file = (Path(name).expanduser() if library == "run" else folder(name)) / RECIPE
        recipe = _RunRecipe.of(read_yaml(file), file)
    # Two checks, so that the message says whether the file or the caller is wrong.
    with one_line_of(f"{file}: protocol", Protocol):
        made = Protocol.model_validate(recipe.protocol or {})
    with one_line_of("protocol", Protocol):
        return Protocol.model_validate({**made.model_dump(), **(changes or {})}), recipe.data_options or {}


def has_weights(folder: Path) -> bool:
    """True if a folder contains weights that its library reads: transformers by their names, open_clip any."""
    if (folder / OPEN_CLIP_CONFIG).is_file():
        return any(file.suffix in (".safetensors", ".bin", ".pth") for file in folder.iterdir())
    return any((folder / file).is_file() for file in HF_WEIGHTS)


def _import(module: str) -> Any:
    package = module.partition(".")[0]
    check_installed(f"a model of {package}", package)
    return importlib.import_module(module)


LIBRARIES: dict[str, Creator] = {
    "torchvision": torchvision_model,
    "hf": hf_model,
    "open_clip": open_clip_model,
    # these two always include their weights
    "vitrim": reference_model,
    "run": lambda folder, pretrained, options: load_run(Path(folder).expanduser(), **options),
    "segmenter": partial(dense_model, "segmenter"),
    "vitdet": partial(dense_model, "vitdet"),
}


def learned_reduction(model: str, checkpoint: Path | None) -> Path | None:
    """The folder of the run that trained a model or its weights, if its method has learned parameters."""
    from vitrim.core.saving import REDUCERS_FILE

    library, _, rest = model.partition(":")
    folder = Path(rest).expanduser() if checkpoint is None and library == "run" else checkpoint
    return folder if folder is not None and (folder / REDUCERS_FILE).is_file() else None


def weights_of(name: str, *, pretrained: bool = False, checkpoint: Path | None = None) -> str:
    """A description of a model's weights for the record: pretrained, reference, random, or a file or folder."""
    library, _, folder = name.partition(":")
    if checkpoint is not None:
        return str(checkpoint)
    if library == "vitrim":
        return "reference"
    if library == "run":
        return folder
    if pretrained:
        return "pretrained"
    return folder if library in ("hf", "open_clip") and has_weights(Path(folder).expanduser()) else "random"


@checked
class ModelSpec(Refined):
    """A model, or its name with the options to create it.

    Attributes:
        model: a module, a name, or an exported file.
        pretrained, checkpoint, options: as of `create_model`; only with a name.
        seed: of random weights of a named model; None: torch's generator.
        img_sizes: sides of square images in pixels, at which the model is measured beside its own: its positions are
            resampled as its library does, and its images resized by its own transform. Read by `vitrim.bench`,
            `vitrim.evaluate`, `vitrim.compare`, `vitrim.profile`, `vitrim.optimize`, and one by `vitrim.tune`.
    """

    model: Any
    pretrained: bool = False
    checkpoint: str | Path | None = None
    options: Mapping[str, Any] | None = None
    seed: Seed | None = None
    img_sizes: Sequence[Annotated[int, Field(ge=1, le=PIXELS)]] = ()

    @classmethod
    def each(cls, models: Any) -> list[Self]:
        """The descriptions of one or several models; the options of a description of a list apply to all of them."""
        spec = cls.of(models)
        if not isinstance(spec.model, list | tuple):
            return [spec]
        given = replace(spec, pretrained=False, checkpoint=None, options=None, seed=None)
        found = [
            cls.of(one) if isinstance(one, Refined) else replace(spec if isinstance(one, str) else given, model=one)
            for one in spec.model
        ]
        if not found:
            raise VitrimError("name at least one model")
        if len(found) > 1 and any(one.checkpoint is not None for one in found):
            raise VitrimError(
                f"a checkpoint holds the weights of one model; {len(found)} models are given: name runs as run:FOLDER"
            )
        return found

    @property
    def named(self) -> bool:
        return isinstance(self.model, str)

    def load_sizes(self, device: str | torch.device | None = None) -> tuple[Loaded, list[Loaded]]:
        """`load`, and the same model at the `img_sizes`, for functions that read those."""
        loaded = replace(self, img_sizes=()).load(device)
        return loaded, loaded.at_sizes(self.img_sizes)

    def load(self, device: str | torch.device | None = None) -> Loaded:
        """Create a named model; a module is used unchanged, without the wrapper of `torch.compile`.

        A model whose inputs are no images is a copy that takes them, see `vitrim.core.registry.taking_images`.
        ``device`` is that of a created model, and overrides the description's.

        Example:
            >>> ModelSpec("test_vit", options={"num_classes": 3}).load().weights
            'random'
        """
        import torch
        from torch import nn

        from vitrim.core.registry import ask, taking_images

        if self.img_sizes:
            raise VitrimError(
                "img_sizes are for bench, evaluate, compare, profile, optimize and tune: this takes a model of one size"
            )
        if self.named:
            how: dict[str, Any] = {"pretrained": self.pretrained, "checkpoint": self.checkpoint}
            with torch.random.fork_rng(devices=[], enabled=self.seed is not None):
                if self.seed is not None:
                    torch.default_generator.manual_seed(self.seed)
                place = device or getattr(self, "device", None) or "cpu"
                made: Any = create_model(self.model, **how, options=dict(self.options or {}), device=place)
            return Loaded(taking_images(made), *made.vitrim_origin[:4])
        model = getattr(self.model, "_orig_mod", self.model)
        if not isinstance(model, nn.Module):
            raise VitrimError(f"expected a model or its name, e.g. deit_small_patch16_224, got {type(model).__name__}")
        if self.pretrained or self.checkpoint is not None or self.options:
            raise VitrimError("pretrained, checkpoint and model_options say how to create a model: give its name, too")
        origin: Origin | None = getattr(model, "vitrim_origin", None)
        if origin is None:
            return Loaded(taking_images(model), ask(model).architecture(model), "given", {}, None)
        # random weights of a module may be intended: reports call them "given"
        same = origin.weights != "random" and origin.edits == _edits(model)
        weights, learned = (origin.weights, origin.learned) if same else ("given", None)
        return Loaded(taking_images(model), origin.name, weights, origin.options, learned)


@checked
class PlacedModel(ModelSpec):
    """A model, and the device of the created model, or of a copy of a module; None: the CPU, or the module's."""

    device: Any = None

    def load(self, device: str | torch.device | None = None) -> Loaded:
        loaded = super().load(device)
        if self.named or self.device is None:
            return loaded
        return replace(loaded, model=copy.deepcopy(loaded.model).to(device or str(self.device)))


@checked
class ScoredModel(PlacedModel):
    """A model, and what it is scored with.

    Attributes:
        dtype: of parameters and images, fp32 or bf16, or torch's; None: fp32, or the module's dtype.
        learned: folder of `vitrim.Reduction.save` for methods of its name; None: the run of the model.
    """

    dtype: Any = None
    learned: str | Path | None = None

    def load(self, device: str | torch.device | None = None) -> Loaded:
        loaded = super().load(device)
        return loaded if self.learned is None else replace(loaded, learned=Path(self.learned))


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with its description for records, and what is known of it, which is asked once.

    Attributes:
        model: in eval mode if it was created here.
        name: as on the command line; the library's name for a module that vitrim did not create.
        weights: "random", "pretrained", "reference", a file or folder, or "given".
        learned: as of `learned_reduction`.
        img_size: of `at_size`; None: the model's own.
    """

    model: nn.Module
    name: str
    weights: str
    options: ModelOptions
    learned: Path | None
    img_size: int | None = None

    @cached_property
    def library(self) -> Library:
        """Answers about the model."""
        from vitrim.core.registry import ask

        return ask(self.model)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Its tasks, its own first; empty for image classification."""
        return self.library.tasks(self.model)

    @cached_property
    def num_classes(self) -> int | None:
        """Classes of its head, 0 without one; None if unknown."""
        return self.library.num_classes(self.model)

    @cached_property
    def class_names(self) -> Sequence[str] | None:
        """The names of these that its library gives."""
        return self.library.class_names(self.model)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of its images."""
        return self.library.preprocessing(self.model)

    def at_size(self, size: int) -> Loaded:
        """The same, dense, for square images of ``size`` pixels: see `vitrim.core.image_size.at_size`."""
        from vitrim.core.image_size import at_size

        return replace(self, model=at_size(self.model, size), img_size=size)

    def at_sizes(self, sizes: Sequence[int]) -> list[Loaded]:
        """`at_size` for each of ``sizes`` but the model's own.

        Example:
            >>> [other.img_size for other in ModelSpec("test_vit").load().at_sizes([128, 160, 96, 128])]
            [128, 96]
        """
        return [self.at_size(size) for size in dict.fromkeys(sizes) if size != self.side]

    @property
    def side(self) -> int:
        """The height of its images in pixels; `VitrimError` if it does not say."""
        from vitrim.core.registry import input_size_of

        return input_size_of(self.model)[1]

    @property
    def embedding_name(self) -> str:
        """Its embedding in a few words."""
        return self.library.embedding_name(self.model)
