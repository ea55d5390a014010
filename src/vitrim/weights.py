"""Weights from local files, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vitrim.errors import VitrimError, first_line

WEIGHTS_FILE = "model.safetensors"
"""Where the folder of a run of ``vitrim train`` has the weights of the model."""

ENCODER = "encoder."
"""What a model for pre-training calls the part that is fine-tuned."""


def weights_file(checkpoint: Path) -> Path:
    """The safetensors file itself, or the one in the folder of a run of ``vitrim train``.

    Example:
        >>> weights_file(Path("runs/a.safetensors")).name
        'a.safetensors'
    """
    return checkpoint / WEIGHTS_FILE if checkpoint.is_dir() else checkpoint


def load_checkpoint(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into ``model``; every name and shape must fit, else nothing is loaded.

    Raises:
        VitrimError: no such file, no safetensors file, or the first name or shape that does not fit.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from safetensors.torch import save_file
        >>> model = nn.Linear(3, 2)
        >>> with TemporaryDirectory() as folder:
        ...     save_file(model.state_dict(), Path(folder) / "linear.safetensors")
        ...     load_checkpoint(model, Path(folder) / "linear.safetensors")
    """
    _load(model, _read(path), path)


def load_host(model: nn.Module, path: Path) -> None:
    """`load_checkpoint`, where the file's classifier may have another number of classes: the model gets its head.

    Args:
        model: a model of timm's kind gets a new head if the file's is of other classes; others must fit.
        path: of a safetensors file.

    Raises:
        VitrimError: as `load_checkpoint`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import timm
        >>> from safetensors.torch import save_file
        >>> model = timm.create_model("test_vit", num_classes=5)
        >>> with TemporaryDirectory() as folder:
        ...     save_file(timm.create_model("test_vit", num_classes=3).state_dict(), Path(folder) / "three.safetensors")
        ...     load_host(model, Path(folder) / "three.safetensors")
        >>> model.num_classes
        3
    """
    weights, heads = _read(path), classifiers_of(model)
    found = next((len(weights[key]) for name in heads if (key := f"{name}.weight") in weights), None)
    if found not in (None, getattr(model, "num_classes", None)):
        _check_fit(_without(model.state_dict(), heads), _without(weights, heads), path)  # before the head is replaced
        cast(Any, model).reset_classifier(found)
    _load(model, weights, path)


def classifiers_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the classifying layers of a model of timm's kind; of others none is known.

    Example:
        >>> import timm
        >>> classifiers_of(timm.create_model("test_vit"))
        ('head',)
    """
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def load_encoder(model: nn.Module, path: Path) -> None:
    """Load what pre-training without labels left: the encoder's weights into ``model``, whose classifiers stay new.

    Args:
        model: of timm's kind; its ``pretrained_cfg`` names its classifiers.
        path: of a safetensors file with the encoder under ``encoder.``; decoders and the like are left out.

    Raises:
        VitrimError: no such file, no encoder in it, or the first name or shape that does not fit.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import timm
        >>> from safetensors.torch import save_file
        >>> model = timm.create_model("test_vit", num_classes=5)
        >>> weights = timm.create_model("test_vit", num_classes=0).state_dict()
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder) / "model.safetensors"
        ...     save_file({f"encoder.{name}": value for name, value in weights.items()}, file)
        ...     load_encoder(model, file)
    """
    weights = {key.removeprefix(ENCODER): value for key, value in _read(path).items() if key.startswith(ENCODER)}
    if not weights:
        raise VitrimError(f"{path} has no weights of an encoder, none called {ENCODER}*")
    expected = model.state_dict()
    trunk = _without(expected, classifiers_of(model))
    _load(model, {**{key: value for key, value in expected.items() if key not in trunk}, **weights}, path)


def holds_encoder(path: Path, model: nn.Module) -> bool:
    """Whether a safetensors file is of a model that has one such as ``model`` as its encoder.

    Raises:
        VitrimError: no such file, or no safetensors file.
    """
    inner = any(key.startswith(ENCODER) for key in _names(path))
    return inner and not any(key.startswith(ENCODER) for key in model.state_dict())


def _load(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Check all names and shapes, then load; a model on the meta device has nothing to load into."""
    expected = model.state_dict()
    _check_fit(expected, weights, path)
    if not any(value.is_meta for value in expected.values()):
        model.load_state_dict(weights)


def _check_fit(expected: dict[str, Tensor], weights: dict[str, Tensor], path: Path) -> None:
    for what, names in (
        ("lacks, of this model,", sorted(set(expected) - set(weights))),
        ("has, beside those of this model,", sorted(set(weights) - set(expected))),
    ):
        if names:
            raise VitrimError(f"{path} {what} {len(names)} parameter(s), first {names[0]}")
    for key, value in weights.items():
        if value.shape != expected[key].shape:
            raise VitrimError(
                f"{path}: {key} has shape {tuple(value.shape)}, this model needs {tuple(expected[key].shape)}"
            )


def _without(weights: dict[str, Tensor], layers: tuple[str, ...]) -> dict[str, Tensor]:
    """Weights but for those of some layers."""
    return {key: value for key, value in weights.items() if key.rpartition(".")[0] not in layers}


def _read(path: Path) -> dict[str, Tensor]:
    with _reading(path):
        return load_file(path)


def _names(path: Path) -> list[str]:
    """What is in a file, without reading it."""
    with _reading(path), safe_open(path, framework="pt") as file:
        return list(file.keys())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """The one error of a file that is not there or not of this format."""
    try:
        there = path.is_file()
        empty = there and not path.stat().st_size  # so are the files of /proc, which cannot be mapped
    except OSError as error:  # no permission to look, or a name that is too long
        raise VitrimError(f"cannot read the checkpoint {path}: {error.strerror}") from error
    if not there:
        raise VitrimError(f"no checkpoint at {path}")
    if empty:
        raise VitrimError(f"{path} is not a safetensors file: it is empty, or no regular file")
    try:
        yield
    except OSError as error:
        raise VitrimError(f"cannot read the checkpoint {path}: {error.strerror or first_line(error)}") from error
    except SafetensorError as error:
        raise VitrimError(
            f"{path} is not a safetensors file ({first_line(error)}); other formats must be converted to it"
        ) from error
