"""Engines that a model can be timed on: eager PyTorch, torch.compile, and those that run exported files.

An engine makes a model ready for one batch of images, which may take minutes, and gives a call that runs it. Those of
exported files register themselves from a room above this one (`vitrim.exporting.engines`), as methods and hosts do in
the registry, so that a new format is a new engine.
"""

from __future__ import annotations

import importlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import enter
from vitrim.errors import MissingPackageError, VitrimError, unknown
from vitrim.measure.latency import shared_copy
from vitrim.measure.memory import peak_memory_mib

Call: TypeAlias = Callable[[], object]
"""One forward pass: a candidate for `vitrim.measure.latency.time_interleaved`."""

COMPILED_VARIANTS = 1000


class Engine(ABC):
    """One way to run a model. Several may go by one name: ``compile`` is two, with frozen weights and without.

    Attributes:
        label: as rows name it.
        compiled: whether torch.compile is what it is.
    """

    label: str
    compiled: bool = False

    @abstractmethod
    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse an engine that cannot run here.

        Raises:
            MissingPackageError: saying what to install.
            VitrimError: the engine does not work on this device or in this dtype.
        """

    def obstacle(self, config: MethodConfig) -> str | None:
        """Say why a model reduced by ``config`` does not run on this engine; None if it does."""
        return None

    @property
    def whole_models_only(self) -> bool:
        """Tell whether parts of a model (`Host.front`) cannot run on it."""
        return False

    @property
    def runs_prompts(self) -> bool:
        """Tell whether the prefill of a vision-language model can run on it."""
        return False

    @abstractmethod
    def prepare(self, model: nn.Module, images: Tensor, folder: Path) -> Call:
        """Make ``model`` ready for these images.

        Args:
            model: dense or reduced, in eval mode; it may be kept, and is not changed.
            images: (B, C, H, W).
            folder: an empty one for files, which stays as long as the call is used.
        """

    @abstractmethod
    def peak_mib(self, model: nn.Module, call: Call, images: Tensor) -> float | None:
        """Peak memory of ``call``, which was made of ``model``, in MiB; None where it cannot be seen."""


_ENGINES: dict[str, Callable[[], Sequence[Engine]]] = {}


def register_engine(name: str, make: Callable[[], Sequence[Engine]]) -> None:
    """Register what makes the engines of a name."""
    enter(_ENGINES, name, make, f"engine '{name}'")


def engines() -> Mapping[str, Callable[[], Sequence[Engine]]]:
    """Every name, with what makes its engines; whether they can run here is `Engine.check`'s to say.

    Example:
        >>> sorted(engines())
        ['aoti', 'compile', 'eager', 'onnxruntime', 'openvino', 'torch.export']
    """
    importlib.import_module("vitrim.exporting.engines")
    return _ENGINES


def engines_named(names: Sequence[str | Engine]) -> list[Engine]:
    """The engines of several names, or engines as they are.

    Raises:
        VitrimError: no name, one that is unknown, or one that is given twice.

    Example:
        >>> [engine.label for engine in engines_named(["eager", "compile"])]
        ['eager', 'compile', 'compile+freezing']
    """
    if not names:
        raise VitrimError(f"no engine is given; valid: {', '.join(sorted(engines()))}")
    found: list[Engine] = []
    for name in names:
        if isinstance(name, str) and name not in engines():
            raise unknown("engine", name, engines())
        found += [name] if isinstance(name, Engine) else engines()[name]()
    labels = [engine.label for engine in found]
    twice = next((label for place, label in enumerate(labels) if label in labels[:place]), None)
    if twice is not None:
        raise VitrimError(f"engine {twice} is given twice")
    return found


def compiler_lack() -> str | None:
    """The name of the C++ compiler that is looked for on this machine and is not there; None if there is one."""
    compiler = os.environ.get("CXX", "g++")
    return compiler if shutil.which(compiler) is None and shutil.which("clang++") is None else None


# ---- of torch --------------------------------------------------------------------------------------------------------


class Eager(Engine):
    """PyTorch as it runs without further ado."""

    label = "eager"
    runs_prompts = True

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """It runs everywhere."""

    def prepare(self, model: nn.Module, images: Tensor, folder: Path) -> Call:
        return partial(model, images)

    def peak_mib(self, model: nn.Module, call: Call, images: Tensor) -> float | None:
        # of a copy, because what a model still holds of its last forward would be released in this one
        return peak_memory_mib(partial(shared_copy(model), images), images.device)


class Compiled(Engine):
    """``torch.compile`` in its default mode.

    Args:
        freezing: make constants of the weights, which inductor then folds, and packs for the processor's matrix
            products: for inference only, and a second copy of the weights in memory.
    """

    compiled = True

    def __init__(self, *, freezing: bool = False) -> None:
        self.freezing = freezing
        self.label = "compile+freezing" if freezing else "compile"

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        lack = compiler_lack() if device.type == "cpu" else None
        if lack is not None:
            raise MissingPackageError(f"engine compile needs a C++ compiler, and there is none here ({lack})")

    def prepare(self, model: nn.Module, images: Tensor, folder: Path) -> Call:
        import torch._inductor.config as inductor  # takes a second to load

        # the option tells the variants of one code apart; what is traced asks the setting
        call: Any = torch.compile(model, options={"freezing": True}) if self.freezing else torch.compile(model)
        with torch.inference_mode(), inductor.patch(freezing=self.freezing):
            call(images)
        return partial(call, images)

    def peak_mib(self, model: nn.Module, call: Call, images: Tensor) -> float | None:
        return peak_memory_mib(call, images.device)


@contextmanager
def compilation(compiled: bool) -> Iterator[None]:
    """torch.compile for many variants of one model.

    Its cache is per source line, so the dense and all reduced models share one: with the usual limit of 8 entries the
    ninth would silently run uncompiled. What earlier settings compiled is forgotten, because a second batch size
    would else be compiled for any size.
    """
    if not compiled:
        yield
        return
    import torch._dynamo  # takes a second to load

    torch.compiler.reset()
    limits = {"recompile_limit": COMPILED_VARIANTS, "accumulated_recompile_limit": COMPILED_VARIANTS}
    with torch._dynamo.config.patch(limits):
        yield


register_engine("eager", lambda: [Eager()])
register_engine("compile", lambda: [Compiled(), Compiled(freezing=True)])
