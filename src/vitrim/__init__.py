"""vitrim makes Vision Transformers faster by giving them fewer tokens.

    import timm, vitrim
    model = timm.create_model("deit_small_patch16_224", pretrained=True)
    reduction = vitrim.reduce_(model, vitrim.ToMe(r=13))

Names are resolved on first use, so that ``vitrim --help`` need not import torch. Config classes of methods
(``vitrim.ToMe``, ``vitrim.ATM``, ...) come from the registry: a new method file adds its own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitrim.version import __version__ as __version__

if TYPE_CHECKING:
    from vitrim.core.assignment import Hard, Soft, merge, prune
    from vitrim.core.attention import Attention
    from vitrim.core.block import Reducer
    from vitrim.core.method import MethodConfig, StagedConfig
    from vitrim.core.plan import Layer
    from vitrim.core.reduce import Reduction, get_reduction, reduce_, reduced, restore_
    from vitrim.core.registry import parse_method, reduces, register, register_host, register_method
    from vitrim.core.scoring import ScorerReducer
    from vitrim.core.tokens import TokenState, unmerge
    from vitrim.errors import ReductionWarning, UnsupportedModelError, VitrimError
    from vitrim.exporting.exported import Exported
    from vitrim.exporting.writing import export

__all__ = [
    "Attention",
    "Exported",
    "Hard",
    "Layer",
    "MethodConfig",
    "Reducer",
    "Reduction",
    "ReductionWarning",
    "ScorerReducer",
    "Soft",
    "StagedConfig",
    "TokenState",
    "UnsupportedModelError",
    "VitrimError",
    "export",
    "get_reduction",
    "merge",
    "parse_method",
    "prune",
    "reduce_",
    "reduced",
    "reduces",
    "register",
    "register_host",
    "register_method",
    "restore_",
    "unmerge",
]

_HOME = {
    "vitrim.core.assignment": ("Hard", "Soft", "merge", "prune"),
    "vitrim.core.attention": ("Attention",),
    "vitrim.core.block": ("Reducer",),
    "vitrim.core.method": ("MethodConfig", "StagedConfig"),
    "vitrim.core.plan": ("Layer",),
    "vitrim.errors": ("ReductionWarning", "UnsupportedModelError", "VitrimError"),
    "vitrim.exporting.exported": ("Exported",),
    "vitrim.exporting.writing": ("export",),
    "vitrim.core.reduce": ("Reduction", "get_reduction", "reduce_", "reduced", "restore_"),
    "vitrim.core.registry": (
        "parse_method",
        "reduces",
        "register",
        "register_backbone",
        "register_host",
        "register_method",
    ),
    "vitrim.core.scoring": ("ScorerReducer",),
    "vitrim.core.tokens": ("TokenState", "unmerge"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if not name.startswith("_"):
        from vitrim.core.registry import methods

        for config in methods().values():
            if config.__name__ == name:
                return config
    raise AttributeError(f"module 'vitrim' has no attribute '{name}'")


def __dir__() -> list[str]:
    from vitrim.core.registry import methods

    return sorted([*globals(), *__all__, *(config.__name__ for config in methods().values())])
