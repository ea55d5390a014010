"""``save_pretrained`` and pickling of Hugging Face models that are reduced or contain a reduced part.

The folder gets the dense model's own files and beside them the reduction. The call is changed in the class of all
models of the library, because a reduced part does not know the model it is in. A ``state_dict`` argument decides what
the weights file contains: `transformers.Trainer` always passes one, so its checkpoints include the learned parameters.
Hooks that record outputs are nested functions, which cannot be pickled; `CapturingHook` replaces them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from vitrim.core.block import access
from vitrim.core.reduce import handle_of, reduced_parts
from vitrim.errors import VitrimError

WHOLE: Any = object()
"""Marker for calls without a ``state_dict``."""


def with_reduction(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_pretrained`` to support reduced models; return it unchanged if it already does."""
    if hasattr(save_pretrained, "vitrim_dense"):
        return save_pretrained

    @functools.wraps(save_pretrained)
    def save(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = WHOLE, *args: Any, **kwargs: Any
    ) -> Any:
        named = None if state_dict is WHOLE else state_dict
        parts = reduced_parts(self)
        if not parts:
            return save_pretrained(self, save_directory, is_main_process, named, *args, **kwargs)
        if len(parts) > 1:
            raise VitrimError(
                f"this {type(self).__name__} holds {len(parts)} reduced parts, and a folder takes one reduction: "
                f"call vitrim.restore_ on all but one of {', '.join(access(name) for name, _ in parts)}"
            )
        ((name, part),) = parts
        prefix = f"{name}." if name else ""
        whole = self.state_dict() if named is None else named
        dense = {key: value for key, value in whole.items() if ".reducer." not in key}
        saved = save_pretrained(
            self, save_directory, is_main_process, dense if state_dict is WHOLE else named, *args, **kwargs
        )
        if is_main_process:
            own = {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}
            # A sharded or partial state dict may lack them: then the reduction saves its own.
            complete = all(key in own for key in part.state_dict() if ".reducer." in key)
            handle_of(part).save(save_directory, state=own if complete else None, module=name)
        return saved

    save.vitrim_dense = save_pretrained  # type: ignore[attr-defined]
    return save


INSTALL: Callable[..., None] = output_capturing.install_output_capuring_hook


class CapturingHook:
    """A picklable copy of a library hook that records outputs.

    It calls the library function that installs the hook again, with the arguments ``given`` besides the module.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        bearer = nn.Module()
        INSTALL(bearer, **given)
        (self.hook,) = bearer._forward_hooks.values()
        self.__module__ = self.hook.__module__  # counts as the library's own (`is_altered`)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.hook(module, args, output)

    def __reduce__(self) -> tuple[type[CapturingHook], tuple[dict[str, Any]]]:
        return CapturingHook, (self.given,)


def capture_by_objects(module: nn.Module) -> None:
    """Replace the library's output-recording hooks of ``module`` by `CapturingHook` objects."""
    for number, hook in module._forward_hooks.items():
        if isinstance(hook, FunctionType) and hook.__qualname__.startswith(f"{INSTALL.__name__}."):
            made_of, wanted = inspect.getclosurevars(hook).nonlocals, inspect.signature(INSTALL).parameters
            module._forward_hooks[number] = CapturingHook({name: made_of[name] for name in made_of if name in wanted})


@functools.wraps(INSTALL)
def install(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    INSTALL(module, *args, **kwargs)
    capture_by_objects(module)


def support(model: nn.Module) -> None:
    """Patch ``save_pretrained`` for all models of the library, and the hooks of ``model`` and of later models."""
    PreTrainedModel.save_pretrained = with_reduction(PreTrainedModel.save_pretrained)  # type: ignore[method-assign]
    output_capturing.install_output_capuring_hook = install
    for module in model.modules():
        capture_by_objects(module)
