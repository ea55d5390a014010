"""vitrim makes Vision Transformers faster by giving them fewer tokens.

    import timm, vitrim
    model = timm.create_model("deit_small_patch16_224", pretrained=True)
    reduction = vitrim.reduce_(model, vitrim.ToMe(r=13))

Names are resolved on first use, so that ``vitrim --help`` need not import torch. Config classes of methods
(``vitrim.ToMe``, ``vitrim.ATM``, ...) come from the registry: a new method file adds its own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrim.assignment import Hard, Soft, merge, prune
    from vitrim.attention import Attention
    from vitrim.block import Reducer
    from vitrim.config import Layer, MethodConfig
    from vitrim.errors import ReductionWarning, UnsupportedModelError, VitrimError
    from vitrim.reduce import Reduction, get_reduction, reduce_, restore_
    from vitrim.registry import parse_method, register_backbone, register_method
    from vitrim.tokens import TokenState, unmerge

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Hard",
    "Layer",
    "MethodConfig",
    "Reducer",
    "Reduction",
    "ReductionWarning",
    "Soft",
    "TokenState",
    "UnsupportedModelError",
    "VitrimError",
    "get_reduction",
    "merge",
    "parse_method",
    "prune",
    "reduce_",
    "register_backbone",
    "register_method",
    "restore_",
    "unmerge",
]

_HOME = {
    "vitrim.assignment": ("Hard", "Soft", "merge", "prune"),
    "vitrim.attention": ("Attention",),
    "vitrim.block": ("Reducer",),
    "vitrim.config": ("Layer", "MethodConfig"),
    "vitrim.errors": ("ReductionWarning", "UnsupportedModelError", "VitrimError"),
    "vitrim.reduce": ("Reduction", "get_reduction", "reduce_", "restore_"),
    "vitrim.registry": ("parse_method", "register_backbone", "register_method"),
    "vitrim.tokens": ("TokenState", "unmerge"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if not name.startswith("_"):
        from vitrim.registry import methods

        for config in methods().values():
            if config.__name__ == name:
                return config
    raise AttributeError(f"module 'vitrim' has no attribute '{name}'")


def __dir__() -> list[str]:
    from vitrim.registry import methods

    return sorted([*globals(), *__all__, *(config.__name__ for config in methods().values())])
