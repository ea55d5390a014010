"""Engines to time a model on, each in a precision: eager PyTorch, torch.compile, and engines that run files.

An engine prepares a model for batches of one size, which may take minutes, and returns a `Runnable`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import get_reduction
from vitrim.engines.copies import shared_copy
from vitrim.engines.exported import Exported
from vitrim.engines.formats import formats
from vitrim.engines.formats.base import PRECISIONS, Format, as_array, check_quantiser
from vitrim.engines.formats.pt2 import compiler_lack
from vitrim.engines.runnable import Module, Runnable
from vitrim.engines.writing import Draft, FileSpec, write
from vitrim.errors import MissingPackageError, VitrimError, check_known, unknown
from vitrim.loading import ModelSpec
from vitrim.tasks.classes import class_names

COMPILED_VARIANTS = 1000


class Engine(ABC):
    """One way to run a model. A name can cover several: ``compile`` is compilation with and without frozen weights.

    Attributes:
        label: name in rows.
        precisions: precisions that the engine supports, if the machine does.
        whole_models_only: parts of a model (`Library.front`) cannot run on it.
        runs_prompts: the prefill of a vision-language model can run on it.
    """

    label: str
    precision: str = "fp32"
    precisions: Sequence[str] = ("fp32", "bf16", "fp16")
    compiled: bool = False
    whole_models_only: bool = False
    runs_prompts: bool = False

    def __init__(self, precision: str = "fp32") -> None:
        self.precision = precision

    def __str__(self) -> str:
        return self.label if self.precision == "fp32" else f"{self.label} {self.precision}"

    @property
    def dtype(self) -> torch.dtype:
        """The parameter dtype of models for this engine."""
        return PRECISIONS[self.precision]

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Refuse an engine that cannot run here: `MissingPackageError`, or `VitrimError` for another device."""

    def lacks(self) -> str | None:
        """The reason why this engine or machine does not support the precision; None if it does."""
        if self.precision in self.precisions:
            return None
        return f"{self.label} runs {' and '.join(self.precisions)} here"

    def obstacle(self, config: MethodConfig, batch: int) -> str | None:
        """The reason why a model reduced by ``config`` cannot run batches of this size here; None if it can."""
        return None

    @abstractmethod
    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Runnable:
        """Prepare ``model`` for batches like these images.

        Args:
            model: dense or reduced, in eval mode and in `dtype`; may be kept, is not changed.
            images: (B, C, H, W), normalised.
            folder: for files, which must exist as long as the result is used; engines share the files of a model in it.
            calibration: (N, C, H, W) to calibrate int8 on; None for ``images``.
        """

    def remark(self) -> str | None:
        """A sentence for the user on how the engine computes here; None if there is nothing to note."""
        return None


def engines() -> dict[str, Callable[[str], list[Engine]]]:
    """Engine factories by name; each makes the engines for a precision.

    Example:
        >>> sorted(engines())
        ['aoti', 'compile', 'eager', 'onnxruntime', 'openvino', 'torch.export']
    """

    def of(kind: type[Format]) -> Callable[[str], list[Engine]]:
        return lambda precision: [FileEngine(kind, precision)]

    return {
        "eager": lambda precision: [Eager(precision)],
        "compile": lambda precision: [Compiled(precision), Compiled(precision, freezing=True)],
        **{kind.engine: of(kind) for kind in formats().values()},
    }


def listed(given: str | Engine | Sequence[str | Engine] | None) -> list[Any]:
    """A list of engines or precisions from a list, a single value, or comma-separated text; empty for None.

    Example:
        >>> listed("eager,openvino"), listed(["eager"]), listed(None)
        (['eager', 'openvino'], ['eager'], [])
    """
    if isinstance(given, str):
        return given.replace(",", " ").split()
    return list(given) if isinstance(given, Sequence) else [] if given is None else [given]


def engines_named(
    names: Sequence[str | Engine], precisions: Sequence[str] = ("fp32",), device: torch.device | None = None
) -> tuple[list[Engine], list[str]]:
    """The engines of names and precisions, and a sentence for every precision that one lacks or supports in part.

    Args:
        names: names of `engines`, or engines, which are used as they are.
        precisions: keys of `vitrim.engines.formats.base.PRECISIONS`, for the names.
        device: device of the models; default: the CPU.

    Raises:
        MissingPackageError: a package is missing.
        VitrimError: an unknown or duplicate name or precision; an engine that supports neither device nor precision.

    Example:
        >>> found, lacking = engines_named(["eager", "compile"], ["bf16"])
        >>> [str(engine) for engine in found]
        ['eager bf16', 'compile bf16', 'compile+freezing bf16']
        >>> engines_named(["eager", "aoti"], ["fp32", "int8"])[1]
        ['eager runs fp32 and bf16 and fp16 here: not timed in int8', 'aoti runs fp32 here: not timed in int8']
    """
    if not names:
        raise VitrimError(f"no engine is given; valid: {', '.join(sorted(engines()))}")
    for precision in precisions or ("",):
        check_known("precision", precision, PRECISIONS)
    found: list[Engine] = []
    lacking: list[str] = []
    for name in names:
        if isinstance(name, Engine):
            candidates = [name]
        elif name in engines():
            candidates = [engine for precision in precisions for engine in engines()[name](precision)]
        else:
            raise unknown("engine", name, engines())
        # One name's engines differ in precision and options, not in what they need.
        candidates[0].check(device or torch.device("cpu"))
        kept = [engine for engine in candidates if engine.lacks() is None]
        if not kept:
            wanted = ", ".join(dict.fromkeys(one.precision for one in candidates))
            raise VitrimError(f"{candidates[0].lacks()}: {candidates[0].label} cannot run in {wanted}")
        for engine in kept:
            # Here and not while timing: the package is missed before minutes of other engines.
            if engine.precision == "int8":
                check_quantiser()
        found += kept
        left = (f"{one.lacks()}: not timed in {one.precision}" for one in candidates if one.lacks() is not None)
        # Several engines of a name lack the same precision: one sentence.
        lacking += dict.fromkeys(left)
        lacking += [remark for engine in kept if (remark := engine.remark()) is not None]
    texts = [str(engine) for engine in found]
    twice = next((text for place, text in enumerate(texts) if text in texts[:place]), None)
    if twice is not None:
        raise VitrimError(f"engine {twice} is given twice")
    return found, lacking


