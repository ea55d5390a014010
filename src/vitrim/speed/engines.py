"""Engines that a model can be timed on: eager PyTorch, torch.compile, and those that run exported files.

An engine makes a model ready for one batch of images, which may take minutes, and gives a call that runs it. Every
format of `vitrim.exporting.formats` is an engine, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.errors import MissingPackageError, VitrimError, unknown
from vitrim.exporting.formats import Array, Format, as_array, formats
from vitrim.exporting.formats import engines as runnable
from vitrim.exporting.formats.pt2 import compiler_lack
from vitrim.exporting.writing import export
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
        """Why a model reduced by ``config`` does not run on this engine; None if it does."""
        return None

    @property
    def whole_models_only(self) -> bool:
        """True if parts of a model (`Host.front`) cannot run on it."""
        return False

    @property
    def runs_prompts(self) -> bool:
        """True if the prefill of a vision-language model can run on it."""
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


def engines() -> dict[str, Callable[[], Sequence[Engine]]]:
    """Every name, with what makes its engines; whether they can run here is `Engine.check`'s to say.

    Example:
        >>> sorted(engines())
        ['aoti', 'compile', 'eager', 'onnxruntime', 'openvino', 'torch.export']
    """
    of_torch: dict[str, Callable[[], Sequence[Engine]]] = {
        "eager": lambda: [Eager()],
        "compile": lambda: [Compiled(), Compiled(freezing=True)],
    }
    return of_torch | {kind.engine: partial(_of_files, kind) for kind in formats().values()}


def _of_files(kind: type[Format]) -> list[Engine]:
    return [FileEngine(kind)]


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


# ---- of exported files ----------------------------------------------------------------------------------------------


class FileEngine(Engine):
    """An engine that runs a file of one format, on the CPU and in float32.

    Args:
        kind: the format.

    Example:
        >>> from vitrim.exporting.formats import format_named
        >>> FileEngine(format_named(None, Path("m.onnx"))).label
        'onnxruntime'
    """

    def __init__(self, kind: type[Format]) -> None:
        self.kind = kind
        self.label = kind.engine

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        self.kind.check()
        if device.type != "cpu" or dtype != torch.float32:
            name = str(dtype).removeprefix("torch.")
            raise VitrimError(
                f"engine {self.label} is timed on the CPU in float32, and this is {name} on {device.type}: leave it out"
            )

    def obstacle(self, config: MethodConfig) -> str | None:
        return config.obstacle()

    @property
    def whole_models_only(self) -> bool:
        return True

    def prepare(self, model: nn.Module, images: Tensor, folder: Path) -> Call:
        """Export the model, as it is, and run it once: that is when the engine is opened."""
        call = on_engine(model, None, self.label, images, folder)
        call()
        return call

    def peak_mib(self, model: nn.Module, call: Call, images: Tensor) -> float | None:
        return None  # its memory is not torch's


def on_engine(
    model: nn.Module, method: MethodConfig | str | None, engine: str, images: Tensor, folder: str | Path
) -> Callable[[], Array]:
    """A call that runs ``images`` through ``model``, exported for ``engine``: a candidate for `time_interleaved`.

    The file is for batches of so many images only: an engine that knows all shapes beforehand is faster, the more so
    the more small operations there are (OpenVINO at batch 1: dense by 2 %, ToMe by 7 %).

    Args:
        model: as of `vitrim.export`.
        method: likewise; None for the model as it is.
        engine: one of `vitrim.exporting.engines`: onnxruntime, openvino, torch.export, aoti.
        images: (B, C, H, W) float32.
        folder: the file is written there; the engine may read it for as long as it runs.

    Raises:
        VitrimError: an engine that is unknown or not installed, or as `vitrim.export`.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     on_engine(model, "tome:r=2", "torch.export", torch.zeros(2, 3, 32, 32), folder)().shape
        (2, 3)
    """
    known = runnable()
    if engine not in known:
        raise unknown("engine", engine, known)
    kind = known[engine]
    place = Path(folder) / f"{'dense' if method is None else 'reduced'}-{engine}{kind.suffix}"
    height, width = images.shape[2:]
    file = export(model, method, place, to=kind.name, batch=len(images), size=(height, width), check=0)
    return file.on(as_array(images))
