"""Models by name, of each library: ``vit_small_patch16_224``, ``torchvision:vit_b_16``, ``hf:FOLDER_OR_NAME``,
``vitrim:cifar10_vit``, ``run:FOLDER``.

    model = create_model("torchvision:vit_b_16", pretrained=True)

Libraries are imported when a model of theirs is created.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrim.errors import MissingPackageError, VitrimError, first_line, unknown

if TYPE_CHECKING:
    import torch
    from torch import nn

Options = dict[str, Any]

HF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def create_model(
    name: str,
    *,
    pretrained: bool = False,
    checkpoint: Path | None = None,
    options: Options | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """The model ``name`` in eval mode, with random, pretrained or local weights.

    Args:
        name: of timm, or ``torchvision:NAME``, ``hf:FOLDER_OR_NAME``, ``vitrim:NAME`` (a reference checkpoint),
            ``run:FOLDER`` (a finished run of ``vitrim train``).
        pretrained: load the library's weights.
        checkpoint: load this safetensors file instead, or the one in the folder of a run of ``vitrim train``.
        options: keyword arguments of the library's model.
        device: where it is created.

    Raises:
        VitrimError: an unknown name (with the nearest one), options the model does not take, weights that do not fit.
        MissingPackageError: its library is not installed.

    Example:
        >>> create_model("deit_tiny_patch16_224", options={"num_classes": 3}, device="meta").num_classes
        3
    """
    import torch

    create, own_name = creator(name)
    if pretrained and checkpoint is not None:
        raise VitrimError("give either pretrained weights or a checkpoint, not both")
    try:
        with torch.device(device):
            model = create(own_name, pretrained, options or {})
    except VitrimError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, OSError, AssertionError) as error:
        raise VitrimError(f"cannot create {name}: {first_line(error)}") from error
    if checkpoint is not None:
        from vitrim.weights import load_checkpoint, weights_file

        load_checkpoint(model, weights_file(checkpoint))
    return model.eval()


def check_name(name: str) -> None:
    """Refuse an unknown library or model of timm without creating anything; other libraries say so when they create.

    Raises:
        VitrimError: an unknown name, with the nearest one.

    Example:
        >>> check_name("deit_tiny_patch16_224")
    """
    create, own_name = creator(name)
    if create is timm_model:
        _check_timm_name(own_name)


def creator(name: str) -> tuple[Callable[[str, bool, Options], nn.Module], str]:
    """The function that creates models of the library in front of the colon, timm's without one, and the rest of
    ``name``. The function takes that rest, whether to load pretrained weights, and options.

    Raises:
        VitrimError: an unknown library.
    """
    library, colon, rest = name.partition(":")
    if not colon:
        return timm_model, name
    if library not in LIBRARIES:
        raise unknown("library", library, LIBRARIES)
    if not rest:
        raise VitrimError(
            f"'{name}' names no model: write torchvision:vit_b_16, hf: and a folder or name, vitrim: and a reference "
            "checkpoint, or run: and the folder of a finished run"
        )
    return LIBRARIES[library], rest


def timm_model(name: str, pretrained: bool, options: Options) -> nn.Module:
    """timm's model ``name``, or one of vitrim's own, which timm knows once they are imported."""
    import timm

    _check_timm_name(name)
    model: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
    return model


def _check_timm_name(name: str) -> None:
    import timm

    import vitrim.models  # noqa: F401 -- registers them with timm

    if not timm.is_model(name.split(".")[0]):
        error = unknown("model", name, timm.list_models("*vit*") + timm.list_models("deit*"))
        hint = str(error).split(" valid:")[0]
        raise VitrimError(f"{hint} valid: the names that `vitrim list models` prints")


def torchvision_model(name: str, pretrained: bool, options: Options) -> nn.Module:
    """torchvision's model ``name``, with the images that its default weights expect as its `eval_transform`."""
    models = _import("torchvision.models", "torchvision")
    if name not in models.list_models():
        raise unknown("model of torchvision", name, models.list_models(include="vit*"))
    weights = models.get_model_weights(name).DEFAULT
    model: nn.Module = models.get_model(name, weights=weights if pretrained else None, **options)
    transform = weights.transforms()
    side = getattr(model, "image_size", None)
    if side is not None and transform.crop_size != [side]:  # another size than that of the weights: the same share
        scale = side / transform.crop_size[0]
        transform = weights.transforms(crop_size=side, resize_size=round(transform.resize_size[0] * scale))
    model.eval_transform = transform
    return model


def hf_model(name: str, pretrained: bool, options: Options) -> nn.Module:
    """The Hugging Face model in the folder ``name``, with its weights if they are there, or of that name on the Hub."""
    transformers = _import("transformers", "hf")
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(("./", "../", "~"))):
        raise VitrimError(f"no folder {name}; write hf: and a folder with config.json, or a name on the Hub")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise VitrimError(f"no config.json in {name}: it is not the folder of a Hugging Face model")
    source = str(folder) if folder.is_dir() else name
    config, unused = transformers.AutoConfig.from_pretrained(source, return_unused_kwargs=True, **options)
    if unused:
        raise unknown(f"option of {config.model_type}", next(iter(unused)), config.to_dict())
    kind = _hf_class(transformers, config)
    transformers.utils.logging.disable_progress_bar()
    load = not _on_meta() and (pretrained or has_weights(folder))
    if load:
        model: nn.Module = kind.from_pretrained(source, config=config)
    elif kind.__name__.startswith("AutoModel"):
        model = kind.from_config(config)
    else:
        model = kind(config)
    return model


def reference_model(name: str, pretrained: bool, options: Options) -> nn.Module:
    """The reference checkpoint ``name``, which comes with this package; it always has its weights."""
    from vitrim.reference import load_reference

    return load_reference(name, **options)


def run_model(folder: str, pretrained: bool, options: Options) -> nn.Module:
    """The model of the finished run of ``vitrim train`` in ``folder``; it always has its weights."""
    from vitrim.training.runs import load_run

    return load_run(Path(folder).expanduser(), **options)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights in a form that transformers reads."""
    return any((folder / file).is_file() for file in HF_WEIGHTS)


def _hf_class(transformers: Any, config: Any) -> Any:
    """The class the model was saved as if images alone can be given to it, else the classifier of its kind."""
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if kind is not None and kind.main_input_name == "pixel_values":
            return kind
    classifier = transformers.AutoModelForImageClassification
    return classifier if type(config) in classifier._model_mapping else transformers.AutoModel


def _on_meta() -> bool:
    import torch

    return torch.empty(0).is_meta


def _import(module: str, extra: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:  # installed, but something it needs is not
            raise
        install = f"'vitrim[{extra}]'" if extra != package else package
        raise MissingPackageError(f"models of {package} need that package: pip install {install}") from error


LIBRARIES: dict[str, Callable[[str, bool, Options], nn.Module]] = {
    "torchvision": torchvision_model,
    "hf": hf_model,
    "vitrim": reference_model,
    "run": run_model,
}