# ---- of torch --------------------------------------------------------------------------------------------------------


class Eager(Engine):
    """Eager PyTorch."""

    label = "eager"
    runs_prompts = True

    def check(self, device: torch.device) -> None:
        """Never refuse."""

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Runnable:
        return Module(model, self.label, self.precision, len(images))


class Compiled(Engine):
    """``torch.compile`` in its default mode; ``freezing`` treats weights as constants, with a second copy in memory."""

    compiled = True

    def __init__(self, precision: str = "fp32", *, freezing: bool = False) -> None:
        super().__init__(precision)
        self.freezing = freezing
        self.label = "compile+freezing" if freezing else "compile"

    def check(self, device: torch.device) -> None:
        lack = compiler_lack() if device.type == "cpu" else None
        if lack is not None:
            raise MissingPackageError(f"engine compile needs a C++ compiler, and there is none here ({lack})")

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Runnable:
        import torch._inductor.config as inductor  # takes a second to load

        # the option distinguishes compiled variants of one code; tracing reads the setting
        options: Any = {"freezing": True} if self.freezing else None
        # Static, or a second image size of the same code would be compiled for dynamic sizes, which are slower.
        call: Any = torch.compile(model, dynamic=False, options=options)
        made = Module(model, self.label, self.precision, len(images), call)
        # Compiles now, for this batch size, and not in the first timed run.
        with torch.inference_mode(), inductor.patch(freezing=self.freezing):
            made.run(made.given(images))
        return made


@contextmanager
def compilation(compiled: bool) -> Iterator[None]:
    """Configure torch.compile for many variants of one model."""
    if not compiled:
        yield
        return
    # Its cache is per source line, so the dense and all reduced models share one: with the default limit of 8 entries,
    # the ninth would silently run uncompiled. The cache is also cleared: entries of earlier batch sizes hold memory.
    import torch._dynamo  # takes a second to load

    torch.compiler.reset()
    # Both limits: each would end compilation silently.
    limits = {"recompile_limit": COMPILED_VARIANTS, "accumulated_recompile_limit": COMPILED_VARIANTS}
    with torch._dynamo.config.patch(limits):
        yield


# ---- of exported files ----------------------------------------------------------------------------------------------


class FileEngine(Engine):
    """An engine that runs a file of one format on the CPU.

    The file is for batches of one size only: engines are faster with static shapes, especially with many small
    operations (OpenVINO at batch 1: dense by 2 %, ToMe by 7 %). Other precisions are converted from fp32 weights.
    """

    whole_models_only = True

    def __init__(self, kind: type[Format], precision: str = "fp32") -> None:
        super().__init__(precision)
        self.kind = kind
        self.label, self.precisions = kind.engine, ("fp32", *kind.makes)

    def check(self, device: torch.device) -> None:
        self.kind.check()
        if device.type != "cpu":
            where = f"and the model is on {device.type}"
            raise VitrimError(f"engine {self.label} is timed on the CPU, {where}: leave it out")

    def lacks(self) -> str | None:
        return super().lacks() or self.kind.lacks(self.precision)

    def remark(self) -> str | None:
        beside = self.kind.facts(self.precision).get("beside_int8")
        return None if beside is None else f"{self}: what is not in int8 runs in {beside}, which is the faster here"

    def obstacle(self, config: MethodConfig, batch: int) -> str | None:
        why = config.in_graph(batch)
        if why is None or not config.traits.single_images:
            return why
        return f"{why}; its file is for single images: --batch-size 1"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Exported:
        """Export the model, or take its file in ``folder``, and run it once, which opens the engine.

        A model whose token counts depend on the image is compared with its file on ``calibration``, if given.
        """
        size = len(images)
        place = folder / f"{self.label}-{size}{self.kind.suffix}"
        # Engines of one format in several precisions begin with the same fp32 file.
        if place.exists():
            file = Exported.open(place, trust=True)
        else:
            height, width = images.shape[2:]
            reduction = get_reduction(model)
            follows = reduction is not None and reduction.config.is_adaptive()
            loaded = ModelSpec(shared_copy(model)).load()
            classes = class_names(loaded.class_names, loaded.num_classes)
            wanted = FileSpec(self.kind.name, size, size=(height, width), name=loaded.name, classes=classes)
            draft = Draft.of(loaded, wanted, self.kind)
            file = write(draft, place, calibration if follows else None, real=True)
        if self.precision != "fp32":
            made = place.with_stem(f"{place.stem}-{self.precision}")
            if made.exists():
                file = Exported.open(made)
            else:
                # Whole batches only: the file takes no other size.
                given = images if calibration is None or len(calibration) < size else calibration
                batches = [as_array(each) for each in given.split(size) if len(each) == size]
                file = file.in_precision(self.precision, made, batches)
        file.run(file.given(images))
        return file
